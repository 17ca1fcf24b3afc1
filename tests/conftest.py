"""Before any test: one thread, and where there is no GPU, Triton interprets its kernels on the
processor. torch and Triton read this when they are imported.
"""

import os

import pytest

# Tests are small, and several processes run them: more threads would only wait for each other.
# Processes that tests start inherit it.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

import torch  # noqa: E402

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    # A first backward pass after fake tensors of a GPU would start a thread for it, and processes
    # that tests fork could then run no backward pass.
    torch.ones(1, requires_grad=True).sum().backward()

from tests.helpers import warm_python  # noqa: E402

MOST_WORKERS = 16
"""Each takes some 2 GiB."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """As many processes for ``-n auto`` as this one may use cores, unless the environment says."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None
    affinity = getattr(os, "sched_getaffinity", None)
    return min(MOST_WORKERS, len(affinity(0)) if affinity else os.cpu_count() or 1)


@pytest.fixture(scope="session")
def quick_python():
    """A Python for tests that start it often: its libraries are imported, the package is not."""
    with warm_python.serving() as python:
        yield python


@pytest.fixture
def started_quickly(quick_python, monkeypatch):
    """Let what the test starts be started by that Python."""
    warm_python.use(quick_python, monkeypatch)
