"""The definitions in ``reference.py`` against loops over single pairs, which know nothing of the
package.
"""

import math
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from tests.ops.drawn_cases import Drawn, paired


def dot(a: Iterable, b: Iterable) -> float:
    return math.fsum(float(x) * float(y) for x, y in zip(a, b, strict=True))


def elu1(x: Tensor) -> Tensor:
    return torch.stack([value + 1 if value > 0 else value.exp() for value in x])


class Pairs:
    """Where the tokens of a case lie, which pairs see each other, and their entries of tables."""

    def __init__(self, case: Drawn, tables: dict[str, Tensor], options: dict):
        self.tables, self.options, self.masks = tables, options, case.mask()
        self.layout, self.width, (self.queries, self.keys) = None, 0, case.tokens()
        if case.lengths is None:
            self.layout, self.width = case.layout(), case.grid[1]

    def place(self, image: int, token: int) -> tuple[int, int] | None:
        """Row and column of a patch; None for a prefix token."""
        if self.layout is None:
            return 0, token
        patch, kept = token - self.layout.num_prefix, self.layout.kept
        if patch < 0:
            return None
        return divmod(patch if kept is None else int(kept[image, patch]), self.width)

    def takes_part(self, image: int, key: int) -> bool:
        place, present = self.place(image, key), self.layout and self.layout.present
        masked = self.masks is not None and not self.masks[image, key]
        if masked or place is None or present is None:
            return not masked
        return bool(present[image, place[0] * self.width + place[1]])

    def window(self, axis: int) -> int:
        """Where the window of a row or a column begins."""
        size = self.options["window_size"]
        first = size // 2 if self.options["shifted"] else 0
        return max(start for start in (0, *range(first, axis + 1, size)) if start <= axis)

    def sees(self, image: int, query: int, key: int) -> bool:
        if not self.takes_part(image, key) or (self.options.get("causal") and key > query):
            return False
        places = self.place(image, query), self.place(image, key)
        if "window_size" not in self.options or None in places:
            return True
        here, there = (tuple(map(self.window, place)) for place in places)
        return here == there

    def index(self, image: int, place: tuple[int, int]) -> int:
        """Where a patch stands in the sequence of those that are present, before all others."""
        index, present = place[0] * self.width + place[1], self.layout and self.layout.present
        if present is None:
            return index if self.layout is not None else place[1]
        order = sorted(range(present.shape[1]), key=lambda i: (not present[image, i], i))
        return order.index(index)

    def classes(self, image: int, query: int, key: int) -> dict[str, tuple[int, ...]]:
        """The class of the pair in each table; nothing for a prefix token or an unseen key."""
        here, there = self.place(image, query), self.place(image, key)
        if here is None or there is None or not self.sees(image, query, key):
            return {}
        dy, dx = there[0] - here[0], there[1] - here[1]
        along = self.index(image, there) - self.index(image, here)
        offsets = {"rows": (dy,), "columns": (dx,), "table": (dy, dx)}
        found = {}
        for name, table in self.tables.items():
            sides = table.shape[1:-1]
            own = (along,) if name == "table" and len(sides) == 1 else offsets[name]
            reach = zip(own, sides, strict=True)
            found[name] = tuple(max(0, min(side - 1, off + side // 2)) for off, side in reach)
        return found

    def entry(self, name: str, head: int, index: tuple[int, ...]) -> Tensor:
        table = self.tables[name]
        return table[(head if len(table) > 1 else 0, *index)]

    def number_of(self, image: int, query: int, name: str, index: tuple[int, ...]) -> int:
        """How many keys that the query sees are of a class."""
        every = range(self.keys)
        return sum(self.classes(image, query, key).get(name) == index for key in every)


def taylor_content(tensors, options, pairs, image, head, query, key):
    (a, b, c), tau = options.get("coefficients", (0.5, 1.0, 1.0)), tensors.get("temperature")
    q, k = tensors["q"][image, head, query], tensors["k"][image, head, key]
    x = dot(q, k)
    if tau is not None:
        x *= tau[head].item() / math.sqrt(dot(q, q) * dot(k, k))
    return a * x**2 + b * x + c


def kernel_content(tensors, options, pairs, image, head, query, key):
    q, k = tensors["q"][image, head, query], tensors["k"][image, head, key]
    name = options.get("feature_map", "elu1")
    if name != "softmax":
        return dot(*map({"elu1": elu1, "relu": torch.relu}[name], (q, k)))
    keys = [j for j in range(pairs.keys) if pairs.takes_part(image, j)]
    over = sum(tensors["k"][image, head, j].exp() for j in keys)
    return len(keys) * dot(q.exp() / q.exp().sum(), k.exp() / over)


CONTENT = {"taylorshift": taylor_content, "kernelized": kernel_content}


def loop_weight(name: str, tensors, options, pairs: Pairs, mean: bool, where) -> float:
    """The weight of one pair, ``where`` being image, head, query and key."""
    image, head, query, key = where
    if not pairs.sees(image, query, key):
        return 0.0
    q, classes = tensors["q"][image, head, query], pairs.classes(image, query, key)
    entries = {table: pairs.entry(table, head, index) for table, index in classes.items()}
    if name not in CONTENT:
        score = dot(q, tensors["k"][image, head, key]) + sum(dot(q, x) for x in entries.values())
        return math.exp(score / math.sqrt(len(q)))
    content = CONTENT[name](tensors, options, pairs, *where)
    if pairs.tables and mean:
        content /= sum(pairs.sees(image, query, other) for other in range(pairs.keys))
    for table, entry in entries.items():
        count = pairs.number_of(image, query, table, classes[table]) if mean else 1
        content += dot(elu1(q), entry) / count
    return content


SMALL = dict(batch=2, heads=2, d=2, e=2, horizons=(1, 2))
SEQUENCE = dict(kind="none", lengths=(3, 5), masked=True, batch=2, heads=2, d=4, e=3)
FULL = dict(grid=(3, 3), prefix=2, missing=2, absent=True, masked=True) | SMALL
TAU = torch.tensor([0.7, 3.1], dtype=torch.float64)
UNEQUAL = {"coefficients": (1.3, -0.7, 0.4)}
LOOPS = {
    "taylorshift": ("taylorshift", UNEQUAL, Drawn(**SEQUENCE)),
    "tempered": ("taylorshift", {}, Drawn(**SEQUENCE)),
    "tempered, joint": ("taylorshift", {}, Drawn(**FULL)),
    "taylorshift, axial sum": ("taylorshift", {}, Drawn(**FULL | dict(kind="axial", mean=False))),
    "elu1": ("kernelized", {}, Drawn(**SEQUENCE)),
    "relu": ("kernelized", {"feature_map": "relu"}, Drawn(**SEQUENCE)),
    "softmax map": ("kernelized", {"feature_map": "softmax"}, Drawn(**SEQUENCE)),
    "causal": ("kernelized", {"causal": True}, Drawn(**SEQUENCE | dict(lengths=(5, 4)))),
    "causal, flat": (
        "kernelized",
        {"causal": True},
        Drawn(**SEQUENCE | dict(lengths=(4, 6), kind="flat", horizons=(1, 0))),
    ),
    "joint sum, one table": ("kernelized", {}, Drawn(**FULL | dict(mean=False, shared=True))),
    "axial": ("kernelized", {}, Drawn(**FULL | dict(kind="axial"))),
    "flat": ("kernelized", {}, Drawn(**FULL | dict(kind="flat"))),
    "a long row": ("kernelized", {}, Drawn((1, 5), prefix=0, **SMALL | dict(kind="flat"))),
    "softmax": ("softmax", {}, Drawn(**FULL)),
    "softmax, axial": ("softmax", {}, Drawn(**FULL | dict(kind="axial"))),
    "softmax, causal flat": (
        "softmax",
        {"causal": True},
        Drawn(**SEQUENCE | dict(lengths=(6, 8), kind="flat")),
    ),
    "windows": ("window", {"window_size": 2, "shifted": False}, Drawn(**FULL)),
    "shifted windows": (
        "window",
        {"window_size": 3, "shifted": True},
        Drawn((4, 3), kind="axial", masked=True, **SMALL),
    ),
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_definition_is_the_mean_over_pairs_one_at_a_time(name):
    attention, options, case = LOOPS[name]
    _, definition, tensors = paired(case, attention, **options)
    if name.startswith("tempered"):
        tensors["temperature"] = TAU
    tables = {key: tensors[key] for key in ("table", "rows", "columns") if key in tensors}
    pairs, v = Pairs(case, tables, options), tensors["v"]
    wanted = torch.zeros(case.batch, case.heads, pairs.queries, case.e, dtype=torch.float64)
    for image, head, query in torch.cartesian_prod(*map(torch.arange, wanted.shape[:3])).tolist():
        places = ((image, head, query, key) for key in range(pairs.keys))
        weights = [loop_weight(attention, tensors, options, pairs, case.mean, at) for at in places]
        mass = math.fsum(weights)
        for column in range(case.e):
            total = dot(weights, v[image, head, :, column])
            wanted[image, head, query, column] = total / mass if mass else 0.0
    torch.testing.assert_close(definition(**tensors), wanted, rtol=1e-13, atol=1e-14)
