"""Teachers for ``visionattn convert`` and for trainings that start from them: files that are
cut off or hold something else, and descriptions with one value wrong.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.malformed.mutations import BYTES, GARBLED_JSON, replace_by_folder, rewrite
from tests.malformed.runner import Case
from tests.malformed.valid import CONVERT, DISTIL, GO_ON, TEACHER
from tests.malformed.weights import read_weights

STATE = ("convert", "teacher.pth", "--model", "vit_tiny_patch16_224", "--output", "out.safetensors")
STATE += ("--args", "{depth: 2, embed_dim: 8, num_heads: 2, mlp_ratio: 1}")
TRAIN = ("train", "--config", "train.yaml", "--run", "out", "--model.name", "converted_vit")
TRAIN += ("--model.args", "{softmax_blocks: [-1]}")
START = (*TRAIN, "--init_from", TEACHER)
PREDICT = ("predict", "--checkpoint", "converted.safetensors", "--images", "images")


def change_state(change: Callable[[dict], Any]) -> Callable[[Path], None]:
    """Return what changes the state dict of the teacher."""

    def apply(folder: Path) -> None:
        path = folder / "teacher.pth"
        torch.save(change(torch.load(path, weights_only=True)), path)

    return apply


def change_note(name: str, key: str, text: str) -> Callable[[Path], None]:
    """Return what changes a text of the metadata of a file."""

    def apply(folder: Path) -> None:
        metadata, tensors = read_weights(folder / name)
        save_file(tensors, folder / name, metadata=metadata | {key: text})

    return apply


def without(name: str) -> Callable[[dict], dict]:
    """Return what takes a tensor out of a state dict."""
    return lambda state: {key: value for key, value in state.items() if key != name}


STATES: dict[str, Callable[[dict], Any]] = {
    "without its position": without("pos_embed"),
    "without a weight of a block": without("blocks.1.attn.qkv.weight"),
    "of another width": lambda state: {key: value[..., :4] for key, value in state.items()},
    "with one more tensor": lambda state: state | {"blocks.0.attn.gate.weight": torch.zeros(8, 8)},
    "of whole numbers": lambda state: {key: value.long() for key, value in state.items()},
    "of complex numbers": lambda state: {key: value + 0j for key, value in state.items()},
    "with filters of two dimensions": lambda state: (
        state | {"patch_embed.proj.weight": torch.zeros(8, 192)}
    ),
    "with filters of no size": lambda state: (
        state | {"patch_embed.proj.weight": torch.zeros(8, 3, 0, 0)}
    ),
    "with a position of two dimensions": lambda state: state | {"pos_embed": torch.zeros(5, 8)},
    "with a position of no grid": lambda state: state | {"pos_embed": torch.zeros(1, 8, 8)},
    "with a head of no dimension": lambda state: state | {"head.weight": torch.tensor(1.0)},
    "of nothing": lambda state: {},
    "that is a tensor": lambda state: torch.zeros(3),
}
NOTES = {
    "model": ("resnet10t", "vit_small_patch16_dinov3", "no_such_model", "x" * 5000, ""),
    "args": (*GARBLED_JSON, '{"depth": 3}', '{"embed_dim": 16}', '{"checkpoint_path": "x"}'),
}
"""What a file says of its teacher that is not so."""
KEPT = tuple(text for text in GARBLED_JSON if "1e999" not in text)  # a key of nobody
KEPT += ('{"crop_pct": "x"}', '{"interpolation": 3}')
"""What a file says to timm that no file of ours says."""
FLAGS = {
    "blocks that do not exist": ("--softmax_blocks", "0", "2"),
    "blocks before the first": ("--softmax_blocks", "-3"),
    "attention for other blocks": ("--attention", "window", "kernelized", "softmax"),
    "no attention of ours": ("--attention", "linear"),
    "heads that do not divide": ("--num_heads", "3"),
    "an output gate": ("--options.output_gate", "true"),
    "another width": ("--options.embed_dim", "16"),
    "an option of nobody": ("--options.layers", "2"),
    "an option with a flag of its own": ("--options.attention", "window"),
    "a patch of nothing": ("--options.patch_size", "0"),
    "an image smaller than a patch": ("--options.img_size", "4"),
    "classes below 0": ("--options.num_classes", "-1"),
    "no channels": ("--options.in_chans", "0"),
    "a convolution of even side": ("--options.value_conv", "4"),
    "a body for a file that says its own": ("--model", "vit_tiny_patch16_224"),
    "a seed below 0": ("--seed", "-1"),
    "a file in no folder": ("--output", "nowhere/out.safetensors"),
    "a file that is there": ("--output", "weights.pth"),
    "no teacher": ("--teacher", "nowhere.pth"),
    "no model of timm": ("--teacher", "vit_tinie"),
    "no ViT": ("--teacher", "test_efficientnet"),
    "rotary position": ("--teacher", "vit_small_patch16_dinov3", "--args.depth", "1"),
    "a folder": ("--teacher", "images"),
}
IN_TRAINING = {
    "blocks that do not exist": (*TRAIN[:-1], "{softmax_blocks: [7]}", "--init_from", TEACHER),
    "a converted model of nothing": TRAIN,
    "a body without weights": (*TRAIN, "--init_model", "test_vit"),
    "a body of another": (*TRAIN, "--init_from", "teacher.pth", "--init_model", "test_vit"),
    "a body that timm does not know": (*TRAIN, "--init_from", "teacher.pth", "--init_model", "x"),
    "weights of no body": (*TRAIN, "--init_from", "teacher.pth"),
    "weights of another width": (*START, "--model.name", "scaleformer_vit_t"),
    "a name that cannot be converted": (*TRAIN, "--init_from", "vit_small_patch16_dinov3"),
}
DISTILLATIONS = {
    "no ViT": ("--teacher", "test_efficientnet"),
    "no teacher": ("--teacher", "nowhere.pth"),
    "weights of another width": ("--teacher", "teacher.pth", "--model", "vit_small_patch16_224"),
    "weights of ours": ("--teacher", "converted.safetensors"),
    "blocks that do not exist": ("--softmax_blocks", "7"),
    "nothing to learn": ("--softmax_blocks", "0", "1"),
    "as many blocks as there are": ("--search_softmax_blocks", "2"),
    "a folder without images": ("--data.root", "run"),
    "other images": ("--data.name", "digits", "--data.root", "null"),
    "a size of no patches": ("--b.img_size", "20"),
    "a size of no tiles": ("--b.img_size", "24", "--b.teacher_size", "tiled"),
    "tiles of images that differ": ("--data.fit", "native", "--a.teacher_size", "tiled"),
    "two limits": ("--b.img_size", "16", "--b.max_patches", "4"),
    "no stage": ("--stages", "[]"),
    "stages out of order": ("--stages", "b", "a"),
    "a place that is taken": ("--run", "student"),
}
GOING_ON = {
    "another attention": ("--attention", "taylorshift"),
    "another teacher": ("--teacher", "vit_tiny_patch16_224"),
    "longer stages that are done": ("--a.epochs", "2"),
    "other sizes of stages that are done": ("--b.img_size", "32"),
}


def cases() -> Iterator[Case]:
    """Return cases of teachers."""
    readers = ((TEACHER, CONVERT), (TEACHER, START), (TEACHER, DISTIL), ("teacher.pth", STATE))
    of_stages = (f"student/{name}" for name in ("distil.yaml", "b/best.safetensors"))
    for name, reader in (*readers, *((name, GO_ON) for name in of_stages)):
        for kind, change in BYTES.items():
            if kind in ("middle off", "less one byte" if name.endswith(".yaml") else ""):
                # other numbers, and a file without its last new line
                continue
            yield Case(f"teacher {reader[0]} {name} {kind}", reader, rewrite(name, change))
        yield Case(f"teacher {reader[0]} {name} is a folder", reader, replace_by_folder(name))
    for kind, change in STATES.items():
        yield Case(f"teacher state {kind}", STATE, change_state(change))
    for key, texts in NOTES.items():
        for number, text in enumerate(texts):
            for reader in (CONVERT, START, DISTIL):
                change = change_note(TEACHER, key, text)
                yield Case(f"teacher {reader[0]} {key} {number}", reader, change)
    for number, text in enumerate(KEPT):
        change = change_note("converted.safetensors", "pretrained_cfg", text)
        yield Case(f"teacher kept {number}", PREDICT, change)
    for kind, words in FLAGS.items():
        yield Case(f"teacher flag {kind}", (*CONVERT, *words))
    for kind, words in IN_TRAINING.items():
        yield Case(f"teacher training {kind}", words)
    for kind, words in DISTILLATIONS.items():
        yield Case(f"teacher distil {kind}", (*DISTIL, *words))
    for kind, words in GOING_ON.items():
        yield Case(f"teacher distil goes on with {kind}", (*GO_ON, *words))
    change = change_note(TEACHER, "data", "{}")
    yield Case("teacher without a description", CONVERT, change)
