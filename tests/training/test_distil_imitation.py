"""What a student is measured by: the losses of both stages, what learns, and which token of the
teacher belongs to which of the student.
"""

import pytest
import torch
from torch import nn

from tests.helpers.distilled_runs import same_softmax, vit_of
from visionattn.layout import Grid, TokenLayout
from visionattn.models import from_softmax
from visionattn.training.distil.imitation import (
    Imitation,
    attention_losses,
    check_teacher_size,
    learn,
    teacher_features,
)

ATTENTIONS = ("kernelized", "taylorshift", "window")
BODIES = {
    "class token": {},
    "registers": dict(reg_tokens=2, no_embed_class=True, init_values=0.3),
    "no prefix": dict(class_token=False, global_pool="max"),
}


def images_of(batch=3, height=16, width=16):
    return torch.randn(batch, 1, height, width, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_the_loss_of_attention_is_that_of_each_block_on_the_inputs_of_timms_own_model(
    attention, body
):
    vit = vit_of(**body).double()
    converted = from_softmax(vit, attention)
    with torch.no_grad():
        for name, value in converted.model.named_parameters():
            if name in converted.new:
                value.add_(0.2 * torch.randn(value.shape))
    student, x = converted.model, images_of(2, 16, 24).double()
    tokens = vit.norm_pre(vit._pos_embed(vit.patch_embed(x)))
    layout = TokenLayout(vit.num_prefix_tokens, Grid(4, 6))
    wanted = []
    for own, block in zip(student.blocks, vit.blocks, strict=True):
        given = block.norm1(tokens)
        right, found = block.attn(given), own.attn(given, layout)
        wanted.append(((found - right) ** 2).sum((1, 2)) / (right**2).sum((1, 2)))
        tokens = block(tokens)
    losses = attention_losses(student, same_softmax(vit), x, None, range(3))
    assert losses.min() > 1e-3
    torch.testing.assert_close(losses.double(), torch.stack(wanted, 1), rtol=1e-5, atol=0)
    one = Imitation(student, same_softmax(vit), "a")(x)
    torch.testing.assert_close(one.double(), torch.stack(wanted, 1).mean(1), rtol=1e-5, atol=0)


def learning(student):
    return {name for name, value in student.named_parameters() if value.requires_grad}


def moved(model):
    return {name for name, value in model.named_parameters() if value.grad is not None}


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_stage_a_moves_queries_keys_values_and_what_is_new_of_linear_blocks_alone(attention):
    vit = vit_of(qk_norm=attention == "taylorshift")
    converted = from_softmax(vit, attention, softmax_blocks=[1])
    student, teacher = converted.model, same_softmax(vit)
    learn(student, "a", converted.new)
    pair = Imitation(student, teacher, "a").train()
    assert pair.student.training and not any(part.training for part in teacher.modules())
    pair(images_of()).mean().backward()
    linear = {f"blocks.{i}.attn.qkv.{part}" for i in (0, 2) for part in ("weight", "bias")}
    assert moved(student) == learning(student) == linear | set(converted.new)
    assert not any(name.startswith("blocks.1.") for name in converted.new)
    assert moved(teacher) == set()
    assert not any(block.attn._forward_hooks for block in teacher.blocks)


@pytest.mark.parametrize(
    ("body", "behind"),
    [
        (BODIES["class token"], {"head"}),
        (BODIES["registers"], {"head"}),
        (BODIES["no prefix"], {"head", "fc_norm"}),
        (dict(class_token=False, global_pool="map"), {"head", "attn_pool"}),
    ],
    ids=[*BODIES, "pooling by attention"],
)
def test_stage_b_moves_all_before_the_final_features_and_leaves_the_head(body, behind):
    vit = vit_of(**body)
    converted = from_softmax(vit, softmax_blocks=[1])
    student, teacher = converted.model, same_softmax(vit)
    learn(student, "a", converted.new)
    learn(student, "b", converted.new)
    Imitation(student, teacher, "b")(images_of()).mean().backward()
    assert moved(teacher) == set() and moved(student) == learning(student)
    left = dict(student.named_parameters()).keys() - moved(student)
    assert {name.partition(".")[0] for name in left} == behind


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_the_loss_of_features_is_cosine_and_smooth_l1_of_the_tokens_of_timms_own_model(body):
    vit = vit_of(**body)
    student, x = from_softmax(vit).model, images_of(2, 24, 16)
    losses = Imitation(student, same_softmax(vit), "b")(x)
    with torch.no_grad():
        right, found = vit.forward_features(x), student.forward_features(x)
    for image in range(2):
        total = 0.0
        for a, b in zip(found[image].double(), right[image].double(), strict=True):
            cosine = (a @ b) / (a @ a).sqrt() / (b @ b).sqrt()
            far = (a - b).abs()
            smooth = torch.where(far < 1, far**2 / 2, far - 0.5).mean()
            total += 0.9 * (1 - cosine) + 0.1 * smooth
        assert losses[image].item() == pytest.approx(float(total / len(found[image])), rel=1e-4)
    assert losses.min() > 1e-3


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_tiled_teacher_gives_each_patch_the_token_that_it_has_in_its_tile(body):
    vit = vit_of(**body, img_size=(8, 12))
    x = images_of(2, 24, 24)  # tiles of 8 x 12 px: 3 rows and 2 columns of 2 x 3 patches
    found = teacher_features(same_softmax(vit), x, None, "tiled")
    prefix = vit.num_prefix_tokens
    grid = found[:, prefix:].unflatten(1, (6, 6))
    with torch.no_grad():
        for row in range(3):
            for column in range(2):
                tile = x[:, :, 8 * row : 8 * row + 8, 12 * column : 12 * column + 12]
                own = vit.forward_features(tile)[:, prefix:].unflatten(1, (2, 3))
                placed = grid[:, 2 * row : 2 * row + 2, 3 * column : 3 * column + 3]
                torch.testing.assert_close(placed, own, rtol=1e-4, atol=1e-5)
        shrunk = nn.functional.interpolate(x, (8, 12), mode="bicubic", antialias=True)
        whole = vit.forward_features(shrunk)[:, :prefix]
    torch.testing.assert_close(found[:, :prefix], whole, rtol=1e-4, atol=1e-5)
    assert found.shape == (2, prefix + 36, 16)


@pytest.mark.parametrize(
    ("size", "fit", "said"),
    [
        (
            (40, 32),
            "crop",
            "teacher_size tiled needs a multiple of the teacher's own 16",
        ),
        ((8, 16), "stretch", "use 16 x 16$"),
        ((32, 32), "pad", "got fit pad; use"),
        (None, "native", "got fit native; use"),
    ],
)
def test_tiles_that_do_not_fit_are_refused(size, fit, said):
    with pytest.raises(ValueError, match=said):
        check_teacher_size(same_softmax(vit_of()), size, fit)
