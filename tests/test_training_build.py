"""From a configuration to a model: gradient checkpointing acts, or says that it cannot."""

from types import SimpleNamespace

import pytest
import torch
from small_runs import MODEL, SPEC
from torch import nn

from visionattn.measure import bytes_kept
from visionattn.models.backbone import VisionAttnTransformer
from visionattn.training.build import build_model, check_img_size
from visionattn.training.config import ModelConfig


def test_checkpointing_keeps_less_and_changes_no_gradient():
    kept, gradients = [], []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model, _ = build_model(ModelConfig("scaleformer_vit_t", MODEL | {"depth": 4}, checkpointing), SPEC)
        image = torch.linspace(-1, 1, 2 * 48 * 48).view(2, 1, 48, 48)
        kept.append(bytes_kept(lambda model=model, image=image: model(image), without=list(model.parameters())))
        model(image).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert kept[1] < kept[0] / 2
    for first, second in zip(*gradients, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-6, atol=1e-7)


def test_a_model_that_cannot_checkpoint_says_so(monkeypatch):
    def refuse(self, enable=True):
        assert not enable, "gradient checkpointing not supported"  # as timm's VGG and others do

    monkeypatch.setattr(VisionAttnTransformer, "set_grad_checkpointing", refuse)
    with pytest.raises(ValueError, match="scaleformer_vit_t has no gradient checkpointing; leave model.grad_checkpointing out"):
        build_model(ModelConfig("scaleformer_vit_t", MODEL, True), SPEC)


def test_a_patch_that_is_one_number_is_a_square():
    model = nn.Module()
    model.patch_embed = SimpleNamespace(patch_size=16)
    check_img_size(model, [32, 48])
    with pytest.raises(ValueError, match="not a whole number of 16 x 16 pixel patches; the nearest that fit: 32 or 48"):
        check_img_size(model, [40])


def test_an_argument_that_timm_would_drop_is_refused():
    with pytest.raises(ValueError, match="model.args.init_values null would do nothing"):
        build_model(ModelConfig("scaleformer_vit_pixel", {"init_values": None}), SPEC)
