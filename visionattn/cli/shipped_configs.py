"""Find the configurations that the package ships.

A wheel has them in ``visionattn/configs``, a clone in ``configs`` next to the package.
"""

from difflib import get_close_matches
from pathlib import Path

PACKAGE = Path(__file__).parents[1]


def shipped() -> dict[str, Path]:
    """Return the shipped files by their names without ``.yaml``, sorted by name."""
    within = PACKAGE / "configs"
    folder = within if within.is_dir() else PACKAGE.parent / "configs"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def find_config(given: str | Path) -> Path:
    """Return the file of a configuration, given by its path or by the name of a shipped one.

    An existing file takes precedence over a shipped configuration of the same name.

    Raises:
        FileNotFoundError: it is neither; the error names the nearest shipped one, or all of them.
    """
    path = Path(given)
    if path.is_file():
        return path
    known = shipped()
    if path.parent == Path() and path.name.removesuffix(".yaml") in known:
        return known[path.name.removesuffix(".yaml")]
    if path.parent != Path():
        raise FileNotFoundError(f"no configuration file at {given}; check the path")
    near = get_close_matches(path.stem, known, n=1)
    raise FileNotFoundError(
        f"no configuration file at {given}; "
        + (f"did you mean the shipped {near[0]}?" if near else f"shipped are {', '.join(known)}")
    )
