"""Time on a GPU without one: clocks that are told what to say, graphs, and how often what is
called.
"""

import inspect

import pytest
import torch

from visionattn.lab.compare import Quartiles
from visionattn.lab.gpu.device import Gpu, RehearsedCuda, RehearsedEvent, rehearsed
from visionattn.lab.gpu.timing import MOST_SETS, Timed, called, recorded, seconds_of, sets_needed


def test_seconds_are_those_of_one_call_of_several():
    now = [0.0]

    def work(seconds):
        return lambda: now.__setitem__(0, now[0] + seconds)

    entries = [called([work(1.0), work(3.0)]), Timed(work(10.0), calls=5)]
    gpu = rehearsed(clock=lambda: now[0])
    slow, fast = seconds_of(entries, gpu, seconds=0, rounds=3)
    assert slow == Quartiles(2.0, 2.0, 2.0) and fast == Quartiles(2.0, 2.0, 2.0)


class Noting(RehearsedCuda):
    """Notes in order what recording asks for."""

    def __init__(self):
        super().__init__()
        self.events = []

    def graph(self, cuda_graph):
        inner = super().graph(cuda_graph)
        events = self.events

        class Recording:
            def __enter__(self):
                events.append("begin")
                return inner.__enter__()

            def __exit__(self, *error):
                events.append("end")
                return inner.__exit__(*error)

        return Recording()


@pytest.fixture
def gpu():
    return Gpu(torch.device("cpu"), Noting())


def test_calls_are_recorded_after_they_have_run_and_replayed(gpu):
    events = gpu.cuda.events
    entry = recorded([lambda: events.append("a"), lambda: events.append("b")], gpu)
    assert events == ["a", "b", "a", "b", "begin", "a", "b", "end"]
    assert (entry.replayed, entry.calls) == (True, 2)
    entry.run()
    assert gpu.cuda.replays == 1 and events[-1] == "end"


def test_calls_that_cannot_be_recorded_are_called_and_too_little_memory_is_told(gpu):
    events = gpu.cuda.events
    error = RuntimeError("operation not permitted when stream is capturing")

    def call():
        events.append("call")
        if events.count("begin"):
            raise error

    entry = recorded([call], gpu)
    assert not entry.replayed and events == ["call", "call", "begin", "call", "end"]
    error = torch.OutOfMemoryError("full")
    events.clear()
    with pytest.raises(torch.OutOfMemoryError):
        recorded([call], gpu)


def test_a_rehearsed_graph_refuses_what_waits_for_the_gpu(gpu):
    x = torch.ones(3)
    assert recorded([lambda: x + 1], gpu).replayed
    assert not recorded([lambda: x.sum().item()], gpu).replayed
    assert not recorded([lambda: x.nonzero()], gpu).replayed


def test_inputs_are_rotated_until_the_cache_holds_none_of_them(monkeypatch):
    gpu = rehearsed()
    monkeypatch.setattr(Gpu, "cache_bytes", 50 << 20)
    assert [sets_needed(size << 20, gpu) for size in (1, 20, 150, 300)] == [MOST_SETS, 10, 2, 1]


def test_the_peak_is_above_what_was_there_before():
    assert rehearsed().peak_bytes(lambda: None) == 2 * 2**20


@pytest.mark.parametrize("name", [name for name in vars(RehearsedCuda) if not name.startswith("_")])
def test_what_is_rehearsed_exists_in_torch_and_takes_as_much(name):
    """What a rehearsal calls with these arguments, ``torch.cuda`` takes too."""
    real, mine = getattr(torch.cuda, name), getattr(RehearsedCuda, name)
    taken = inspect.signature(real).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in taken.values())
    asked = list(inspect.signature(mine).parameters)[1:]
    assert open_ended or set(asked) <= set(taken), (name, asked, list(taken))


def test_events_of_torch_have_what_rehearsed_ones_have():
    for name in ("record", "elapsed_time"):
        assert callable(getattr(torch.cuda.Event, name)) and hasattr(RehearsedEvent, name)
    with pytest.raises(RuntimeError, match="enable_timing"):
        RehearsedEvent(float, False).elapsed_time(RehearsedEvent(float, True))


def test_the_real_gpu_asks_torch_itself():
    gpu = Gpu(torch.device("cuda", 0))
    assert gpu.cuda is torch.cuda and not gpu.is_rehearsed and rehearsed().is_rehearsed
