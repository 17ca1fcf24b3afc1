"""``visionattn features --engine ray``: the nodes of a Ray cluster extract parts of a collection,
and this process merges them.

This module owns the connection to the cluster, which parts are handed out, and how a run ends. The
unit of work is a part, as ``--shard`` writes it: its files have their names only when they are
whole, so that Ray may start a part again wherever a worker died, or twice, and the merge finds each
image once. Nothing but the numbers of parts goes through Ray.
"""

import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from visionattn.cli.ends import Failed, OutOfMemory, Stopped, exit_code, in_one_line
from visionattn.cli.files import first_line, locked
from visionattn.cli.interruption import Interruption
from visionattn.cli.progress import Progress
from visionattn.inference.extraction import AT_WORK, Collection, Extraction, collect
from visionattn.inference.feature_options import ExtractOptions
from visionattn.inference.result_files import difference
from visionattn.inference.shards import INDEX, LOCK, PARTS, Part, merge

IMAGES_OF_PART = 512
"""Images of a part where ``parts`` does not say how many parts there are."""
ANSWER_SECONDS = 30
"""Until a cluster that does not answer counts as not there."""
RETRIES = 10
"""How often Ray starts a part again whose worker or node died."""
LOCK_SECONDS = 120
"""How long a part waits for the worker of a node that is lost, which may live on for a while."""
STORE_BYTES = 100 * 2**20
"""Of Ray's store of objects in a cluster of this machine, through which nothing large goes."""
LOOK_SECONDS = 0.2
"""Between two looks at whether Ctrl-C came."""
PROBE = "import sys, ray; ray.init(sys.argv[1], logging_level='ERROR', log_to_driver=False)"
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing is sent anywhere
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else it warns of a change to come
}


def import_ray() -> Any:
    """Return the module ``ray``.

    Raises:
        ValueError: it is not installed; one line with how it is.
    """
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError as error:
        raise ValueError("engine ray needs ray: pip install 'visionattn[ray]'") from error
    return ray


def extract(options: ExtractOptions, say: Callable[[str], None]) -> None:
    """Extract features as the options say, part by part on the nodes of a cluster, and merge them.

    Raises:
        ValueError, FileNotFoundError: options, images, model, folder or cluster are wrong; one
            line.
        Stopped: Ctrl-C; the parts that are written stay.
        OutOfMemory, Failed: a part could not be done.
    """
    output, address = Path(options.output or ""), options.address or ""
    plain = replace(options, engine="here", address=None, parts=None)
    if (output / INDEX).is_file():  # an earlier call has merged all
        Extraction(plain).run(say)
        return
    ray = import_ray()
    if address != "local":
        check_there(address)
    collection = collect(plain)
    total = len(collection.images)
    count = options.parts or -(-total // IMAGES_OF_PART)
    parts = [Part(number, count) for number in range(1, count + 1)]
    parts[0].check_division(output)
    sizes = {part: len(part.images(total)) for part in parts}
    left = {part: sizes[part] for part in parts if not (part.folder(output) / INDEX).is_file()}
    for note in collection.opened.notes:
        say(note)
    done = total - sum(left.values())
    say(f"{total} images in {count} part{'' if count == 1 else 's'}, {done} images are done")
    if left:
        with connected(ray, address):
            check_nodes(ray, "CPU", options.threads or 1, "processors (threads)")
            if collection.opened.device.type == "cuda":
                check_nodes(ray, "GPU", 1, "GPU; --device cpu takes processors")
            (output / PARTS).mkdir(parents=True, exist_ok=True)
            taken = f"{AT_WORK} in {output}; wait for it or end it"
            with locked(output / PARTS / LOCK, taken), Progress(total, done) as progress:
                hand_out(ray, plain, collection, left, progress)
    merge(output, say, collection.identity)


@contextmanager
def connected(ray: Any, address: str) -> Iterator[None]:
    """Connect to a cluster; one of this machine ends with the context."""
    given = {"object_store_memory": STORE_BYTES, "include_dashboard": False}
    given = given if address == "local" else {}
    ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **given)
    try:
        yield
    finally:
        ray.shutdown()


def check_nodes(ray: Any, resource: str, wanted: int, what: str) -> None:
    """Raise ValueError where no node has what a task asks for: Ray would wait for one."""
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    largest = max((each.get(resource, 0) for each in alive), default=0)
    if largest < wanted:
        raise ValueError(f"no node of the cluster has {wanted} {what}; the largest has {largest:g}")


def hand_out(
    ray: Any,
    options: ExtractOptions,
    collection: Collection,
    left: dict[Part, int],
    progress: Progress,
) -> None:
    """Have the parts that are left extracted.

    Args:
        ray: the module, connected.
        options: of a plain run.
        collection: all images.
        left: the images of each part that is left.
        progress: is told of each part that is done.

    Raises:
        Stopped: Ctrl-C.
        OutOfMemory, Failed, ValueError: a part could not be done.
    """
    cpus, gpus = options.threads or 1, int(collection.opened.device.type == "cuda")
    task = ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=RETRIES, max_calls=0)(extract_part)
    given = ray.put((options, os.getcwd(), collection.identity))
    with Interruption() as interruption:
        open_ = {task.remote(given, str(part)): part for part in left}
        while open_ and not interruption.requested:
            ready, _ = ray.wait(list(open_), timeout=LOOK_SECONDS)
            for reference in ready:
                part = open_.pop(reference)
                try:
                    code, reason = ray.get(reference)
                except ray.exceptions.RayError as error:
                    short = isinstance(error, ray.exceptions.OutOfMemoryError)
                    raise (OutOfMemory if short else Failed)(
                        f"part {part} could not be done on the cluster ({type(error).__name__}: "
                        f"{first_line(error.__cause__ or error)}); the same command goes on"
                    ) from error
                if code:
                    kind = {3: OutOfMemory, 4: Failed}.get(code, ValueError)
                    raise kind(f"part {part}: {reason}")
                progress.advance(left[part])
        if interruption.requested:
            ray.shutdown()
            raise Stopped(
                f"stopped; the parts that are written stay in {options.output}, the same command "
                "goes on"
            )


def check_there(address: str) -> None:
    """Check within ``ANSWER_SECONDS`` that a cluster answers at an address other than ``local``.

    Raises:
        ValueError: none does; one line.
    """
    named = os.environ.get("RAY_ADDRESS", "") if address == "auto" else ""
    said = f"{address} (RAY_ADDRESS {named})" if named else address
    wanted = "start one with ray start --head, or use --address local"
    # Ray itself waits for most of a minute for what is no cluster, and writes pages of text.
    command = [sys.executable, "-c", PROBE, address]
    try:
        probe = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise ValueError(
            f"no Ray cluster at {said}: nothing answers within {ANSWER_SECONDS} s; {wanted}"
        ) from error
    if probe.returncode:
        lines = probe.stderr.strip().splitlines() or [f"exit code {probe.returncode}"]
        raise ValueError(f"no Ray cluster at {said} ({lines[-1][:200]}); {wanted}")


_known: dict[str, Collection] = {}
"""The collection of this worker: one model, and one list of images."""


def extract_part(given: tuple[ExtractOptions, str, dict[str, Any]], number: str) -> tuple[int, str]:
    """Extract a part, in a process of Ray's; return 0 or the error's exit code, and its reason.

    Args:
        given: the options, the folder that paths are relative to, and what decides the features
            where the command was called.
        number: the part.
    """
    options, folder, identity = given
    try:
        key = repr((options, folder))
        if key not in _known:
            _known.clear()
            _known[key] = _collected(options, folder, identity)
        _write(replace(options, shard=number), _known[key])
    except (ValueError, OSError, OutOfMemory, Failed) as error:
        return exit_code(error), f"{in_one_line(error)} (on {socket.gethostname()})"
    return 0, ""


def _collected(options: ExtractOptions, folder: str, identity: dict[str, Any]) -> Collection:
    """Open model and images in a worker, and check that they are the caller's."""
    try:
        os.chdir(folder)
    except OSError as error:
        raise ValueError(
            f"{folder} is not there; images, weights and --output lie on a file system that all "
            "nodes share, at the same paths"
        ) from error
    collection = collect(options)
    if (other := difference(collection.identity, identity)) is not None:
        raise ValueError(f"model or images are not as where the command was called: {other}")
    return collection


def _write(options: ExtractOptions, collection: Collection) -> None:
    """Write a part; where a worker whose node is lost still writes it, once that has ended."""
    until = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            Extraction(options, collection).run(lambda text: None)
            return
        except ValueError as error:
            if not str(error).startswith(AT_WORK) or time.monotonic() > until:
                raise
        time.sleep(1)
