"""Measure means and standard deviations of your training images: ``python tools/stats.py
--data.root FOLDER --output stats.yaml``.

Pass the file to ``visionattn train`` as a further ``--config``. Exit codes: 0; 2 for bad input.
"""

from functools import partial

from visionattn.command import leave, run

main = partial(run, "stats")

if __name__ == "__main__":
    leave(main())
