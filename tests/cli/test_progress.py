"""How far tools have come: bars on terminals, lines elsewhere, and the blocks of one pass."""

import io

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from visionattn.cli.progress import Progress


class Terminal(io.StringIO):
    """What is printed to a terminal."""

    def isatty(self) -> bool:
        return True


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Stack(nn.Module):
    """Three blocks, each of which takes some seconds on a clock."""

    def __init__(self, clock: Clock, seconds: float, *, again: bool = False):
        super().__init__()
        self.clock, self.seconds, self.again = clock, seconds, again
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))

    def forward(self, inputs):
        for block in self.blocks:
            self.clock.now += self.seconds
            inputs = checkpoint(block, inputs, use_reentrant=False) if self.again else block(inputs)
        return inputs


def test_a_bar_with_speed_and_failures_is_on_a_terminal_after_some_seconds():
    stream, clock = Terminal(), Clock()
    with Progress(40, 8, stream, clock=clock) as progress:
        clock.now += 4.9
        progress.advance(2)
        assert stream.getvalue() == ""
        clock.now += 5.1
        progress.advance(3, 2)
    assert "13/40" in stream.getvalue() and "2 without a result" in stream.getvalue()
    assert "0.5 images/s" in stream.getvalue()


def test_lines_come_every_half_minute_elsewhere():
    stream, clock = io.StringIO(), Clock()
    with Progress(100, 10, stream, what="validation", unit="batches", clock=clock) as progress:
        for _ in range(12):
            clock.now += 5
            progress.advance(2, note="loss 0.5")
    assert stream.getvalue().splitlines() == [
        "validation: 22 of 100 batches, 0.4 batches/s, loss 0.5, 3 min 15 s left",
        "validation: 34 of 100 batches, 0.4 batches/s, loss 0.5, 2 min 45 s left",
    ]


@pytest.mark.parametrize("again", [False, True])
def test_a_pass_is_shown_block_by_block_forward_and_backward_and_gradients_stay(again):
    clock = Clock()
    model, inputs = Stack(clock, 3.0, again=again), torch.ones(1, 2, requires_grad=True)
    wanted = torch.autograd.grad(model(inputs).sum(), list(model.parameters()))
    for trained, shown in ((False, [4 / 3, 8 / 3, 4]), (True, [4 * n / 6 for n in range(1, 6)])):
        progress, parts = Progress(4, 0, Terminal(), clock=clock), []
        progress.show = lambda progress=progress, parts=parts: parts.append(progress._part)
        with progress.within(model, images=4), torch.set_grad_enabled(trained):
            total = model(inputs).sum()
            if trained:
                found = torch.autograd.grad(total, list(model.parameters()))
                assert all(map(torch.equal, found, wanted))
        assert sorted(set(parts)) == pytest.approx(shown) and parts == sorted(parts)
    assert not any(block._forward_hooks for block in model.blocks)


def test_results_go_where_they_are_asked_to_beside_a_bar(capsys):
    stream, clock = Terminal(), Clock()
    with Progress(2, 0, stream, clock=clock) as progress:
        clock.now += 9
        progress.advance(1)
        progress.say("a row of the table")
    assert capsys.readouterr().out == "a row of the table\n"
    assert "a row" not in stream.getvalue()
