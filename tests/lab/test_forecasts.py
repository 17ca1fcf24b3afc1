"""The table that compares forecasts with what is measured: ``docs/cost.md`` has it."""

import contextlib
import sys
from pathlib import Path

import pytest
import timm
import torch

from visionattn.lab import forecasts
from visionattn.lab.forecasts import CASES, Case, measure, rows

MIB = 2**20
PAGE = Path(__file__).parents[2] / "docs" / "cost.md"
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux tells its peaks")


def test_the_page_has_a_row_of_each_case_and_all_are_as_right_as_is_promised():
    table = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if "|" in line]
    head, _, *found = table
    assert head[:4] == ["model", "px", "images", "work"] and head[6::3] == ["ratio", "ratio"]
    assert [tuple(row[:4]) for row in found] == [
        (case.model, str(case.px), str(case.batch), case.work) for case in CASES
    ]
    for row in found:
        memory, pace = (float(row[i]) / float(row[i + 1]) for i in (4, 7))
        assert 0.8 <= memory <= 1.2 and 1 / 1.5 <= pace <= 1.5
        assert [float(row[6]), float(row[9])] == pytest.approx([memory, pace], abs=0.011)
    assert len({case.model for case in CASES}) >= 6
    assert all(timm.is_model(case.model) for case in CASES)


def test_a_row_has_what_was_expected_beside_what_was_measured(monkeypatch, tmp_path):
    asked = []

    def answer(work, given, name, run):
        asked.append((work, given, name))
        measured = {"expected": 300 * MIB, "measured": 400 * MIB}
        return measured | {"seconds expected": 3.0, "seconds measured": 2.0}

    monkeypatch.setattr(forecasts, "ask", answer)
    monkeypatch.setattr(forecasts, "Forks", lambda log: contextlib.nullcontext())
    monkeypatch.setattr(forecasts, "CASES", (Case("convnext_tiny", 224, 8, "training"),))
    (row,) = rows(3)
    assert row[:4] == ["convnext_tiny", "224", "8", "training"]
    assert row[4:] == ["300", "400", "0.75", "3.00", "2.00", "1.50"]
    given = {"model": "convnext_tiny", "px": 224, "batch": 8, "work": "training", "threads": 3}
    assert asked == [(measure, given, "convnext_tiny")]


@linux
@pytest.mark.parametrize("work", ["training", "checkpointed", "inference"])
def test_a_case_says_what_it_expects_and_measures_that_work(monkeypatch, work):
    """A clock on which each step or forward of n images takes n seconds."""
    now, seen, threads = [0.0], [], torch.get_num_threads()

    class Small(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.head = torch.nn.Linear(3, forecasts.CLASSES)
            self.checkpointed = False

        def set_grad_checkpointing(self, enable):
            self.checkpointed = enable

        def forward(self, images):
            if type(images) is torch.Tensor:  # and no count of memory
                seen.append((len(images), self.training, self.checkpointed))
                now[0] += len(images)
            return self.head(images.mean((2, 3)))

    monkeypatch.setattr(timm, "create_model", lambda name, **options: Small())
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    monkeypatch.setattr(
        forecasts, "try_steps", lambda learner, shapes: real(learner, shapes, lambda: now[0])
    )
    found = measure("vit_small_patch16_224", 32, 6, work, threads)
    training, checkpointed = work != "inference", work == "checkpointed"
    assert seen[-4:] == [(6, training, checkpointed)] * forecasts.REPEATS
    assert (found["seconds expected"], found["seconds measured"]) == (6.0, 6.0)
    assert 0.5 < found["expected"] / found["measured"] < 2


real = forecasts.try_steps


@linux
def test_the_peak_that_is_measured_is_that_of_the_work_alone():
    """Of tensors that are too large for the memory that libraries have kept."""
    torch.ones(160 * MIB // 4)  # an earlier and larger one
    held = []

    def work():
        held[:] = [torch.ones(64 * MIB // 4)]

    before = forecasts.resident_bytes("VmRSS")
    found = forecasts._measured(work, 7.0, 8.0)
    assert (found["expected"], found["seconds expected"]) == (7.0, 8.0)
    assert 32 * MIB < found["measured"] - before < 152 * MIB
