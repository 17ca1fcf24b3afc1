"""Some of the kills of ``python -m tests.kills``: one of each kind amid a write, one at a time of
its own.
"""

import random
import sys

import pytest

from tests import kills
from tests.helpers import warm_python


@pytest.fixture(scope="module")
def reference(quick_python, tmp_path_factory):
    """What nothing happens to, by its kind; trainings of sweeps begin quickly."""
    with pytest.MonkeyPatch.context() as patch:
        warm_python.use(quick_python, patch)
        patch.setenv("PYTHONPATH", str(kills.ROOT))
        assert sys.executable == str(quick_python)
        made = {}

        def reference_of(name: str) -> kills.Reference:
            folder = tmp_path_factory.mktemp(name)
            return made.setdefault(name, kills.Reference(kills.KINDS[name], folder / "whole"))

        yield reference_of


USUAL = [("features", 0), ("bands", 0), ("training", 0), ("sweep", 3)]
MORE = [("features", 1), ("bands", 1), ("images", 0), ("images", 4), ("distillation", 0)]


@pytest.mark.parametrize(
    ("name", "number"), [*USUAL, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)]
)
def test_what_is_killed_goes_on_to_the_same_bytes_and_leaves_nothing(
    reference, tmp_path, name, number
):
    said = reference(name).kill(tmp_path / "killed", number, random.Random(number))
    assert said.endswith("same bytes")
