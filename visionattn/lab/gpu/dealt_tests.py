"""A plugin of pytest: deals tests out among processes, and writes each result down as it comes.

``pytest -p visionattn.lab.gpu.dealt_tests --share=1/8 --results=FILE``; a run that is killed keeps
what it found.
"""

import pytest

from visionattn.cli.files import add_line


def pytest_addoption(parser) -> None:
    """Add the two options."""
    group = parser.getgroup("gpu")
    group.addoption("--share", default="0/1", help="I/N: the I-th of N processes, from 0")
    group.addoption("--results", help="JSON lines to which results are added")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items) -> None:
    """Keep a share of what the marks have left, and write down how many tests that are."""
    share, of = map(int, config.getoption("share").split("/"))
    items[:] = items[share::of]
    if config.getoption("results"):
        record = {"kind": "dealt", "share": share, "tests": len(items)}
        add_line(config.getoption("results"), record)


class _Writer:
    """Adds a line for each test that ends."""

    def __init__(self, path: str):
        self.path = path

    def pytest_runtest_logreport(self, report) -> None:
        """Write down how a test ended: with its call, or a part before it that does not pass."""
        if report.when == "call" or report.outcome != "passed":
            record = {"kind": "test", "name": report.nodeid, "outcome": report.outcome}
            record |= {"seconds": round(report.duration, 3), "message": _message(report)}
            add_line(self.path, record)


def _message(report) -> str | None:
    """Return what went wrong, in one line."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is None:
        return None if report.longrepr is None else str(report.longrepr)[-300:]
    return " ".join(crash.message.split())[:500]


def pytest_configure(config) -> None:
    """Write results where a file is named."""
    if config.getoption("results"):
        config.pluginmanager.register(_Writer(config.getoption("results")), "gpu results")
