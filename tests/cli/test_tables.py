"""Tables: what rows say to people and to programs."""

import csv

from visionattn.cli.tables import (
    csv_text,
    read_rows,
    write_rows,
)

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
