"""Predict the classes of images: ``python tools/predict.py --checkpoint PATH --images FOLDER
--output predictions.csv``.

Writes a row per image with the most probable classes, as CSV or JSON by the suffix of the file, or
without ``--output`` prints a table. An unreadable image is a row with the reason. Exit codes: 0; 2
for bad input; 3 if no image fits into memory; 4 if a data loader process ended; 130 for Ctrl-C.
"""

from functools import partial

from visionattn.command import leave, run

main = partial(run, "predict")

if __name__ == "__main__":
    leave(main())
