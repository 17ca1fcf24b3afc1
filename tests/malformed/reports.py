"""What a report reads of runs and tables, wrong in many ways: it shows the rest."""

import json
from collections.abc import Iterator

from tests.malformed.images import encoded
from tests.malformed.mutations import (
    BYTES,
    GARBLED_JSON,
    broken_trees,
    few,
    replace_by_folder,
    rewrite,
    write,
)
from tests.malformed.runner import Case
from tests.malformed.runs import STATUS
from tests.malformed.valid import REPORT
from tests.malformed.weights import ARGS, HEADS, SPEC, change_json
from tests.malformed.yaml_texts import YAML

ODD_METRICS = {
    "a line of null": "null\n",
    "a line of a list": "[1]\n",
    "a nested step": '{"kind": "train", "step": {"a": 1}, "loss": 1}\n',
    "a loss of text": '{"kind": "train", "step": 1, "loss": "x"}\n',
    "a nested kind": '{"kind": [1], "step": 1}\n',
    "nested accuracies": '{"kind": "epoch", "epoch": 1, "step": 1, "val_accuracy": {"a": 1}}\n',
    "a deep line": "[" * 100_000 + "\n",
    "a nested test": '{"kind": "test", "accuracy": [1], "images": "x", "loss": {"a": 1}}\n',
    "bytes": "\ufffd\0\x07\n",
    "no end": '{"kind": "train"',
}


PICTURE = "data:image/png;base64,iVBORw0KGgo="
BY_CLASS = {
    "version": 1,
    "split": "validation",
    "epoch": 1,
    "images": 4,
    "seen": "whole",
    "class_names": ["cat", "dog"],
    "classes": [[2, 1, 2], [2, 1, 2]],
    "confusions": [[0, 1, 1], [1, 0, 1]],
    "mistakes": [
        {"label": 0, "said": 1, "probability": 0.9, "of_label": 0.1}
        | {"name": "a.png", "size": [16, 16], "picture": PICTURE}
    ],
}
FILES = ("run/metrics.jsonl", "run/status.json", "run/config.yaml", "run/best.safetensors")
FILES += ("run/validation.json",)


def cases() -> Iterator[Case]:
    """Return cases of runs that are shown as far as they can be read."""
    yield from table_cases()
    goes_on = dict(tolerated="page.html: runs 1", writes=("page.html",))
    for name, text in ODD_METRICS.items():
        yield Case(f"report metrics {name}", REPORT, write("run/metrics.jsonl", text), **goes_on)
    for name, tree in few(broken_trees(STATUS), 2):
        change = write("run/status.json", json.dumps(tree))
        yield Case(f"report status.{name}", REPORT, change, **goes_on)
    for name, text in YAML.items():
        change = write("run/config.yaml", text)
        yield Case(f"report config {name}", REPORT, change, **goes_on)
    for text in GARBLED_JSON:
        shown = text if len(text) < 20 else f"{text[:5]}...({len(text)})"
        change = write("run/status.json", text)
        yield Case(f"report status {shown!r}", REPORT, change, **goes_on)
    for key, tree in (("args", ARGS), ("data", SPEC)):
        for name, broken in few(broken_trees(tree), 1):
            change = change_json(key, broken)
            yield Case(f"report weights {key}.{name}", REPORT, change, **goes_on)
    for name, content in HEADS.items():
        change = write("run/best.safetensors", content)
        yield Case(f"report weights head {name}", REPORT, change, **goes_on)
    for name, broken in few(broken_trees(BY_CLASS), 2):
        change = write("run/validation.json", json.dumps(broken))
        yield Case(f"report classes {name}", REPORT, change, **goes_on)
    for file in FILES:
        for kind, change in BYTES.items():
            yield Case(f"report bytes {file} {kind}", REPORT, rewrite(file, change), **goes_on)
        yield Case(f"report {file} is a folder", REPORT, replace_by_folder(file), **goes_on)


MEMORY = "model,pass,px,tokens,peak_bytes,above_bytes,status\n"
CSV = {
    "of nothing": b"",
    "of a head alone": MEMORY.encode(),
    "of other columns": b"a,b\n1,2\n",
    "of no UTF-8": MEMORY.encode() + b"\xff\xfe\n",
    "of a field of 200,000": (MEMORY + "x" * 200_000 + "\n").encode(),
    "of a picture": encoded("png"),
}
ODD_ROWS = {
    "of text": "m,inference,x,y,z,w,ok\n",
    "of nan": "m,inference,nan,nan,nan,nan,ok\n",
    "of inf": "m,inference,inf,inf,inf,-inf,ok\n",
    "of huge numbers": f"m,inference,{'9' * 5000},1,1,1,ok\n",
    "of numbers below 0": "m,inference,-1,-1,-1,-1,ok\n",
    "of zeros": "m,inference,0,0,0,0,ok\n",
    "of half a row": "m,inference\n",
    "of more than a row": "m,inference,1,1,1,1,ok,x,y,z\n",
    "of NUL": "m\0,inference,1,1,1,1,ok\n",
    "of an unknown status": "m,inference,1,1,1,1,odd\n",
    "of markup": "<script>alert(1)</script>,inference,1,1,1,1,ok\n",
    "of 5,000 letters": f"{'m' * 5000},inference,1,1,1,1,ok\n",
}


def table_cases() -> Iterator[Case]:
    """Return cases of tables that a report reads."""
    words = ("report", "odd.csv", "--output", "page.html")
    for name, content in CSV.items():
        yield Case(f"table {name}", words, write("odd.csv", content))
    goes_on = dict(tolerated="sweeps and profiles 1", writes=("page.html",))
    for name, text in ODD_ROWS.items():
        yield Case(f"table row {name}", words, write("odd.csv", MEMORY + text), **goes_on)
    for name in ("nowhere", "images", "run/config.yaml", "empty", ""):
        yield Case(f"report of {name}", ("report", name, "--output", "page.html"))
    for key in ("nowhere/page.html", "images"):
        yield Case(f"report to {key[:20]}", ("report", "run", "--output", key))
