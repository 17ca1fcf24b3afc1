"""What the host checks of a launch, and the table of launches, without Triton."""

import json
from contextlib import nullcontext
from importlib.util import find_spec

import pytest
import torch

from visionattn.ops.gpu import launch

CPU = torch.device("cpu")


class Kernel:
    """Notes how it is launched."""

    __name__ = "some_kernel"

    def __init__(self):
        self.launched = []

    def __getitem__(self, grid):
        return lambda *args, **meta: self.launched.append((grid, args, meta))


@pytest.fixture
def table(tmp_path, monkeypatch):
    """A function that puts a table in place of ``launches.json``."""
    path = tmp_path / "launches.json"
    monkeypatch.setattr(launch, "TABLE", path)

    def put(**sections):
        path.write_text(json.dumps(sections))
        launch.forget()

    yield put
    launch.forget()


def test_grids_that_cuda_does_not_launch_are_refused_and_an_empty_one_is_not_launched():
    kernel, x = Kernel(), torch.empty(1)
    for grid in ((2**31,), (1, 65_536), (1, 1, 65_536)):
        with pytest.raises(
            ValueError, match="some_kernel: expected a grid of at most .* programs, got"
        ):
            launch.run(kernel, grid, x)
    launch.run(kernel, (0,), x)
    assert not kernel.launched
    launch.run(kernel, (2**31 - 1, 65_535), x, 3, BLOCK=16)
    assert kernel.launched == [((2**31 - 1, 65_535), (x, 3), {"BLOCK": 16})]


WITHOUT_PRODUCTS = ("joint far sums", "sums of parts", "taylor efficient state", "unit")
WITHOUT_PRODUCTS += ("unit backward",)


def test_rows_hold_what_a_gpu_can_run():
    sections = json.loads(launch.TABLE.read_text())
    pairs = [(name, row) for x in sections.values() for name, rows in x.items() for row in rows]
    for kernel, row in pairs:
        assert row["bits"] in (16, 32) and row["num_warps"] in (1, 2, 4, 8, 16), (kernel, row)
        assert 1 <= row.get("num_stages", 1) <= 4, (kernel, row)
        blocks = [size for name, size in row.items() if name.startswith("BLOCK")]
        assert all(size & (size - 1) == 0 for size in blocks), (kernel, row)
        # A product of matrices wants 16 at least.
        assert kernel in WITHOUT_PRODUCTS or min(blocks) >= 16, (kernel, row)


def test_the_row_of_the_least_widths_that_hold_both_is_taken(table, monkeypatch):
    rows = [
        {"d": 64, "e": 64, "bits": 16, "BLOCK_N": 1},
        {"d": 32, "e": 64, "bits": 16, "BLOCK_N": 2, "ctas": 3},
    ]
    table(default={"k": rows}, **{"9.0": {"k": [rows[0] | {"BLOCK_N": 3}]}})
    monkeypatch.setattr(launch, "_multiprocessors", lambda device: 100)
    asked = 24, 64, torch.bfloat16, CPU
    assert launch.launch_row("k", *asked) == {"BLOCK_N": 2}
    assert launch.resident_programs("k", *asked) == 300
    assert launch.launch_row("k", 40, 8, torch.float16, CPU) == {"BLOCK_N": 1}
    assert launch.resident_programs("k", 40, 8, torch.float16, CPU) == 200
    for d, dtype in ((72, torch.float16), (16, torch.float32)):
        with pytest.raises(ValueError, match=f"k: no launch of d = {d}, e = 64"):
            launch.launch_row("k", d, 64, dtype, CPU)
    monkeypatch.setattr(launch, "capability", lambda device: "9.0")
    assert launch.launch_row("k", 48, 64, torch.bfloat16, CPU) == {"BLOCK_N": 3}


def test_views_of_one_projection_are_read_where_they_lie_and_others_are_copied():
    q, k, v = torch.empty(2, 7, 3, 4, 24).permute(2, 0, 3, 1, 4)
    assert all(launch.readable(x) is x for x in (q, k, v))
    assert launch.octets(q) == (7 * 36, 3, 36)
    for x in (q.mT, torch.empty(2, 4, 7, 28)[..., :24], torch.ones(1).expand(2, 4, 7, 24)):
        assert launch.readable(x) is not x and launch.readable(x).is_contiguous()


def test_segments_leave_each_two_blocks_and_take_as_few_in_turn_as_any_number_of_them():
    """Against all numbers of parts, by counting the blocks that the busiest place works on."""

    def blocks(parts: int) -> int:
        rounds = -(-programs * parts // 132)
        return rounds * (-(-tokens // (64 * parts)) + 2)

    for programs, tokens in ((6, 4096), (12, 65_536), (240, 65_536), (133, 16_384), (1, 130)):
        found = launch.segments(tokens, programs, 64, resident=132)
        most = max(1, tokens // 128)
        assert found == 1 or tokens // found >= 128
        assert blocks(found) <= 1.1 * min(blocks(parts) for parts in range(1, most + 1))


def test_launches_and_rows_are_made_otherwise_within_a_context_alone(table):
    kernel, x = Kernel(), torch.empty(1)
    table(default={"unit": [{"d": 64, "e": 64, "bits": 16, "BLOCK_N": 7}]})

    def twice(launch_one, kernel, grid, *args, **meta):
        launch_one(kernel, grid, *args, **meta)
        launch_one(kernel, grid, *args, **meta)

    def wider(row_of, name, d, *others):
        return row_of(name, d, *others) | {"asked": d}

    asked = "unit", 64, 64, torch.float16, CPU
    with launch.launching_with(run=twice, rows=wider):
        assert launch.launch_row(*asked) == {"BLOCK_N": 7, "asked": 64}
        with launch.launching_with(run=twice):
            launch.run(kernel, (1,), x)
        launch.run(kernel, (1,), x)
    launch.run(kernel, (1,), x)
    assert len(kernel.launched) == 4 + 2 + 1 and launch.launch_row(*asked) == {"BLOCK_N": 7}


def test_a_launch_switches_to_the_gpu_of_its_tensors_where_another_is_current(monkeypatch):
    switched = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(
        torch.cuda, "device", lambda device: switched.append(device.index) or nullcontext()
    )

    class OnGpu(torch.Tensor):
        device = torch.device("cuda", 0)

    x = torch.empty(1).as_subclass(OnGpu)
    launch.run(Kernel(), (1,), 5, x)
    OnGpu.device = torch.device("cuda", 1)
    launch.run(Kernel(), (1,), 5, x)
    assert switched == [0]


@pytest.mark.skipif(find_spec("triton") is None, reason="GPU kernels need Triton")
@pytest.mark.parametrize("name", ["kernelized", "efficient", "direct"])
def test_a_million_tokens_of_many_heads_launch_within_the_limits(name):
    """On tensors without memory: 64 x 16,384 patches of 96 heads; a grid beyond them raises."""
    from tests.helpers.kernel_launches import both_passes, recorded

    with recorded() as launches:
        both_passes(name, 64, 64, "bf16", tokens=2**20, horizons=(3, 3), heads=96)
    assert len(launches) > 10
