"""Time on a GPU without one: clocks that are told what to say, and as much of ``torch.cuda`` as recording asks for."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from visionattn.benchmark.compare import Quartiles
from visionattn.benchmark.gpu_timing import MOST_SETS, Timed, called, recorded, seconds_of, sets_needed

CPU = torch.device("cpu")


def test_seconds_are_those_of_one_call_of_several():
    now = [0.0]

    def work(seconds):
        return lambda: now.__setitem__(0, now[0] + seconds)

    entries = [called([work(1.0), work(3.0)]), Timed(work(10.0), calls=5)]
    slow, fast = seconds_of(entries, CPU, seconds=0, rounds=3, clock=lambda: now[0])
    assert slow == Quartiles(2.0, 2.0, 2.0) and fast == Quartiles(2.0, 2.0, 2.0)
    assert recorded([work(1.0)], CPU).replayed is False and sets_needed(1, CPU) == 1


@pytest.fixture
def fake_cuda(monkeypatch):
    """As much of ``torch.cuda`` as recording asks for; what happens is noted in order."""
    events = []

    @contextlib.contextmanager
    def context(*given):
        yield

    @contextlib.contextmanager
    def graph(recording):
        events.append("begin")
        yield
        events.append("end")

    stream = SimpleNamespace(wait_stream=lambda other: None)
    fakes = dict(Stream=lambda device: stream, stream=context, current_stream=lambda device: stream, graph=graph)
    fakes |= dict(synchronize=lambda device: None, CUDAGraph=lambda: SimpleNamespace(replay=lambda: events.append("replay")))
    fakes["get_device_properties"] = lambda device: SimpleNamespace(L2_cache_size=50 << 20)
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return events


def test_calls_are_recorded_after_they_have_run_and_replayed(fake_cuda):
    entry = recorded([lambda: fake_cuda.append("a"), lambda: fake_cuda.append("b")], torch.device("cuda"))
    assert fake_cuda == ["a", "b", "a", "b", "begin", "a", "b", "end"] and (entry.replayed, entry.calls) == (True, 2)
    entry.run()
    assert fake_cuda[-1] == "replay"


def test_calls_that_cannot_be_recorded_are_called_and_too_little_memory_is_told(fake_cuda):
    error = RuntimeError("operation not permitted when stream is capturing")

    def call():
        fake_cuda.append("call")
        if fake_cuda.count("begin"):
            raise error

    entry = recorded([call], torch.device("cuda"))
    assert not entry.replayed and fake_cuda == ["call", "call", "begin", "call"]
    error = torch.OutOfMemoryError("full")
    fake_cuda.clear()
    with pytest.raises(torch.OutOfMemoryError):
        recorded([call], torch.device("cuda"))


def test_inputs_are_rotated_until_the_cache_holds_none_of_them(fake_cuda):
    sets = [sets_needed(size << 20, torch.device("cuda")) for size in (1, 20, 150, 300)]
    assert sets == [MOST_SETS, 10, 2, 1]
