"""The output gate of attention layers: what it computes, and of which token."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

from tests.helpers.oracles import assert_agree, draw, run
from tests.ops.drawn_cases import DEFINITIONS, Drawn
from visionattn.layers import Attention
from visionattn.ops import reference

DIM, HEADS = 24, 3


def make_layer(attention="kernelized", **options) -> Attention:
    """A layer whose parameters are all away from what they start with."""
    own = dict(window_size=3, shifted=True) if attention == "window" else {}
    layer = Attention(DIM, HEADS, attention=attention, output_gate=True, **own, **options).double()
    with torch.no_grad():
        for i, parameter in enumerate(layer.parameters()):
            parameter.add_(draw(*parameter.shape, seed=50 + i), alpha=0.3)
    return layer


def attended(layer, q, k, v, layout, mask, causal):
    """What the heads of a layer give, by the quadratic definition of its operation."""
    key_mask = layout.key_mask(mask)
    if layer.centre_keys:
        k = reference.centred_keys(k, key_mask)
    own = {
        "kernelized": dict(feature_map=layer.feature_map, causal=causal),
        "taylorshift": dict(temperature=layer.temperature),
        "softmax": dict(causal=causal),
        "window": dict(layout=layout, key_mask=mask, window_size=3, shifted=True),
    }[layer.attention]
    position = None if layer.relative is None else layer.relative(layout)
    given = dict(relative=position, key_mask=key_mask) | own
    return DEFINITIONS[layer.attention](q, k, v, **given)


class ByHand(nn.Module):
    """A layer with a gate, written with ``einsum``, the gate token by token."""

    def __init__(self, layer: Attention):
        super().__init__()
        self.layer = layer

    def forward(self, x, layout, mask, causal):
        layer, weights = self.layer, dict(self.layer.named_parameters())
        q, k, v = torch.einsum(
            "khfd,bnd->kbhnf", weights["qkv.weight"].unflatten(0, (3, HEADS, DIM // HEADS)), x
        )
        heads = attended(layer, q, k, v, layout, mask, causal)
        if layer.value_conv is not None:
            taps = weights["value_conv.weight"]
            heads = heads + reference.value_convolution(v, taps, layout, key_mask=mask)
        tokens = []
        for i in range(x.shape[1]):
            a = torch.einsum("od,bd->bo", weights["output_gate.weight"], x[:, i])
            joined = torch.cat([heads[:, head, i] for head in range(HEADS)], dim=1)
            tokens.append(joined * a / (1 + torch.exp(-a)))
        out = torch.stack(tokens, dim=1)
        if "norm.weight" in weights:
            centred = out - out.mean(2, keepdim=True)
            spread = (centred.square().mean(2, keepdim=True) + layer.norm.eps).sqrt()
            out = centred / spread * weights["norm.weight"] + weights["norm.bias"]
        return torch.einsum("od,bnd->bno", weights["proj.weight"], out) + weights["proj.bias"]


def assert_as_by_hand(layer, layout, mask=None, causal=False):
    """Result and gradients equal their definition; outputs of absent patches do not count."""
    there, meaning = layout.key_mask(None), ByHand(layer)

    def ours(x, **parameters):
        given = {name.removeprefix("layer."): p for name, p in parameters.items()}
        options = dict(attn_mask=mask, is_causal=causal)
        return zero_absent(functional_call(layer, given, (x, layout), options))

    def meant(x, **parameters):
        return zero_absent(functional_call(meaning, parameters, (x, layout, mask, causal)))

    def zero_absent(out):
        return out if there is None else out.masked_fill(~there[:, :, None], 0)

    tensors = {"x": draw(2, layout.num_tokens, DIM, seed=1)}
    tensors |= {name: p.detach() for name, p in meaning.named_parameters()}
    expected = run(meant, tensors)
    assert_agree(run(ours, tensors), expected, 1e-12, floor=1.0)
    assert expected["layer.output_gate.weight"].abs().max() > 0.1


# What a layer computes


FULL = Drawn(absent=True, missing=14, masked=True, horizons=(2, 2))
KEPT = Drawn(missing=14, masked=True)
LAYERS = [
    (dict(attention="kernelized", relative="joint", value_conv=3, centre_keys=True), FULL, False),
    (dict(attention="kernelized", relative="none"), Drawn((1, 1)), False),
    (dict(feature_map="relu", relative="axial", normalization="sum"), FULL, False),
    (dict(feature_map="random", random_features=5, relative="flat"), Drawn(), False),
    (dict(attention="taylorshift", relative="none", scale_norm=True), FULL, False),
    (dict(attention="softmax", relative="joint", value_conv=3), KEPT, False),
    (dict(attention="window", relative="axial", value_conv=3), FULL, False),
    (dict(attention="window", relative="none", scale_norm=True), FULL, False),
    (dict(attention="kernelized", relative="flat"), Drawn((3, 4)), True),
    (dict(attention="softmax", relative="joint"), Drawn((3, 4)), True),
]


@pytest.mark.parametrize("options, case, causal", LAYERS)
def test_a_layer_and_its_gradients_are_its_definition(options, case, causal):
    """Keys are centered; the gate is between the convolution and the norm."""
    assert_as_by_hand(make_layer(**options), case.layout(), case.mask(), causal)
