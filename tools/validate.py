"""Accuracy at several image sizes: ``python tools/validate.py --checkpoint PATH --img-size 128
256``.

The data are those of the ``config.yaml`` beside the checkpoint, unless flags say otherwise
(``--data.name``, ``--data.root``); ``images/s`` counts the model alone, without the loading. Exit
codes: 0; 2 for bad input.
"""

import sys
from collections.abc import Sequence

from visionattn.cli.ends import run_tool
from visionattn.training.validate import COLUMNS, Validation, align, parse_validate


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate as the flags say; returns the exit code."""

    def work() -> None:
        config = parse_validate(sys.argv[1:] if argv is None else argv)
        validation = Validation(config)
        print(
            f"{config.checkpoint} on the {validation.split} images of "
            f"{config.data.name}\n{align(COLUMNS)}",
            flush=True,
        )
        rows = []
        for row in validation.rows():
            rows.append(row)
            print(align(row.cells()), flush=True)
        if config.json:
            validation.save(rows)

    return run_tool(work)


if __name__ == "__main__":
    sys.exit(main())
