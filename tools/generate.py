"""Images that a pixel decoder writes: ``python tools/generate.py CHECKPOINT --count 64 --output
grid.png``.

All images side by side on one picture, as an array, or in a folder with an index; with
``--complete`` the lower part of images that are given. Exit codes: 0; 2 for bad input, when nothing
is written; 3 for too little memory; 130 for Ctrl-C, after which the same command resumes.
"""

from functools import partial

from visionattn.command import leave, run

main = partial(run, "generate")

if __name__ == "__main__":
    leave(main())
