"""The grid of a sweep: how many trainings and networks, and that networks differ in what is varied
alone.
"""

import json
from itertools import product
from subprocess import CompletedProcess

import pytest
import timm

from tests.helpers.tools import words
from visionattn.cli.ends import Failed
from visionattn.cli.fresh_process import OUT_OF_MEMORY
from visionattn.data.data_config import DataConfig
from visionattn.lab.sweep import meter
from visionattn.lab.sweep.config import SweepConfig
from visionattn.lab.sweep.folder import comparable
from visionattn.lab.sweep.grid import Network, attention_of, make_grid, make_plan, model_of, on_meta
from visionattn.lab.sweep.measurement import Meter, keep_time, times_faster
from visionattn.model_config import ModelConfig
from visionattn.models.weights import DataSpec
from visionattn.training.config import TrainConfig

ATTENTIONS = ("taylorshift", "kernelized", "softmax")


def test_the_grid_is_every_combination_and_one_training_can_stand_for_all_forms():
    config = SweepConfig(
        heads=[4, 8, 16],
        attention=list(ATTENTIONS),
        seeds=[0, 1],
        form=["direct", "efficient", "auto"],
    )
    grid = make_grid(config, "kernelized", "scaleformer_vit_t", [32, 48])
    expected = set(
        product(
            ("taylorshift", "kernelized"), (4, 8, 16), ("direct", "efficient", "auto"), (32, 48)
        )
    )
    expected |= set(product(("softmax",), (4, 8, 16), (None,), (32, 48)))
    assert {(n.attention, n.heads, n.form, n.img_size) for n in grid.networks} == expected
    assert len(grid.networks) == len(expected) == 42 and len(grid.cells()) == 84
    config.train_form = "efficient"
    cells = make_grid(config, "kernelized", "scaleformer_vit_t", [32, 48]).cells()
    assert len(cells) == len(set(cells)) == 36 and {cell.network.form for cell in cells} == {
        "efficient",
        None,
    }
    assert [cell.seed for cell in cells] == [0] * 18 + [1] * 18


SIZE = dict(depth=2, embed_dim=24, img_size=32, patch_size=8)
NAMES = words("taylorshift_vit_pixel scaleformer_vit_pixel taylorshift_vit_t taylorshift_abs_vit_t")


@pytest.mark.parametrize("name", [*NAMES, "scaleformer_vit_tiny_patch16_224"])
def test_networks_of_a_sweep_differ_in_the_attention_alone(name):
    args = {"depth": 1, "horizon": 2, "embed_dim": 24, "img_size": 32} | (
        {} if "pixel" in name else {"patch_size": 8}
    )
    if "abs" in name or name == "taylorshift_vit_pixel":
        del args["horizon"]
        args["temperature_init"] = 2.0
    own = "kernelized" if name.startswith("scaleformer") else "taylorshift"
    base = timm.create_model(name, num_heads=3, **args)
    spec = DataSpec(base.patch_embed.proj.in_channels, base.num_classes, (), (), (), None, 32)
    shapes = {
        key: value.shape for key, value in base.state_dict().items() if "temperature" not in key
    }
    for attention in ATTENTIONS:
        form = None if attention == "softmax" else "efficient"
        config = model_of(ModelConfig(name, args), own, Network(attention, 3, form, 32))
        model = on_meta(config, spec)
        assert model.blocks[0].attn.attention == attention
        assert model.blocks[0].attn.form == (form or "auto")
        assert model.global_pool == base.global_pool
        assert ("blocks.0.attn.temperature" in model.state_dict()) == (attention == "taylorshift")
        other = {
            key: value.shape
            for key, value in model.state_dict().items()
            if "temperature" not in key
        }
        assert set(other) == set(shapes)
        assert {
            key for key in other if other[key] != shapes[key] and "relative" not in key
        } == set()


def test_the_facts_of_a_network_are_those_of_its_model():
    args = {"patch_size": 8, "embed_dim": 24, "depth": 2}
    base = TrainConfig(model=ModelConfig("scaleformer_vit_t", args), data=DataConfig(img_size=40))
    plan = make_plan(SweepConfig(base="", heads=[3, 6], form=["efficient"]), base)
    assert plan.tested and plan.own_attention == "kernelized"
    for network, head_dim in zip(plan.grid.networks, (8, 4), strict=True):
        facts, model = plan.facts[network], plan.model(network)
        built = timm.create_model(model.name, num_classes=10, in_chans=1, img_size=40, **model.args)
        assert facts.parameters == sum(parameter.numel() for parameter in built.parameters())
        assert (facts.head_dim, facts.tokens) == (head_dim, 25)
        assert built.blocks[1].attn.head_dim == head_dim
        linear = 2 * 25 * 64 * 24 + 2 * (26 * (24 * 72 + 24 * 24 + 2 * 24 * 96) * 2) + 2 * 24 * 10
        assert linear < facts.flops < 3 * linear


def test_a_model_of_timm_is_swept_over_its_heads_alone():
    base = TrainConfig(
        model=ModelConfig("vit_tiny_patch16_224", {"depth": 1, "patch_size": 8, "img_size": 32})
    )
    plan = make_plan(SweepConfig(base="", heads=[2, 4]), base)
    assert [network.name for network in plan.grid.networks] == [
        f"vit_tiny_patch16_224_h{h}_32px" for h in (2, 4)
    ]
    built = on_meta(plan.model(plan.grid.networks[1]), plan.spec)
    assert built.blocks[0].attn.num_heads == 4


def test_ratios_of_speed_are_taken_round_by_round_and_what_does_not_fit_has_none():
    slow, fast, large = (
        Network("taylorshift", 2, form, 32) for form in ("direct", "efficient", "auto")
    )
    found = {
        network: {"inference": {"status": "ok", "peak_bytes": 1}} for network in (slow, fast, large)
    }
    answer = {
        "status": "ok",
        "seconds": {slow.name: [4.0, 9.0, 6.0], fast.name: [1.0, 3.0, 3.0], large.name: None},
    }
    keep_time(found, "inference", answer)
    entries = {network.form: found[network]["inference"] for network in found}
    assert times_faster(entries["efficient"], entries["direct"]) == 3.0
    assert times_faster(entries["efficient"], entries["auto"]) is None
    assert entries["auto"]["status"] == "oom" and "seconds" not in entries["auto"]


OK = {"status": "ok", "reason": None}


@pytest.mark.parametrize(
    ("end", "answer"),
    [
        ((0, '{"peak_bytes": 7}\n', ""), OK | {"peak_bytes": 7}),
        ((OUT_OF_MEMORY, "", "low"), {"status": "oom", "reason": "out of memory"}),
        ((1, "", "Traceback:\nE: no\n"), {"status": "failed", "reason": "E: no"}),
        ((-11, "", "low"), {"status": "failed", "reason": "killed by signal 11"}),
    ],
)
def test_how_a_process_ended_is_part_of_what_is_measured(end, answer):
    told = []

    class Run:
        ended = False

        def __call__(self, text):
            told.append(json.loads(text))
            return CompletedProcess([], *end)

    base = TrainConfig(model=ModelConfig("scaleformer_vit_t", {"depth": 1}))
    plan = make_plan(SweepConfig(base="", heads=[3], form=["direct"]), base)
    asking = Meter(plan, {"batch": 5}, Run())
    assert asking.ask(meter.measure_memory, "training", plan.grid.networks) == answer
    (given,) = (one["given"]["told"] for one in told)
    assert (given["batch"], given["pass"]) == (5, "training")
    assert [network["name"] for network in given["networks"]] == ["kernelized_h3_direct_32px"]
    Run.ended = True
    if answer["status"] == "failed":
        with pytest.raises(Failed, match=answer["reason"]):
            asking.ask(meter.measure_memory, "training", plan.grid.networks)


def test_a_second_timing_replaces_the_first():
    network = Network("taylorshift", 2, "direct", 32)
    found = {network: {"inference": {"status": "ok", "peak_bytes": 1}}}
    keep_time(found, "inference", {"status": "ok", "seconds": {network.name: [4.0]}})
    keep_time(found, "inference", {"status": "oom", "reason": "out of memory"})
    assert found[network]["inference"] == dict(status="oom", reason="out of memory", peak_bytes=1)


@pytest.mark.parametrize("attention", ["taylorshift", "kernelized"])
def test_a_network_keeps_the_checkpointing_of_its_training(attention):
    base = ModelConfig("taylorshift_vit_pixel", {"depth": 2}, grad_checkpointing=True)
    assert model_of(base, "taylorshift", Network(attention, 4, "direct", 32)).grad_checkpointing
    assert comparable(TrainConfig(model=base)) != comparable(
        TrainConfig(model=ModelConfig(base.name, base.args))
    )


def test_a_sweep_leaves_the_map_out_of_attentions_that_have_none():
    base = ModelConfig("scaleformer_vit_t", dict(feature_map="random", random_features=5))
    kept = {
        attention: model_of(base, "kernelized", Network(attention, 3, None, 64)).args
        for attention in ("kernelized", "taylorshift", "softmax")
    }
    assert kept["kernelized"] == base.args | {"num_heads": 3}
    for attention in ("taylorshift", "softmax"):
        assert kept[attention] == {"num_heads": 3, "attention": attention}


def test_a_model_of_several_attentions_is_swept_as_it_is_and_against_each_alone():
    mix = dict(attention=["window", "kernelized"], window_size=5, form="efficient", horizon=2)
    base = ModelConfig("scaleformer_vit_t", dict(SIZE, **mix))
    own = attention_of(on_meta(base, DataSpec(3, 4, (), (0.5,) * 3, (0.5,) * 3, None, 32)))
    assert own == "window+kernelized"
    grid = make_grid(SweepConfig(heads=[3]), own, base.name, [32])
    assert grid.networks == (Network(own, 3, None, 32),)
    kept = {
        name: model_of(base, own, Network(name, 3, None, 32)).args
        for name in (own, "window", "softmax")
    }
    assert kept[own] == base.args | {"num_heads": 3}
    size = SIZE | {"num_heads": 3}
    assert kept["window"] == size | dict(attention="window", window_size=5)
    assert kept["softmax"] == size | dict(attention="softmax", horizon=2)
