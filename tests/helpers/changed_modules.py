"""Models with modules that are replaced, wrapped, parametrized or have hooks, as adapters, pruning
and quantization leave them.
"""

import copy

import torch
from torch import nn
from torch.nn.utils import parametrizations, prune


class Adapted(nn.Module):
    """A linear layer or a convolution with another one beside it, as LoRA adds it."""

    def __init__(self, base):
        super().__init__()
        self.base, self.beside = base, copy.deepcopy(base)
        nn.init.normal_(self.beside.weight, std=0.1)

    def forward(self, x):
        return self.base(x) + self.beside(x)


class Centred(nn.Module):
    """Takes the mean of all tokens off each."""

    def forward(self, x):
        return x - x.mean(1, keepdim=True)


def adapt(*names):
    """Return what adapts some modules."""

    def change(model):
        for name in names:
            model.set_submodule(name, Adapted(model.get_submodule(name)))

    return change


def put(name, make):
    """Return what replaces a module by what ``make`` makes of it."""
    return lambda model: model.set_submodule(name, make(model.get_submodule(name)))


def hook(name, after):
    """Return what registers a forward hook that changes outputs."""
    return lambda model: model.get_submodule(name).register_forward_hook(
        lambda module, given, out: after(out)
    )


def hook_before(name):
    """Return what registers a forward hook that doubles the first input."""
    return lambda model: model.get_submodule(name).register_forward_pre_hook(
        lambda module, given: (2 * given[0], *given[1:])
    )


def patch(name):
    """Return what replaces ``forward`` of one module, as accelerate does."""

    def change(model):
        module = model.get_submodule(name)
        old = module.forward
        module.forward = lambda *given, **options: 1.5 * old(*given, **options)

    return change


def patch_operation(model):
    """Let the attention of a block halve what its operation gives."""
    old = model.blocks[1].attn.operation
    model.blocks[1].attn.operation = lambda *given, **options: old(*given, **options) / 2


def prune_all(model):
    """Prune every linear layer and convolution, by hooks."""
    for module in list(model.modules()):
        if isinstance(module, nn.Linear | nn.Conv2d):
            prune.l1_unstructured(module, "weight", 0.5)


CALLED = {
    "LoRA on qkv": adapt("blocks.0.attn.qkv", "blocks.1.attn.qkv"),
    "LoRA elsewhere": adapt("patch_embed.proj", "blocks.1.attn.proj", "blocks.1.mlp.fc1", "head"),
    "hook on qkv": hook("blocks.1.attn.qkv", lambda out: 1.5 * out),
    "hook on mlp": hook("blocks.1.mlp", torch.sin),
    "hook on head": hook("head", lambda out: out.flip(1)),
    "hook before mlp": hook_before("blocks.1.mlp"),
    "another forward of qkv": patch("blocks.1.attn.qkv"),
    "another norm": put("blocks.1.norm1", lambda old: nn.RMSNorm(old.normalized_shape).double()),
    "no norm": put("blocks.1.norm2", lambda old: nn.Identity()),
    "parametrized qkv": lambda model: parametrizations.spectral_norm(model.blocks[0].attn.qkv),
    "parametrized patches": lambda model: parametrizations.spectral_norm(model.patch_embed.proj),
    "pruned": prune_all,
}
"""Changes that count."""
REFUSED = {
    "hook on block": (
        hook("blocks.1", torch.sin),
        r"^blocks\.1 has hooks, which would be bypassed",
    ),
    "hook before attention": (hook_before("blocks.1.attn"), r"^blocks\.1\.attn has hooks"),
    "hook on patches": (hook("patch_embed", torch.sin), "^patch_embed has hooks"),
    "hook on model": (hook("", torch.sin), "^the model has hooks"),
    "another forward of a block": (patch("blocks.1"), r"^blocks\.1 has another forward"),
    "another block": (put("blocks.1", lambda old: nn.Identity()), r"^blocks\.1 is a torch\.nn\."),
    "another attention": (
        put("blocks.1.attn", lambda old: nn.Linear(24, 24).double()),
        r"^blocks\.1\.attn is a torch\.nn\.modules\.linear\.Linear",
    ),
    "another operation": (patch_operation, "^block 1 has an operation of another attention"),
    "tokens in an MLP": (put("blocks.1.mlp", lambda old: Centred()), r"^blocks\.1 has a module"),
    "tokens in a hook": (hook("norm", lambda x: x - x.mean(1, keepdim=True)), "^norm, head or"),
    "patches that overlap": (
        put("patch_embed.proj", lambda old: nn.Conv2d(3, 24, 7, 4, 2).double()),
        "^patch_embed has a module whose output for a token depends on others",
    ),
}
"""Changes that cannot count where only the parts of blocks are called, with the reason."""
