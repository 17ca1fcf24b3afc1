"""Names of files in any encoding go through the tools, and printed text is UTF-8."""

import io
import os
import sys

from tests.helpers.inference_files import write_image, write_weights
from tests.helpers.tools import read_csv
from visionattn.cli.ends import run_tool
from visionattn.cli.parsing import parse, yaml_text
from visionattn.command import main
from visionattn.data.data_config import DataConfig

LATIN = os.fsdecode(b"caf\xe9")
"""A name in Latin-1, as Python has it."""


def test_a_configuration_keeps_any_name_on_the_way_through_flags_and_yaml(tmp_path):
    for name in (LATIN, "\N{SNOWMAN}\N{GRINNING FACE}", "a: [b], 'c'"):
        config = parse(DataConfig, ["--root", f"/x/{name}"])
        assert config.root == f"/x/{name}"
        (tmp_path / "a.yaml").write_text(yaml_text({"root": config.root}), encoding="utf-8")
        assert parse(DataConfig, ["--config", str(tmp_path / "a.yaml")]) == config


def test_images_with_names_in_another_encoding_have_rows(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_weights(tmp_path / "best.safetensors")
    write_image(tmp_path / "images" / f"{LATIN}.png", 16, 24, 7)
    given = ["predict", "--checkpoint", "best.safetensors", "--images", "images", "--workers", "0"]
    assert main(given) == 0 and "caf?.png" in capsys.readouterr().out
    assert main([*given, "--output", "a.csv"]) == 0
    assert os.fsencode(read_csv(tmp_path / "a.csv")[0]["path"]).endswith(b"caf\xe9.png")


def test_output_that_is_strict_about_encodings_gets_question_marks(monkeypatch):
    """As in a terminal whose locale names UTF-8."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="utf-8"))
    assert run_tool(lambda: print(LATIN, flush=True)) == 0
    assert written.getvalue() == b"caf?\n"
