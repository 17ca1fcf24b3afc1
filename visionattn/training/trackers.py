"""Send the metrics of a run to MLflow or Weights & Biases. Their environment variables choose
server, project and offline mode.
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from visionattn.cli.files import first_line, write_text


class Mlflow:
    """A run in MLflow.

    Args:
        kept: file with the identifier of the run; a resumed run continues it.
        name: name of the run.
        options: its parameters.

    Raises:
        ValueError: MLflow refuses; one line.
    """

    def __init__(self, kept: Path, name: str, options: Mapping[str, Any]):
        import mlflow

        self.mlflow, self.error = mlflow, mlflow.exceptions.MlflowException
        known = kept.read_text() if kept.exists() else None
        with refusal("mlflow", self.error):
            run = mlflow.start_run(run_id=known, run_name=name, nested=True)
            if known is None:  # MLflow parameters cannot change
                mlflow.log_params(options)
        write_text(kept, run.info.run_id)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Send metrics of a step."""
        try:
            self.mlflow.log_metrics(metrics, step=step)
        except self.error as error:  # a tracker must not end the training
            warnings.warn(f"mlflow lacks step {step}: {first_line(error)}", stacklevel=2)

    def close(self, *, failed: bool) -> None:
        """End the run."""
        self.mlflow.end_run("FAILED" if failed else "FINISHED")


class Wandb:
    """A run in Weights & Biases; arguments and errors as for ``Mlflow``."""

    def __init__(self, kept: Path, name: str, options: Mapping[str, Any]):
        import wandb

        known = kept.read_text() if kept.exists() else None
        with refusal("wandb", wandb.Error):
            self.run = wandb.init(id=known, resume="allow", name=name)
            self.run.config.update(options, allow_val_change=True)
        write_text(kept, self.run.id)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Send metrics of a step."""
        self.run.log(metrics, step=step, commit=True)

    def close(self, *, failed: bool) -> None:
        """End the run."""
        self.run.finish(exit_code=int(failed))


TRACKERS = {"mlflow": Mlflow, "wandb": Wandb}
"""The trackers by the names of their packages."""


@contextmanager
def refusal(name: str, kind: type[Exception]) -> Iterator[None]:
    """Raise an error of a tracker as ValueError; one line."""
    try:
        yield
    except kind as error:
        raise ValueError(
            f"{name}: {first_line(error).rstrip('.')}; pass --log null to train without a tracker"
        ) from error
