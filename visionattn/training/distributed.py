"""Connect the processes of a ``torchrun`` run, end them together, and distribute the model: the
whole model on each process (DDP, optionally with the rows of each image shared), or shards (FSDP2).

With one process there is no group, and all functions return immediately. ``torchrun`` ends all
processes when one has died or failed, and the timeout of the process group ends processes that wait
for a stopped one. This module adds the reason: the first failing process writes it to the store,
where the others read it.

Files hold whole tensors, so a run resumes with any number of processes.
"""

import atexit
import copy
import hashlib
import json
import os
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.utils.store import barrier
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from visionattn.cli.exit_codes import (
    Failed,
    NonFinite,
    OutOfMemory,
    Stopped,
    exit_code,
    is_out_of_memory,
)
from visionattn.cli.files import first_line
from visionattn.cli.interruption import Interrupted
from visionattn.models.devices import pick_device
from visionattn.models.large.row_parallel import RowParallel, check_dropout, parallelize
from visionattn.models.large.row_parallel import check_model as check_divisible
from visionattn.training.config import TrainConfig

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")
Kind = Literal["ddp", "fsdp", "sequence"]

START_SECONDS = 120
"""Timeout for the other processes to join."""
ANSWER_SECONDS = 600
"""Default timeout for the other processes after joining."""
FIRST_SECONDS = 3
"""Delay after which another process than the first reports that a process has died."""
LEAVE_SECONDS = 20
"""Timeout for the store, and at the end for processes that do not end."""
SHARED = (ValueError, OSError, RuntimeError, OutOfMemory, Failed, Interrupted)
"""Errors of one process that ``together`` and ``on_first`` raise on all."""
SPOKEN = (ValueError, OSError, NonFinite, OutOfMemory, Failed, Stopped, KeyboardInterrupt)
"""Errors that a command prints as one line, in one process only."""
KINDS = {"input": ValueError, "oom": OutOfMemory, "failed": Failed}
"""Exceptions by kind, as which the other processes raise the failure of one process."""


class Processes:
    """One process of a run: its rank, and its communication with the others.

    Args:
        rank: the index of this process.
        size: the number of processes.
        local_rank: the index of this process on its machine.
        hosts: the machine of each process.
    """

    def __init__(
        self, rank: int = 0, size: int = 1, local_rank: int = 0, hosts: Sequence[str] = ("",)
    ):
        self.rank, self.size = rank, size
        self.local_rank, self.hosts = local_rank, list(hosts)
        self.per_image = 1
        """Number of neighboring processes that share each image; they have the same batches."""
        self.store: distributed.Store | None = None
        self.speaks = rank == 0
        """Whether this process reports how the run ended."""
        self.failing = False
        """Whether the run ends because of an error in a single process."""
        self._agreed: BaseException | None = None

    @property
    def first(self) -> bool:
        """Tell whether this process prints and writes."""
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """The index of this process's part of each batch."""
        return self.rank // self.per_image

    @property
    def data_size(self) -> int:
        """The number of parts of each batch."""
        return self.size // self.per_image

    @property
    def counts(self) -> bool:
        """Tell whether this process counts its images; of processes that share images, one does."""
        return self.rank % self.per_image == 0

    @property
    def name(self) -> str:
        """The name of this process in messages."""
        return f"process {self.rank} on {socket.gethostname()}"

    def device(self, name: str) -> torch.device:
        """Return the device of this process: ``cpu``, or the GPU with its local rank.

        Raises:
            ValueError: unknown device, or no GPU for this process.
        """
        if self.size == 1:
            return pick_device(name)
        if name.partition(":")[2]:
            raise ValueError(
                f"device {name} is a single GPU for all processes; pass cuda, and each process "
                "gets the GPU of its local rank"
            )
        device = pick_device(name)
        if device.type != "cuda":
            return device
        found = torch.cuda.device_count()
        if self.local_rank >= found:
            raise ValueError(
                f"process {self.local_rank} of this machine has no GPU, because there are "
                f"{found}; start torchrun with --nproc-per-node {found}"
            )
        torch.cuda.set_device(self.local_rank)
        return torch.device("cuda", self.local_rank)

    def describe(self, device: torch.device, kind: str | None) -> str:
        """Describe the processes and devices of the run."""
        if self.size == 1:
            return device.type
        machines = len(set(self.hosts))
        shared = f", {self.per_image} for each image" if self.per_image > 1 else ""
        return f"{self.size} processes ({kind}{shared}), {device.type}" + (
            f", {machines} machines" if machines > 1 else ""
        )

    def sum(self, *values: float) -> list[float]:
        """Return the sum of each value over all processes, in float64."""
        if self.size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        distributed.all_reduce(total)
        return total.tolist()

    def gather(self, value: Item) -> list[Item]:
        """Return the values of all processes, ordered by rank."""
        if self.size == 1:
            return [value]
        values = [value] * self.size
        distributed.all_gather_object(values, value)
        return values

    def together(self, work: Callable[[], Outcome]) -> Outcome:
        """Run ``work`` on each process; an exception on one process is raised on all.

        ``work`` must not communicate with other processes. If several processes raise, an error
        takes precedence over an interruption, and a lower rank over a higher one.
        """
        if self.size == 1:
            return work()
        outcome, error = None, None
        try:
            outcome = work()
        except SHARED as own:
            error = own
        if self.sum(error is not None) == [0]:
            return outcome  # type: ignore[return-value]
        errors = [each for each in self.gather(self._portable(error)) if each is not None]
        chosen = min(errors, key=lambda each: isinstance(each, Interrupted))
        raise self.agree(chosen) from error

    def on_first(self, work: Callable[[], Outcome]) -> Outcome:
        """Run ``work`` on the first process, and return its result or raise its error on all."""
        if self.size == 1:
            return work()
        outcome, error = None, None
        if self.first:
            try:
                outcome = work()
            except SHARED as own:
                error = own
        message = [outcome, self._portable(error)]
        distributed.broadcast_object_list(message)
        if message[1] is not None:
            raise self.agree(message[1]) from error
        return message[0]  # type: ignore[return-value]

    def check_same(self, lists: Mapping[str, Sequence[str]]) -> None:
        """Raise ValueError on all processes if one has other data than the first process.

        Args:
            lists: names of images and classes, by their description for the error.
        """
        for what, own in lists.items():
            digest = hashlib.sha256("\0".join(own).encode("utf-8", "surrogateescape")).digest()
            found = self.gather((digest, len(own)))
            other = next((rank for rank in range(self.size) if found[rank] != found[0]), None)
            if other is not None:
                raise self.agree(
                    ValueError(
                        f"expected the same {what} on every machine, got {found[other][1]} on "
                        f"process {other} ({self.hosts[other]}) and {found[0][1]} on the first "
                        "process"
                    )
                )

    def agree(self, error: BaseException) -> BaseException:
        """Record and return an error that all processes raise at the same place."""
        self._agreed = error
        return error

    def agreed(self, error: BaseException) -> bool:
        """Tell whether all processes raise this error (or its cause) at the same place, so that
        they can still communicate.
        """
        agreed = self._agreed is not None and self._agreed in (error, error.__cause__)
        return self.size == 1 or agreed

    def _portable(self, error: BaseException | None) -> BaseException | None:
        """Copy an error to send it; add the name of this process unless it is the first."""
        if error is None:
            return None
        place = "" if self.first else f" ({self.name})"
        if isinstance(error, OSError) and error.filename and error.strerror:
            made = OSError(error.errno, error.strerror + place, error.filename)
        else:
            kind = next(kind for kind in SHARED if isinstance(error, kind))
            made = (OutOfMemory if kind is RuntimeError and is_out_of_memory(error) else kind)(
                f"{error}{place}"
            )
        made.place = place  # type: ignore[attr-defined]
        return made

    def set_timeout(self, seconds: float) -> None:
        """Set the timeout for the other processes."""
        if self.size > 1:
            distributed.group.WORLD.set_timeout(timedelta(seconds=seconds))

    @contextmanager
    def guard(self) -> Iterator[None]:
        """End all processes with the same reason if one raises an error in this context."""
        try:
            yield
        except (Stopped, NonFinite, Interrupted):  # raised on all processes
            raise
        except BaseException as error:
            after_help = isinstance(error, SystemExit) and not error.code
            if self.store is None or after_help or self.agreed(error):
                raise
            end = self.agree(self._end_of(error))
            if end is error:
                raise
            raise end from error

    def _end_of(self, error: BaseException) -> BaseException:
        """Return the error that ends this process: the given error, or the failure of another
        process that reached the store first.
        """
        self.failing, lost = True, False
        kind = "input" if isinstance(error, (ValueError, OSError)) else "failed"
        said = " ".join(str(error).split()) or "interrupted"
        if isinstance(error, OutOfMemory) or is_out_of_memory(error):
            kind = "oom"
        elif isinstance(error, SystemExit):  # torchrun's SIGTERM, after the end of another one
            lost, said = True, "ended by SIGTERM, as torchrun does when a process has died"
        elif isinstance(error, distributed.DistError) or "gloo" in str(error):
            # Remove gloo's code location at the beginning and its advice at the end.
            said = said.split("] ", 1)[-1].partition(". This is")[0]
            lost, said = True, f"another process has died or does not answer: {said}"
        elif not isinstance(error, SPOKEN):
            said = f"{type(error).__name__}: {said}"
        found = [own := json.dumps([kind, f"{said} ({self.name})"])]

        def tell() -> None:
            # The first process reports an error of several processes, unless it is dead.
            if not self.first:
                time.sleep(FIRST_SECONDS if lost else 1)
            with suppress(RuntimeError):  # the store may have ended, too
                found[0] = self.store.compare_set("failure", "", own).decode()

        # A store on an unreachable machine never answers.
        asking = threading.Thread(target=tell, daemon=True)
        asking.start()
        asking.join(LEAVE_SECONDS)
        kind, said = json.loads(found[0])
        self.speaks = self.first or (lost and found[0] == own)
        return error if found[0] == own and not lost else KINDS[kind](said)

    def terminate(self, signum: int, frame: object) -> None:
        """End on SIGTERM, unless this process already ends."""
        if not self.failing:
            raise SystemExit(128 + signum)


@contextmanager
def joined() -> Iterator[Processes]:
    """Join the other processes that ``torchrun`` has started, and wait for them at the end.

    A single process joins nothing. At the end only one process prints its line on standard error.
    When one process has failed, ``torchrun`` sends SIGTERM to the others. They ignore it after the
    end of the context, so that all end with the same exit code.

    Raises:
        ValueError: the environment variables of torchrun are incomplete, or torchrun or the first
            process does not answer within ``START_SECONDS``.
        Failed: a process does not join within ``START_SECONDS``.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Processes()
        return
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in names if name not in os.environ]:
        raise ValueError(
            f"WORLD_SIZE is set but not {', '.join(missing)}; start several processes with torchrun"
        )
    processes = Processes(*(int(os.environ[name]) for name in names[:3]))
    processes.store = reach_store(processes)
    try:
        with processes.guard():
            join_group(processes)
            # Only from here on: before, it would not end a process that waits for others to join.
            signal.signal(signal.SIGTERM, processes.terminate)
            yield processes
    except SPOKEN:
        if not processes.speaks:
            _be_quiet()
        raise
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        part(processes)


def reach_store(processes: Processes) -> distributed.Store:
    """Connect to the store through which the processes find each other.

    Raises:
        ValueError: the store does not answer; one process of each machine reports it.
    """
    try:
        timeout = timedelta(seconds=START_SECONDS)
        store, *_ = next(
            distributed.rendezvous("env://", processes.rank, processes.size, timeout=timeout)
        )
    except (distributed.DistError, OSError) as error:
        if processes.local_rank:
            _be_quiet()
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise ValueError(
            f"torchrun or the first process does not answer at {place}: {first_line(error)}; start "
            "torchrun on each machine with the same reachable --rdzv-endpoint"
        ) from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return distributed.PrefixStore(f"visionattn/{attempt}", store)


def join_group(processes: Processes) -> None:
    """Create the process group, and collect the machines of all processes."""
    on_gpus = torch.cuda.is_available() and distributed.is_nccl_available()
    distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpus else "gloo",
        store=processes.store,
        rank=processes.rank,
        world_size=processes.size,
        timeout=timedelta(seconds=START_SECONDS),
    )
    processes.hosts = processes.gather(socket.gethostname())
    processes.set_timeout(ANSWER_SECONDS)


def part(processes: Processes) -> None:
    """Leave the group when all processes have come here, or at once if the run has failed."""
    if processes.failing:  # a pending message to a dead process would delay the end
        atexit.register(_end_at_once, exit_code(processes._agreed))
        return
    with suppress(RuntimeError):  # a process is dead or stuck
        barrier(processes.store, processes.size, "ended", LEAVE_SECONDS)
    distributed.destroy_process_group()


def place_of(error: BaseException) -> str:
    """Return the process of an error as `` (process 1 on host)``; empty for the first process, and
    for errors to which ``guard`` adds it later.
    """
    return getattr(error, "place", "")


def _be_quiet() -> None:
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115  open until the process ends, which is now


def _end_at_once(exit_code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def ranks_per_image(config: TrainConfig, size: int) -> int:
    """Return how many of ``size`` processes share each image.

    Raises:
        ValueError: ``parallel`` does not divide ``size``.
    """
    if config.parallel != "sequence" and not isinstance(config.parallel, int):
        return 1
    ranks = size if config.parallel == "sequence" else config.parallel
    if size % ranks:
        raise ValueError(
            f"parallel {ranks} does not divide the {size} process{'es' * (size > 1)} of torchrun; "
            "change --nproc-per-node or parallel"
        )
    return ranks


def choose_kind(config: TrainConfig, size: int) -> Kind | None:
    """Choose how to distribute the model over the processes; None for one process.

    Raises:
        ValueError: ``parallel`` is set without ``torchrun``, does not divide the number of
            processes, or a batch has too few images for all processes.
    """
    if size == 1:
        if config.parallel and "WORLD_SIZE" not in os.environ:
            raise ValueError(
                f"parallel {config.parallel} needs several processes; start with torchrun "
                "--nproc-per-node 2 tools/train.py ..."
            )
        return None
    parts = size // ranks_per_image(config, size)
    kind: Kind = "sequence" if isinstance(config.parallel, int) else config.parallel or "ddp"
    if config.batch_size == "auto":  # checked again when the batch size is known
        return kind
    mixes, fewest = config.optim.mixup or config.optim.cutmix, config.batch_size // parts
    if fewest < (2 if mixes else 1):
        wanted = "two images to mix" if mixes else "an image"
        raise ValueError(
            f"expected batch_size at least {(2 if mixes else 1) * parts}, so that each of {size} "
            f"processes has {wanted}, got {config.batch_size}; use a larger batch or fewer "
            "processes"
        )
    return kind


def check_model(model: nn.Module, name: str, size: int, kind: Kind | None = None) -> None:
    """Check that the model trains on several processes as on one.

    Raises:
        ValueError: the model has batch norm, whose statistics cover only one process's part of a
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
            f"model {name} has batch norm ({norms[0]}), whose statistics differ between "
            "processes; train on one process, or choose a model with another norm"
        )


class Spread:
    """Distribute a model over the processes of a run; with one process, do nothing.

    Args:
        kind: ``ddp``, ``fsdp``, ``sequence``, or None for one process.
        model: a whole model on its device; takes the values of the first process, and ``fsdp``
            shards it in place.
        average: a copy of the model for averaged weights, never called; sharded in the same way.
        compiled: compile the called module; with ``fsdp`` compile each stage separately, because
            parameters are gathered between stages.
        per_image: with ``sequence``, the number of processes that share an image.
        timeout: timeout of these processes for each other.

    Attributes:
        called: the module to call in training.
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
        """Wrap forward and backward of one batch of a step; gradients are averaged over the
        processes only after the ``last`` batch.
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
            # Raised for one-channel convolutions, whose strides are irrelevant.
            warnings.filterwarnings(
                "ignore", message="Grad strides do not match bucket view strides"
            )
            yield
        if self.kind != "fsdp" and last:
            self._check_gradients()

    def _check_gradients(self) -> None:
        """Raise ValueError if a parameter has no effect on the loss: DDP would wait for it."""
        for name, parameter in self._module.module.named_parameters():
            if parameter.requires_grad and parameter.grad is None:
                name = name.removeprefix("model.") if self._group else name
                raise ValueError(
                    f"parameter {name} does not affect the loss, and {self.kind} would wait for "
                    "its gradient; use parallel fsdp, or train on one process"
                )

    def evaluated(self, model: nn.Module) -> nn.Module:
        """Return the model to evaluate, which with ``sequence`` shares the rows of each image."""
        return model if self._group is None else RowParallel(model, self._group)

    def total(self, value: Tensor) -> Tensor:
        """Sum a value over all processes, on its device."""
        if self.kind:
            distributed.all_reduce(value)
        return value

    def whole(self, module: nn.Module, *, gradients: bool = False) -> nn.Module:
        """Return the module with whole tensors, to evaluate or save: the module itself, or an
        unsharded copy. All processes must call it.

        Args:
            module: the model, or the average.
            gradients: copy the gradients, too.
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
    """Return the parts of a model that FSDP gathers one after another: blocks or stages."""
    found = getattr(model, "blocks", None) or getattr(model, "stages", None) or []
    return [stage for stage in found if next(stage.parameters(), None) is not None]


def whole_tensor(tensor: Tensor) -> Tensor:
    """Return the tensor, gathered if it is sharded; all processes must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_tensors(state: Any) -> Any:
    """Return a state of nested dicts and lists with its sharded tensors gathered on the CPU; all
    processes must call it.
    """
    if isinstance(state, DTensor):
        return whole_tensor(state).cpu()
    if isinstance(state, dict):
        return {key: whole_tensors(value) for key, value in state.items()}
    return [whole_tensors(value) for value in state] if isinstance(state, list) else state


def cut_like(value: Any, like: Tensor) -> Any:
    """Shard a whole tensor like another tensor of its shape; return other values unchanged."""
    if not isinstance(like, DTensor) or not isinstance(value, Tensor) or value.shape != like.shape:
        return value
    return distribute_tensor(
        value.to(like.device), like.device_mesh, like.placements, src_data_rank=None
    )


def load_whole(module: nn.Module, state: dict[str, Tensor]) -> None:
    """Load whole tensors, equal on all processes, into a module that may be sharded."""
    own = module.state_dict()
    module.load_state_dict(
        {key: cut_like(value, own[key]) if key in own else value for key, value in state.items()}
    )


def cut_optimizer_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Convert the ``state_dict`` of an optimizer of whole parameters for parameters that may be
    sharded.
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
