"""Names of files in any encoding go through the tools, and printed text is UTF-8."""

import os

from tests.helpers.inference_files import write_image, write_weights
from tests.helpers.tools import read_csv
from visionattn.command import main

LATIN = os.fsdecode(b"caf\xe9")
"""A name in Latin-1, as Python has it."""


def test_images_with_names_in_another_encoding_have_rows(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_weights(tmp_path / "best.safetensors")
    write_image(tmp_path / "images" / f"{LATIN}.png", 16, 24, 7)
    given = ["predict", "--checkpoint", "best.safetensors", "--images", "images", "--workers", "0"]
    assert main(given) == 0 and "caf?.png" in capsys.readouterr().out
    assert main([*given, "--output", "a.csv"]) == 0
    assert os.fsencode(read_csv(tmp_path / "a.csv")[0]["path"]).endswith(b"caf\xe9.png")
