"""Models with an output gate: results, start, weights and counts."""

import pytest
import torch
from timm import create_model

from tests.helpers.oracles import draw
from tests.models.test_absent import close, small
from visionattn.lab.measure import bytes_kept, count_flops
from visionattn.lab.networks import identity_twin
from visionattn.models.placement import place_weights
from visionattn.models.state_dicts import checkpoint_filter_fn
from visionattn.ops.local import gated

DIM, HEADS = 24, 3
SMALL = dict(embed_dim=DIM, depth=2, num_heads=HEADS, num_classes=5, img_size=64)
BOTH = dict(output_gate=True, value_conv=3)
GATES = [f"blocks.{i}.attn.output_gate.weight" for i in (0, 1)]


# What a model computes


@pytest.mark.parametrize("family", ["scaleformer_vit", "taylorshift_vit", "taylorshift_abs_vit"])
def test_families_of_relative_position_have_gate_and_convolution_by_default(family):
    with torch.device("meta"):
        model = create_model(f"{family}_t")
    for block in model.blocks:
        parts = (block.attn.output_gate, block.attn.value_conv)
        assert [part is not None for part in parts] == [family != "taylorshift_abs_vit"] * 2
        assert parts[1] is None or parts[1].weight.shape[-1] == 3


STARTS = {"": 0.02, "jax": 1 / 96**0.5, "moco": 1 / 96**0.5, "reset": 1 / (3 * 96) ** 0.5}
"""The standard deviation that each of timm's starts gives to a linear layer of 96 x 96."""


@pytest.mark.parametrize("start", STARTS)
def test_the_gate_starts_as_the_other_linear_layers(start):
    torch.manual_seed(0)
    options = SMALL | dict(embed_dim=96, weight_init=start)
    model = create_model("scaleformer_vit_t", output_gate=True, **options)
    for block in model.blocks:
        for weight in (block.attn.output_gate.weight, block.attn.proj.weight):
            assert weight.std().item() == pytest.approx(STARTS[start], rel=0.05)
            assert abs(weight.mean().item()) < 0.05 * STARTS[start]


# Compiled, exported, traced, in other precisions


def test_gradients_of_a_compiled_product_leave_unused_tokens_out():
    """A compiled graph looks at no entries: it sets the rows to 0 beforehand."""
    out, gate = draw(2, 7, DIM, seed=1), draw(2, 7, DIM, seed=2)
    compiled = torch.compile(gated, fullgraph=True, backend="aot_eager")
    results = []
    for function, held in ((gated, 1.0), (gated, float("nan")), (compiled, float("inf"))):
        factors = [x.clone() for x in (out, gate)]
        for x in factors:
            x[0, 3] = held
            x.requires_grad_()
        product = function(*factors)
        results.append(torch.autograd.grad(product[:, :3].square().sum(), factors))
    for found in results[1:]:
        for grad, wanted in zip(found, results[0], strict=True):
            close(grad, wanted, 1e-12)
    assert results[0][0][:, :3].abs().min() > 0


# Weights


def test_weights_that_lack_gates_leave_them_as_they_are(tmp_path):
    source = small(dtype=torch.float32, output_gate=False)
    model = small(dtype=torch.float32, output_gate=True)
    gates = {name: model.state_dict()[name].clone() for name in GATES}
    model.load_state_dict(checkpoint_filter_fn(source.state_dict(), model))
    assert all(torch.equal(model.state_dict()[name], gate) for name, gate in gates.items())
    torch.save(source.state_dict(), tmp_path / "plain.pth")
    placement = place_weights(model, "scaleformer_vit_t", tmp_path / "plain.pth")
    assert placement.missing == GATES and not placement.unused
    *_, missing, warning = placement.lines()
    assert "blocks.{0-1}.attn.output_gate.weight" in missing and "near 0" in warning


def test_a_sigmoid_gate_of_timm_is_not_taken_for_ours():
    model = small(dtype=torch.float32, output_gate=True)
    weights = model.state_dict()
    given = {name.replace("output_gate", "gate"): value + 1 for name, value in weights.items()}
    fitted = checkpoint_filter_fn(given, model)
    assert all(torch.equal(fitted[name], weights[name]) for name in GATES)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*blocks.0.attn.gate.weight"):
        model.load_state_dict(fitted)


# Training, and what it is expected to take


def test_operations_of_the_gate_are_counted():
    plain, gated = (
        count_flops(small(dtype=torch.float32, output_gate=on), 64, 80) for on in (False, True)
    )
    assert gated - plain == 2 * 2 * 21 * DIM**2


def test_backward_keeps_both_factors_and_no_other_tensor():
    """Plain autograd would keep the silu of the second factor too."""
    factors = [draw(2, 7, DIM, seed=i).requires_grad_() for i in (1, 2)]
    assert bytes_kept(lambda: gated(*factors)) == 2 * 2 * 7 * DIM * 8


def test_the_identity_twin_keeps_the_gate_and_the_convolution():
    model = small(relative="none", **BOTH)
    twin, x = identity_twin(model), torch.randn(2, 3, 48, 80, dtype=torch.float64)
    for block in model.blocks:
        block.attn.operation = lambda q, k, v, **options: v
    close(twin(x), model(x), 1e-12)
    sizes = torch.tensor([[48, 80], [32, 48]])
    close(twin(x, sizes=sizes), model(x, sizes=sizes), 1e-12)


@pytest.mark.parametrize("mode", ["", "jax"])
def test_prefix_tokens_of_gated_models_start_where_a_gate_is_open(mode):
    """A class token that starts at 1e-6, as timm's, gets nothing through its gate."""
    made = [
        create_model("scaleformer_vit_t", **SMALL, reg_tokens=2, output_gate=gate, weight_init=mode)
        for gate in (True, False)
    ]
    for model, std in zip(made, (0.02, 1e-6), strict=True):
        for token in (model.cls_token, model.reg_token):
            assert token.std().item() == pytest.approx(std, rel=0.5)


def test_a_class_token_learns_from_patches_at_the_start():
    torch.manual_seed(0)
    model = create_model("scaleformer_vit_t", **SMALL, global_pool="token").double()
    tokens = []
    for block in model.blocks:
        block.attn.proj.register_forward_hook(lambda *args: tokens.append(args[2]))
    model(torch.randn(4, 3, 64, 64, dtype=torch.float64)).logsumexp(1).sum().backward()
    for found in tokens:
        of_class, of_patches = found[:, 0].norm(dim=-1).mean(), found[:, 1:].norm(dim=-1).mean()
        assert of_class > 0.1 * of_patches
    assert model.patch_embed.proj.weight.grad.norm() < 100 * model.head.weight.grad.norm()
