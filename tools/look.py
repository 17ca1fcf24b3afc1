"""The attribution of a class in images: ``python tools/look.py CHECKPOINT IMAGE...
--output FOLDER``.

Over each image, at full resolution: the patches that win the pooling, the gradient times the input,
and rows of attention; besides them the main components of the features, the relative tables, and a
page of all. Exit codes: 0; 2 for bad input, when nothing is written; 3 where an image does not fit
into memory; 130 for Ctrl-C.
"""

from functools import partial

from visionattn.command import leave, run

main = partial(run, "look")

if __name__ == "__main__":
    leave(main())
