"""The page of ``visionattn report`` in a browser: it shows what it should, and runs and
fetches nothing.
"""

import os
import shutil
import subprocess
import sys

import pytest

from tests.helpers.report_folders import Page, memory_rows, sweep_rows, write_rows, write_run
from tests.helpers.tools import words
from visionattn.lab.report.report_page import report

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
FLAGS = words(
    "--headless --disable-gpu --no-first-run --disable-background-networking "
    "--enable-logging=stderr"
)
FLAGS += [
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--proxy-server=127.0.0.1:9",
    "--allow-file-access-from-files",
]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        BROWSER is None,
        reason=f"no {' and no '.join(NAMES)} here; .ci/chromium installs one where apt-get is",
    ),
    pytest.mark.skipif(
        sys.platform != "linux", reason="the flags of the browser are those of Linux"
    ),
]


def open_page(path, folder):
    """What the browser makes of a page: its document after loading, and the messages of its
    console.
    """
    as_root = ["--no-sandbox"] if os.geteuid() == 0 else []
    place = [f"--user-data-dir={folder / 'profile'}", "--dump-dom", path.as_uri()]
    command = [BROWSER, *FLAGS, *as_root, *place]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-500:]
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A page of everything: two runs, one of a name that is markup, with images; a sweep and a
    profile.
    """
    folder = tmp_path_factory.mktemp("shown")
    bad = "</td><script>document.title=2</script>" * 5
    runs = [write_run(folder / "<img src=x onerror=document.title=1>", always=7)]
    runs += [write_run(folder / ("a_long_name_" * 9), status="nan", reason=bad, result=None)]
    write_rows(folder / "heads" / "cells.csv", sweep_rows())
    write_rows(folder / "memory.csv", memory_rows())
    paths = [*map(str, runs), str(folder / "heads"), str(folder / "memory.csv")]
    output = str(folder / "report.html")
    report([*paths, "--output", output, "--title", "Mine & <others>", "--images", "5"])
    return folder / "report.html"


def test_a_browser_shows_the_rows_and_has_nothing_to_complain_of(page, tmp_path):
    document, complaints = open_page(page, tmp_path)
    assert complaints == []
    assert "<title>Mine &amp; &lt;others&gt;</title>" in document
    assert document.rstrip().endswith("</html>")
    shown = Page(document)
    assert "script" not in shown.tags
    assert not any(key.startswith("on") for _, key, _ in shown.attributes)
    cells = [cell for row in shown.rows for cell in row]
    assert {"56.25 %", "finished", "2 h 1 min", "83 ± 2.8", "1,324", "out of memory"} <= set(cells)
    assert cells.count("<img src=x onerror=document.title=1>") >= 2
    assert document.count('<svg class="chart"') == 6 + 6 + 2
    assert document.count('src="data:image/png;base64,') == 5
    assert document.count("</section>") == 7
