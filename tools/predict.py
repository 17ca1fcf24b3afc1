"""Classes of images: ``python tools/predict.py --checkpoint PATH --images FOLDER --output
predictions.csv``.

A row per image with the most probable classes, as CSV or JSON by the file's ending, or without
``--output`` as a table. Images that cannot be read are rows with the reason. Exit codes: 0; 2 for
bad input; 3 where no image fits into memory; 4 where a process that reads images ended; 130 for
Ctrl-C.
"""

import sys
from collections.abc import Sequence

from visionattn.cli.ends import run_tool
from visionattn.inference.options import parse_options
from visionattn.inference.predict import PredictOptions, Predictor

EXAMPLE = (
    "python tools/predict.py --checkpoint checkpoints/digits/best.safetensors --images docs/figures"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Predict as the flags say; returns the exit code."""

    def work() -> None:
        options = parse_options(
            PredictOptions,
            sys.argv[1:] if argv is None else argv,
            prog="predict.py",
            description="Name the classes of images.",
            example=EXAMPLE,
        )
        Predictor(options).run(lambda text: print(text, flush=True))

    return run_tool(work)


if __name__ == "__main__":
    sys.exit(main())
