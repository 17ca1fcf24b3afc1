"""Measure the memory of models over image sizes: ``python tools/profile_memory.py --models
taylorshift_vit_s vit_small_patch16_224+eager``.

Each cell (model, image size, pass, precision, form, checkpointing) runs in its own process.
``--largest`` finds the largest image that fits, ``--snapshot`` records one cell for PyTorch's
memory viewer, and ``--help`` lists all options. A cell that does not fit is a row. Exit codes: 0; 2
for bad input; 3 if the cell of ``--snapshot`` does not fit; 4 if a cell failed for another reason
than memory; 130 for Ctrl-C.
"""

from functools import partial

from visionattn.command import leave, run

main = partial(run, "profile")

if __name__ == "__main__":
    leave(main())
