"""Measure accuracy at several image sizes: ``python tools/validate.py --checkpoint PATH --img-size
128 256``.

The data options come from the ``config.yaml`` next to the checkpoint, unless flags replace them
(``--data.name``, ``--data.root``). ``images/s`` counts the model without data loading. Exit codes:
0; 2 for bad input.
"""

from functools import partial

from visionattn.command import leave, run

main = partial(run, "validate")

if __name__ == "__main__":
    leave(main())
