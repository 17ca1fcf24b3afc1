"""Names of files in any encoding go through a training and the tools, and every text that comes of
it is UTF-8.
"""

import io
import json
import os
import sys

import numpy as np
import pytest
from PIL import Image

from tests.helpers.tools import load_tool, read_csv
from visionattn.cli.ends import run_tool
from visionattn.cli.parsing import parse, yaml_text
from visionattn.data.data_config import DataConfig

LATIN = os.fsdecode(b"caf\xe9")
"""A name in Latin-1, as Python has it."""


@pytest.fixture
def root(tmp_path):
    rng = np.random.default_rng(0)
    for name in (LATIN, "b"):
        folder = tmp_path / f"pict{LATIN}" / name
        folder.mkdir(parents=True)
        for index in range(3):
            picture = Image.fromarray(rng.integers(0, 256, (20, 30, 3), np.uint8))
            picture.save(folder / f"{LATIN}{index}.png")
    (tmp_path / f"pict{LATIN}" / "b" / f"{LATIN}3.png").write_bytes(b"no image")
    return tmp_path / f"pict{LATIN}"


def test_a_configuration_keeps_any_bytes_of_a_name_on_the_way_through_flags_and_yaml(tmp_path):
    for name in (LATIN, "\N{SNOWMAN}\N{GRINNING FACE}", "a: [b], 'c'"):
        config = parse(DataConfig, ["--root", f"/x/{name}"])
        assert config.root == f"/x/{name}"
        text = yaml_text({"root": config.root})
        (tmp_path / "a.yaml").write_text(text, encoding="utf-8")
        assert parse(DataConfig, ["--config", str(tmp_path / "a.yaml")]) == config


# the report may draw a batch that has the damaged image
@pytest.mark.filterwarnings("ignore:left out unreadable image:UserWarning")
def test_training_and_tools_take_and_print_them(root, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    model = "{patch_size: 8, embed_dim: 24, depth: 1, num_heads: 3}"
    flags = ["--data.name", "folder", "--data.root", str(root), "--data.img_size", "16"]
    flags += ["--data.on_error", "skip", "--data.workers", "0", "--epochs", "1", "--run", "run"]
    flags += ["--optim.warmup_epochs", "0", "--batch_size", "4", "--model.args", model]
    with pytest.warns(UserWarning, match="left out unreadable image"):
        assert load_tool("train")(flags) == 0
        assert load_tool("validate")(["--checkpoint", "checkpoints/run/best.safetensors"]) == 0
    given = ["--checkpoint", "checkpoints/run/best.safetensors", "--images", str(root)]
    predict = load_tool("predict")
    assert predict([*given, "--workers", "0"]) == 0
    assert "pictcaf?/caf?/caf?0.png" in capsys.readouterr().out
    for name in ("a.csv", "a.json"):
        assert predict([*given, "--workers", "0", "--output", name]) == 0
    row = next(row for row in read_csv(tmp_path / "a.csv") if "no" not in row["path"])
    assert os.fsencode(row["path"]).startswith(os.fsencode(root))
    rows = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    assert str(root) in json.dumps(rows, ensure_ascii=False)
    assert load_tool("report")(["checkpoints/run", "--overwrite"]) == 0
    assert "caf?" in capsys.readouterr().out + (tmp_path / "checkpoints/run/report.html").read_text(
        encoding="utf-8"
    )


def test_output_that_is_strict_about_encodings_gets_question_marks(monkeypatch):
    """As in a terminal whose locale names UTF-8."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="utf-8"))
    assert run_tool(lambda: print(LATIN, flush=True)) == 0
    assert written.getvalue() == b"caf?\n"
