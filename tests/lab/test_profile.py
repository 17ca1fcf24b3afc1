"""Cells of a memory profile: their parts, their growth, the largest image, and the file for the
memory viewer.
"""

import json
import math
import pickle
import pickletools
import resource
import subprocess
import sys
from dataclasses import asdict, replace

import numpy as np
import pytest
import timm
import torch
from torch.cuda import _memory_viz as viewer

import visionattn.lab.profile.snapshot as snapshot
from tests.helpers.tools import words
from visionattn.cli import fresh_process
from visionattn.cli.ends import Failed
from visionattn.lab.cases import PRECISIONS, Case
from visionattn.lab.figures import memory_of
from visionattn.lab.networks import build_model
from visionattn.lab.profile.largest import find_largest, largest_fit
from visionattn.lab.profile.process import Bytes, Job, measure, measure_here
from visionattn.lab.profile.rows import Row, growth, growths, record_of
from visionattn.lab.profile.run import n1_of
from visionattn.lab.profile.shape import Shape
from visionattn.lab.profile.snapshot import PICKLE_PROTOCOL, record, write_snapshot
from visionattn.lab.profile.step import Step

linux = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="memory of a CPU is measured under Linux only"
)
TINY = Case("model", "taylorshift_vit_t", 48, depth=1)
VIEWER_OPCODES = set(
    words("APPEND APPENDS BINFLOAT BINGET BININT BININT1 BININT2 BINPUT BINUNICODE DICT")
)
VIEWER_OPCODES |= set(
    words("EMPTY_DICT EMPTY_LIST EMPTY_TUPLE FRAME LIST LONG1 LONG_BINGET LONG_BINPUT MARK")
)
VIEWER_OPCODES |= set(
    words("MEMOIZE NEWFALSE NEWTRUE NONE PROTO SETITEM SETITEMS SHORT_BINUNICODE STOP")
)
VIEWER_OPCODES |= {"TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"}
"""What the unpickler of https://pytorch.org/memory_viz reads."""


def bytes_at(above: int, **others: int) -> Bytes:
    return Bytes(
        **dict(
            peak_bytes=above,
            reserved_bytes=None,
            above_bytes=above,
            parameters_bytes=3,
            gradients_bytes=5,
        )
        | dict(optimizer_bytes=7, activations_bytes=11)
        | others
    )


def row_at(px: int, tokens: int, above: int | None) -> Row:
    case = replace(TINY, size=px)
    return Row(case, tokens, bytes_at(above)) if above else Row(case, tokens, None, "out of memory")


def test_growth_is_the_least_squares_slope_over_sizes_that_were_measured_from_the_given_one_up():
    noise = np.random.default_rng(7)
    tokens = np.array([1025, 1601, 2305, 4097, 6401])
    above = (tokens**1.7 * np.exp(noise.normal(0, 0.1, 5))).astype(int)
    rows = [row_at(512, 1025, 10**9)]
    rows += [
        row_at(16 * math.isqrt(n), int(n), int(size))
        for n, size in zip(tokens[1:], above[1:], strict=True)
    ]
    rows.append(row_at(2048, 16385, None))
    wanted = np.polyfit(np.log(tokens[1:]), np.log(above[1:]), 1)[0]
    assert growth(rows, 640) == pytest.approx(wanted, rel=1e-9)
    assert growth(rows[1:2], 640) is None and growth(rows, 1280) is None
    record = record_of(rows[-1], None)
    assert record["status"] == "out of memory" and record["peak_bytes"] is None
    assert record["tokens"] == 16385


def test_each_series_has_its_own_growth():
    linear = (row_at(64, 17, 170), row_at(96, 37, 370))
    other = [
        Row(replace(row.case, backward=True, update=True), row.tokens, row.bytes) for row in linear
    ]
    found = growths([row_at(64, 17, 17**2), row_at(96, 37, 37**2), *other], 64)
    assert sorted(found.values()) == [pytest.approx(1.0), pytest.approx(2.0)]


def allocated_at_most(case: Case) -> int:
    """What PyTorch's allocator has handed out at most during a pass: the same on every
    processor.
    """
    step = Step(case)
    step.place(case.size)
    level = most = 0
    for event in record(step.run)["device_traces"][0]:
        level += event["size"] * {"alloc": 1, "free_completed": -1}.get(event["action"], 0)
        most = max(most, level)
    return most


@pytest.mark.parametrize(
    ("model", "form", "sizes", "least", "most"),
    [
        ("taylorshift_vit_t", "efficient", (1024, 2048), 3.5, 16385 / 4097),  # buffers take 8 MB
        ("scaleformer_vit_t", "efficient", (512, 736), 1.8, 2117 / 1025),
        ("vit_tiny_patch16_224+eager", "auto", (512, 736), 3.7, (2117 / 1025) ** 2),
    ],
)
def test_memory_grows_with_the_tokens_of_ours_and_with_their_square_in_eager_attention(
    model, form, sizes, least, most, one_thread
):
    small, large = (allocated_at_most(Case("model", model, px, depth=1, form=form)) for px in sizes)
    assert least < large / small < most


@pytest.fixture
def one_thread():
    """Slices in cache are as many as there are threads, and each takes memory."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


LIBRARY = """
import json, mmap, sys, torch
from visionattn.lab.profile import process
from visionattn.lab.profile.step import Step

kept, pages = {}, open(sys.argv[2], "rb")

def run(self):
    tokens = (self.image.shape[-1] // 16) ** 2
    if sys.argv[1] == "buffer" and tokens > 64:
        kept.setdefault("packed matrices", torch.ones(1 << 20))
    if sys.argv[1] == "buffer of a size":
        kept.setdefault(tokens, torch.ones(1 << 20))
    if sys.argv[1] == "code" and "mapped" not in kept and tokens > 64:
        kept["mapped"] = mmap.mmap(pages.fileno(), 0, access=mmap.ACCESS_READ)
        sum(kept["mapped"][i] for i in range(0, 4 << 20, 4096))
    torch.ones(tokens, 4096)

Step.run = run
print(json.dumps(process.measure_told(json.load(sys.stdin))))
"""
"""A pass of 16 KiB a patch, under a library that keeps 4 MiB from its first large call on, or from
its first at each size.
"""


@linux
@pytest.mark.parametrize("library", ["buffer", "buffer of a size", "code"])
def test_what_a_library_keeps_does_not_count_as_growth(tmp_path, started_quickly, library):
    (tmp_path / "code").write_bytes(bytes(4 << 20))
    rows = []
    for px in (512, 736):
        told = json.dumps(asdict(Job(replace(TINY, size=px), threads=1)))
        command = [sys.executable, "-c", LIBRARY, library, str(tmp_path / "code")]
        given = dict(
            input=told,
            capture_output=True,
            text=True,
            env=fresh_process.environment(returning=True),
        )
        printed = subprocess.run(command, check=True, **given).stdout
        rows.append(Row(replace(TINY, size=px), (px // 16) ** 2, Bytes(**json.loads(printed))))
        assert rows[-1].bytes.above_bytes == pytest.approx(rows[-1].tokens * 4 * 4096, abs=1 << 20)
    assert growth(rows, 512) == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize(("precision", "size"), [("float32", 4), ("bfloat16", 2), ("amp_fp16", 4)])
def test_parameters_gradients_and_optimizer_state_are_the_bytes_of_their_tensors(precision, size):
    own = timm.create_model("vit_tiny_patch16_224", depth=1)
    tensors = [parameter for parameter in own.parameters()]
    count = sum(parameter.numel() for parameter in tensors)
    dtype, amp = PRECISIONS[precision]
    how = dict(dtype=dtype, amp=amp, backward=True, update=True, depth=1)
    step = Step(Case("model", "vit_tiny_patch16_224", 32, **how))
    step.warm_up()
    assert step.gradients_bytes == 0 and step.image.shape == (1, 3, 32, 32)
    step.place(48)
    step.run()
    assert step.parameters_bytes == size * count
    assert step.gradients_bytes == size * (
        count + 9 * 192
    )  # of the class token it is a view of that of all 10 tokens
    assert step.optimizer_bytes == 2 * step.parameters_bytes + 4 * len(tensors)


def test_a_checkpointed_block_keeps_its_input_alone():
    def saved(depth: int, checkpointing: bool) -> int:
        step = Step(replace(TINY, backward=True, depth=depth, checkpointing=checkpointing))
        step.place(80)
        return step.saved_bytes()

    assert saved(2, True) - saved(1, True) == (25 + 1) * 192 * 4
    assert saved(2, False) - saved(1, False) > 10 * 26 * 192 * 4


def test_what_inference_holds_are_activations_and_a_backward_counts_what_is_saved():
    for work in ("inference", "forward+backward"):
        sizes = measure_here(Job(replace(TINY, backward=work != "inference")))
        assert sizes.reserved_bytes is None and sizes.peak_bytes > sizes.above_bytes
        if work == "inference":
            assert sizes.activations_bytes == sizes.above_bytes
            assert sizes.gradients_bytes == sizes.optimizer_bytes == 0
        else:
            assert sizes.activations_bytes > 10 * 192 * 4 * 8
            assert sizes.gradients_bytes == sizes.parameters_bytes + 9 * 192 * 4


def test_a_form_is_the_one_that_runs():
    for form in ("direct", "efficient"):
        model = build_model(replace(TINY, form=form))
        assert [block.attn.form for block in model.blocks] == [form]


def test_tokens_are_patches_and_prefix_and_sizes_in_pixels_lead_back():
    shape = Shape.of(TINY)
    assert (shape.patch_px, shape.prefix, shape.taylor_width) == (16, 1, 32)
    assert shape.tokens(112) == 50 and shape.px(50) == 112
    assert Shape.of(replace(TINY, name="taylorshift_vit_t+identity")).taylor_width is None
    assert Shape.of(replace(TINY, name="scaleformer_vit_t")).taylor_width is None


@pytest.mark.parametrize("start", [1, 4, 16])
def test_bisection_finds_what_a_scan_finds_and_asks_no_size_twice(start):
    for most in range(45):
        asked = []

        def fits(patches, most=most, asked=asked):
            asked.append(patches)
            return patches**2 * 100 <= most**2 * 100 + 50

        scan = next(n for n in range(100) if (n + 1) ** 2 * 100 > most**2 * 100 + 50)
        assert largest_fit(fits, start) == scan == most
        assert len(set(asked)) == len(asked) and (scan + 1 in asked)


def test_the_largest_image_comes_with_the_next_size_that_does_not_fit():
    shape = Shape.of(TINY)
    budget = 37**2 * 1000

    def measured(case, tokens):
        above = (tokens - 1) * 1000
        return row_at(case.size, tokens, above if above < budget else None)

    found, rows = find_largest(TINY, shape, measured)
    assert (found.fits.case.size, found.beyond.case.size, found.status) == (36 * 16, 37 * 16, "ok")
    assert [row.case.size for row in rows] == sorted(row.case.size for row in rows)
    nothing, _ = find_largest(TINY, shape, lambda case, tokens: row_at(case.size, tokens, None))
    assert nothing.fits is None and nothing.status == "nothing fits"
    assert nothing.beyond.case.size == 16


def test_the_plot_marks_n1_in_tokens_and_pixels_for_taylorshift_alone():
    rows = [row_at(64, 17, 1 << 21), row_at(96, 37, 1 << 22)]
    shapes = {
        "taylorshift_vit_t": Shape.of(TINY),
        "scaleformer_vit_t": Shape.of(replace(TINY, name="scaleformer_vit_t")),
    }
    exponents = growths(rows, 64)
    records = [record_of(row, exponents[row.case.series]) for row in rows]
    (chart,) = memory_of(records, n1=n1_of(shapes))
    (line,), (mark,) = chart.series, chart.marks
    assert (list(line.x), list(line.y)) == ([64, 96], [2, 4]) and "tokens⁰·⁸⁹" in line.name
    assert mark.text == "N1 of TaylorShift, d = 32: 574 tokens"  # as in the table of the paper
    assert round(mark.x) == 383 and mark.y is None
    assert n1_of({"scaleformer_vit_t": shapes["scaleformer_vit_t"]}) == {}


def test_a_snapshot_holds_each_allocation_with_where_it_was_made_and_where_it_was_freed():
    kept = []

    def work():
        big = torch.ones(1000, 1000)
        kept.append(big[:1].clone())

    content = record(work)
    trace = content["device_traces"][0]
    big = [event for event in trace if event["size"] == 4_000_000]
    assert [event["action"] for event in big] == words(
        "segment_alloc alloc free_requested free_completed segment_free"
    )
    assert len({event["addr"] for event in big}) == 1
    frames = big[0]["frames"]
    assert frames[0]["name"].startswith("aten::")
    assert any(
        frame["name"] == "work" and frame["filename"].endswith("test_profile.py")
        for frame in frames
    )
    assert [(s["address"], s["total_size"]) for s in content["segments"]] == [
        (kept[0].data_ptr(), 4000)
    ]


def test_a_snapshot_of_a_pass_balances_and_pytorchs_own_reader_takes_it(tmp_path):
    step = Step(replace(TINY, backward=True))
    step.warm_up()
    step.place(48)
    path = tmp_path / "pass.pickle"
    write_snapshot(path, step)
    opcodes = {opcode.name for opcode, _, _ in pickletools.genops(path.read_bytes())}
    assert opcodes <= VIEWER_OPCODES and PICKLE_PROTOCOL == 4
    content = pickle.loads(path.read_bytes())
    before = [*step.model.parameters(), step.image]
    living = {tensor.data_ptr(): tensor.numel() * 4 for tensor in before}
    for event in content["device_traces"][0]:
        if event["action"] == "alloc":
            assert event["addr"] not in living
            living[event["addr"]] = event["size"]
        elif event["action"] == "free_completed":
            assert living.pop(event["addr"]) == event["size"]
    assert living == {segment["address"]: segment["total_size"] for segment in content["segments"]}
    held = step.parameters_bytes + 4 * step.image.numel()
    assert sum(living.values()) == held + step.gradients_bytes
    assert f"segments: {len(content['segments'])}\n" in viewer.segsum(content)
    assert f"{len(content['device_traces'][0])} entries" in viewer.trace(content)
    assert "snapshot.pickle" in viewer.trace_plot(content)


def test_a_cell_beyond_the_budget_ends_as_out_of_memory_in_a_process_of_its_own(started_quickly):
    """A matrix of 3 x 16,385 x 16,385 float32 is 3 GiB."""
    case = Case("model", "vit_tiny_patch16_224+eager", 2048, depth=1)
    with pytest.raises(torch.OutOfMemoryError, match=r"2048 px does not fit"):
        measure(Job(case, threads=1, budget_bytes=3 << 29))


def test_a_killed_process_ran_out_of_memory_only_where_the_system_says_so(monkeypatch):
    killed = subprocess.CompletedProcess([], -9, "", "")
    monkeypatch.setattr(subprocess, "run", lambda command, **options: killed)
    kills = iter([5, 5, 5, 6])
    monkeypatch.setattr(fresh_process, "memory_kills", lambda: next(kills))
    with pytest.raises(Failed, match="killed by signal 9"):
        measure(Job(TINY))
    with pytest.raises(torch.OutOfMemoryError, match="48 px does not fit"):
        measure(Job(TINY))


def test_kills_for_want_of_memory_are_those_of_the_control_group_or_of_the_system(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(fresh_process, "Path", lambda name: tmp_path / name.lstrip("/"))
    assert fresh_process.memory_kills() == 0
    group = tmp_path / "sys" / "fs" / "cgroup" / "a" / "b"
    for folder in (tmp_path / "proc" / "self", group):
        folder.mkdir(parents=True)
    (tmp_path / "proc" / "vmstat").write_text("nr_free_pages 77\noom_kill 4\n")
    assert fresh_process.memory_kills() == 4
    (tmp_path / "proc" / "self" / "cgroup").write_text("4:memory:/c\n0::/a/b\n")
    assert fresh_process.memory_kills() == 4
    (group / "memory.events").write_text("low 0\noom 9\noom_kill 2\noom_group_kill 0\n")
    assert fresh_process.memory_kills() == 2


def test_a_snapshot_is_written_without_the_limit_of_the_pass(tmp_path, monkeypatch):
    seen = []
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    real = snapshot.write_snapshot
    monkeypatch.setattr(
        snapshot,
        "write_snapshot",
        lambda *given: seen.append(resource.getrlimit(resource.RLIMIT_DATA)[0]) or real(*given),
    )
    try:
        measure_here(Job(TINY, budget_bytes=2**40, snapshot=str(tmp_path / "a.pickle")))
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    assert seen == [hard] and (tmp_path / "a.pickle").is_file()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_peaks_are_those_of_pytorchs_allocator_and_a_budget_is_a_smaller_card(tmp_path):
    case = Case("model", "vit_tiny_patch16_224+eager", 1024, backward=True, update=True, depth=1)
    path = tmp_path / "pass.pickle"
    sizes = measure(Job(case, "cuda", snapshot=str(path)))
    matrix = 3 * 4097**2 * 4
    assert sizes.reserved_bytes >= sizes.peak_bytes >= sizes.above_bytes > 2 * matrix
    assert sizes.optimizer_bytes > 2 * sizes.parameters_bytes
    assert (
        max(
            event["size"]
            for event in pickle.loads(path.read_bytes())["device_traces"][0]
            if "size" in event
        )
        >= matrix
    )
    with pytest.raises(torch.OutOfMemoryError):
        measure(Job(case, "cuda", budget_bytes=2 * matrix))
