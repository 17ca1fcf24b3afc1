"""Distil a softmax ViT: ``python tools/distil.py --config configs/distil_canvas.yaml``.

Every key of the YAML file is a flag, ``--help`` lists them, ``--print_config`` shows what would
run. What it writes is in ``checkpoints/<run>/``, a run folder for each stage. Exit codes are those
of ``tools/train.py``; ``--resume`` continues it.
"""

from functools import partial

from visionattn.command import leave, run

main = partial(run, "distil")

if __name__ == "__main__":
    leave(main())
