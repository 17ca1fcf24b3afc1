"""What is compiled once for all tests of kernels, whichever processes they are dealt to."""

import fcntl
import json
import warnings

import pytest

from tests.counting.facts import from_fresh_process


@pytest.fixture(scope="session")
def compiled(request, tmp_path_factory) -> dict[str, dict[str, dict]]:
    """``counting.facts.results`` of all modules that the collected tests name.

    The first process that asks makes them, and the others wait for what it writes down.
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
            results = from_fresh_process(*modules) if modules else {}
            warn_of_missing(results)
            found.write_text(json.dumps(results))
    return json.loads(found.read_text())


def warn_of_missing(results: dict[str, dict[str, dict]]) -> None:
    """Say how many kernels the record lacks: their compilation takes most of the tests' time."""
    cases = (case for found in results.values() for case in found["compiled"].values())
    anew = sum(kernel["anew"] for case in cases for found in case.values() for kernel in found)
    with warnings.catch_warnings():
        warnings.simplefilter("always")  # a note, and no failure as other warnings are
        if anew:
            warnings.warn(
                f"{anew} kernels are not in tests/kernels/compiled.json and were compiled; "
                "python -m tests.counting.facts --record puts them there",
                stacklevel=2,
            )
