"""Features of images by any model: ``python tools/extract_features.py --checkpoint PATH --images
FOLDER --output FOLDER``.

One vector per image, or with ``--dense`` one map, as safetensors with an index of paths;
``--probe`` fits a linear probe and kNN on a labelled folder. A run that was killed goes on where it
is called again. Exit codes: 0; 2 for bad input; 3 where no image fits into memory; 4 where a
process that reads images ended; 130 for Ctrl-C.
"""

import sys
from collections.abc import Sequence

from visionattn.cli.ends import run_tool
from visionattn.inference.features import Extraction, ExtractOptions
from visionattn.inference.options import parse_options

EXAMPLE = (
    "python tools/extract_features.py --model scaleformer_vit_t --images docs/figures "
    "--img_size 224 "
    "--output checkpoints/features/figures"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Extract as the flags say; returns the exit code."""

    def work() -> None:
        options = parse_options(
            ExtractOptions,
            sys.argv[1:] if argv is None else argv,
            prog="extract_features.py",
            description="Write features of images to safetensors, with an index.",
            example=EXAMPLE,
        )
        Extraction(options).run(lambda line: print(line, flush=True))

    return run_tool(work)


if __name__ == "__main__":
    sys.exit(main())
