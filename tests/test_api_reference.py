"""``make docs``: the pages show what the documentation imports, and no link in them is broken."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urljoin, urlsplit

import pytest

pytest.importorskip("pdoc", reason="pdoc is not installed: pip install 'visionattn[docs]'")
pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]


class Page(HTMLParser):
    """The anchors and the links of a page."""

    def __init__(self, path):
        super().__init__()
        self.anchors, self.links = set(), set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.anchors.add(found.get("id"))
        self.links |= {found[name] for name in ("href", "src") if found.get(name)}


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The built pages by their path in the folder."""
    folder = tmp_path_factory.mktemp("api")
    warn = ["-W", "error:::pdoc", "-W", "error:::visionattn"]
    command = [sys.executable, *warn, "docs/api_reference.py", str(folder)]
    env = {"PYTHONPATH": ":".join([str(ROOT), *filter(None, sys.path)]), "PATH": ""}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*.html"))}


def test_links_lead_to_pages_and_anchors_that_exist(pages):
    read = {name: Page(path) for name, path in pages.items()}
    assert sum(len(page.links) for page in read.values()) > 500
    broken = []
    for name, page in read.items():
        for link in page.links - {"https://pdoc.dev"}:
            parts = urlsplit(urljoin(f"http://here/{name}", link))
            if parts.scheme == "data" or parts.path == "/search.js":
                continue
            target = read.get(parts.path.removeprefix("/"))
            exists = parts.netloc == "here" and target is not None
            if not exists or (parts.fragment and parts.fragment not in target.anchors):
                broken.append((name, link))
    assert broken == []


def test_what_the_documentation_imports_is_described(pages):
    missing = []
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for module, names in re.findall(
            r"^from (visionattn[\w.]*) import ([\w, ]+)", page.read_text(), re.M
        ):
            built = pages.get(f"{module.replace('.', '/')}.html")
            anchors = Page(built).anchors if built else set()
            missing += [
                f"{page.name}: {module}.{name}"
                for name in re.findall(r"\w+", names)
                if name not in anchors and name != "shipped"
            ]
    assert missing == []


def test_docstrings_are_rendered_and_kernels_left_out(pages):
    texts = {name: path.read_text(encoding="utf-8") for name, path in pages.items()}
    raw = r"(Args|Returns|Raises|Yields):\s*(<|\n)(?!/h6)|Alias for field number|shared by both nn"
    assert [name for name, text in texts.items() if re.search(raw, text)] == []
    assert not any("kernel" in name or "/gpu/" in name for name in pages)
