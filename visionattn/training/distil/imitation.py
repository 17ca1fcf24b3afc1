"""Compute the distillation losses: on the attention of each block, and on the final features.

The teacher is a model of this package with softmax blocks that computes the same as timm's ViT. So
both models have the same tokens at the same positions for any image size, and padding is absent in
both.

Source: the two stages of ViT-AdaLA and JetViT (2026): attention outputs on the teacher's inputs,
then final features with 0.9 cosine and 0.1 smooth L1.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from visionattn.data.batches import Batch
from visionattn.layout import TokenLayout
from visionattn.models import VisionAttnTransformer
from visionattn.models.backbone import with_counts
from visionattn.models.devices import autocast
from visionattn.models.patches import call, takes_sizes
from visionattn.models.weights import DataSpec
from visionattn.training.config import OptimConfig
from visionattn.training.distil.kept_tokens import KeptTokens
from visionattn.training.distributed import Processes
from visionattn.training.objectives import Judged, Objective, weighted_mean

Stage = Literal["a", "b", "c"]
TeacherSize = Literal["same", "tiled"]

COSINE, SMOOTH_L1 = 0.9, 0.1
"""Weights of the two terms of the feature loss."""
BEHIND = ("head.", "fc_norm.", "attn_pool.")
"""Prefixes of the modules after the features, which keep the teacher's weights."""


def learn(student: VisionAttnTransformer, stage: Stage, new: Sequence[str]) -> None:
    """Enable the gradients of the parameters that a stage trains, and freeze the others.

    Args:
        student: changed in place.
        stage: ``a`` trains queries, keys, values and new parameters in blocks that are not softmax;
            ``b`` and ``c`` train everything up to the features.
        new: names of the parameters that the teacher does not have.

    Raises:
        ValueError: the stage would train nothing.
    """
    imitating = tuple(f"blocks.{i}.attn." for i in imitating_blocks(student))
    for name, parameter in student.named_parameters():
        if stage == "a":
            learns = name.startswith(imitating) and (".attn.qkv." in name or name in new)
        else:
            learns = not name.startswith(BEHIND)
        parameter.requires_grad_(learns)
    if not any(parameter.requires_grad for parameter in student.parameters()):
        raise ValueError(
            "stage a has nothing to learn, because all blocks stay softmax; remove a from "
            "stages, or keep fewer blocks softmax"
        )


def imitating_blocks(student: VisionAttnTransformer) -> list[int]:
    """Return the blocks whose attention differs from the teacher's."""
    return [i for i, block in enumerate(student.blocks) if block.attn.attention != "softmax"]


class Imitation(nn.Module):
    """A student with its teacher, as a module that maps images to the loss of each image.

    Args:
        student: the model to train.
        teacher: frozen, always in eval mode.
        stage: ``a`` for attention, ``b`` or ``c`` for features.
        features: returns the teacher's tokens; None: ``teacher_features`` of ``teacher``.
    """

    def __init__(
        self,
        student: VisionAttnTransformer,
        teacher: VisionAttnTransformer,
        stage: Stage,
        features: Callable[[Tensor, Tensor | None], Tensor] | None = None,
    ):
        super().__init__()
        self.student, self.teacher = student, teacher
        self.stage, self.features = stage, features or partial(teacher_features, teacher)

    def train(self, mode: bool = True) -> "Imitation":
        """Set the mode of the student; the teacher stays in eval mode."""
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, images: Tensor, sizes: Tensor | None = None) -> Tensor:
        """Return the loss of each image, float32 ``[B]``.

        Args:
            images: ``[B, C, H_px, W_px]``.
            sizes: int64 ``[B, 2]``, size of each image in pixels without padding; None: no padding.
        """
        if self.stage == "a":
            blocks = imitating_blocks(self.student)
            return attention_losses(self.student, self.teacher, images, sizes, blocks).mean(1)
        return self.judge_features(images, sizes)[0]

    def judge_features(self, images: Tensor, sizes: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the feature loss of each image, ``[B]``, and the student's tokens."""
        wanted = self.features(images, sizes)
        tokens = self.student.forward_features(images, sizes=sizes)
        present = self.student.present_patches(images, sizes)
        if present is not None:
            present = F.pad(present, (self.student.num_prefix_tokens, 0), value=True)
        return feature_losses(tokens, wanted, present), tokens


class Imitating(Objective):
    """Learn to imitate the teacher.

    Args:
        teacher: on the device of the training, in eval mode.
        stage: as for ``Imitation``.
        teacher_size: image size of the teacher, see ``teacher_features``.
        labelled: whether the labels are classes of the teacher's head, so that the student has an
            accuracy.
        kept: folder for the teacher's tokens, see ``KeptTokens``; None: computed in each epoch.
    """

    learns_labels = False

    def __init__(
        self,
        teacher: VisionAttnTransformer,
        stage: Stage,
        teacher_size: TeacherSize,
        *,
        labelled: bool,
        kept: str | None = None,
    ):
        super().__init__(OptimConfig())
        self.teacher = teacher.requires_grad_(False).eval()
        self.stage, self.labelled = stage, labelled
        self.features = partial(teacher_features, self.teacher, teacher_size=teacher_size)
        if kept is not None and stage != "a":
            known = teacher_size, teacher.pos_antialias
            self.features = KeptTokens(kept, self.features, self.teacher, *known)

    def called(self, model: nn.Module) -> Imitation:
        """Return the student with its teacher."""
        assert isinstance(model, VisionAttnTransformer)
        return Imitation(model, self.teacher, self.stage, self.features)

    def loss(self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the mean loss of the images, each times its weight; labels are not used."""
        return weighted_mean(outputs, weights)

    def judge(
        self, model: nn.Module, inputs: Tensor, sizes: Tensor | None, labels: Tensor
    ) -> Judged:
        """Return the loss of a batch and, if labeled, the student's outputs."""
        pair = self.called(model)
        sizes = None if sizes is None else sizes.to(inputs.device)
        if self.stage == "a":
            logits = call(model, inputs, sizes).float() if self.labelled else None
            return Judged(pair(inputs, sizes).sum(), logits)
        losses, tokens = pair.judge_features(inputs, sizes)
        logits = None
        if self.labelled:
            student = pair.student
            present = student.present_patches(inputs, sizes)
            logits = student.forward_head(tokens, present=present).float()
        return Judged(losses.sum(), logits)

    def rank(self, score: float, loss: float) -> tuple[float, ...]:
        """Return a key that is larger for better weights: only the loss counts, not the labels."""
        return (-loss,)


def attention_losses(
    student: VisionAttnTransformer,
    teacher: VisionAttnTransformer,
    images: Tensor,
    sizes: Tensor | None,
    blocks: Sequence[int],
) -> Tensor:
    """Return the relative squared error of the student's attention on the teacher's inputs, for
    each image and each given block, float32 ``[B, blocks]``.

    It is the squared error over the squared norm of the teacher's attention, both after the output
    projection and over all tokens without padding.
    """
    with torch.no_grad(), recorded(teacher) as calls:
        teacher.forward_features(images, sizes=sizes)
    losses = []
    layout: TokenLayout | None = None
    for i in blocks:
        given, places, wanted = calls[i]
        layout = with_counts(places, student.blocks, given) if layout is None else layout
        found = student.blocks[i].attn(given, layout).float()
        wanted = wanted.float()
        error, square = (found - wanted).square(), wanted.square()
        present = places.key_mask()
        if present is not None:  # outputs at absent tokens are meaningless
            absent = ~present.unsqueeze(2)
            error, square = error.masked_fill(absent, 0), square.masked_fill(absent, 0)
        tiny = torch.finfo(torch.float32).tiny
        losses.append(error.sum((1, 2)) / square.sum((1, 2)).clamp(min=tiny))
    return torch.stack(losses, 1)


@torch.inference_mode()
def block_losses(
    student: VisionAttnTransformer,
    teacher: VisionAttnTransformer,
    batches: Iterable[Batch],
    spec: DataSpec,
    amp: str,
    processes: Processes,
) -> list[float]:
    """Return the attention loss of each block, averaged over images.

    Args:
        student, teacher: on one device, in eval mode.
        batches: the images, or this process's part of them.
        spec: the specification of the images.
        amp: mixed precision.
        processes: the processes with the other parts; all get the same result.
    """
    blocks, device = range(len(student.blocks)), next(student.parameters()).device
    total = torch.zeros(len(blocks), dtype=torch.float64)

    def own() -> int:
        count = 0
        for images, labels, sizes, *_ in batches:
            filled = sizes.to(device) if sizes is not None and takes_sizes(student) else None
            inputs = spec.prepare(images.to(device))
            with autocast(device, amp):
                found = attention_losses(student, teacher, inputs, filled, blocks)
            total.add_(found.sum(0).cpu().double())
            count += len(labels)
        return count

    count = processes.together(own)
    *sums, images = processes.sum(*total.tolist(), count)
    return [value / images for value in sums]


@contextmanager
def recorded(model: VisionAttnTransformer) -> Iterator[list[tuple[Tensor, TokenLayout, Tensor]]]:
    """Record the input ``[B, N, D]``, the token layout and the output of the attention of each
    block that runs in this context.
    """
    calls: list[tuple[Tensor, TokenLayout, Tensor]] = []

    def note(_: nn.Module, given: tuple, output: Tensor) -> None:
        calls.append((given[0], given[1], output))

    handles = [block.attn.register_forward_hook(note) for block in model.blocks]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def feature_losses(found: Tensor, wanted: Tensor, present: Tensor | None = None) -> Tensor:
    """Return 0.9 (1 - cosine) + 0.1 smooth L1, averaged over the tokens of each image: float32
    ``[B]``.

    Args:
        found, wanted: ``[B, N, D]``.
        present: bool ``[B, N]``, the tokens that count; None: all.
    """
    found, wanted = found.float(), wanted.float()
    apart = 1 - F.cosine_similarity(found, wanted, dim=2)
    beside = F.smooth_l1_loss(found, wanted, reduction="none").mean(2)
    losses = COSINE * apart + SMOOTH_L1 * beside
    if present is None:
        return losses.mean(1)
    return losses.masked_fill(~present, 0).sum(1) / present.sum(1)


@torch.no_grad()
def teacher_features(
    teacher: VisionAttnTransformer,
    images: Tensor,
    sizes: Tensor | None,
    teacher_size: TeacherSize = "same",
) -> Tensor:
    """Return the teacher's tokens after its final norm, ``[B, P + H*W, D]``, in the order of the
    student's tokens.

    Args:
        teacher_size: ``same``: the student's image size, with the teacher's absolute position
            resampled. ``tiled``: tiles of the teacher's own size, from the top left, where each
            patch gets its token from its tile; prefix tokens come from the whole image resized to
            that size.
    """
    if teacher_size == "same":
        return teacher.forward_features(images, sizes=sizes)
    height, width = teacher.patch_embed.img_size
    prefix, (rows, columns) = teacher.num_prefix_tokens, teacher.patch_embed.grid_size
    down, across = images.shape[2] // height, images.shape[3] // width
    tiles = rearrange(images, "b c (i h) (j w) -> (b i j) c h w", h=height, w=width)
    tokens = teacher.forward_features(tiles)[:, prefix:]
    patches = rearrange(
        tokens,
        "(b i j) (h w) d -> b (i h j w) d",
        i=down,
        j=across,
        h=rows,
        w=columns,
    )
    if not prefix:
        return patches
    shrunk = F.interpolate(images, (height, width), mode="bicubic", antialias=True)
    return torch.cat([teacher.forward_features(shrunk)[:, :prefix], patches], dim=1)


def check_teacher_size(
    teacher: VisionAttnTransformer, size: tuple[int, int] | None, fit: str
) -> None:
    """Check that the image size is a multiple of the teacher's own size.

    Args:
        size: height and width of the images in pixels; None: sizes differ.
        fit: the resizing of images.

    Raises:
        ValueError: the size is not a multiple; one line.
    """
    height, width = teacher.patch_embed.img_size
    own = f"the teacher's own {height} x {width} px"
    if size is None or fit not in ("crop", "stretch"):
        raise ValueError(
            f"teacher_size tiled cuts images into tiles of {own}, got fit {fit}; use data.fit "
            "crop or stretch, or teacher_size same"
        )
    if size[0] % height or size[1] % width:
        raise ValueError(
            f"teacher_size tiled needs a multiple of {own}, got img_size {size[0]} x {size[1]}; "
            f"use {max(1, size[0] // height) * height} x {max(1, size[1] // width) * width}"
        )
