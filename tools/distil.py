"""Distill a softmax ViT: ``python tools/distil.py --config configs/distil_canvas.yaml``.

Every key of the YAML file is a flag; ``--help`` lists them, and ``--print_config`` prints the
configuration. ``checkpoints/<run>/`` gets a run folder for each stage. Exit codes as
``tools/train.py``; ``--resume`` continues a stopped run.
"""

from functools import partial

from visionattn.command import leave, run

main = partial(run, "distil")

if __name__ == "__main__":
    leave(main())
