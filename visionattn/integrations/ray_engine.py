"""Run ``visionattn features --engine ray``: Ray nodes extract parts of a collection of images, and
this process merges them.

The unit of work is a part, as ``--shard`` writes it. Files of a part get their names only when they
are complete. So Ray may restart a part or run it twice, and the merge still finds each image once.
Images and features do not go through Ray.
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

from visionattn.cli.exit_codes import Failed, OutOfMemory, Stopped, exit_code, in_one_line
from visionattn.cli.files import first_line, locked
from visionattn.cli.interruption import Interruption
from visionattn.cli.progress import Progress
from visionattn.inference.extraction import AT_WORK, Collection, Extraction, collect
from visionattn.inference.feature_options import ExtractOptions
from visionattn.inference.result_files import difference
from visionattn.inference.shards import INDEX, LOCK, PARTS, CollectionPart, merge

IMAGES_OF_PART = 512
"""Images per part, unless ``parts`` is given."""
ANSWER_SECONDS = 30
"""Timeout of the connection to a cluster."""
RETRIES = 10
"""How often Ray restarts a part after its worker or node died."""
LOCK_SECONDS = 120
"""How long a part waits for its lock, which the worker of a lost node may hold for a while."""
STORE_BYTES = 100 * 2**20
"""Size of Ray's object store in a local cluster; nothing large goes through it."""
LOOK_SECONDS = 0.2
"""Interval between two checks for Ctrl-C."""
PROBE = "import sys, ray; ray.init(sys.argv[1], logging_level='ERROR', log_to_driver=False)"
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",  # no usage reports
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # no warning of a future change
}


def import_ray() -> Any:
    """Return the module ``ray``.

    Raises:
        ValueError: Ray is not installed; one line with the command that installs it.
    """
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError as error:
        raise ValueError("engine ray needs ray: pip install 'visionattn[ray]'") from error
    return ray


def extract(options: ExtractOptions, say: Callable[[str], None]) -> None:
    """Extract features part by part on the nodes of a cluster, and merge the parts.

    Raises:
        ValueError, FileNotFoundError: wrong options, images, model, folder or cluster; one line.
        Stopped: Ctrl-C; finished parts stay.
        OutOfMemory, Failed: a part failed.
    """
    output, address = Path(options.output or ""), options.address or ""
    plain = replace(options, engine="here", address=None, parts=None)
    if (output / INDEX).is_file():  # an earlier call has merged all parts
        Extraction(plain).run(say)
        return
    ray = import_ray()
    if address != "local":
        check_there(address)
    collection = collect(plain)
    total = len(collection.images)
    count = options.parts or -(-total // IMAGES_OF_PART)
    parts = [CollectionPart(number, count) for number in range(1, count + 1)]
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
                check_nodes(ray, "GPU", 1, "GPU; pass --device cpu to use processors")
            (output / PARTS).mkdir(parents=True, exist_ok=True)
            taken = f"{AT_WORK} in {output}; wait for it or end it"
            with locked(output / PARTS / LOCK, taken), Progress(total, done) as progress:
                hand_out(ray, plain, collection, left, progress)
    merge(output, say, collection.identity)


@contextmanager
def connected(ray: Any, address: str) -> Iterator[None]:
    """Connect to a cluster; a local cluster ends with the context.

    Raises:
        Failed: Ray does not start, for example because the machine is too busy; one line.
    """
    given = {"object_store_memory": STORE_BYTES, "include_dashboard": False}
    given = given if address == "local" else {}
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **given)
    except Exception as error:  # errors of Ray's processes have no class of their own
        ray.shutdown()
        raise Failed(f"Ray has not started at {address}: {first_line(error)}") from error
    try:
        yield
    finally:
        ray.shutdown()


def check_nodes(ray: Any, resource: str, wanted: int, what: str) -> None:
    """Raise ValueError if no node has the resources of a task; Ray would wait forever."""
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    largest = max((each.get(resource, 0) for each in alive), default=0)
    if largest < wanted:
        raise ValueError(f"no node of the cluster has {wanted} {what}; the largest has {largest:g}")


def hand_out(
    ray: Any,
    options: ExtractOptions,
    collection: Collection,
    left: dict[CollectionPart, int],
    progress: Progress,
) -> None:
    """Extract the remaining parts on the nodes of the cluster.

    Args:
        ray: the module, connected.
        options: options of a run without Ray.
        collection: all images.
        left: the number of images of each remaining part.
        progress: counts the images of finished parts.

    Raises:
        Stopped: Ctrl-C.
        OutOfMemory, Failed, ValueError: a part failed.
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
                    full = isinstance(error, ray.exceptions.OutOfMemoryError)
                    raise (OutOfMemory if full else Failed)(
                        f"part {part} failed on the cluster ({type(error).__name__}: "
                        f"{first_line(error.__cause__ or error)}); run the same command to resume"
                    ) from error
                if code:
                    kind = {3: OutOfMemory, 4: Failed}.get(code, ValueError)
                    raise kind(f"part {part}: {reason}")
                progress.advance(left[part])
        if interruption.requested:
            ray.shutdown()
            raise Stopped(
                f"stopped; finished parts stay in {options.output}; run the same command to resume"
            )


def check_there(address: str) -> None:
    """Check within ``ANSWER_SECONDS`` that a cluster answers at an address other than ``local``.

    Raises:
        ValueError: no cluster answers; one line.
    """
    named = os.environ.get("RAY_ADDRESS", "") if address == "auto" else ""
    said = f"{address} (RAY_ADDRESS {named})" if named else address
    wanted = "start one with ray start --head, or use --address local"
    # Ray itself would wait for most of a minute at a wrong address, and print pages of text.
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
"""The collection open in this worker: one model and one list of images."""


def extract_part(given: tuple[ExtractOptions, str, dict[str, Any]], number: str) -> tuple[int, str]:
    """Extract a part in a worker of Ray; return the exit code, 0 for success, and the error's text.

    Args:
        given: the options, the folder of relative paths, and the caller's ``identity`` of the
            collection.
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
    """Open the model and the images in a worker, and check that they equal the caller's."""
    try:
        os.chdir(folder)
    except OSError as error:
        raise ValueError(
            f"expected {folder} on all nodes; put images, weights and --output on a shared file "
            "system, at the same paths"
        ) from error
    collection = collect(options)
    if (other := difference(collection.identity, identity)) is not None:
        raise ValueError(f"model or images differ from the calling machine: {other}")
    return collection


def _write(options: ExtractOptions, collection: Collection) -> None:
    """Write a part; if the worker of a lost node still writes it, wait until that worker ends."""
    until = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            Extraction(options, collection).run(lambda text: None)
            return
        except ValueError as error:
            if not str(error).startswith(AT_WORK) or time.monotonic() > until:
                raise
        time.sleep(1)
