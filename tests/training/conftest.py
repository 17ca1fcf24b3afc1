"""Runs that several files of tests look at."""

import pytest

from tests.helpers.resumed_runs import finished_run, on_small_data
from tests.helpers.small_runs import quadrants_for
from visionattn.training import engine


@pytest.fixture(scope="module")
def small_data():
    """Every run within the module is one on small data."""
    with on_small_data():
        yield


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """The folder of a run that nothing happens to."""
    with on_small_data():
        return finished_run(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def small(monkeypatch):
    """Runs on images of quadrants."""
    monkeypatch.setattr(engine, "build_splits", quadrants_for)
