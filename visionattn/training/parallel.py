"""A model that several processes train: whole on each of them (DDP; also where some of them share
the rows of each image), or cut into parts (FSDP2), and whole tensors of both.

Files hold whole tensors, in the format of one process, so that a run goes on with any number of
processes, whichever way it began. The module knows nothing of steps.
"""

import copy
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from visionattn.models.large.row_parallel import RowParallel, check_dropout, parallelize
from visionattn.models.large.row_parallel import check_model as check_divisible
from visionattn.training.config import TrainConfig

Kind = Literal["ddp", "fsdp", "sequence"]


def ranks_per_image(config: TrainConfig, size: int) -> int:
    """Return how many of so many processes share each image.

    Raises:
        ValueError: ``sequence_ranks`` does not divide their number.
    """
    if config.parallel != "sequence":
        return 1
    ranks = size if config.sequence_ranks is None else config.sequence_ranks
    if size % ranks:
        raise ValueError(
            f"sequence_ranks {ranks} does not divide the {size} process{'es' * (size > 1)} that "
            "torchrun has started"
        )
    return ranks


def choose_kind(config: TrainConfig, size: int) -> Kind | None:
    """Choose how the processes of a run hold its model; None for one process.

    Raises:
        ValueError: ``parallel`` is set for one process that ``torchrun`` has not started,
            ``sequence_ranks`` does not divide their number, or a batch has too few images for all
            processes.
    """
    if size == 1:
        if config.parallel and "WORLD_SIZE" not in os.environ:
            raise ValueError(
                f"parallel {config.parallel} is for several processes: torchrun --nproc-per-node 2 "
                "tools/train.py ..."
            )
        return None
    parts = size // ranks_per_image(config, size)
    if config.batch_size == "auto":  # it is asked for again once it is known
        return config.parallel or "ddp"
    mixes, fewest = config.optim.mixup or config.optim.cutmix, config.batch_size // parts
    if fewest < (2 if mixes else 1):
        wanted = "two images, which are mixed," if mixes else "an image"
        raise ValueError(
            f"batch_size {config.batch_size} is that of all {size} processes together and leaves "
            f"some without {wanted} of a batch; wanted at least {(2 if mixes else 1) * parts}, or "
            "fewer processes"
        )
    return config.parallel or "ddp"


def check_model(model: nn.Module, name: str, size: int, kind: Kind | None = None) -> None:
    """Check that the model trains on several processes as it does on one.

    Raises:
        ValueError: it has batch norm, whose statistics would be those of each process's part of a
            batch; or, with ``sequence``, its tokens cannot be divided (``parallelize``).
    """
    if kind == "sequence":
        check_divisible(model)
        check_dropout(model)
    norms = [
        place
        for place, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
    ]
    if norms and size > 1:
        raise ValueError(
            f"model {name} has batch norm ({norms[0]}), whose statistics would be those of each "
            "process's part of a batch; train it on one process, or choose a model with another "
            "norm"
        )


class Spread:
    """How the processes of a run hold its model. With one process that is the model itself, and
    nothing here acts.

    Args:
        kind: ``ddp``, ``fsdp``, ``sequence``, or None for one process.
        model: whole and on its device; takes the values of the first process, and ``fsdp`` cuts it
            in place.
        average: a copy of it that is never called; cut in the same way.
        compiled: compile what is called; with ``fsdp`` each stage by itself, as parameters are
            gathered between stages.
        per_image: with ``sequence``, how many processes share an image.
        timeout: how long these wait for each other.

    Attributes:
        called: what to call in training.
    """

    def __init__(
        self,
        kind: Kind | None,
        model: nn.Module,
        average: nn.Module | None = None,
        *,
        compiled: bool = False,
        per_image: int = 1,
        timeout: timedelta = distributed.default_pg_timeout,
    ):
        self.kind, self._module = kind, model
        self._whole = None
        self._group: distributed.ProcessGroup | None = None
        if kind:
            self._spread(model, average, compiled, per_image)
            if self._group:
                self._group.set_timeout(timeout)
        self.called = torch.compile(self._module) if compiled and kind != "fsdp" else self._module

    def _spread(
        self, model: nn.Module, average: nn.Module | None, compiled: bool, per_image: int
    ) -> None:
        for module in filter(None, (model, average)):
            for tensor in module.state_dict().values():
                distributed.broadcast(tensor, src=0)
        device = next(model.parameters()).device
        if self.kind != "fsdp":
            called = model
            if self.kind == "sequence":
                sides = distributed.get_world_size() // per_image, per_image
                mesh = init_device_mesh(device.type, sides, mesh_dim_names=("data", "sequence"))
                called = parallelize(model, mesh["sequence"])
                self._group = called.group
            self._module = DistributedDataParallel(
                called, device_ids=[device] if device.type == "cuda" else None
            )
            return
        self._whole = copy.deepcopy(model).to("cpu")
        if compiled:
            for stage in stages(model) or [model]:
                stage.compile()
        mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
        for module in filter(None, (model, average)):
            for block in stages(module):
                fully_shard(block, mesh=mesh)
            fully_shard(module, mesh=mesh)

    @contextmanager
    def summing(self, last: bool) -> Iterator[None]:
        """Surround forward and backward of one batch of a step; the processes' gradients are
        averaged after the last one.
        """
        if self.kind is None:
            yield
            return
        if self.kind == "fsdp":
            self._module.set_requires_gradient_sync(last)
        with (
            warnings.catch_warnings(),
            self._module.no_sync() if self.kind != "fsdp" and not last else nullcontext(),
        ):
            # Of convolutions of one channel, whose strides mean nothing.
            warnings.filterwarnings(
                "ignore", message="Grad strides do not match bucket view strides"
            )
            yield
        if self.kind != "fsdp" and last:
            self._check_gradients()

    def _check_gradients(self) -> None:
        """Raise ValueError where a parameter takes no part in the loss: the processes would wait
        for its gradient.
        """
        for name, parameter in self._module.module.named_parameters():
            if parameter.requires_grad and parameter.grad is None:
                name = name.removeprefix("model.") if self._group else name
                raise ValueError(
                    f"the parameter {name} of the model takes no part in the loss, and "
                    f"{self.kind} waits for its gradient; use parallel fsdp, or train on one "
                    "process"
                )

    def evaluated(self, model: nn.Module) -> nn.Module:
        """Return what evaluates a whole model: itself, or with the rows of each image shared among
        processes.
        """
        return model if self._group is None else RowParallel(model, self._group)

    def total(self, value: Tensor) -> Tensor:
        """Sum a value over all processes, on its device."""
        if self.kind:
            distributed.all_reduce(value)
        return value

    def whole(self, module: nn.Module, *, gradients: bool = False) -> nn.Module:
        """Return the module with whole tensors, to evaluate or to save: itself, or a copy where it
        is cut.

        All processes must call it.

        Args:
            module: the model, or the average.
            gradients: whether the copy gets the gradients too.
        """
        if self.kind:
            for buffer in module.buffers():
                distributed.broadcast(buffer, src=0)
        if self._whole is None:
            return module
        device = next(module.parameters()).device
        found = copy.deepcopy(self._whole)
        found.load_state_dict(whole_tensors(module.state_dict()))
        found = found.to(device).train(module.training)
        if gradients:
            for own, part in zip(found.parameters(), module.parameters(), strict=True):
                own.grad = None if part.grad is None else part.grad.full_tensor()
        return found


def stages(model: nn.Module) -> list[nn.Module]:
    """Return the parts of a model whose parameters FSDP gathers in turn: the blocks of a
    transformer, the stages of others.
    """
    found = getattr(model, "blocks", None) or getattr(model, "stages", None) or []
    return [stage for stage in found if next(stage.parameters(), None) is not None]


def whole_tensor(tensor: Tensor) -> Tensor:
    """Return the tensor, gathered if it is cut; all processes must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_tensors(state: Any) -> Any:
    """Return the same state of nested dicts and lists with its cut tensors gathered on the CPU; all
    processes must call it.
    """
    if isinstance(state, DTensor):
        return whole_tensor(state).cpu()
    if isinstance(state, dict):
        return {key: whole_tensors(value) for key, value in state.items()}
    return [whole_tensors(value) for value in state] if isinstance(state, list) else state


def cut_like(value: Any, like: Tensor) -> Any:
    """Cut a whole tensor as another one of its shape is cut; anything else comes back as it is."""
    if not isinstance(like, DTensor) or not isinstance(value, Tensor) or value.shape != like.shape:
        return value
    return distribute_tensor(
        value.to(like.device), like.device_mesh, like.placements, src_data_rank=None
    )


def load_whole(module: nn.Module, state: dict[str, Tensor]) -> None:
    """Load whole tensors, the same on all processes, into a module that may be cut."""
    own = module.state_dict()
    module.load_state_dict(
        {key: cut_like(value, own[key]) if key in own else value for key, value in state.items()}
    )


def cut_optimizer_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Turn the ``state_dict`` of an optimiser of whole parameters into one of parameters that may
    be cut.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    moments = {
        number: {
            key: value if key == "step" else cut_like(value, parameters[number])
            for key, value in values.items()
        }
        for number, values in state["state"].items()
    }
    return state | {"state": moments}
