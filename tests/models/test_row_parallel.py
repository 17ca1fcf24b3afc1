"""One image on several processes: values and gradients of one process, and the bytes sent.

The processes start once and compute all cases; the tests look at what they found.
"""

import json
from dataclasses import replace

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.several_processes import run_processes
from visionattn.models.backbone import VisionAttnTransformer
from visionattn.models.large import row_parallel
from visionattn.models.large.row_parallel import check_dropout, check_model, parallelize
from visionattn.ops.kernelized import kernelized_attention as kernelized

BASE = dict(img_size=(28, 20), patch_size=4, embed_dim=12, depth=2, num_heads=2, num_classes=3)
BASE |= dict(in_chans=1, mlp_ratio=2.0)
SIZE = 3
"""Processes: the first, the last and one with neighbors on both sides."""
HEIGHT, WIDTH = 28, 20
"""Pixels of the images: 7 rows of 5 patches, so that ranks have 2, 2 and 3 rows."""
CASES = {
    "kernelized joint mean": dict(value_conv=5, horizon=1, reg_tokens=2, global_pool="avg"),
    "kernelized axial sum": dict(relative="axial", normalization="sum", output_gate=True),
    "kernelized flat": dict(
        relative="flat", horizon=9, pos_embed="learn", pos_antialias=False, global_pool="avgmax"
    ),
    "kernelized none": dict(relative="none", class_token=False, global_pool="avg"),
    "taylorshift joint sum": dict(attention="taylorshift", normalization="sum", centre_keys=True),
    "taylorshift axial mean": dict(attention="taylorshift", relative="axial"),
    "taylorshift none": dict(attention="taylorshift", relative="none", pool_include_prefix=True),
    "one class": dict(horizon=0, feature_map="random", qk_norm=True),
    "a halo of more rows than a rank has": dict(horizon=6),
    "windows of 3": dict(window_size=3, attention="window", reg_tokens=1),
    "windows of all rows": dict(
        window_size=7, attention="window", relative="none", class_token=False
    ),
    "windows beside a state": dict(
        attention=["window", "taylorshift", "window"], depth=3, window_size=4, value_conv=3
    )
    | dict(centre_keys=True, relative="axial"),
    "gradient checkpointing": dict(value_conv=3),
    "stochastic depth": dict(drop_path_rate=0.5),
    "dropped values beside a convolution": dict(attn_drop_rate=0.5, value_conv=3),
    "an image of one value": dict(relative="none", global_pool="max"),
}
"""The last ones are prepared by ``prepared`` too."""


def prepared(name: str) -> tuple[VisionAttnTransformer, torch.Tensor]:
    """The model and the images of a case, the same on all processes."""
    torch.manual_seed(0)
    model = VisionAttnTransformer(**(BASE | CASES[name])).double()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "relative" not in key:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.set_grad_checkpointing(name == "gradient checkpointing")
    images = torch.randn(
        2, 1, HEIGHT, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    # Of an image of one value all patches are the largest, on all ranks.
    return model, torch.ones_like(images) if name == "an image of one value" else images


def loss_of(logits: torch.Tensor) -> torch.Tensor:
    factors = torch.arange(logits.numel(), dtype=logits.dtype).view_as(logits)
    return (logits * factors).sum() + logits.square().sum()


def gradients(model, averaged: bool = False) -> dict[str, torch.Tensor]:
    """By name; averaged over all processes."""
    found = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        found[name] = torch.zeros_like(parameter) if grad is None else grad.clone()
        if averaged:
            distributed.all_reduce(found[name])
            found[name] /= distributed.get_world_size()
        parameter.grad = None
    return found


def wrong_by(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).abs().max() / (expected.abs().max() + 1e-6)).item()


def compared(name: str) -> dict[str, float]:
    """How far logits and gradients are from those of one process."""
    model, images = prepared(name)
    torch.manual_seed(5)
    whole = model(images)
    loss_of(whole).backward()
    expected = gradients(model)
    rows = parallelize(model)
    torch.manual_seed(5)
    logits = rows(images)
    loss_of(logits).backward()
    found = gradients(model, averaged=True)
    wrong = {key: wrong_by(found[key], expected[key]) for key in expected}
    wrong["logits"] = wrong_by(logits, whole)
    moved = sum(grad.abs().max().item() > 0 for grad in expected.values())
    with torch.inference_mode():
        model.eval()
        own = images[:, :, rows.own_rows(HEIGHT)]
        wrong["inference"] = wrong_by(rows(own, HEIGHT), model(images))
        # Divided as tensors are: 12 and 12, or 8, 8 and 8 rows of pixels.
        even = torch.cat([images, images], 2)[:, :, :24]
        divided = distribute_tensor(
            even, init_device_mesh("cpu", (distributed.get_world_size(),)), [Shard(2)]
        )
        wrong["divided"] = wrong_by(rows(divided), model(even))
    return wrong | {"without a gradient": float(len(expected) - moved)}


class Sent(TorchDispatchMode):
    """Counts the bytes that collectives are given, but for what a rank sends itself."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, size = str(func), 0
        if "all_reduce" in name or "all_to_all" in name:
            size = args[0].numel() * args[0].element_size()
            self.found.append([name.split(".")[1], size])
        return func(*args, **(kwargs or {}))


TRAFFIC = {
    "joint": dict(horizon=3),
    "wide halo": dict(horizon=6, value_conv=3, centre_keys=True),
    "taylorshift axial": dict(attention="taylorshift", relative="axial"),
    "flat": dict(relative="flat", horizon=9, feature_map="random", random_features=5),
    "conv": dict(relative="none", value_conv=3),
}


def traffic() -> dict[str, list]:
    """What the collectives of both passes are given, for images of 21 and 42 rows of patches."""
    found = {}
    for name, options in TRAFFIC.items():
        rows, found[name] = parallelize(VisionAttnTransformer(**(BASE | options))), []
        for height in (84, 168):
            with Sent() as sent:
                rows.forward_features(torch.randn(2, 1, height, WIDTH)).sum().backward()
            found[name].append(sent.found)
    return found


def dropped() -> tuple[list[float], list[float]]:
    """Logits with and without dropped values, and what is left of values of 1."""
    torch.manual_seed(0)
    model = VisionAttnTransformer(**(BASE | dict(attn_drop_rate=0.5, global_pool="token")))
    rows, images = parallelize(model.double()), torch.ones(1, 1, HEIGHT, WIDTH).double()
    torch.manual_seed(3)
    first = rows(images)
    share = rows.share(HEIGHT, WIDTH)
    second, share = rows(images), replace(share, layout=share.layout._replace(num_prefix=8))
    left = row_parallel._dropped(torch.ones(1, 1, 48, 1), 0.5, share).flatten().tolist()
    return torch.cat([first, second, rows.eval()(images)]).flatten().tolist(), left


def refusals() -> list[str]:
    model = VisionAttnTransformer(**BASE)
    rows, said = parallelize(model), []
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    few = VisionAttnTransformer(**(BASE | dict(dynamic_img_size=False)))
    for call in (
        lambda: rows(torch.zeros(1, 1, 4, 20)),
        lambda: rows(torch.zeros(1, 1, 28, 21)),
        lambda: rows(torch.zeros(1, 1, 28, 20), 32),
        lambda: rows(torch.zeros(1, 1, 28, 20), sizes=torch.tensor([[28, 20]])),
        lambda: rows(distribute_tensor(torch.zeros(1, 1, 32, 20), mesh, [Shard(2)])),
        lambda: rows(distribute_tensor(torch.zeros(1, 1, 32, 20), mesh, [Shard(0)])),
        lambda: parallelize(few)(torch.zeros(1, 1, 32, 20)),
        lambda: parallelize(model, init_device_mesh("cpu", (1, distributed.get_world_size()))),
    ):
        try:
            call()
        except ValueError as error:
            said.append(str(error))
    return said


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict]:
    """What each of three processes finds in all cases."""

    def work(rank):
        distributed.init_process_group("gloo")
        cases = {}
        for name in CASES:
            with pytest.MonkeyPatch.context() as patch:
                if "dropped" in name:  # not by chance, so that draws are the same
                    for module in (kernelized, row_parallel):
                        patch.setattr(module, "drop_values", lambda v, *drawn: 0.5 * v)
                cases[name] = compared(name)
        more = dict(traffic=traffic(), dropped=dropped(), refused=refusals())
        print(json.dumps(more | {"cases": cases}))
        distributed.destroy_process_group()

    ended = run_processes(SIZE, work, tmp_path_factory.mktemp("sequence"))
    assert all(each.code == 0 for each in ended), ended[0].err
    return [json.loads(each.out) for each in ended]


def test_logits_and_gradients_are_those_of_one_process(found):
    for of_rank in found:
        for name, wrong in of_rank["cases"].items():
            # A shift of all keys, the bias of keys among them, may have no gradient; weights all
            # have.
            assert wrong.pop("without a gradient") < 3
            assert max(wrong.values()) < 1e-10, (name, wrong)


@pytest.mark.parametrize("name", TRAFFIC)
def test_what_is_sent_does_not_grow_with_the_tokens(name, found):
    """States, a halo of rows and far sums; axial also sends a number for each row."""
    for each in found:
        of_few, of_many = each["traffic"][name]
        assert [kind for kind, _ in of_few] == [kind for kind, _ in of_many] != []
        few, many = (sum(size for _, size in sent) for sent in (of_few, of_many))
        assert many < 1.5 * few  # images of twice the tokens


def test_dropped_values_are_the_same_draws_of_what_all_ranks_have(found):
    dropped = [each["dropped"] for each in found]
    one, *others = (logits for logits, _ in dropped)
    assert others == [one, one]
    left = [tuple(values) for _, values in dropped]
    assert {value for values in left for value in values} == {0, 2}
    assert len({values[:8] for values in left}) == 1 and len({values[8:] for values in left}) == 3
    first, second, whole = one[:3], one[3:6], one[6:]
    assert first != second and second != whole and first != whole


def test_what_does_not_fit_is_refused_in_one_line(found):
    said = found[1]["refused"]
    starts = [
        "expected at least 3 rows of patches, one per process, got 1 row",
        "image of 28 x 21 pixels is not a whole number of 4-pixel patches",
        "expected 12 rows of pixels on rank 1 (rows 8 to 19 of 32), got 28",
        "one image on several processes must fill its canvas",
        "expected whole patches of 4 rows on each process, got 11, 11, 10 rows of pixels",
        "expected images divided by rows, Shard(2), among 3 processes, got [Shard",
        "image of 32 x 20 pixels, but dynamic_img_size=False",
        "mesh: expected one dimension",
    ]
    assert len(said) == len(starts)
    assert all(a.startswith(b) for a, b in zip(said, starts, strict=True)), said
    assert not any("\n" in line for line in said)


NEED_ALL = {
    "got softmax over all tokens in block 1": {"softmax_blocks": [1]},
    "expected feature_map .*, got softmax, whose keys": {"feature_map": "softmax"},
    "form=.direct. needs all tokens": {"form": "direct"},
    "patch_drop_rate would drop parts of rows": {"patch_drop_rate": 0.5},
    "global_pool='map' sees all tokens; expected max, avg, avgmax or": {"global_pool": "map"},
}


def test_models_that_need_all_tokens_other_models_and_dropout_are_refused():
    for message, options in NEED_ALL.items():
        with pytest.raises(ValueError, match=f"^one image on several processes: .*{message}"):
            check_model(VisionAttnTransformer(**(BASE | options)))
    with pytest.raises(
        ValueError, match="expected a classification model of this package, got Lin"
    ):
        check_model(torch.nn.Linear(1, 1))
    check_dropout(VisionAttnTransformer(**(BASE | dict(drop_rate=0.1, attn_drop_rate=0.1))))
    with pytest.raises(
        ValueError, match=r"blocks\.0\.attn\.proj_drop would drop different entries"
    ):
        check_dropout(VisionAttnTransformer(**(BASE | dict(proj_drop_rate=0.1))))


def test_without_a_process_group_there_is_nobody_to_share_with():
    with pytest.raises(ValueError, match="^no process group; start the program with torchrun"):
        parallelize(VisionAttnTransformer(**BASE))
