"""Classes of images: ``python tools/predict.py --checkpoint PATH --images FOLDER --output
predictions.csv``.

A row per image with the most probable classes, as CSV or JSON by the file's ending, or without
``--output`` as a table. Images that cannot be read are rows with the reason. Exit codes: 0; 2 for
bad input; 3 where no image fits into memory; 4 where a process that reads images ended; 130 for
Ctrl-C.
"""

from functools import partial

from visionattn.command import leave, run

main = partial(run, "predict")

if __name__ == "__main__":
    leave(main())
