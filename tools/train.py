"""Train a model: ``python tools/train.py --config configs/digits.yaml --optim.lr 3e-4``.

Every key of the YAML file is a flag, ``--help`` lists them, ``--print_config`` shows what would
run. What a run writes is in ``checkpoints/<run>/``. Exit codes: 0; 1 for a loss that is not finite;
2 for bad input; 3 for too little memory; 4 where another process of the run ended; 130 for Ctrl-C,
after which ``--resume`` goes on. On several GPUs or machines:
``torchrun --nproc-per-node 8 tools/train.py ...``, which itself ends with 0 or 1; ``status.json``
has the code.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from visionattn.cli.ends import Stopped, run_tool
from visionattn.cli.parsing import config_files, parse
from visionattn.training.config import TrainConfig
from visionattn.training.distributed import joined
from visionattn.training.engine import train
from visionattn.training.report import how_to_resume, report

TOOLS = Path(__file__).parent
EXAMPLE = (
    "python tools/train.py --config configs/digits.yaml --epochs 1 --optim.warmup_epochs "
    "0.5 --run try --overwrite"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Train as the flags say; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv

    def work() -> None:
        with joined() as processes:
            config = processes.together(lambda: read(argv))
            try:
                result = train(config, processes=processes)
            except Stopped as stop:
                raise Stopped(f"{stop}; to go on: {how_to_resume(config, TOOLS)}") from stop
            if processes.first:
                print("\n".join(report(config, result, TOOLS)), flush=True)

    return run_tool(work, several=True)


def read(argv: Sequence[str]) -> TrainConfig:
    """The run that the flags describe."""
    config = parse(
        TrainConfig, argv, prog="train.py", description="Train a model.", example=EXAMPLE
    )
    files = config_files(argv)
    config.run = config.run or (
        Path(files[-1]).stem if files else f"{config.data.name}_{config.model.name}"
    )
    return config


if __name__ == "__main__":
    sys.exit(main())
