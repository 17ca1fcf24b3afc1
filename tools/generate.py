"""Generate images with a pixel decoder: ``python tools/generate.py CHECKPOINT --count 64 --output
grid.png``.

Writes one picture with a grid of images, an array, or a folder with an index. With ``--complete``,
the lower part of given images is generated. Exit codes: 0; 2 for bad input (nothing is written); 3
for too little memory; 130 for Ctrl-C, after which the same command resumes.
"""

from functools import partial

from visionattn.command import leave, run

main = partial(run, "generate")

if __name__ == "__main__":
    leave(main())
