"""The configurations that come with the package: where they lie, and how one is named.

A wheel has them in the package, at ``visionattn/configs``; a clone has them beside it, in
``configs``.
"""

from pathlib import Path

PACKAGE = Path(__file__).parents[1]


def shipped() -> dict[str, Path]:
    """Return the files that come with the package, by their names without ``.yaml``, in order."""
    within = PACKAGE / "configs"
    folder = within if within.is_dir() else PACKAGE.parent / "configs"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def find_config(given: str | Path) -> Path:
    """Return the file of a configuration, given by its path or, if it comes with the package, by
    its name. A file at that path counts before a name.

    Raises:
        FileNotFoundError: it is neither; the line lists the names.
    """
    path = Path(given)
    if path.is_file():
        return path
    known = shipped()
    if path.parent == Path() and path.name.removesuffix(".yaml") in known:
        return known[path.name.removesuffix(".yaml")]
    raise FileNotFoundError(
        f"no configuration file at {given}; those that come with visionattn are {', '.join(known)}"
    )
