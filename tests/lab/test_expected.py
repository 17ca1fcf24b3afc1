"""What dry runs of profiles and sweeps expect of their cells."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from visionattn.lab.profile import expected as of_profile
from visionattn.lab.sweep import expected as of_sweep


@dataclass(frozen=True)
class Cell:
    """A cell of a profile."""

    series: str
    size: int
    backward: bool = False


@pytest.mark.parametrize("backward, passes", [(False, 2.0), (True, 2 + 1 / 3)])
def test_a_cell_takes_the_start_of_a_process_and_its_passes_once_libraries_run(
    monkeypatch, backward, passes
):
    """A first pass takes 50 s, others a second for 10,000 pixels, a process 7 s."""
    now, measured, placed = [0.0], [], []

    class Step:
        model = SimpleNamespace(patch_embed=SimpleNamespace(patch_size=(8, 16)))

        def __init__(self, case, device):
            self.case, self.ran = case, 0

        def place(self, size):
            self.size = size
            placed.append((self.case.series, size))

        def run(self):
            self.ran += 1
            now[0] += 50.0 if self.ran == 1 else self.size**2 / 10_000

    def measure(case):
        measured.append(case)
        now[0] += 7.0

    monkeypatch.setattr(of_profile, "Step", Step)
    monkeypatch.setattr(of_profile, "build_model", lambda case, device: None)
    monkeypatch.setattr(of_profile, "count_flops", lambda model, rows, columns: rows * columns)
    monkeypatch.setattr(of_profile.time, "perf_counter", lambda: now[0])
    cases = [Cell(series, size, backward) for series in "ab" for size in (800, 1600)]
    cases.append(Cell("c", 200, backward))
    found = list(of_profile.expected_seconds(cases, "cpu", measure))
    assert [case for case, _ in found] == cases
    for case, seconds in found:
        assert seconds == pytest.approx(7 + passes * case.size**2 / 10_000)
    assert measured == [Cell("a", 64, backward)]  # one small cell tells of all starts
    assert placed == [("a", 512), ("b", 512), ("c", 200)]


def test_a_training_takes_its_epochs_or_has_a_reason(monkeypatch):
    config = SimpleNamespace(device="cpu")
    monkeypatch.setattr(of_sweep, "build", lambda *given: (None, None, []))
    found = SimpleNamespace(epochs=3, seconds_per_epoch=5.0)
    monkeypatch.setattr(of_sweep, "forecast", lambda trainer, memory: found)
    assert of_sweep.expected_seconds(config) == 15
    monkeypatch.setattr(of_sweep, "forecast", lambda trainer, memory: None)
    assert of_sweep.expected_seconds(config) == "none of its images can be read"


def test_a_dry_run_says_how_many_train_at_a_time(monkeypatch):
    monkeypatch.setattr(of_sweep, "config_of", lambda plan, cell, folder: None)
    monkeypatch.setattr(of_sweep, "expected_seconds", lambda config: 90.0)
    cells, lines = [SimpleNamespace(name=name, network=name) for name in "ab"], []
    of_sweep.list_cells(None, cells, 2, lines.append)
    assert lines[-1].startswith(
        "\n2 trainings of together 3 min, 2 at a time, besides measurements"
    )
    of_sweep.list_cells(None, cells, 1, lines.append)
    assert lines[-1].startswith("\n2 trainings of together 3 min, besides measurements")
