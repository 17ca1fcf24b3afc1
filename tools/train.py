"""Train a model: ``python tools/train.py --config configs/digits.yaml --optim.lr 3e-4``.

Every key of the YAML file is a flag; ``--help`` lists them, and ``--print_config`` prints the
configuration. The run is written to ``checkpoints/<run>/``. Exit codes: 0; 1 if the loss is not
finite; 2 for bad input; 3 for too little memory; 4 if another process of the run ended; 130 for
Ctrl-C, after which ``--resume`` continues. On several GPUs or machines: ``torchrun --nproc-per-node
8 tools/train.py ...``, which itself ends with 0 or 1; ``status.json`` has the exit code.
"""

from functools import partial

from visionattn.command import leave, run

main = partial(run, "train")

if __name__ == "__main__":
    leave(main())
