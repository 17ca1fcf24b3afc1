"""Labels, splits, groups and weights of images from a table, which pandas reads (extra ``tables``).

``own_images.py`` joins the rows with the images of a folder or a tar.
"""

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from visionattn.data.formats.reader import one_line, require
from visionattn.data.walk import composed, in_order, listed, split_of, suffix_of
from visionattn.model_config import Task

if TYPE_CHECKING:
    from pandas import DataFrame, Series

SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")
"""Suffixes of tables."""
ABOUT = ("path", "label", "split", "group", "weight")
"""Columns with a meaning; all other columns may be labels."""


@dataclass(frozen=True)
class LabelTable:
    """A table with a row per image."""

    file: str
    rows: "DataFrame"
    """All cells as text, empty if missing; ``path`` is relative to the root and normalised."""

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
        self.refuse(lost, f"name no image in {root}, to which paths are relative", "path")
        without = np.flatnonzero(numbers < 0)
        if len(without):
            warnings.warn(
                f"left out {len(without)} of {len(images)} images in {root} without a row in "
                f"{self.file}; the first: {images[without[0]]}",
                stacklevel=2,
            )
        return numbers

    def splits(self) -> list[str] | None:
        """Return the split of each row, ``train`` for an empty cell; None without the column."""
        if "split" not in self.rows:
            return None
        found = [split_of(name or "train") or "" for name in self.rows["split"]]
        self.refuse(np.array(found) == "", "have a split other than train, val and test", "split")
        return found

    def groups(self) -> np.ndarray | None:
        """Return the group of each row as text; None without the column."""
        if "group" not in self.rows:
            return None
        self.refuse(self.rows["group"] == "", "have no group", "group")
        return self.rows["group"].to_numpy(str)

    def weights(self) -> np.ndarray | None:
        """Return the weight of each row, float64, at least 0; None without the column."""
        if "weight" not in self.rows:
            return None
        values = self._numbers(["weight"])[:, 0]
        self.refuse(~(values >= 0), "have no weight of 0 or more", "weight")
        return values

    def classes(self) -> list[str]:
        """Return the name of the class of each row."""
        self._need("label")
        self.refuse(self.rows["label"] == "", "have no label", "label")
        return list(self.rows["label"])

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
        single = "label" in self.rows and columns is None
        if task == "multilabel" and single:
            return self._listed_classes(known)
        others = [name for name in self.rows if name not in ABOUT]
        usual = ["label"] if single or task == "regression" else others
        names = tuple(columns or known or usual)
        if not names:
            self._need("label")
        values = self._numbers(names)
        for name, column in zip(names, values.T, strict=True):
            if task == "regression":
                self.refuse(np.isnan(column), f"have no number in {name}", name)
            else:
                wrong = ~np.isin(column, (0, 1)) & ~np.isnan(column)
                self.refuse(wrong, f"have neither 0 nor 1 nor nothing in {name}", name)
        return names, values.astype(np.float32)

    def _listed_classes(self, known: Sequence[str]) -> tuple[tuple[str, ...], np.ndarray]:
        """Return classes and labels of cells like ``a;b``; an empty cell has no class."""
        found = self.rows["label"].str.replace(r"\s*;\s*", ";", regex=True).str.get_dummies(";")
        found = found.drop(columns="", errors="ignore")
        if strange := [name for name in found if known and name not in known]:
            raise ValueError(
                f"{self.file} has classes that the weights do not know: {listed(strange)}; the "
                f"classes of the weights: {listed(known)}"
            )
        names = tuple(known or sorted(found, key=in_order))
        return names, found.reindex(columns=list(names), fill_value=0).to_numpy(np.float32)

    def _numbers(self, columns: Sequence[str]) -> np.ndarray:
        """Return numeric columns, float64 ``[n, columns]``; NaN for empty cells."""
        import pandas as pd

        self._need(*columns)
        found = [pd.to_numeric(self.rows[name], errors="coerce") for name in columns]
        for name, values in zip(columns, found, strict=True):
            wrong = ~np.isfinite(values) & (self.rows[name] != "")
            self.refuse(wrong, f"have no number in {name}", name)
        return np.stack(found, 1).astype(np.float64)

    def _need(self, *columns: str) -> None:
        """Raise ValueError unless the table has these columns."""
        if missing := [name for name in columns if name not in self.rows]:
            raise ValueError(
                f"{self.file} needs the column {listed(missing)}; it has {listed(self.rows)}"
            )

    def refuse(self, wrong: "Series | np.ndarray", reason: str, column: str) -> None:
        """Raise ValueError if rows are wrong, with their number, and the path of the first one with
        its cell in ``column``.
        """
        wrong = np.asarray(wrong)
        if wrong.any():
            first = self.rows[wrong].iloc[0]
            cell = "" if column == "path" else f", {column} {first[column]!r}"
            raise ValueError(
                f"{self.file}: {wrong.sum()} of {len(wrong)} rows {reason}; the first: "
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
    rows = _read(file)
    table = LabelTable(file, rows.map(str).map(str.strip).map(composed))
    table._need("path")
    table.refuse(table.rows["path"] == "", "have no path", "path")
    paths = [os.path.relpath(path, root) if os.path.isabs(path) else path for path in rows["path"]]
    table.rows["path"] = [composed(os.path.normpath(path)) for path in paths]
    table.refuse(table.rows["path"].duplicated(), "repeat the path of an earlier row", "path")
    return table


def _read(file: str) -> "DataFrame":
    """Return the cells of a table, empty text for missing ones."""
    suffix = suffix_of(file)
    if suffix not in SUFFIXES:
        raise ValueError(f"a table of labels ends in {', '.join(SUFFIXES)}, got {file}")
    if not os.path.isfile(file):
        raise FileNotFoundError(f"no table of labels at {file}")
    require("tables", "pandas", *(["pyarrow"] if suffix == ".parquet" else []), what=file)
    import pandas as pd

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)
            if suffix == ".parquet":
                rows = pd.read_parquet(file)
            elif suffix in (".csv", ".tsv"):
                rows = pd.read_csv(
                    file,
                    sep="\t" if suffix == ".tsv" else ",",
                    dtype=str,
                    keep_default_na=False,
                    index_col=False,
                    encoding="utf-8-sig",
                )
            else:
                rows = pd.read_json(file, lines=True, dtype=False)
    except (ValueError, pd.errors.ParserWarning) as error:
        raise ValueError(f"cannot read {file} as {suffix[1:]}: {one_line(error)}") from error
    if not len(rows):
        raise ValueError(f"{file} has no rows")
    return rows.astype(object).where(rows.notna(), "")
