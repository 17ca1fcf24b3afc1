"""The pages that people read: what they name exists, their Python runs, and README stays short."""

import ast
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "checkpoints" / "README.md"])
LEFT_OUT = ("checkpoints/digits", "torch.compile", "torch.export", "import ray")
"""Blocks that need the demo's weights, or that tests/models and tests/integrations hold to more."""


def name(page):
    return str(page.relative_to(ROOT))


def test_links_and_paths_lead_somewhere():
    gone = []
    for page in PAGES:
        links = re.findall(r"\]\(([^)#:]+)\)", page.read_text())
        gone += [(name(page), link) for link in links if not (page.parent / link).exists()]
        named = re.findall(r"`((?:visionattn|tests|tools|configs|docs)/[\w./]+)`", page.read_text())
        gone += [(name(page), path) for path in named if not (ROOT / path).exists()]
    assert gone == []


def test_links_to_sections_lead_to_headings():
    gone = []
    for page in PAGES:
        for link, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text()):
            text = (page.parent / link if link else page).read_text()
            titles = re.findall(r"^#+ (.*)$", text, re.M)
            slugs = [re.sub(r"[^\w\- ]", "", title).lower().replace(" ", "-") for title in titles]
            gone += [(name(page), link, anchor)] * (anchor not in slugs)
    assert gone == []


def test_lines_of_prose_are_at_most_120_characters():
    lines = [(name(page), line) for page in PAGES for line in page.read_text().split("\n")]
    assert [each for each in lines if len(each[1]) > 120 and not each[1].startswith("|")] == []


def blocks():
    for page in PAGES:
        if page.name == "usage.md":  # one script, which tests/cli/test_command.py runs
            continue
        for i, block in enumerate(
            re.findall(r"^```python\n(.*?)^```", page.read_text(), re.S | re.M)
        ):
            if not any(word in block for word in LEFT_OUT):
                yield pytest.param(block, id=f"{name(page)}-{i}")


@pytest.mark.parametrize("block", list(blocks()))
def test_python_in_the_pages_runs_and_prints_what_it_says(block, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "page", "exec"), {})
    printed = squeezed(capsys.readouterr().out)
    # What stands behind a print, as a result.
    said = re.findall(r"^print\(.*\)  # ([\[(\d].*)$", block, re.M)
    assert [each for each in said if squeezed(each) not in printed] == []


def squeezed(text):
    return re.sub(r"\s+|torch\.Size", "", text).replace("([", "[").replace("])", "]")


def test_scripts_that_measure_a_figure_import_what_exists():
    scripts = sorted(ROOT.glob("docs/figures/*.py"))
    nodes = [node for script in scripts for node in ast.walk(ast.parse(script.read_text()))]
    gone = [
        f"{node.module}.{each.name}"
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.module.startswith("visionattn")
        for each in node.names
        if not hasattr(importlib.import_module(node.module), each.name)
    ]
    assert gone == [] and len(scripts) > 3


def test_scripts_that_measure_a_figure_run_at_a_small_size(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs" / "figures")
    pointing, writing = map(importlib.import_module, ("pointing", "writing"))
    monkeypatch.setattr(pointing, "IMAGES", 1)
    assert len(list(pointing.measure("taylorshift_vit_canvas", 128))) == 7
    for way in writing.WAYS:
        assert writing.Writer(way, "flat", 4, 2).step(3).shape == (2, 256)


def test_readme_and_pages_are_short():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 160
    assert len(text.split()) <= 900
    assert sum(len(page.read_text().split()) for page in ROOT.glob("docs/*.md")) < 22_000
