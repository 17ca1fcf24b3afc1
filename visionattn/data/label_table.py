"""Labels, splits, groups and weights of images from a table, which pandas reads (extra ``tables``).

``own_images.py`` joins the rows with the images of a folder or a tar.
"""

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from visionattn.data.folder_walk import composed, in_order, listed, split_of, suffix_of
from visionattn.data.formats.reader import one_line, require
from visionattn.model_config import Task

if TYPE_CHECKING:
    from pandas import DataFrame, Series

TEXT = {"dtype": str, "keep_default_na": False, "index_col": False, "encoding": "utf-8-sig"}
READERS: dict[str, tuple[str, dict[str, Any]]] = {
    ".csv": ("read_csv", TEXT),
    ".tsv": ("read_csv", TEXT | {"sep": "\t"}),
    ".jsonl": ("read_json", {"lines": True, "dtype": False}),
    ".parquet": ("read_parquet", {}),
}
"""Function of pandas and its options, by suffix."""
ABOUT = ("path", "label", "split", "group", "weight")
"""Columns with a fixed meaning; all other columns may be labels."""
WANTED = {
    "weight": "a number of 0 or more",
    "regression": "a number",
    "multilabel": "0, 1 or an empty cell",
}
"""Expected cells of number columns, by use."""


@dataclass(frozen=True)
class LabelTable:
    """A table with a row per image."""

    file: str
    rows: "DataFrame"
    """All cells as text, empty if missing; ``path`` is relative to the root and normalized."""

    def rows_of(self, images: Sequence[str], root: str) -> np.ndarray:
        """Return the number of the row of each image, int64 ``[n]``; -1 without a row, with one
        warning for all of them.

        Args:
            images: paths relative to ``root``.
            root: a folder or a tar.

        Raises:
            ValueError: rows without an image.
        """
        import pandas as pd

        numbers = pd.Index(self.rows["path"]).get_indexer(list(map(composed, images)))
        lost = ~np.isin(np.arange(len(self.rows)), numbers)
        self.refuse(lost, f"name no image in {root}; paths must be relative to it", "path")
        without = np.flatnonzero(numbers < 0)
        if len(without):
            warnings.warn(
                f"skipped {len(without)} of {len(images)} images in {root} without a row in "
                f"{self.file}; first: {images[without[0]]}",
                stacklevel=2,
            )
        return numbers

    def texts(self, column: str) -> np.ndarray:
        """Return a column of texts, none of them empty."""
        self._need(column)
        self.refuse(self.rows[column] == "", f"have no {column}", column)
        return self.rows[column].to_numpy(str)

    def splits(self) -> list[str]:
        """Return the split of each row, ``train`` for an empty cell."""
        found = [split_of(name or "train") or "" for name in self.rows["split"]]
        self.refuse(np.array(found) == "", "have a split other than train, val and test", "split")
        return found

    def values(
        self, task: Task, columns: Sequence[str] | None, known: Sequence[str]
    ) -> tuple[tuple[str, ...], np.ndarray]:
        """Return the names of the outputs, and the labels of each row, float32 ``[n, outputs]``.

        For multilabel, 1 and 0 say whether a class applies, and NaN does not count.

        Args:
            task: ``multilabel`` or ``regression``.
            columns: the columns of the labels; None: ``known`` columns, ``label``, or for
                multilabel without ``label`` all columns without another meaning.
            known: the names of the outputs of weights to evaluate; empty: unknown.
        """
        usual = ["label"]
        if known and columns and tuple(columns) != tuple(known):
            raise ValueError(
                f"expected data.columns {listed(known)}, the model's outputs in order, got "
                f"{listed(columns)}; remove data.columns"
            )
        if task == "multilabel" and columns is None:
            if "label" in self.rows:
                return self._listed_classes(known)
            usual = [name for name in self.rows if name not in ABOUT] or usual
        names = tuple(columns or known or usual)
        return names, self.numbers(names, task).astype(np.float32)

    def _listed_classes(self, known: Sequence[str]) -> tuple[tuple[str, ...], np.ndarray]:
        """Return classes and labels of cells like ``a;b``; an empty cell has no class."""
        found = self.rows["label"].str.replace(r"\s*;\s*", ";", regex=True).str.get_dummies(";")
        found = found.drop(columns="", errors="ignore")
        if strange := [name for name in found if known and name not in known]:
            raise ValueError(
                f"expected classes of the model ({listed(known)}), got {listed(strange)} "
                f"({self.file})"
            )
        names = tuple(known or sorted(found, key=in_order))
        return names, found.reindex(columns=list(names), fill_value=0).to_numpy(np.float32)

    def numbers(
        self, columns: Sequence[str], use: Literal["weight", "regression", "multilabel"]
    ) -> np.ndarray:
        """Return columns of numbers as in ``WANTED``, float64 ``[n, columns]``; NaN for an empty
        cell.
        """
        import pandas as pd

        self._need(*columns)
        cells = self.rows[list(columns)]
        values = cells.apply(pd.to_numeric, errors="coerce").to_numpy(np.float64)
        fits = (
            np.isin(values, (0, 1)) | (cells == "") if use == "multilabel" else np.isfinite(values)
        )
        fits = fits & (values >= 0) if use == "weight" else fits
        for name, right in zip(columns, np.asarray(fits).T, strict=True):
            self.refuse(~right, f"do not have {WANTED[use]} in {name}", name)
        return values

    def _need(self, *columns: str) -> None:
        """Raise ValueError unless the table has these columns."""
        if missing := [name for name in columns if name not in self.rows]:
            one_column = len(self.rows.columns) == 1 and suffix_of(self.file) == ".csv"
            hint = "; separate columns by commas" if one_column else ""
            raise ValueError(
                f"expected the column {listed(missing)}, got {listed(self.rows)} "
                f"({self.file}){hint}"
            )

    def refuse(self, wrong: "Series | np.ndarray", reason: str, column: str) -> None:
        """Raise ValueError if rows are wrong, with their number, and path and cell of the first."""
        if wrong.any():
            first = self.rows[wrong].iloc[0]
            cell = "" if column == "path" else f", {column} {first[column]!r}"
            raise ValueError(
                f"{self.file}: {wrong.sum()} of {len(wrong)} rows {reason}; first: "
                f"{first['path'] or '(no path)'}{cell}"
            )


def read_labels(file: str, root: str) -> LabelTable:
    """Read a table of images.

    Args:
        file: CSV, TSV, JSON lines or Parquet, by its suffix.
        root: the folder or tar of the images, to which ``path`` is relative.

    Raises:
        FileNotFoundError, ValueError: the file is missing or malformed, pandas is not installed, or
            paths are missing or occur twice; one line.
    """
    table = LabelTable(file, _read(file).map(_text))
    paths = [
        os.path.normpath(os.path.relpath(path, root) if os.path.isabs(path) else path)
        for path in table.texts("path")
    ]
    table.rows["path"] = paths
    table.refuse(table.rows["path"].duplicated(), "repeat the path of an earlier row", "path")
    return table


def _text(cell: Any) -> str:
    """Return the text of a cell: ``a;b`` for a list of classes, 0 or 1 for a truth value."""
    if isinstance(cell, (list, np.ndarray)):
        cell = ";".join(map(str, cell))
    return composed(str(int(cell) if isinstance(cell, (bool, np.bool_)) else cell).strip())


def _read(file: str) -> "DataFrame":
    """Return the cells of a table, empty text for missing ones."""
    suffix = suffix_of(file)
    if suffix not in READERS:
        raise ValueError(f"expected a label table that ends in {', '.join(READERS)}, got {file}")
    if not os.path.isfile(file):
        raise FileNotFoundError(f"no label table at {file}")
    require("tables", "pandas", "pyarrow", what=file)
    import pandas as pd

    function, options = READERS[suffix]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "error", pd.errors.ParserWarning
            )  # raised for a row with surplus cells
            rows = getattr(pd, function)(file, **options)
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text; save the table as UTF-8") from error
    except (ValueError, pd.errors.ParserWarning) as error:
        raise ValueError(f"cannot read {file} as {suffix[1:]}: {one_line(error)}") from error
    if not len(rows):
        raise ValueError(f"{file} has no rows")
    rows.columns = rows.columns.map(str)  # numbers where lines of JSON are lists
    return rows.astype(object).where(rows.notna(), "")
