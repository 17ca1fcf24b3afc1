"""What is compiled once for all tests of kernels, whichever processes they are dealt to."""

import fcntl
import json

import pytest

from tests.helpers.kernel_launches import results_in_fresh_process


@pytest.fixture(scope="session")
def compiled(request, tmp_path_factory) -> dict[str, dict[str, dict]]:
    """``kernel_launches.results`` of all modules that the collected tests name.

    The first process that asks compiles them, and the others wait for what it writes down.
    """
    named = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    modules = sorted({params["launches"] for params in named if "launches" in params})
    folder = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):
        folder = folder.parent
    found = folder / "compiled.json"
    with (folder / "compiled.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not found.exists():
            found.write_text(json.dumps(results_in_fresh_process(modules) if modules else {}))
    return json.loads(found.read_text())
