"""States that do not fit each other, their queries or their options are refused in one line."""

import contextlib
import itertools

import pytest
import torch

from tests.helpers.oracles import draw_qkv
from visionattn.ops import KernelState, TaylorState, attend, step, summarize
from visionattn.ops.feature_maps import PositionSoftmax

COEFFICIENTS = (0.7, 0.4, 1.3)
TAU = {"temperature": torch.tensor([0.7, 1.9, 4.0], dtype=torch.float64)}


@contextlib.contextmanager
def refused(match: str):
    """A ValueError of one line."""
    with pytest.raises(ValueError, match=match) as caught:
        yield
    assert "\n" not in str(caught.value)


def test_states_that_differ_in_kind_or_options_do_not_add():
    _, k, v = draw_qkv(queries=1, keys=9, d=5, e=4).values()
    kernel, taylor = summarize(k, v), summarize(k, v, "taylorshift")
    assert isinstance(kernel, KernelState) and isinstance(taylor, TaylorState)
    with pytest.raises(ValueError, match=r"KernelState.*TaylorState"):
        kernel + taylor
    with pytest.raises(ValueError, match=r"feature_map.*elu1.*relu"):
        kernel + summarize(k, v, feature_map="relu")
    with pytest.raises(ValueError, match="coefficients"):
        taylor + summarize(k, v, "taylorshift", coefficients=COEFFICIENTS)
    for a, b in itertools.permutations((None, TAU["temperature"], TAU["temperature"] + 1), 2):
        with pytest.raises(ValueError, match="temperature"):
            summarize(k, v, "taylorshift", temperature=a) + summarize(
                k, v, "taylorshift", temperature=b
            )
    summarize(k, v, "taylorshift", **TAU) + summarize(
        k, v, "taylorshift", temperature=TAU["temperature"].clone()
    )


def test_states_of_other_sizes_dtypes_or_devices_do_not_add_and_are_not_attended_to():
    q, k, v = draw_qkv(queries=1, d=5, e=4).values()
    for kind in ("kernelized", "taylorshift"):
        state = summarize(k, v, kind)
        others = {
            r"\(2, 3, 5, 4\).*\(1, 3, 5, 4\)": (k[:1], v[:1]),
            r"\(2, 3, 5, 4\).*\(2, 1, 5, 4\)": (k[:, :1], v[:, :1]),
            r"\(2, 3, 5, 4\).*\(2, 3, 5, 1\)": (k, v[..., :1]),
            r"\(2, 3, .*, 4\).*\(2, 3, .*, 4\)": (k[..., :1], v),
            "float64.*float32": (k.float(), v.float()),
            "cpu.*meta": (k.to("meta"), v.to("meta")),
        }
        for match, (keys, values) in others.items():
            with refused(match):
                state + summarize(keys, values, kind)
            with refused(match):
                step(keys, keys, values, state)
        with refused(r"q: wanted \[2, 3, N"):
            attend(q[:1], state)
        with refused("q is on meta, the state on cpu"):
            attend(q.to("meta"), state)
        with refused("q: wanted torch.float32.*got torch.float64"):
            attend(q, summarize(k.float(), v.float(), kind))
        with refused("q: wanted a floating point dtype, got torch.int64"):
            attend(q.long(), state)
        assert attend(q.to("meta"), summarize(k.to("meta"), v.to("meta"), kind)).values.shape == (
            2,
            3,
            1,
            4,
        )
    for call in (lambda: attend(q, (k, v)), lambda: step(q, k, v, (k, v))):
        with refused("state: wanted a KernelState.*got tuple"):
            call()


def test_tensors_on_two_devices_are_refused_by_name():
    q, k, v = draw_qkv(queries=1, d=5, e=4).values()
    with refused("k is on cpu, v on meta"):
        summarize(k, v.to("meta"))
    with refused("k is on cpu, key_mask on meta"):
        summarize(k, v, key_mask=torch.ones(2, 1, dtype=torch.bool, device="meta"))
    with refused("k is on cpu, temperature on meta"):
        summarize(k, v, "taylorshift", temperature=torch.ones(3, device="meta"))
    with refused("q is on cpu, k on meta"):
        step(q, k.to("meta"), v)
    with refused("k: wanted width >= 1"):
        summarize(k[..., :0], v)


def test_options_that_do_not_fit_are_refused_in_one_line():
    q, k, v = draw_qkv(queries=2, keys=2, d=5, e=4).values()
    token = q[:, :, :1], k[:, :, :1], v[:, :, :1]
    calls = {
        "softmax": lambda: summarize(k, v, feature_map="softmax"),
        "kind 'linear'": lambda: summarize(k, v, "linear"),
        "feature_map belongs": lambda: summarize(k, v, "taylorshift", feature_map="elu1"),
        "temperature and coefficients belong": lambda: summarize(k, v, **TAU),
        "softmax.*depend": lambda: summarize(k, v, feature_map=PositionSoftmax()),
        "temperature: wanted a floating tensor .* got float 2.0": lambda: summarize(
            k, v, "taylorshift", temperature=2.0
        ),
        "a > 0": lambda: summarize(k, v, "taylorshift", coefficients=(0.5, 1.0, 0.5)),
        r"temperature: wanted a floating tensor \[3\]": lambda: summarize(
            k, v, "taylorshift", temperature=torch.ones(2)
        ),
        "key_mask": lambda: summarize(k, v, key_mask=torch.ones(2, 3, dtype=torch.bool)),
        "v: wanted": lambda: summarize(k, v[:, :, :1]),
        "one token": lambda: step(q, k, v),
        "its own options, got feature_map": lambda: step(
            *token, summarize(k, v), feature_map="relu"
        ),
        r"q: wanted \[2, 3, N, 5\]": lambda: attend(q[..., :4], summarize(k, v, "taylorshift")),
        r"q: wanted \[2, 3": lambda: attend(q[:, :2], summarize(k, v)),
        "wanted 5 features": lambda: attend(q[..., :4], summarize(k, v)),
    }
    for match, call in calls.items():
        with refused(match):
            call()
