"""What the host checks of a launch, and the table of launches, without Triton."""

import json
from contextlib import nullcontext
from importlib.util import find_spec

import pytest
import torch

from visionattn.layout import Grid, TokenLayout
from visionattn.ops import Joint, kernelized_attention, taylorshift_attention
from visionattn.ops.gpu import launch


class Kernel:
    """Notes how it is launched."""

    __name__ = "some_kernel"

    def __init__(self):
        self.launched = []

    def __getitem__(self, grid):
        return lambda *args, **meta: self.launched.append((grid, args, meta))


@pytest.mark.parametrize("grid", [(2**31,), (1, 65_536), (1, 1, 65_536)])
def test_a_grid_beyond_what_cuda_launches_is_refused_before_it_is_launched(grid):
    kernel = Kernel()
    with pytest.raises(ValueError, match="some_kernel: a grid of .* programs is beyond"):
        launch.run(kernel, grid, torch.empty(1))
    assert not kernel.launched


def test_a_grid_of_the_largest_size_is_launched_and_an_empty_one_is_not():
    kernel, x = Kernel(), torch.empty(1)
    launch.run(kernel, (2**31 - 1, 65_535), x, 3, BLOCK=16)
    launch.run(kernel, (0,), x)
    assert kernel.launched == [((2**31 - 1, 65_535), (x, 3), {"BLOCK": 16})]


ROWS = [
    pytest.param(kernel, row, id=f"{section} {kernel} {row['d']} {row['e']} {row['bits']}")
    for section, kernels in json.loads(launch.TABLE.read_text()).items()
    for kernel, rows in kernels.items()
    for row in rows
]


WITHOUT_PRODUCTS = (
    "joint far sums",
    "sums of parts",
    "taylor efficient state",
    "unit",
    "unit backward",
)


@pytest.mark.parametrize(("kernel", "row"), ROWS)
def test_rows_hold_what_a_gpu_can_run(kernel, row):
    assert row["bits"] in (16, 32) and row["num_warps"] in (1, 2, 4, 8, 16)
    assert 1 <= row.get("num_stages", 1) <= 4
    blocks = {name: size for name, size in row.items() if name.startswith("BLOCK")}
    assert all(size & (size - 1) == 0 for size in blocks.values()), (
        f"{kernel}: {blocks} are no powers of two"
    )
    if (
        kernel == "kernelized sum and remainders"
    ):  # its sums and the few tokens of a prefix take no product
        blocks = {
            name: size
            for name, size in blocks.items()
            if name not in ("BLOCK_P", "BLOCK_E", "BLOCK_N")
        }
    products = kernel not in WITHOUT_PRODUCTS
    assert not products or (blocks and min(blocks.values()) >= 16), (
        f"{kernel}: a product wants 16 at least, got {blocks}"
    )


def test_the_row_of_the_least_widths_that_hold_both_is_taken(tmp_path, monkeypatch):
    rows = [
        {"d": 64, "e": 64, "bits": 16, "BLOCK_N": 1},
        {"d": 32, "e": 64, "bits": 16, "BLOCK_N": 2},
    ]
    table = {"default": {"k": rows}, "9.0": {"k": [rows[0] | {"BLOCK_N": 3}]}}
    path = tmp_path / "launches.json"
    path.write_text(json.dumps(table))
    monkeypatch.setattr(launch, "TABLE", path)
    launch._table.cache_clear()
    device = torch.device("cpu")
    assert launch.launch_row("k", 24, 64, torch.bfloat16, device) == {"BLOCK_N": 2}
    assert launch.launch_row("k", 40, 8, torch.float16, device) == {"BLOCK_N": 1}
    for d, dtype in ((72, torch.float16), (16, torch.float32)):
        with pytest.raises(ValueError, match=f"k: no launch of d = {d}, e = 64"):
            launch.launch_row("k", d, 64, dtype, device)
    monkeypatch.setattr(launch, "capability", lambda device: "9.0")
    assert launch.launch_row("k", 48, 64, torch.bfloat16, device) == {"BLOCK_N": 3}
    monkeypatch.undo()
    launch._table.cache_clear()


def test_views_of_one_projection_are_read_where_they_lie_and_others_are_copied():
    q, k, v = torch.empty(2, 7, 3, 4, 24).permute(2, 0, 3, 1, 4)
    assert all(launch.readable(x) is x for x in (q, k, v))
    assert launch.octets(q) == (7 * 36, 3, 36)
    for x in (q.mT, torch.empty(2, 4, 7, 28)[..., :24], torch.ones(1).expand(2, 4, 7, 24)):
        assert launch.readable(x) is not x and launch.readable(x).is_contiguous()


@pytest.mark.parametrize("programs", [1, 3, 264, 300, 528, 10_000])
def test_segments_fill_whole_rounds_of_the_gpu_and_leave_each_two_blocks(programs):
    for tokens in (1, 100, 4096, 1 << 20):
        parts = launch.segments(tokens, programs, 64, resident=264)
        assert parts == 1 or (parts * programs <= 8 * 264 and tokens // parts >= 2 * 64)
    assert (
        launch.segments(1 << 20, 1, 64, resident=264) == 264
    )  # one round: more would be the same blocks, and more parts
    assert launch.segments(1 << 20, 264, 64, resident=264) == 1
    # 300 programs take two rounds, of which the second is nearly empty; 2100 of a seventh take
    # eight of a seventh.
    assert launch.segments(1 << 20, 300, 64, resident=264) == 7


def test_no_number_of_segments_takes_fewer_blocks_in_turn_by_more_than_what_starting_them_costs():
    """Against all numbers of parts, by counting the blocks that the busiest place of the GPU works
    on.
    """

    def blocks(parts: int, tokens: int, programs: int) -> int:
        rounds = -(-programs * parts // 132)
        return rounds * (-(-tokens // (64 * parts)) + 2)

    for programs, tokens in (
        (6, 4096),
        (12, 65_536),
        (240, 65_536),
        (131, 16_384),
        (133, 16_384),
        (1, 130),
    ):
        found = launch.segments(tokens, programs, 64, resident=132)
        most = max(1, tokens // 128)
        best = min(blocks(parts, tokens, programs) for parts in range(1, most + 1))
        assert blocks(found, tokens, programs) <= 1.1 * best


def test_a_row_says_how_many_of_its_programs_fit_and_the_kernel_is_not_given_that(
    tmp_path, monkeypatch
):
    rows = [
        {"d": 64, "e": 64, "bits": 16, "BLOCK_N": 1, "ctas": 3},
        {"d": 128, "e": 64, "bits": 16, "BLOCK_N": 2},
    ]
    path = tmp_path / "launches.json"
    path.write_text(json.dumps({"default": {"k": rows}}))
    monkeypatch.setattr(launch, "TABLE", path)
    monkeypatch.setattr(launch, "_multiprocessors", lambda device: 100)
    launch._table.cache_clear()
    device = torch.device("cpu")
    assert launch.launch_row("k", 64, 64, torch.float16, device) == {"BLOCK_N": 1}
    assert [launch.resident_programs("k", d, 64, torch.float16, device) for d in (64, 128)] == [
        300,
        200,
    ]
    monkeypatch.undo()
    launch._table.cache_clear()


def test_launches_and_rows_are_made_otherwise_within_a_context_alone(tmp_path):
    kernel, device, x = Kernel(), torch.device("cpu"), torch.empty(1)
    asked = "unit", 64, 64, torch.float16, device
    table, before = tmp_path / "other.json", launch.launch_row(*asked)
    row = {"d": 64, "e": 64, "bits": 16, "BLOCK_N": 7}
    table.write_text(json.dumps({"default": {"unit": [row]}}))
    names = []

    def twice(launch_one, kernel, grid, *args, **meta):
        names.append(kernel.__name__)
        launch_one(kernel, grid, *args, **meta)
        launch_one(kernel, grid, *args, **meta)

    def wider(row_of, name, d, *others):
        return row_of(name, d, *others) | {"asked": d}

    with launch.launching_with(run=twice, table=table), launch.launching_with(rows=wider):
        assert launch.launch_row(*asked) == {"BLOCK_N": 7, "asked": 64}
        with launch.launching_with(run=twice):
            launch.run(kernel, (1,), x, BLOCK=16)
        launch.run(kernel, (1,), x, BLOCK=16)
    assert len(kernel.launched) == 4 + 2 and names == ["some_kernel"] * (1 + 2 + 1)
    launch.run(kernel, (1,), x, BLOCK=16)
    assert len(kernel.launched) == 7 and launch.launch_row(*asked) == before


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
@pytest.mark.parametrize("name", ["kernelized", "causal", "taylorshift"])
def test_a_million_tokens_of_many_heads_launch_within_the_limits(name, monkeypatch):
    """On tensors without memory: 1024 x 1024 patches, 16 images of 6 heads."""
    from visionattn.ops.kernelized import gpu as kernel_mean
    from visionattn.ops.taylorshift import gpu as taylor_mean

    grids = []
    monkeypatch.setattr(
        launch,
        "run",
        lambda kernel, grid, *args, **meta: (launch.check_grid("k", grid), grids.append(grid)),
    )
    monkeypatch.setattr("visionattn.ops.gpu.machine.why_not_here", lambda device, dtype: None)
    side, batch, heads, d = 1024, 16, 6, 64
    q, k, v = torch.empty(
        batch, side * side, 3, heads, d, dtype=torch.bfloat16, device="meta"
    ).permute(2, 0, 3, 1, 4)
    relative = Joint(
        torch.empty(heads, 7, 7, d, device="meta"), TokenLayout(0, Grid(side, side)), "mean"
    )
    place = [side, side, 0, 3, 3, 1]
    if name == "taylorshift":
        assert taylorshift_attention(q, k, v, relative=relative, impl="triton").shape == v.shape
        taylor_mean.taylor_mean._init_fn(
            q, k, v, None, None, relative.table, 0.5, 1.0, 1.0, "efficient", place
        )
    else:
        causal = name == "causal"
        assert (
            kernelized_attention(
                q, k, v, causal=causal, relative=None if causal else relative, impl="triton"
            ).shape
            == v.shape
        )
        table, place = (None, []) if causal else (relative.table, place)
        kernel_mean.kernel_mean._init_fn(q, k, v, None, table, "elu1", causal, place)
    assert grids and all(len(grid) == 1 for grid in grids)
