"""Memory of models over image sizes: ``python tools/profile_memory.py --models taylorshift_vit_s
vit_small_patch16_224+eager``.

Each cell (model, image size, pass, precision, form, checkpointing) runs in a process of its own.
``--largest`` finds the largest image that fits, ``--snapshot`` records one cell for PyTorch's
memory viewer, ``--help`` lists the rest. A cell that does not fit is a row. Exit codes: 0; 2 for
bad input; 3 where the cell of ``--snapshot`` does not fit; 4 where a cell failed for another reason
than memory; 130 for Ctrl-C.
"""

from functools import partial

from visionattn.command import leave, run

main = partial(run, "profile")

if __name__ == "__main__":
    leave(main())
