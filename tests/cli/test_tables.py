"""Tables: what rows say to people and to programs, and of which processor a number is."""

import csv
from pathlib import Path

import pytest
import torch

from visionattn.cli import provenance as module
from visionattn.cli.provenance import processor, processor_name, provenance, provenance_of, summary
from visionattn.cli.tables import csv_text, read_rows, write_rows

RISKY = ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "＝1", "'=1", "''-1", "-", "="]
HARMLESS = ["", "a=1", "'", "'quoted'", "''", " =1", "1-2", "cats/-1.png", "²"]


def test_no_text_of_a_table_begins_as_a_formula_and_programs_read_all_back(tmp_path):
    texts = RISKY + HARMLESS
    rows = [{"name": text, "number": -i - 0.5, "none": None} for i, text in enumerate(texts)]
    path = tmp_path / "rows.csv"
    with open(path, "w", encoding="utf-8", newline="") as file:
        write_rows(file, ["name", "number", "none"], rows)
    with open(path, encoding="utf-8", newline="") as file:
        cells = list(csv.DictReader(file))
    assert len(cells) == len(texts)
    assert [row["number"] for row in cells] == [str(row["number"]) for row in rows]
    assert {row["none"] for row in cells} == {""}
    for text, row in zip(texts, cells, strict=True):
        assert row["name"][:1] not in tuple("=+-@\t\r\n＝")
        assert row["name"] == (f"'{text}" if text in RISKY else text)
    with open(path, encoding="utf-8", newline="") as file:
        assert [row["name"] for row in read_rows(file)] == texts


def test_the_tables_of_all_tools_have_no_formulas():
    written = csv_text([{"case": "=1+1", "seconds": -0.5}], {"command": "visionattn benchmark"})
    assert written == "case,seconds,command\n'=1+1,-0.5,visionattn benchmark\n"


CPUINFO = (
    "processor\t: 0\nvendor_id\t: X\nmodel name\t: Xeon: 6 @ 2 GHz\nflags\t: a\n\nmodel "
    "name\t: another\n"
)


@pytest.mark.parametrize(
    ("content", "known", "wanted"),
    [
        (CPUINFO, "ignored", "Xeon: 6 @ 2 GHz"),
        ("processor : 0\nCPU part : 0xd4f\n", "", "aarch64"),
        ("model name :\n", "arm", "arm"),
        (None, "i386 Family 6", "i386 Family 6"),
        (None, "", "aarch64"),
    ],
)
def test_the_processor_is_called_as_linux_calls_it_and_elsewhere_as_python_does(
    tmp_path, monkeypatch, content, known, wanted
):
    if content is not None:
        (tmp_path / "cpuinfo").write_text(content)
    monkeypatch.setattr(module, "Path", lambda name: tmp_path / Path(name).name)
    monkeypatch.setattr(module.platform, "processor", lambda: known)
    monkeypatch.setattr(module.platform, "machine", lambda: "aarch64")
    assert processor_name() == wanted


def test_every_kind_of_provenance_names_the_processor(monkeypatch):
    monkeypatch.setattr(module, "processor_name", lambda: "Abacus 7")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    for has, units in ((True, " with AVX512-BF16"), (False, "")):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda has=has: has)
        assert processor().startswith(f"Abacus 7{units}, ")
    assert provenance(torch.device("cpu"))["processor"].startswith("Abacus 7, ")
    found = provenance_of("cpu", ["benchmark", "targets"])
    assert summary(found).startswith("Abacus 7, ")
    assert "; cpu, 1 thread; load average " in summary(found | {"device": "cpu, 1 threads"})
    assert "Abacus 7, " in csv_text([{"seconds": 1}], found).splitlines()[1]
