"""The recorded table of counts: made, written, and held against what is counted now.

One file for all, ``visionattn/lab/gpu/counts.json``, which the model of time reads too: by
version of Triton, since ptxas differs, then by GPU, dtype and sizes, then launches by name and
which of them each operation makes.
"""

import csv
import json
import math
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple
from multiprocessing import get_context

from tests.counting import workloads
from tests.counting.counting import count
from tests.counting.workloads import Task
from tests.helpers.kernel_launches import Launch
from visionattn.lab.cases import Case
from visionattn.lab.gpu import counts as gpu_counts

PROCESSES = 2
HIGHER = 1.03
"""Instructions beyond this many times the recorded ones are worse; ptxas is the same, so that
nothing else moves them."""
MORE_REGISTERS = 1.05
Table = dict[str, dict]


def named(launch: Launch) -> str:
    """The kernel's row, its widths, its switches and its function."""
    kernel, *held = launch.row or (launch.kernel.__name__, 0, 0, 0)
    flags = [name.lower() for name, value in launch.meta.items() if value is True]
    bits = ["f32"] if held[2] == 32 else []
    return " ".join([kernel, "x".join(map(str, held[:2])), *bits, *flags, launch.kernel.__name__])


def told_apart(launches: Sequence[Launch], known: dict[tuple, str]) -> list[str]:
    """A name for each launch, with a number where one kernel is launched on other sizes; ``known``
    grows."""
    names = []
    for launch in launches:
        shapes = tuple(tuple(x.shape) if hasattr(x, "shape") else x for x in launch.args)
        place = named(launch), launch.grid, shapes
        if place not in known:
            same = sum(name == place[0] for name, *_ in known)
            known[place] = place[0] + (f" #{same + 1}" if same else "")
        names.append(known[place])
    return names


def row_of(launch: Launch) -> str:
    """Block sizes, warps and stages in short."""
    short = {"num_warps": "warps", "num_stages": "stages"}
    wanted = ("BLOCK_N", "BLOCK_M", "BLOCK_T", "BLOCK_Y", "BLOCK_F", "BLOCK_K", "PAIRS", "num_")
    sizes = {name: value for name, value in launch.meta.items() if name.startswith(wanted)}
    return " ".join(
        f"{short.get(name, name.removeprefix('BLOCK_'))}{value}" for name, value in sizes.items()
    )


def counted(task: Task, change=None, wanted=None, counting=count) -> tuple[str, str, dict]:
    """Group and operation of a task, and what ``counting`` gives of its launches; ``({},)`` where
    there are no kernels for it."""
    capability, case, e = task
    group = gpu_counts.group_of(case, e, f"{capability / 10:.1f}")
    launches: dict[str, list] = {}
    names: dict[str, list[str]] = {}
    known: dict[tuple, str] = {}
    for way, backward in (("forward", False), ("both", True)):
        if backward and not case.backward:
            continue
        try:
            own = Case(**case.as_dict() | {"backward": backward})
            found = workloads.launches_of(own, capability, e, change)
        except (NotImplementedError, ValueError):
            return group, case.label, {}
        names[way] = told_apart(found, known)
        for launch, name in zip(found, names[way], strict=True):
            if name not in launches and (wanted is None or wanted(name)):
                _, *values = astuple(counting(launch, capability))
                values = [round(x) if isinstance(x, float) else x for x in values]
                launches[name] = [*values, row_of(launch)]
    return group, case.label, {"launches": launches, "operations": {case.label: names}}


def table_of(tasks: Sequence[Task], processes: int = PROCESSES) -> Table:
    """Everything counted, by group. What compiles the same kernels is counted in one process."""
    together: dict[tuple, list[Task]] = {}
    for capability, case, e in tasks:
        place = capability, case.dtype, case.width, e
        together.setdefault(place, []).append((capability, case, e))
    table: Table = {}
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for results in pool.map(_all_counted, together.values()):
            for group, operation, found in results:
                if found:
                    merge(table, group, operation, found)
    return table


def _all_counted(tasks: Sequence[Task]) -> list[tuple[str, str, dict]]:
    return [counted(task) for task in tasks]


def merge(table: Table, group: str, operation: str, found: dict) -> None:
    """Add an operation; a launch that another one makes on other sizes gets a name of its own."""
    own = table.setdefault(group, {"launches": {}, "operations": {}})
    launches = own["launches"]
    other = {
        name for name, values in found["launches"].items() if launches.get(name, values) != values
    }
    renamed = {
        name: f"{name} in {operation}" if name in other else name for name in found["launches"]
    }
    launches |= {renamed[name]: values for name, values in found["launches"].items()}
    ways = found["operations"][operation].items()
    known = own["operations"].setdefault(operation, {})
    known |= {way: [renamed[name] for name in names] for way, names in ways}


def save(version: str, table: Table) -> None:
    """Put operations into the section of a version of Triton; those that were not counted stay."""
    gpu_counts.recorded.cache_clear()
    whole = gpu_counts.recorded() if gpu_counts.TABLE.exists() else {}
    section = whole.setdefault(version, {})
    for group, own in table.items():
        for operation, ways in section.get(group, {"operations": {}})["operations"].items():
            if operation not in own["operations"]:
                names = {name for way in ways.values() for name in way}
                kept = {name: section[group]["launches"][name] for name in names}
                merge(table, group, operation, {"launches": kept, "operations": {operation: ways}})
    section |= table
    gpu_counts.TABLE.write_text(text_of(whole), encoding="utf-8")
    gpu_counts.recorded.cache_clear()


def write_csv(path: str, table: Table) -> None:
    """One row for each launch of a table."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        derived = ("instructions_per_token_and_head", "expected_h100_seconds")
        writer.writerow(["capability", "dtype", "sizes", "launch", *gpu_counts.FIELDS, *derived])
        for group, own in sorted(table.items()):
            capability, dtype, sizes = group.split(" ", 2)
            tokens = math.prod(int(x.split("=")[1]) for x in sizes.split(" ")[:3])
            for name, values in sorted(own["launches"].items()):
                launch = gpu_counts.launch_from(name, values)
                per_token = f"{launch.instructions / tokens:.1f}"
                seconds = f"{launch.seconds(gpu_counts.H100):.3g}"
                writer.writerow([capability, dtype, sizes, name, *values, per_token, seconds])


def text_of(whole: dict[str, Table]) -> str:
    """The table as JSON, one launch in a line, the newest Triton that GPUs were met with first."""
    sections = []
    for version, table in sorted(whole.items()):
        groups = []
        for group, found in sorted(table.items()):
            launches = ",\n".join(
                f"      {json.dumps(n)}: {json.dumps(v)}"
                for n, v in sorted(found["launches"].items())
            )
            names = ",\n".join(
                f"      {json.dumps(n)}: {json.dumps(v)}"
                for n, v in sorted(found["operations"].items())
            )
            inside = f'     "launches": {{\n{launches}}},\n     "operations": {{\n{names}}}'
            groups.append(f"    {json.dumps(group)}: {{\n{inside}}}")
        sections.append(f"  {json.dumps(version)}: {{\n" + ",\n".join(groups) + "}")
    return "{\n" + ",\n".join(sections) + "}\n"


def worse(recorded: Table, group: str, operation: str, found: dict) -> list[str]:
    """What of an operation's launches is worse than recorded, one sentence each.

    Launches are told apart by their place in the operation, since names of recorded ones depend on
    what else was recorded.
    """
    old = recorded.get(group, {"launches": {}, "operations": {}})
    problems: dict[str, None] = {}
    for way, names in found["operations"][operation].items():
        before = old["operations"].get(operation, {}).get(way, [])
        if [_plain(name) for name in names] != [_plain(name) for name in before]:
            what = ", ".join(dict.fromkeys(x for x in names if x not in before)) or "the order"
            problems[f"{group}: {operation}: other launches than recorded: {what}"] = None
            continue
        for name, was in zip(names, before, strict=True):
            if name in found["launches"]:
                reasons = _reasons(*_fields(old["launches"][was], found["launches"][name]))
                problems |= dict.fromkeys(f"{group}: {name}: {reason}" for reason in reasons)
    return list(problems)


def _plain(name: str) -> str:
    """The name without what tells it apart from others of the kernel."""
    return name.split(" in ")[0].split(" #")[0]


def _fields(*values: list) -> list[dict]:
    return [dict(zip(gpu_counts.FIELDS, x, strict=True)) for x in values]


def _reasons(was: dict, now: dict) -> list[str]:
    """In what a launch is worse."""
    instructions = [x["looped"] + x["once"] for x in (was, now)]
    reasons = []
    if now["spilled_bytes"] > was["spilled_bytes"]:
        reasons.append(f"spills {now['spilled_bytes']} bytes, recorded {was['spilled_bytes']}")
    if (
        now["resident"] * now["warps"] < was["resident"] * was["warps"]
        and now["resident"] < was["resident"]
    ):
        reasons.append(
            f"{now['resident']} programs on a multiprocessor, recorded {was['resident']}"
        )
    if instructions[1] > HIGHER * instructions[0]:
        reasons.append(f"{instructions[1] / instructions[0]:.2f} times the recorded instructions")
    if now["registers"] > MORE_REGISTERS * was["registers"]:
        reasons.append(f"{now['registers']} registers, recorded {was['registers']}")
    return reasons
