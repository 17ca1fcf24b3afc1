"""What timm's clients do with a vision transformer, in one walk."""

import copy
import pickle

import torch
from timm.models import VisionTransformer
from torch import Tensor


def keeps_contract(
    model: VisionTransformer, x: Tensor, grid: tuple[int, int], classes: int
) -> None:
    """Assert what clients rely on.

    Args:
        model: in train mode, without dropout; its head and its dtype are changed.
        x: images, of a grid of that many patches.
        grid: rows and columns of patches.
        classes: of the model's head.
    """
    assert isinstance(model, VisionTransformer)
    assert model.default_cfg["first_conv"] == "patch_embed.proj"
    batch = len(x)
    features = model.forward_features(x)
    assert torch.equal(model.forward_head(features), model(x))
    assert model(x).shape == (batch, classes)
    model(x).square().sum().backward()
    assert [n for n, p in model.named_parameters() if p.grad is None] == []

    final, maps = model.forward_intermediates(x)
    assert torch.equal(final, features)
    assert maps[-1].shape == (batch, model.embed_dim, *grid)
    last = model.forward_intermediates(x, indices=1, norm=True, intermediates_only=True)[0]
    assert torch.equal(last.flatten(2).mT, final[:, model.num_prefix_tokens :])

    pooled = model.train(False)(x)
    again = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert torch.equal(again(x), pooled)
    model.reset_classifier(5)
    assert model(x).shape == (batch, 5) and model.get_classifier().training is False
    model.reset_classifier(0)
    assert model(x).shape == (batch, model.num_features)
    assert model.to(torch.bfloat16)(x.to(torch.bfloat16)).dtype == torch.bfloat16
