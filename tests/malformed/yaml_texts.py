"""Texts of YAML that no tool takes as a configuration."""

from collections.abc import Callable, Iterator
from pathlib import Path

from tests.malformed.mutations import write
from tests.malformed.runner import Case
from tests.malformed.valid import VALIDATE

YAML = {
    "100,000 brackets": "model: {args: {x: " + "[" * 100_000 + "]" * 100_000 + "}}\n",
    "a tag of Python": "model: !!python/object/apply:os.system ['true']\n",
    "a tag of its own": "model: !mine 3\n",
    "a number of no digits": 'epochs: !!int ""\n',
    "a fraction of no digits": 'optim: {lr: !!float ""}\n',
    "a word that is neither true nor false": "compile: !!bool maybe\n",
    "a word that is no date": "epochs: !!timestamp soon\n",
    "epochs null": "epochs: null\n",
    "epochs empty": "epochs:\n",
    "epochs of text": "epochs: many\n",
    "epochs of 30 digits": f"epochs: {'9' * 30}\n",
    "epochs of a date": "epochs: 2026-13-45\n",
    "epochs of a time": "epochs: 2026-01-02T03:04:05Z\n",
    "epochs nan": "epochs: .nan\n",
    "epochs of a list": "epochs: [1]\n",
    "lr inf": "optim: {lr: .inf}\n",
    "lr nan": "optim: {lr: .nan}\n",
    "lr null": "optim: {lr: null}\n",
    "seed below 0": "seed: -1\n",
    "seed of 30 digits": f"seed: {'9' * 30}\n",
    "workers of 30 digits": f"data: {{workers: {'9' * 30}}}\n",
    "a million workers": "data: {workers: 1000000}\n",
    "threads of 30 digits": f"threads: {'9' * 30}\n",
    "a billion threads": "threads: 1000000000\n",
    "a size of 30 digits": f"data: {{img_size: {'9' * 30}}}\n",
    "a batch of 30 digits": f"batch_size: {'9' * 30}\n",
    "a key twice": "epochs: 1\nepochs: 2\n",
    "a key of a group twice": "optim: {lr: 0.1, lr: 0.2}\n",
    "a group twice": "optim: {lr: 0.1}\noptim: {lr: 0.2}\n",
    "an unknown key": "colour: red\n",
    "an unknown key of a group": "optim: {colour: red}\n",
    "a group of a number": "optim: 3\n",
    "a group of null": "optim: null\n",
    "a group of a list": "optim: [1, 2]\n",
    "a list": "- epochs\n",
    "a text": "epochs\n",
    "a number": "7\n",
    "two documents": "epochs: 1\n---\nepochs: 2\n",
    "a tab": "optim:\n\tlr: 1\n",
    "an open bracket": "optim: {lr: 1\n",
    "an open quote": 'run: "abc\n',
    "an unknown alias": "epochs: *a\n",
    "a NUL": "run: a\0b\n",
    "control letters": "run: a\x07b\n",
    "no UTF-8": b"run: \xff\xfe\n",
    "UTF-16": "epochs: 1\n".encode("utf-16"),
    "a name with a slash": "run: a/b\n",
    "a name of points": "run: ..\n",
    "arguments null": "model: {args: null}\n",
    "arguments of a list": "model: {args: [1]}\n",
    "arguments of nothing": "model: {args: {embed_dim: null}}\n",
    "arguments of text": "model: {args: {embed_dim: x}}\n",
    "arguments of a list inside": "model: {args: {embed_dim: [1]}}\n",
    "arguments below 0": "model: {args: {embed_dim: -8}}\n",
    "arguments nan": "model: {args: {mlp_ratio: .nan}}\n",
    "arguments inf": "model: {args: {mlp_ratio: .inf}}\n",
    "arguments of a date": "model: {args: {embed_dim: 2026-01-02}}\n",
    "arguments of 30 digits": f"model: {{args: {{embed_dim: {'9' * 30}}}}}\n",
    "a billion blocks": "model: {args: {depth: 1000000000}}\n",
    "a model of the hub": "model: {name: 'hf-hub:a/b'}\n",
    "a model of a folder": "model: {name: 'local-dir:/tmp'}\n",
    "a device of text": "device: quantum\n",
    "device cuda:99": "device: cuda:99\n",
    "show_batch of a folder": "show_batch: images\n",
    "a range of text": "data: {value_range: [a, b]}\n",
    "a range of one": "data: {value_range: [1]}\n",
    "a range turned": "data: {value_range: [2, 1]}\n",
    "a range nan": "data: {value_range: [.nan, 1]}\n",
    "bands of 0": "data: {bands: [0]}\n",
    "bands of 30 digits": f"data: {{bands: [{'9' * 30}, 1, 2]}}\n",
    "no bands": "data: {bands: []}\n",
    "a page of 30 digits": f"data: {{page: {'9' * 30}}}\n",
    "means of one": "data: {mean: [0.5]}\n",
    "means nan": "data: {mean: [.nan, 0.5, 0.5], std: [1, 1, 1]}\n",
    "spreads of 0": "data: {mean: [0.5, 0.5, 0.5], std: [0, 0, 0]}\n",
    "no choices": "data: {img_size_choices: []}\n",
    "choices of 30 digits": f"data: {{img_size_choices: [{'9' * 30}]}}\n",
    "three sides": "data: {img_size: [16, 16, 16]}\n",
    "sides of text": "data: {img_size: [a, b]}\n",
    "no sides": "data: {img_size: []}\n",
}
"""Texts that no tool takes as a configuration."""
NOT_OF_SWEEPS = ("show_batch", "a name", "seed", "an output", "a root", "weights")
NOT_OF_VALIDATION = ("arguments", "a billion blocks", "a model", "a device", "show_batch", "lr")
NOT_OF_VALIDATION += ("device", "a name", "an output", "weights", "choices", "no choices")
NOT_OF_VALIDATION += ("a size", "three sides", "sides", "no sides", "a batch", "a billion threads")
NOT_OF_LOADERS = NOT_OF_VALIDATION + ("seed", "workers", "a million workers", "a root")


def cases() -> Iterator[Case]:
    """Return a case for each text and each tool that reads configurations."""
    for name, text in YAML.items():
        for tool, argv in YAML_READERS.items():
            skipped = {"sweep": NOT_OF_SWEEPS, "validate": NOT_OF_VALIDATION}
            skipped |= {"benchmark": NOT_OF_LOADERS}
            if name.startswith(skipped.get(tool, ())):
                continue
            yield Case(f"yaml {tool} {name}", argv, layered(argv, text))


YAML_READERS = {
    "train": ("train", "--config", "train.yaml", "--config", "odd.yaml"),
    "sweep": ("sweep", "--base", "odd.yaml", "--heads", "2", "--output", "out"),
    "validate": VALIDATE,
    "benchmark": ("benchmark", "loader", "odd.yaml", "--seconds", "0", "--workers", "0"),
}


def layered(argv: tuple[str, ...], text: str | bytes) -> Callable[[Path], None]:
    """Return what writes an odd text where a tool reads it."""
    name = "run/config.yaml" if argv is VALIDATE else "odd.yaml"
    return write(name, text)
