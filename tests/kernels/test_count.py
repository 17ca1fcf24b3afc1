"""The counts of launches: how machine code and loops are read, and that no launch gets worse
unseen.
"""

import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from tests.counting import sass, trips
from tests.counting.branches import shares_of_programs
from tests.counting.occupancy import Use, programs_per_multiprocessor
from tests.counting.record import merge, worse
from visionattn.lab.gpu import counts as gpu_counts

ROOT = Path(__file__).parents[2]
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="kernels are compiled")


@pytest.mark.parametrize(
    ("use", "capability", "programs"),
    [
        (Use(warps=8, registers=32, shared_bytes=0), 90, 8),  # 64 warps
        (
            Use(warps=8, registers=33, shared_bytes=0),
            90,
            6,
        ),  # a warp gets 1280 registers, 12 of a quarter
        (Use(warps=4, registers=168, shared_bytes=0), 90, 3),  # 5376, 3 of a quarter
        (Use(warps=8, registers=168, shared_bytes=0), 90, 1),
        (Use(warps=2, registers=255, shared_bytes=0), 90, 4),
        (Use(warps=1, registers=16, shared_bytes=0), 90, 32),
        (
            Use(warps=4, registers=64, shared_bytes=113 * 1024),
            90,
            2,
        ),  # with 1 KiB each, all 228 KiB
        (Use(warps=4, registers=64, shared_bytes=113 * 1024 + 1), 90, 1),
        (Use(warps=4, registers=64, shared_bytes=113 * 1024), 80, 1),
        (Use(warps=4, registers=64, shared_bytes=228 * 1024), 90, 0),
    ],
)
def test_programs_that_fit_are_limited_by_warps_registers_and_shared_memory(
    use, capability, programs
):
    assert programs_per_multiprocessor(use, capability) == programs


CODE = """
	//## File "/a/kernel.py", line 7
        /*0000*/                   S2R R0, SR_CTAID.X ;
        /*0010*/              @!P0 BRA `(.L_x_3) ;
.L_x_0:
	//## File "/a/kernel.py", line 8
        /*0020*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
.L_x_1:
        /*0030*/                   HGMMA.64x32x16.F32.BF16 R8, R4, gdesc[UR4], R8 ;
        /*0040*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
	//## File "/a/kernel.py", line 9
        /*0050*/               @P1 BRA `(.L_x_1) ;
	//## File "/a/kernel.py", line 7
        /*0060*/              @!P0 BRA `(.L_x_0) ;
.L_x_3:
        /*0070*/                   STG.E desc[UR4][R2.64], R8 ;
        /*0080*/                   EXIT ;
.L_x_4:
        /*0090*/                   BRA `(.L_x_4);
        /*00a0*/                   NOP;
"""


def test_machine_code_is_read_with_its_loops_their_lines_and_what_instructions_do():
    code = sass.instructions(CODE)
    assert [x.name for x in code] == [
        "S2R",
        "BRA",
        "LDG",
        "HGMMA",
        "BAR",
        "BRA",
        "BRA",
        "STG",
        "EXIT",
    ]
    outer, inner = sass.loops(code)
    assert (outer.first, outer.last, outer.place) == (0x20, 0x60, ("/a/kernel.py", 7))
    assert (inner.first, inner.last, inner.place) == (0x30, 0x50, ("/a/kernel.py", 9))
    assert [x.loaded_bytes for x in code if x.loaded_bytes] == [16]
    assert sum(x.operations for x in code) == 2 * 64 * 32 * 16 / 4  # of a quarter of four warps
    assert sass.markers(code) == Counter(LDG=1, BAR=1, STG=1)


TEXT = """
#loc1 = loc("/a/kernel.py":7:4)
#loc2 = loc("/a/kernel.py":9:8)
module {
  tt.func public @_kernel(%p_x: !tt.ptr<bf16>, %tokens: i32, %segment: i32) {
    %c1_i32 = arith.constant 1 : i32 loc(#loc1)
    %c16_i32 = arith.constant 16 : i32 loc(#loc1)
    %c0_i32 = arith.constant 0 : i32 loc(#loc1)
    %c3_i32 = arith.constant 3 : i32 loc(#loc1)
    %0 = tt.get_program_id x : i32 loc(#loc1)
    %1 = arith.muli %0, %segment : i32 loc(#loc1)
    %2 = arith.addi %1, %segment : i32 loc(#loc1)
    %last = arith.minsi %tokens, %2 : i32 loc(#loc1)
    %sum = scf.for %start = %1 to %last step %c16_i32 iter_args(%s = %c) -> (tensor<16x16xf32>)   : i32 {
      %inner = scf.for %i = %c0_i32 to %c3_i32 step %c1_i32 iter_args(%t = %s) -> (tensor<16x16xf32>)   : i32 {
        %d = tt.dot %a, %b, %t, inputPrecision = tf32x3 : tensor<16x8xf32> * tensor<8x32xf32> -> tensor<16x32xf32> loc(#loc2)
        scf.yield %d : tensor<16x16xf32> loc(#loc2)
      } loc(#loc2)
      scf.yield %inner : tensor<16x16xf32> loc(#loc1)
    } loc(#loc1)
    tt.return loc(#loc1)
  } loc(#loc1)
} loc(#loc1)
"""  # noqa: E501


def test_trips_of_loops_and_products_follow_from_the_text_and_the_numbers_of_a_launch():
    found = trips.read(TEXT, (3,), {"tokens": 100, "segment": 40})
    outer, inner = found.loops
    assert outer.trips.tolist() == [3, 3, 2] and outer.place == ("/a/kernel.py", 7)
    assert inner.total.tolist() == [9, 9, 6] and inner.place == ("/a/kernel.py", 9)
    # Three passes of tf32 in twice the time of half precision.
    assert found.operations == pytest.approx(24 * 2 * 16 * 8 * 32 * 3 * 2)


def test_a_loop_whose_end_is_not_known_before_the_launch_is_an_error():
    with pytest.raises(ValueError, match="line 7 of /a/kernel.py: how often this loop runs"):
        trips.read(TEXT, (3,), {"tokens": 100})


def test_a_loop_in_a_branch_runs_in_the_programs_that_take_it():
    first, after = "    %sum = scf.for", "    tt.return"
    begin, end = TEXT.index(first), TEXT.index(after)
    condition = "    %own = arith.cmpi eq, %0, %c3_i32 : i32 loc(#loc1)\n    scf.if %own {\n"
    loop = TEXT[begin:end]
    text = f"{TEXT[:begin]}{condition}{loop}    }} else {{\n{loop}    }} loc(#loc1)\n{TEXT[end:]}"
    taken, other, *_ = [
        x.total.tolist() for x in trips.read(text, (5,), {"tokens": 100, "segment": 20}).loops[::2]
    ]
    assert (taken, other) == ([0, 0, 0, 2, 0], [2, 2, 2, 0, 2])


BRANCHES = """
	//## File "/a/kernel.py", line 6
        /*0000*/                   S2R R0, SR_CTAID.X ;
        /*0010*/               @P0 BRA `(.L_x_2) ;
        /*0020*/                   LDG.E R4, desc[UR4][R2.64] ;
        /*0030*/              @!P2 BRA `(.L_x_1) ;
.L_x_0:
        /*0040*/                   STG.E desc[UR4][R2.64], R8 ;
	//## File "/a/kernel.py", line 7
        /*0050*/               @P1 BRA `(.L_x_0) ;
.L_x_1:
        /*0060*/                   STG.E desc[UR4][R2.64], R8 ;
        /*0070*/                   BRA `(.L_x_4) ;
.L_x_2:
        /*0080*/                   LDG.E R4, desc[UR4][R2.64] ;
.L_x_3:
        /*0090*/                   STG.E desc[UR4][R2.64], R8 ;
	//## File "/a/kernel.py", line 9
        /*00a0*/                   BRA.U UP1, `(.L_x_3) ;
.L_x_4:
        /*00b0*/                   EXIT ;
.L_x_5:
        /*00c0*/                   BRA `(.L_x_5);
"""


def test_code_that_a_branch_alone_leads_to_runs_in_the_programs_of_its_loop():
    code = sass.instructions(BRANCHES)
    taken = np.array([1, 0, 0, 0])
    meant = [
        trips.Loop(7 * x, ("/a/kernel.py", line), None, x)
        for x, line in ((taken, 7), (1 - taken, 9))
    ]
    shares = shares_of_programs(code, sass.loops(code), meant)
    assert [shares[x.address] for x in code] == [1, 1, *[0.25] * 6, *[0.75] * 3, 1]


def test_loops_are_those_of_the_source_by_line_or_by_order_and_waiting_is_none():
    from tests.counting.counting import loops_of_source

    text = trips.read(TEXT, (3,), {"tokens": 100, "segment": 40})
    code = sass.instructions(CODE)
    assert loops_of_source(code, sass.loops(code), text) == sass.loops(code)
    moved = sass.instructions(CODE.replace("line 9", "line 11"))
    assert loops_of_source(moved, sass.loops(moved), text) == sass.loops(code)
    only_outer = trips.Text(text.loops[:1], 0.0)
    with pytest.raises(ValueError, match="a loop of the machine code at .* is not in the source"):
        loops_of_source(code, sass.loops(code), only_outer)
    asking = "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4], R0"
    waiting = sass.instructions(CODE.replace("BAR.SYNC.DEFER_BLOCKING 0x0", asking))
    assert loops_of_source(waiting, sass.loops(waiting), only_outer) == sass.loops(waiting)[:1]


def test_a_loop_that_ptxas_has_unrolled_runs_less_often():
    from tests.counting.counting import times_run

    place = ("/a/kernel.py", 7)
    stores = [sass.Instruction(16 * i, "STG.E", place) for i in range(5)]
    branches = [sass.Instruction(0x48, "BRA", place, 0), sass.Instruction(0x58, "BRA", place, 0x50)]
    code = [*stores[:4], branches[0], sass.Instruction(0x50, "STG.E", place), branches[1]]
    ptx = "$L__BB0_1:\n.loc 1 8 0\nst.global.b32 [%rd1], %r1;\n.loc 1 7 0\n@%p1 bra $L__BB0_1;"
    text = trips.read(
        TEXT.replace("step %c16_i32", "step %c3_i32"), (1,), {"tokens": 32, "segment": 40}
    )
    runs = times_run(code, sass.loops(code), trips.Text(text.loops[:1], 0.0), ptx)
    # 11 trips: two of four copies, and three that remain.
    assert [runs[x.address] for x in code] == [2, 2, 2, 2, 2, 3, 3]


def compared(*options: str) -> subprocess.CompletedProcess:
    """What is worse than recorded, from a process in which Triton compiles; skips where nothing
    is.
    """
    command = [sys.executable, "-m", "tests.counting.count", "--compare", *options]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode in (0, 1) and not result.stderr, result.stderr
    if result.stdout.startswith("not compared"):
        pytest.skip(result.stdout)
    return result


@needs_triton
def test_no_launch_on_a_hopper_gpu_is_worse_than_recorded():
    """Of width 64 in bfloat16, which the tests of each kernel compile too."""
    result = compared("--target", "9.0")
    assert result.returncode == 0, result.stdout


@needs_triton
def test_what_is_on_record_is_what_the_compiler_says():
    """Of the kernels of one operation; recording makes all anew."""
    result = compared("--operation", "^kernelized$", "--anew")
    assert result.returncode == 0, result.stdout


@needs_triton
def test_no_launch_takes_more_registers_elsewhere_than_recorded():
    result = compared("--target", "8.0", "10.0", "--registers")
    assert result.returncode == 0, result.stdout


@needs_triton
def test_a_row_with_smaller_blocks_is_seen_to_be_worse_and_how_to_record_it_is_said():
    only = ("--operation", "^kernelized$", "--kernel", "kernelized state")
    result = compared(*only, "--row", '{"BLOCK_N": 16}')
    assert result.returncode == 1
    assert "kernelized state 64x64" in result.stdout and "times the recorded" in result.stdout
    assert "record it: python -m tests.counting.count --record" in result.stdout


def recorded(**values: object) -> dict:
    """A table of one launch, all of whose other counts are 100."""
    fields = dict.fromkeys(gpu_counts.FIELDS, 100) | {"unit": "wgmma", "row": "N64"} | values
    launches = {"k 64x64 _k": list(fields.values())}
    return {"launches": launches, "operations": {"op": {"both": ["k 64x64 _k"]}}}


@pytest.mark.parametrize(
    ("now", "said"),
    [
        ({}, None),
        ({"once": 105}, None),
        ({"once": 107}, "1.03 times the recorded instructions"),
        ({"spilled_bytes": 104}, "spills 104 bytes, recorded 100"),
        ({"registers": 105}, None),
        ({"registers": 106}, "106 registers, recorded 100"),
        ({"resident": 99}, "99 programs on a multiprocessor, recorded 100"),
        ({"resident": 99, "warps": 200}, None),
    ],
)
def test_what_is_worse_is_said(now, said):
    found = worse({"g": recorded()}, "g", "op", recorded(**now))
    assert found == ([] if said is None else [f"g: k 64x64 _k: {said}"])


def test_a_forward_pass_alone_leaves_what_is_recorded_of_both_passes():
    table = {}
    merge(table, "g", "op", recorded())
    forward = recorded() | {"operations": {"op": {"forward": ["k 64x64 _k"]}}}
    merge(table, "g", "op", forward)
    assert set(table["g"]["operations"]["op"]) == {"forward", "both"}


def test_launches_that_are_not_recorded_are_named():
    other = recorded()
    other["operations"]["op"]["both"] = ["k 64x64 _k", "k 64x64 _k"]
    assert worse({"g": recorded()}, "g", "op", other) == [
        "g: op: other launches than recorded: the order"
    ]
    (only,) = worse({}, "g", "op", recorded())
    assert only == "g: op: other launches than recorded: k 64x64 _k"
