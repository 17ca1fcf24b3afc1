"""Content that anybody may have written: what is taken, what is refused, and in which words."""

import math
import os
import tracemalloc
from dataclasses import dataclass
from typing import Any, Literal, NotRequired, TypedDict

import pytest
import torch
import yaml

from visionattn.cli.untrusted import (
    DEEPEST,
    MOST_VALUES,
    brief,
    check_partly,
    checked,
    from_json,
    from_yaml,
    read_csv,
    read_json,
    read_text,
    read_yaml,
)


@dataclass(frozen=True)
class Point:
    x: float
    names: tuple[str, ...] = ()


class Entry(TypedDict):
    kind: Literal["one", "two"]
    where: Point
    note: NotRequired[str | None]


DEEP: Any = 1
for _ in range(DEEPEST - 1):
    DEEP = [DEEP]
NESTED = [DEEP]


@pytest.mark.parametrize(
    "kind, value, found",
    [
        (int, 3, 3),
        (float, 3, 3.0),
        (int | None, None, None),
        (list[int], [1, 2], [1, 2]),
        (tuple[int, float], [1, 2], (1, 2.0)),
        (int | tuple[int, int], [3, 4], (3, 4)),
        (Point, {"x": 1, "names": ["a"]}, Point(1.0, ("a",))),
        (Entry, {"kind": "two", "where": {"x": 2}, "more": 1}, None),
        (dict[str, Any], {"a": [1, {"b": None}]}, {"a": [1, {"b": None}]}),
        (torch.Tensor, torch.zeros(2), None),
        (Any, DEEP, DEEP),
    ],
)
def test_values_of_a_type_are_returned_as_it_says(kind, value, found):
    given = checked(kind, value, "it")
    assert found is None or (given == found and type(given) is type(found))


@pytest.mark.parametrize(
    "kind, value, line",
    [
        (int, True, "it must be a whole number, got true"),
        (int, 1.0, "it must be a whole number, got 1.0"),
        (int, 2**63, "it must be a whole number, got 9223372036854775808"),
        (float, math.nan, "it must be a number, got nan"),
        (float, 10**400, "it must be a number, got a number of 401 digits"),
        (str, None, "it must be text, got null"),
        (bool, 1, "it must be true or false, got 1"),
        (list[str], "x", "it must be a list of values, got x"),
        (dict[str, str], "x", "it must be names and values, got x"),
        (list[int], {}, "it must be a list of whole numbers, got no names and values"),
        (list[int], [1, "x"], "it[1] must be a whole number, got x"),
        (tuple[int, int], [1], "it must have 2 values, got 1"),
        (Literal[1, 2], True, "it must be one of 1, 2, got true"),
        (Literal["one", "two"], "three", "it must be one of one, two, got three"),
        (Point, {"x": None}, "it.x must be a number, got null"),
        (Point, {}, "it has no x"),
        (Point, {"x": 1, "y": 2}, "it has an unknown key y"),
        (Point | None, {"x": "a"}, "it.x must be a number, got a"),
        (Entry, {"kind": "two", "where": []}, "it.where must be names and values, got an empty"),
        (dict[str, int], {1: 2}, "a key of it must be text, got 1"),
        (dict[str, Any], {"a": {2: 3}}, "keys of it.a must be text, got 2"),
        (dict[str, int], {"x" * 5000: "y"}, "it.'xxxxx"),
        (Any, {"a": [2**63]}, "it has a number beyond 2**63: 9223372036854775808"),
        (Any, NESTED, f"it has more than {DEEPEST} levels of lists and mappings"),
        (Any, {"a": torch.zeros(2)}, "it must be a plain value, got a tensor"),
        (torch.Tensor, [1], "it must be a tensor, got a list of 1"),
    ],
)
def test_other_values_are_one_line_with_the_key_what_was_wanted_and_what_came(kind, value, line):
    with pytest.raises(ValueError) as error:
        checked(kind, value, "it")
    assert str(error.value).startswith(line) and "\n" not in str(error.value)
    assert len(str(error.value)) < 200


def test_numbers_of_results_may_be_nan_where_a_reader_says_so():
    found = checked(dict[str, list[float]], {"a": [1, math.nan]}, "it", nan=True)["a"]
    assert found[0] == 1 and math.isnan(found[1])
    with pytest.raises(ValueError, match=r"it.a\[1\] must be a number, got nan"):
        checked(dict[str, list[float]], {"a": [1, math.nan]}, "it")


def test_options_of_another_version_are_checked_as_far_as_they_are_known():
    check_partly(Point, {"z": [1]}, "old")
    with pytest.raises(ValueError, match="old.x must be a number, got x"):
        check_partly(Point, {"x": "x"}, "old")
    with pytest.raises(ValueError, match="old must be names and values, got a list of 1"):
        check_partly(Point, [1], "old")

    @dataclass
    class Line:
        begin: Point

    check_partly(Line, {"begin": {"z": 1}}, "old")
    with pytest.raises(ValueError, match="old.begin.x must be a number, got x"):
        check_partly(Line, {"begin": {"x": "x"}}, "old")


@pytest.mark.parametrize(
    "text, part",
    [
        ("{", "is no JSON"),
        ("[" * 100_000, "too many levels"),
        ('{"a": NaN}', "NaN is no number"),
        ('{"a": -Infinity}', "-Infinity is no number"),
        ('{"a": 1, "a": 2}', "the key a comes twice"),
        ("9" * 5000, "digits"),
        ("[1]", "must be names and values, got a list of 1"),
    ],
)
def test_texts_that_are_no_such_json_are_one_line(text, part):
    with pytest.raises(ValueError) as error:
        from_json(dict[str, Any], text, "it")
    assert str(error.value).startswith("it") and part in str(error.value)
    assert len(str(error.value)) < 250 and "\n" not in str(error.value)


BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{former}'] * 10)}]\n"
    for former, name in zip("abcdefgh", "bcdefghi", strict=True)
)
CHAIN = "a0: &a0 [1]\n" + "".join(f"a{i + 1}: &a{i + 1} [*a{i}]\n" for i in range(DEEPEST))


@pytest.mark.parametrize(
    "text, part",
    [
        (BOMB, f"more than {MOST_VALUES:,} values"),
        (CHAIN, f"more than {DEEPEST} levels"),
        ("a: &a [*a]\n", "stands for a value that it lies in"),
        ("&a {b: *a}\n", "stands for a value that it lies in"),
        ("a: " + "[" * 50_000, "levels"),
        ("a: 1\na: 2\n", "the key a comes twice"),
        ("a: !!python/name:os.system x\n", "could not determine a constructor"),
        ('a: !!int ""\n', "not of the kind that its tag names"),
        ("a: !!bool maybe\n", "not of the kind that its tag names"),
        ("a: !!timestamp x\n", "not of the kind that its tag names"),
        ("? [a]\n: 1\n", "unhashable key"),
        ("a: !!python/name:" + "x" * 5000, "could not determine a constructor"),
        ("a: *b\n", "undefined alias"),
        ("a: 2026-13-45\n", "month"),
        (f"a: {'9' * 5000}\n", "digits"),
    ],
)
def test_texts_that_are_no_yaml_within_bounds_are_one_line(text, part):
    with pytest.raises(ValueError) as error:
        from_yaml(text)
    assert part in str(error.value) and "\n" not in str(error.value)
    assert len(str(error.value)) <= 160


def test_aliases_within_bounds_are_taken():
    text = "a: &a {lr: 1.0}\nb: *a\nc: {<<: *a, d: 2}\n"
    assert from_yaml(text) == yaml.safe_load(text)
    assert from_yaml("") is None and from_yaml("# nothing\n") is None


def test_files_of_another_kind_too_large_or_of_no_text_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_text("x" * 11)
    (tmp_path / "bytes").write_bytes(b"\xff")
    for name, part in (("pipe", "a pipe"), ("large", "larger than the 10 "), ("bytes", "no text")):
        with pytest.raises(ValueError, match=part):
            read_text(tmp_path / name, 10)
    os.truncate(tmp_path / "large", 50_000_000)
    tracemalloc.start()
    with pytest.raises(ValueError, match="larger than"):
        read_text(tmp_path / "large", 10)
    assert tracemalloc.get_traced_memory()[1] < 1_000_000  # no more of it is read
    tracemalloc.stop()
    with pytest.raises(OSError):
        read_text(tmp_path, 10)
    with pytest.raises(OSError):
        read_text(tmp_path / "none", 10)


def test_an_error_names_the_file_and_the_way_out(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"x": []}')
    with pytest.raises(ValueError) as error:
        read_json(Point, path, "delete it")
    assert str(error.value) == (
        f"{path} is damaged (a.json.x must be a number, got an empty list); delete it"
    )
    path.write_text("a: [")
    with pytest.raises(ValueError, match=f"^{path} is no YAML file: "):
        read_yaml(path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match=f"^{tmp_path}/pipe is no YAML file: a pipe, a socket or"):
        read_yaml(tmp_path / "pipe")


def test_tables_are_read_whatever_their_rows_have_and_other_files_are_refused(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("a,b\n1\n1,2,3\n")
    assert read_csv(path) == (["a", "b"], [{"a": "1", "b": ""}, {"a": "1", "b": "2"}])
    path.write_text("a,b\n'=1+1,'a\n")
    assert read_csv(path)[1] == [{"a": "=1+1", "b": "'a"}]  # as tables write what would be run
    path.write_text('a,b\n"1"2,3\n')
    with pytest.raises(ValueError, match="is no CSV file: ',' expected after"):
        read_csv(path)
    path.write_text("a,b\n" + "x" * 200_000)
    with pytest.raises(ValueError, match="is no CSV file: field larger"):
        read_csv(path)


def test_any_value_is_shown_in_a_short_line():
    long = "x" * 10**6
    for value in (long, [[1] * 10**6], {long: 1}, 10**100_000, -(10**5000), "\n" * 500, ""):
        assert 0 < len(brief(value)) <= 70 and "\n" not in brief(value)


def test_a_number_of_thousands_of_digits_is_refused_in_any_notation(tmp_path):
    path = tmp_path / "long.yaml"
    for text in (f"epochs: 0x{'f' * 5000}", f"epochs: {'9' * 5000}", f"a: [1, {'1_' * 3000}1]"):
        path.write_text(text)
        with pytest.raises(ValueError, match="a whole number has more than 100 digits"):
            read_yaml(path)


def test_a_table_of_ours_has_no_row_of_more_cells_than_columns(tmp_path):
    path = tmp_path / "cells.csv"
    path.write_text("a,b\n1,2\n1,2,3\n")
    assert read_csv(path)[1][1] == {"a": "1", "b": "2"}
    with pytest.raises(ValueError, match="a row has more cells than there are columns"):
        read_csv(path, ours=True)
