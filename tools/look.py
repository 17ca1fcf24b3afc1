"""Draw the attribution of a class over images: ``python tools/look.py CHECKPOINT IMAGE...
--output FOLDER``.

Draws, at full resolution, the patches that win the pooling, gradient times input and rows of
attention; also the main components of the features, the relative tables, and an HTML page. Exit
codes: 0; 2 for bad input (nothing is written); 3 if an image does not fit into memory; 130 for
Ctrl-C.
"""

from functools import partial

from visionattn.command import leave, run

main = partial(run, "look")

if __name__ == "__main__":
    leave(main())
