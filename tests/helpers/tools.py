"""Tools as they are called: the words of a command line, ``main``, and the ends that all share."""

import csv
import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


def words(text: str, *given: object) -> list[str]:
    """Split a line into its words, each ``{}`` of which stands for the next of what is given."""
    rest = map(str, given)
    return [next(rest).join(word.split("{}")) if "{}" in word else word for word in text.split()]


def load_tool(name: str):
    """``main`` of the file of that name in ``tools/``."""
    spec = importlib.util.spec_from_file_location(f"tool_{name}", ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


def assert_one_error(capsys, part: str) -> None:
    """A tool has printed nothing but one line, and this says so."""
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ") and part in printed.err, printed.err
    assert printed.err.count("\n") == 1 and printed.out == "", printed


def read_csv(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file, whatever the names in it."""
    with open(path, encoding="utf-8", errors="surrogateescape", newline="") as file:
        return list(csv.DictReader(file))


def written(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
