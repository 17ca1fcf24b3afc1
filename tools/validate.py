"""Accuracy at several image sizes: ``python tools/validate.py --checkpoint PATH --img-size 128
256``.

The data are those of the ``config.yaml`` beside the checkpoint, unless flags say otherwise
(``--data.name``, ``--data.root``); ``images/s`` counts the model alone, without the loading. Exit
codes: 0; 2 for bad input.
"""

from functools import partial

from visionattn.command import leave, run

main = partial(run, "validate")

if __name__ == "__main__":
    leave(main())
