"""Files that anybody may have written become checked types, or one line."""

import math
from dataclasses import dataclass
from typing import Any, Literal, NotRequired

import pytest
import torch
from typing_extensions import TypedDict

from visionattn.cli.untrusted import (
    checked,
    from_json,
    from_yaml,
    read_csv,
    read_json,
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


IMAGE = torch.zeros(2)
CHECKED = [
    (int, "3", 3),
    (float, 3, 3.0),
    (int | None, None, None),
    (int | tuple[int, int], [3, 4], (3, 4)),
    (Point, {"x": 1, "names": ["a"]}, Point(1.0, ("a",))),
    (
        Entry,
        {"kind": "two", "where": {"x": 2}, "more": 1},
        {"kind": "two", "where": Point(2.0), "more": 1},
    ),
    (dict[str, Any], {"a": [1, {"b": None}]}, {"a": [1, {"b": None}]}),
    (dict[str, int | float | None], {"a": 1, "b": 1.5}, {"a": 1, "b": 1.5}),
    (torch.Tensor, IMAGE, IMAGE),
]


def test_values_of_a_type_are_returned_as_it_says():
    for kind, value, wanted in CHECKED:
        found = checked(kind, value, "it")
        assert found is wanted or (found == wanted and type(found) is type(wanted)), kind


REFUSED = [
    (int, 1.5, "it must be an integer, got 1.5"),
    (int | Literal["auto"], "many", "it must be an integer or auto, got many"),
    (float, math.nan, "it must be a finite number, got nan"),
    (str, None, "it must be text, got null"),
    (bool, "perhaps", "it must be true or false, got perhaps"),
    (list[str], "x", "it must be a list, got x"),
    (dict[str, str], "x", "it must be names and values, got x"),
    (list[int | list[int]], [1, [2, "x"]], "it[1][1] must be an integer, got x"),
    (tuple[int, int], [1, 2, 3], "it has 3 values: Tuple should have at most 2 items"),
    (Literal["one", "two"], "three", "it must be one of one, two, got three"),
    (Point, {}, "it has no x"),
    (Point, {"x": 1, "xx": 2}, "it has an unknown key xx; did you mean x?"),
    (Point | None, {"x": "a"}, "it.x must be a number, got a"),
    (Entry, {"kind": "two", "where": []}, "it.where must be names and values, got an empty list"),
    (torch.Tensor, [1], "it must be a tensor, got a list of 1"),
]


def test_other_values_are_one_line_with_the_key_the_expected_type_and_the_given_value():
    for kind, value, line in REFUSED:
        with pytest.raises(ValueError) as error:
            checked(kind, value, "it")
        assert str(error.value).startswith(line)
        assert "\n" not in str(error.value) and len(str(error.value)) < 200


def test_numbers_of_yaml_may_have_an_exponent_alone():
    text = "a: 1e-3\nb: [-2E+1, .5e2, 1.5, 3, 1e, e5]\nbase: &c {x: 1}\nd: {<<: *c, x: 2}\n"
    found = from_yaml(text)
    assert found["a"] == 1e-3 and found["b"] == [-20.0, 50.0, 1.5, 3, "1e", "e5"]
    assert found["d"] == {"x": 2} and from_yaml("# nothing\n") is None


def mapping(text):
    return from_json(dict[str, Any], text, "it")


@pytest.mark.parametrize(
    ("read", "text", "part"),
    [
        (mapping, "{", "it is not JSON: Expecting property name"),
        (mapping, '{"a": NaN}', "it is not JSON: NaN is not a number"),
        (mapping, "[" * 100_000, "it is not JSON"),
        (mapping, "[]", "it must be names and values, got an empty list"),
        (from_yaml, "a: [", "while parsing a flow node"),
        (from_yaml, "epochs: 1\nepochs: 2", "the key epochs occurs twice; remove one"),
        (from_yaml, "a: !!int x", "invalid literal for int"),
        (from_yaml, "a: !!python/object:os.system x", "could not determine a constructor"),
        (from_yaml, "[" * 10_000, "it has too many levels"),
    ],
)
def test_a_text_that_is_no_json_of_the_type_or_no_yaml_is_one_line(read, text, part):
    with pytest.raises(ValueError, match=f"^{part}") as error:
        read(text)
    assert "\n" not in str(error.value)


def test_a_file_is_named_and_the_error_ends_with_the_way_out(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"x": "a"}')
    line = rf"^{path} is damaged \(a.json.x must be a number, got a\); delete it$"
    with pytest.raises(ValueError, match=line):
        read_json(Point, path, "delete it")
    path.write_bytes(b"\xff")
    for read in (read_csv, read_yaml):
        with pytest.raises(ValueError, match="a.json is not .*UTF-8"):
            read(path)


def test_rows_of_csv_have_every_column_and_texts_as_they_were_before_escaping(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("a,b\n'=1+1,''a\n1\n1,2,3\n")
    rows = [{"a": "=1+1", "b": "''a"}, {"a": "1", "b": ""}, {"a": "1", "b": "2"}]
    assert read_csv(path) == (["a", "b"], rows)
    path.write_text('a,b\n"1,2\n')
    with pytest.raises(ValueError, match="a.csv is not a CSV file: unexpected end of data"):
        read_csv(path)
