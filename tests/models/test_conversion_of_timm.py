"""Every ``vit_*`` of timm, tiny, becomes one of our models or is refused in one line."""

import re
from functools import cache
from pathlib import Path

import pytest
import timm
import torch
from timm.models._features_fx import create_feature_extractor

from tests.helpers.timm_contract import keeps_contract
from visionattn.models import from_softmax
from visionattn.models.conversion import ACCEPTED, body_of

PAGE = Path(__file__).parents[2] / "docs" / "conversion.md"
NAMES = timm.list_models("vit_*")
TINY = dict(depth=2, embed_dim=24, num_heads=3, num_classes=5)
OTHERS = {
    "_sapiens2": dict(num_kv_heads=[3, 3]),
    "vit_base_mci": dict(embed_dim=768, num_heads=12),
}
"""Arguments that make some of timm's names tiny; their number of blocks or width is in others."""


def tiny(name, **options):
    """timm's architecture, tiny, with weights that are neither zero nor one."""
    torch.manual_seed(0)
    own = next((own for part, own in OTHERS.items() if part in name), {})
    patch = next((int(n) for n in re.findall(r"patch(\d+)", name)), 16)
    sized = {} if "mci" in name else dict(img_size=4 * patch)
    vit = timm.create_model(name, **(TINY | sized | own | options)).eval()
    with torch.no_grad():
        for parameter in vit.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return vit


def structure(vit):
    """What tells bodies apart, whatever their size."""
    own = body_of(vit)
    sizes = ("img_size", "patch_size", "embed_dim", "depth", "num_heads", "mlp_ratio")
    return tuple((key, value) for key, value in own.items() if key not in sizes)


@cache
def found_of_all():
    """The structure of each name, or why it is refused."""
    found = {}
    for name in NAMES:
        try:
            found[name] = structure(tiny(name))
        except ValueError as error:
            found[name] = str(error)
    return found


def one_of_each():
    """A name for each structure that there is."""
    found = found_of_all()
    return tuple({of: name for name, of in reversed(found.items()) if type(of) is tuple}.values())


def test_every_vit_of_timm_is_taken_or_refused_in_one_line_as_the_page_says():
    for name, found in found_of_all().items():
        refusal = said_of(name)
        wanted = refusal and f"{name} cannot be converted: {refusal}; {ACCEPTED}"
        assert wanted == (None if type(found) is tuple else found), name
    assert len(one_of_each()) >= 20  # so that the next tests are of more than a few


def test_each_structure_is_converted_with_all_its_weights_and_its_function():
    for name in one_of_each():
        vit = tiny(name).double()
        x = torch.randn(1, vit.in_chans, *vit.patch_embed.img_size, dtype=torch.float64)
        converted = from_softmax(vit, softmax_blocks=(0, 1))
        assert converted.taken == list(vit.state_dict()) and converted.new == []
        with torch.no_grad():
            torch.testing.assert_close(converted.model(x), vit(x), rtol=1e-10, atol=1e-10)
        converted = from_softmax(vit, "taylorshift", softmax_blocks=(0,))
        own = converted.model.state_dict()
        assert all(torch.equal(own[key], value) for key, value in vit.state_dict().items()), name
        assert {of.removeprefix("blocks.1.attn.") for of in converted.new} == {
            "relative.table",
            "temperature",
            "value_conv.weight",
        }
        with torch.no_grad():
            assert converted.model(x).isfinite().all() and converted.left_out == []


def said_of(name):
    """What the page says of a name: why it is refused, or nothing."""
    table = PAGE.read_text().partition("## Which ViTs of timm are taken?")[2]
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        patterns = re.findall(r"`(vit_[\w*]+)`", cells[0]) if line.startswith("| `vit_") else []
        if any(re.fullmatch(of.replace("*", ".*"), name) for of in patterns):
            return cells[-1]
    return None


def test_converted_models_keep_the_contract_of_timm():
    for number, name in enumerate(one_of_each()[::5]):
        attention = ("kernelized", ["taylorshift", "window"])[number % 2]
        model = from_softmax(tiny(name), attention, softmax_blocks=()).model.train()
        assert model.default_cfg["architecture"] == "converted_vit"
        rows, columns = model.patch_embed.patch_size
        x = torch.randn(2, 3, 5 * rows, 3 * columns)
        keeps_contract(model, x, (5, 3), 5)


MIXED = dict(attention=["kernelized", "taylorshift", "window", "kernelized"], softmax_blocks=[3])


def mixed_of(name):
    return from_softmax(tiny(name, depth=4), **MIXED)


def images(model, rows=5, columns=3, batch=2):
    height, width = model.patch_embed.patch_size
    return torch.randn(batch, 3, rows * height, columns * width)


@pytest.mark.slow
def test_converted_models_are_exported_with_open_sizes_and_traced():
    model = mixed_of("vit_base_patch16_siglip_256").model.eval()
    height, width = model.patch_embed.patch_size
    rows, columns = (torch.export.Dim(of, min=2, max=64) for of in ("rows", "columns"))
    sizes = {2: height * rows, 3: width * columns}
    program = torch.export.export(model, (images(model, 5, 3),), dynamic_shapes=(sizes,))
    x = images(model, 3, 7)
    torch.testing.assert_close(program.module()(x), model(x), atol=1e-5, rtol=1e-5)
    traced = create_feature_extractor(model, ["blocks.1"])
    assert traced(x)["blocks.1"].shape == (2, model.num_prefix_tokens + 21, 24)


@pytest.mark.slow
def test_one_graph_serves_converted_models_at_all_sizes():
    model, graphs = mixed_of("vit_small_patch14_reg4_dinov2").model.eval(), []

    def backend(graph, inputs):
        graphs.append(1)
        return graph

    compiled = torch.compile(model, fullgraph=True, backend=backend)
    with torch.no_grad():
        for rows, columns in ((5, 3), (4, 6), (7, 3), (3, 9)):
            x = images(model, rows, columns)
            torch.testing.assert_close(compiled(x), model(x), atol=1e-5, rtol=1e-5)
    assert len(graphs) <= 2
