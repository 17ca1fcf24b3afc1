"""Published costs against the papers' tables and independent counts; the choice of form against
data it must follow.
"""

import json
import re
import subprocess
import sys
from fractions import Fraction
from functools import partial
from pathlib import Path

import pytest
import torch

from visionattn.ops import choice, published
from visionattn.ops.pairs.mean import few_pairs
from visionattn.ops.position import joint
from visionattn.ops.taylorshift.features import BUFFER_ELEMENTS, chunk_tokens, num_features

ROOT = Path(__file__).parents[2]
WIDTHS = (8, 16, 32, 64, 128)
ODD_WIDTHS = (1, 3, 7, 24, 77)


@pytest.fixture
def calibrate_as(tmp_path, monkeypatch):
    """Puts a calibration of other devices, dtypes and seconds in place of the shipped one."""

    def forget():
        choice._calibration.cache_clear()
        choice._faster_form.cache_clear()

    def put(devices):
        path = tmp_path / "calibration.json"
        path.write_text(json.dumps({"devices": devices}))
        monkeypatch.setattr(choice, "CALIBRATION", path)
        forget()

    yield put
    monkeypatch.undo()
    forget()


def taylor_seconds(direct, efficient):
    """A calibration of TaylorShift in which a multiply-add of either form takes so many seconds,
    and nothing else takes any.
    """
    rest = {"elements": 0.0, "values": 0.0, "calls": 0.0}
    forms = {
        "direct": rest | {"multiply_adds": direct},
        "efficient": rest | {"multiply_adds": efficient, "rows": 0.0},
    }
    return {"taylorshift": forms}


def published_ops_efficient(n, d):
    """The paper's list of steps, added up."""
    features = 2 * n * d * d
    products = 2 * n * d * d * (d + 1) + 2 * n * d * d * (d + 1) + 4 * n * d * (d + 1)
    return features + products + n * (d + 1) + 3 * n * (d + 1) + n * d


def test_crossovers_are_those_of_the_published_table():
    assert [published.N0(d) for d in WIDTHS] == [73, 273, 1057, 4161, 16513]
    assert [published.N1(d) for d in WIDTHS] == [47, 159, 574, 2174, 8446]


def test_web_page_shows_the_upper_bound_of_the_crossover_of_memory():
    assert (published.N0(32), published.N1_bound(32)) == (1057, 577)
    for d in WIDTHS:
        assert published.N1(d) <= published.N1_bound(d)
        assert published.N1_bound(d) - 1 < Fraction(d * d, 2) + 2 * d + Fraction(1, 2)


@pytest.mark.parametrize("d", ODD_WIDTHS)
def test_published_counts_are_the_sums_of_their_steps(d):
    n = 91
    assert published.ops_efficient(n, d) == published_ops_efficient(n, d)
    assert published.ops_direct(n, d) == sum([2 * n * n * d, 4 * n * n, 2 * n * n, 2 * n * n * d])
    assert published.entries_direct(n, d) == sum([n * d, n * n, n * n])
    assert published.entries_efficient(n, d) == sum(
        [2 * n * d, n * (d + 1), n * d * d, d * d * (d + 1)]
    )


@pytest.mark.parametrize("d", WIDTHS)
def test_forms_cost_the_same_at_the_exact_crossover(d):
    exact = Fraction(4 * d**3 + 10 * d**2 + 9 * d + 4, 4 * d + 6)
    assert exact * published.ops_direct(1, d) == published.ops_efficient(
        1, d
    )  # quadratic and linear in N
    assert exact <= published.N0(d) < exact + 1


@pytest.mark.parametrize("d", WIDTHS + ODD_WIDTHS)
@pytest.mark.parametrize(
    "crossover, direct, efficient",
    [
        (published.N0, published.ops_direct, published.ops_efficient),
        (published.N1, published.entries_direct, published.entries_efficient),
        (published.N0_packed, published.ops_direct, published.ops_efficient_packed),
        (published.N1_packed, published.entries_direct, published.entries_efficient_packed),
    ],
    ids=["operations", "entries", "packed operations", "packed entries"],
)
def test_crossover_is_the_first_length_at_which_the_efficient_form_costs_no_more(
    d, crossover, direct, efficient
):
    n = crossover(d)
    assert direct(n, d) >= efficient(n, d)
    assert n == 1 or direct(n - 1, d) < efficient(n - 1, d)


def test_heads_multiply_the_cost_of_one_and_follow_the_published_polynomials():
    n, dim, heads = 77, 48, 3
    h, width = Fraction(heads), Fraction(dim)
    assert published.ops_efficient_heads(n, dim, heads) == n * (
        4 * width**3 / h**2 + 10 * width**2 / h + 9 * width + 4 * h
    )
    assert (
        published.entries_efficient_heads(n, dim, heads)
        == width**3 / h**2 + (n + 1) * width**2 / h + 3 * n * width + n * h
    )
    assert published.ops_direct_heads(n, dim, heads) == 4 * n * n * dim + 6 * n * n * heads
    assert published.entries_direct_heads(n, dim, heads) == dim * n + 2 * heads * n * n


@pytest.mark.parametrize(
    "count", [published.ops_efficient_heads, published.entries_efficient_heads]
)
def test_more_heads_make_the_efficient_form_cheaper(count):
    costs = [count(1024, 256, heads) for heads in (4, 8, 16, 32, 64, 128, 256)]
    assert costs == sorted(costs, reverse=True) and len(set(costs)) == 7


def test_heads_that_do_not_divide_the_width_are_refused():
    with pytest.raises(ValueError, match="^width 50: wanted a multiple of the number of heads, 3$"):
        published.ops_efficient_heads(77, 50, 3)


@pytest.mark.parametrize("d", ODD_WIDTHS)
def test_packed_operations_are_the_sums_of_their_steps(d):
    n, features = 91, d * (d + 1) // 2
    values = 2 * n * features + 2 * (2 * n * features * d) + 2 * (2 * n * d * d) + n * d + 2 * n * d
    mass = 2 * n * d * d + n * d + (2 * n * d * d + 2 * n * d) + 2 * n * d + 4 * n
    division = n * d
    assert (
        published.ops_efficient_packed(n, d)
        == values + mass + division
        == n * (2 * d**3 + 11 * d**2 + 10 * d + 4)
    )


def test_packed_entries_stop_growing_with_the_features_at_one_chunk():
    d, features = 24, 300
    assert published.entries_efficient_packed(77, d, chunk_tokens=100) == 3 * 77 * d + features * (
        d + 77
    )
    assert published.entries_efficient_packed(
        1077, d, chunk_tokens=100
    ) == 3 * 1077 * d + features * (d + 100)


@pytest.mark.parametrize("chunk_tokens", [5, 50, 5000])
def test_packed_crossover_of_memory_follows_the_chunk(chunk_tokens):
    d = 32
    n = published.N1_packed(d, chunk_tokens=chunk_tokens)
    assert published.entries_direct(n, d) >= published.entries_efficient_packed(
        n, d, chunk_tokens=chunk_tokens
    )
    assert published.entries_direct(n - 1, d) < published.entries_efficient_packed(
        n - 1, d, chunk_tokens=chunk_tokens
    )


def test_scaleformer_rules_take_the_smaller_memory_and_the_quadratic_form_when_equal():
    # n m against d^2 max(n, m): the shorter sequence against d^2 = 25.
    assert [published.scaleformer_causal_form(n, 77, 5) for n in (24, 25, 26)] == [
        "direct",
        "direct",
        "efficient",
    ]
    assert [published.scaleformer_causal_form(77, m, 5) for m in (24, 25, 26)] == [
        "direct",
        "direct",
        "efficient",
    ]
    # n m against d^2 = 144.
    assert [published.scaleformer_bidirectional_form(9, m, 12) for m in (15, 16, 17)] == [
        "direct",
        "direct",
        "efficient",
    ]
    # n m against n (2 * 3 + 5) = 11 n, whatever n is.
    for n in (2, 77):
        assert [published.scaleformer_relative_form(n, m, 3) for m in (10, 11, 12)] == [
            "direct",
            "direct",
            "efficient",
        ]


@pytest.mark.parametrize("operation", choice.OPERATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("by", ["speed", "memory"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_once_efficient_stays_efficient_as_tokens_grow(operation, dtype, by, device):
    lengths = [*range(1, 300, 7), *range(300, 3000, 91), *range(3000, 60000, 1999)]
    for d, heads, batch in ((16, 3, 2), (32, 6, 1), (64, 12, 1), (128, 1, 1)):
        options = dict(heads=heads, batch=batch, dtype=dtype, by=by, device=device)
        forms = [choice.choose_form(operation, n, n, d, d, **options) for n in lengths]
        assert forms == sorted(forms), f"d={d}, heads={heads}"  # "direct" sorts before "efficient"
        assert forms[-1] == "efficient"
        first = choice.crossover(operation, d, **options)
        assert [form == "efficient" for form in forms] == [n >= first for n in lengths]
        assert (
            first == 1
            or choice.choose_form(operation, first - 1, first - 1, d, d, **options) == "direct"
        )
        assert choice.choose_form(operation, first, first, d, d, **options) == "efficient"


def test_shipped_calibration_covers_this_kind_of_processor_and_every_operation():
    for operation in choice.OPERATIONS:
        for form in choice.FORMS:
            for dtype in (torch.float32, torch.float64):
                short, long = (
                    choice.predicted_seconds(operation, form, n, n, 32, 32, heads=6, dtype=dtype)
                    for n in (96, 6144)
                )
                assert 0 < short < long < 60


def test_choice_takes_the_form_of_fewer_predicted_seconds(calibrate_as):
    # n m (d + e) against (n + m) F e: at d = e = 16, F = 136, 32 n^2 against 4352 n, equal at n =
    # 136.
    calibrate_as({"cpu": {"seconds": {"float32": taylor_seconds(1e-9, 1e-9)}}})
    chosen = [choice.choose_form("taylorshift", n, n, 16, 16) for n in (135, 136, 137)]
    assert chosen == ["direct", "direct", "efficient"]
    assert choice.crossover("taylorshift", 16) == 137
    assert choice.predicted_seconds(
        "taylorshift", "direct", 5, 7, 3, 4, heads=2, batch=11
    ) == pytest.approx(22 * 35 * 7e-9)
    assert choice.predicted_seconds(
        "taylorshift", "efficient", 5, 7, 3, 4, heads=2, batch=11
    ) == pytest.approx(22 * 12 * 24e-9)
    calibrate_as({"cpu": {"seconds": {"float32": taylor_seconds(1e-9, 3e-9)}}})
    assert choice.crossover("taylorshift", 16) == 3 * 136 + 1


def test_dtype_and_device_have_measurements_of_their_own(calibrate_as):
    calibrate_as(
        {
            "cpu": {
                "seconds": {
                    "float32": taylor_seconds(1e-9, 1e-9),
                    "float64": taylor_seconds(1e-9, 2e-9),
                }
            },
            "cuda": {"seconds": {"float32": taylor_seconds(1e-9, 4e-9)}},
        }
    )
    crossovers = {
        (device, dtype): choice.crossover("taylorshift", 16, dtype=dtype, device=device)
        for device in ("cpu", "cuda", torch.device("cuda", 1))
        for dtype in (torch.float16, torch.bfloat16, torch.float32)
    }
    assert {
        crossovers["cpu", dtype] for dtype in (torch.float16, torch.bfloat16, torch.float32)
    } == {137}
    assert choice.crossover("taylorshift", 16, dtype=torch.float64) == 2 * 136 + 1
    assert (
        crossovers["cuda", torch.float32]
        == crossovers[torch.device("cuda", 1), torch.bfloat16]
        == 4 * 136 + 1
    )


@pytest.mark.parametrize("n, m", [(5, 7), (7, 5), (6, 6)])
def test_causal_scores_are_counted_where_they_are_seen(n, m):
    pairs = sum(j <= i for i in range(n) for j in range(m))
    counts = choice.work("kernelized causal", "direct", n, m, 3, 4, heads=2, batch=11)
    assert (counts["elements"], counts["multiply_adds"]) == (22 * pairs, 22 * pairs * 7)


def test_batch_and_heads_share_the_cost_of_a_call(calibrate_as):
    seconds = taylor_seconds(1e-9, 1e-9)
    seconds["taylorshift"]["efficient"]["calls"] = 1e-3
    calibrate_as({"cpu": {"seconds": {"float32": seconds}}})
    one, heads, both = (
        choice.crossover("taylorshift", 16, heads=h, batch=b) for h, b in ((1, 1), (6, 1), (6, 2))
    )
    assert one > heads > both > 137


def test_what_was_not_measured_goes_by_operations_and_has_no_seconds(calibrate_as):
    calibrate_as({"cpu": {"seconds": {"float32": taylor_seconds(1e-9, 9e-9)}}})
    assert choice.is_calibrated("taylorshift")
    assert not choice.is_calibrated("taylorshift", device="cuda")
    for d in WIDTHS:
        assert choice.crossover("taylorshift", d, device="cuda", heads=7) == published.N0_packed(d)
    assert choice.crossover("kernelized", 24, device="cuda") == 25  # 2 n^2 d against 2 n d^2
    with pytest.raises(
        ValueError,
        match=r"^no measurement of kernelized in torch.float32 on cuda: wanted one of \['cpu'\]$",
    ):
        choice.predicted_seconds("kernelized", "direct", 5, 7, 3, 4, device="cuda")


def test_memory_counts_blocks_of_scores_against_sums_and_features():
    # Direct: 256 queries of 900 keys and their product; two heads fit 2^20 entries, four do not.
    held = choice.held_elements("taylorshift", "direct", 700, 900, 16, 24, heads=2)
    assert held == 2 * 256 * (900 + 24)
    assert (
        choice.held_elements("taylorshift", "direct", 700, 900, 16, 24, heads=8, batch=3) == 1 << 20
    )
    # Efficient: sums over 160 products, 16 inputs and a one, and as many of 77 tokens.
    assert choice.held_elements("taylorshift", "efficient", 5, 77, 16, 24, heads=2) == 2 * 177 * (
        24 + 77
    )
    assert (
        choice.held_elements("kernelized", "efficient", 5, 77, 16, 24, heads=2, batch=3)
        == 6 * 16 * 24
    )
    assert choice.choose_form("kernelized", 5, 77, 16, 24, by="memory") == "efficient"
    assert choice.choose_form("taylorshift", 77, 77, 64, 64, by="memory") == "direct"
    assert choice.choose_form("taylorshift", 77777, 77777, 64, 64, by="memory") == "efficient"


def test_each_thread_of_a_processor_holds_features_up_to_eight(monkeypatch):
    rows = num_features(64) + 65
    sums, one = rows * 64, rows * chunk_tokens(64)
    for threads, buffers in ((1, 1), (3, 3), (8, 8), (64, 8)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        held = choice.held_elements("taylorshift", "efficient", 9999, 9999, 64, 64, heads=12)
        assert held == 12 * sums + min(12 * one, buffers * max(one, BUFFER_ELEMENTS))
        on_a_gpu = choice.held_elements(
            "taylorshift", "efficient", 9999, 9999, 64, 64, heads=12, device="cuda"
        )
        assert on_a_gpu == 12 * sums + BUFFER_ELEMENTS > 12 * sums + one
        first = choice.crossover("taylorshift", 64, heads=12, by="memory")
        assert 256 * (first - 1 + 64) <= held < 256 * (first + 64)


@pytest.mark.parametrize("size", [0, -3, 2.0, True, "7"], ids=repr)
def test_sizes_that_are_none_are_refused_in_one_line(size):
    counts = (
        published.ops_direct,
        published.ops_efficient,
        published.entries_direct,
        published.entries_efficient,
    )
    for count in (*counts, published.ops_efficient_packed, published.entries_efficient_packed):
        with pytest.raises(
            ValueError, match=re.escape(f"n={size!r}: wanted a whole number from 1") + "$"
        ):
            count(size, 7)
        with pytest.raises(
            ValueError, match=re.escape(f"d={size!r}: wanted a whole number from 1") + "$"
        ):
            count(7, size)
    for count in (
        published.N0,
        published.N1,
        published.N1_bound,
        published.N0_packed,
        published.N1_packed,
    ):
        with pytest.raises(ValueError, match="^d=.*: wanted a whole number from 1$"):
            count(size)
    for count in (
        published.ops_direct_heads,
        published.ops_efficient_heads,
        published.entries_direct_heads,
        published.entries_efficient_heads,
    ):
        with pytest.raises(ValueError, match="^heads=.*: wanted a whole number from 1$"):
            count(7, 24, size)
    for ask in (choice.choose_form, partial(choice.choose_form, by="memory")):
        with pytest.raises(ValueError, match="^d=.*: wanted a whole number from 1$"):
            ask("kernelized", 5, 7, size, 4)
    for bad in ({"n": -3}, {"m": 2.5}, {"heads": "7"}, {"batch": True}):
        sizes = {"n": 5, "m": 7, "d": 3, "e": 4} | bad
        for ask in (choice.choose_form, partial(choice.predicted_seconds, form="direct")):
            with pytest.raises(
                ValueError, match=f"^{next(iter(bad))}=.*: wanted a whole number from 0$"
            ):
                ask(operation="taylorshift", **sizes)


def test_published_names_are_all_there_is():
    public = {
        name
        for name, thing in vars(published).items()
        if callable(thing) and not name.startswith("_")
    }
    assert set(published.__all__) == public - {"main", "isqrt", "Sequence", "check_sizes"}


def test_memory_and_speed_are_different_questions(calibrate_as):
    calibrate_as({"cpu": {"seconds": {"float32": taylor_seconds(1e-9, 1e-9)}}})
    forms = {
        by: choice.choose_form("taylorshift", 1000, 1000, 32, 32, by=by)
        for by in ("speed", "memory")
    }
    assert forms == {"speed": "efficient", "memory": "direct"}


@pytest.mark.parametrize(
    "wrong, message",
    [
        (
            {"operation": "softmax"},
            "^operation 'softmax': wanted one of taylorshift, kernelized, kernelized causal$",
        ),
        ({"by": "luck"}, '^by=\'luck\': wanted "speed" or "memory"$'),
    ],
    ids=["operation", "by"],
)
def test_unknown_names_are_refused_in_one_line(wrong, message):
    args = {"operation": "taylorshift"} | wrong
    with pytest.raises(ValueError, match=message):
        choice.choose_form(args.pop("operation"), 5, 7, 3, 4, **args)


def test_unknown_form_has_no_prediction():
    with pytest.raises(ValueError, match="^form 'auto': wanted one of direct, efficient$"):
        choice.predicted_seconds("taylorshift", "auto", 5, 7, 3, 4)


def calculator(*args):
    return subprocess.run(
        [sys.executable, "-m", "visionattn.ops.published", *args],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )


def test_calculator_prints_the_published_crossovers_beside_ours():
    result = calculator("--dim", "32", "--heads", "3", "--tokens", "1000")
    assert (result.returncode, result.stderr) == (0, "")
    rows = {line[:24].strip(): line[24:].split() for line in result.stdout.splitlines()}
    assert rows["published"] == ["1,057", "574"]
    assert rows["packed features"] == [
        f"{published.N0_packed(32):,}",
        f"{published.N1_packed(32):,}",
    ]
    assert rows["efficient"] == [
        f"{published.ops_efficient_heads(1000, 96, 3):,}",
        f"{published.entries_efficient_heads(1000, 96, 3):,}",
    ]
    assert rows["direct"] == ["402,000,000", "6,096,000"]
    assert "577" in result.stdout


def test_calculator_says_which_crossover_the_automatic_form_takes(capsys, calibrate_as):
    calibrate_as(
        dict.fromkeys(("cpu", "cuda"), {"seconds": {"float32": taylor_seconds(1e-9, 1e-9)}})
    )
    published.main(["--dim", "16", "--heads", "6"])
    (line,) = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith('form="auto"')
    ]
    assert line[24:].split() == [
        "137",
        f"{choice.crossover('taylorshift', 16, heads=6, by='memory'):,}",
    ]


def test_choices_are_made_as_for_other_inputs_within_a_context_alone(calibrate_as):
    seconds = {"float32": taylor_seconds(1.0, 9e9), "float64": taylor_seconds(9e9, 1.0)}
    calibrate_as({"cpu": {"seconds": seconds}})

    def chosen():
        forms = [
            choice.choose_form("taylorshift", 77, 77, 16, 16, device=x) for x in ("cpu", "meta")
        ]
        return *forms, joint.direct_is_faster(700, 7), few_pairs(5000, 5000)

    before = chosen()
    assert before == ("direct", "direct", True, False)
    with choice.choosing_as(device="cpu", dtype=torch.float64):
        assert chosen() == ("efficient", "efficient", True, False)
        with choice.choosing_as(tokens=720):  # forms go by the inputs' own tokens
            assert chosen() == ("efficient", "efficient", False, True)
    assert chosen() == before


@pytest.mark.parametrize(
    "args, message",
    [
        (["--dim", "-3"], "argument --dim: wanted a whole number from 1, got '-3'"),
        (["--dim", "many"], "argument --dim: wanted a whole number from 1, got 'many'"),
        ([], "the following arguments are required: --dim"),
        (["--dim", "32", "--colour"], "unrecognized arguments: --colour"),
    ],
)
def test_wrong_arguments_of_the_calculator_end_with_one_line_and_exit_code_2(args, message, capsys):
    with pytest.raises(SystemExit) as end:
        published.main(args)
    assert end.value.code == 2
    assert capsys.readouterr().err == f"python -m visionattn.ops.published: {message}\n"


def test_help_ends_with_a_command_that_works_as_pasted(capsys):
    with pytest.raises(SystemExit):
        published.main(["--help"])
    command = capsys.readouterr().out.strip().splitlines()[-1].split()
    assert command[:3] == ["python", "-m", "visionattn.ops.published"]
    published.main(command[3:])
    assert "4,096 tokens of width 384, heads=12" in capsys.readouterr().out
