"""What the compiler says of kernels, remembered by all that it was given.

``tests/kernels/compiled.json`` holds it by version of Triton, which brings its ptxas, and by a
fingerprint of the kernel's code, its specialisation, its options and the GPU. A kernel that is
on record is not compiled again.

Run in a process of its own, in which Triton does not interpret: ``python -m tests.counting.facts
MODULE...`` for modules of ``tests.helpers.launches``, whose ``CASES`` map names to functions of
nothing that launch kernels on the meta device, and whose ``SIZES`` map names to a function of one
argument and its values; prints one JSON object by module. ``--record`` compiles all that tests
compile, and writes the record of the Triton that is installed.
"""

import ast
import json
import math
import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import astuple
from functools import cache
from hashlib import sha256
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

from tests.counting import branches, counting, occupancy, sass, trips, workloads
from tests.counting.counting import Count, compiled
from tests.counting.occupancy import Use, programs_per_multiprocessor
from tests.helpers.kernel_launches import CAPABILITIES, Launch, recorded

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "tests" / "kernels" / "compiled.json"
LAUNCHES = ROOT / "tests" / "helpers" / "launches"
USUAL = {"dtype": "bfloat16", "widths": [(64, 64)]}
"""What tests compare with the counts of ``visionattn/lab/gpu/counts.json``: registers and the like
for 8.0 and 10.0, and all counts for 9.0."""
COUNTED_BY = (counting, sass, trips, branches, occupancy)
"""The code that counts: where it changes, nothing that was counted is on record."""


class Facts(NamedTuple):
    """What tests ask of one compiled kernel."""

    registers: int
    """Of a thread."""
    spilled_bytes: int
    """Of registers of a thread that did not fit."""
    shared_bytes: int
    """Of a program."""
    unit: str
    """The matrix unit's instruction: "wgmma", "mma.sync", "tcgen05.mma" or ""."""


def fingerprint(launch: Launch, capability: int) -> str:
    """A name of all that decides what the compiler makes: not of comments and lines' numbers."""
    from triton.compiler import make_backend

    _, source, target, options = launch.specialised(capability)
    given = [source.signature, source.constants, source.attrs, text_of(launch.kernel), target]
    given.append(make_backend(target).parse_options(options).hash())
    return sha256(" ".join(map(str, given)).encode()).hexdigest()[:20]


@cache
def text_of(kernel) -> str:
    """The code of a kernel, of the functions that it calls and of the values that it names, each
    once, comments and docstrings left out.
    """
    from triton.language import constexpr
    from triton.runtime import JITFunction

    found: dict[str, str] = {}
    waiting = [kernel]
    while waiting:
        function = waiting.pop()
        place = f"{function.module}.{function.__name__}"
        if place in found:
            continue
        tree = ast.parse(textwrap.dedent(function.src))
        (definition,) = tree.body
        if ast.get_docstring(definition) is not None:
            definition.body = definition.body[1:] or [ast.Pass()]
        found[place] = ast.unparse(definition)
        for node in ast.walk(definition):
            value = _value_of(node, function.fn.__globals__)
            if isinstance(value, JITFunction):
                waiting.append(value)
            elif isinstance(value, (constexpr, int, float, str, tuple)):
                found[f"{place}: {ast.unparse(node)}"] = repr(value)
    return json.dumps(found, sort_keys=True)


def _value_of(node: ast.AST, names: dict[str, object]) -> object:
    """What a name or an attribute stands for among these global names; None: something local."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        return getattr(_value_of(node.value, names), node.attr, None)
    return None


@cache
def on_record() -> dict[str, Facts]:
    """What is recorded of the Triton that is installed, by fingerprint."""
    return {name: Facts(*values) for name, values in _section("kernels").items()}


@cache
def counts_on_record() -> dict[str, Count]:
    """What is recorded of launches of the Triton that is installed, by ``name_of_count``."""
    return {name: Count(*values) for name, values in _section("counts").items()}


def _section(name: str) -> dict[str, list]:
    import triton

    return json.loads(RECORD.read_text(encoding="utf-8")).get(triton.__version__, {}).get(name, {})


def name_of_count(launch: Launch, capability: int) -> str:
    """A name of all that decides what is counted of a launch: its kernel, its sizes, the code that
    counts.
    """
    sizes = [
        (tuple(x.shape), x.stride(), str(x.dtype)) if hasattr(x, "shape") else x
        for x in launch.args
    ]
    given = [fingerprint(launch, capability), launch.grid, sizes, _counting_code()]
    return sha256(" ".join(map(str, given)).encode()).hexdigest()[:20]


@cache
def _counting_code() -> str:
    return "".join(ast.unparse(ast.parse(Path(x.__file__).read_text())) for x in COUNTED_BY)


def count_in_full(launch: Launch, capability: int) -> Count:
    """All counts of a launch, from the record where it is on it."""
    known = counts_on_record().get(name_of_count(launch, capability))
    return known or counting.count(launch, capability)


def recorded_of(launch: Launch, capability: int) -> Facts | None:
    """Facts of the launch on record; None: it is not on it."""
    return on_record().get(fingerprint(launch, capability))


def facts(launch: Launch, capability: int) -> Facts:
    """Facts of the compiled launch, from the record where it is on it."""
    return recorded_of(launch, capability) or compiled_facts(launch, capability)


def compiled_facts(launch: Launch, capability: int) -> Facts:
    """Facts of the launch, compiled here."""
    found = compiled(launch, capability)
    return Facts(found.usage["REG"], found.spilled_bytes, found.shared_bytes, found.unit)


def count(launch: Launch, capability: int) -> Count:
    """What facts alone say of a launch, in the fields of a count; all others are 0."""
    found, programs = facts(launch, capability), math.prod(launch.grid)
    use = Use(launch.specialised(capability)[-1]["num_warps"], found.registers, found.shared_bytes)
    resident = programs_per_multiprocessor(use, capability)
    size = programs, use.warps, use.registers, found.spilled_bytes, use.shared_bytes, resident
    return Count(launch.kernel.__name__, *size, *[0.0] * 7, found.unit)


def launches_of_case(module: str, case: str, capability: int) -> list[Launch]:
    """One launch for each different kernel that the case launches."""
    with recorded(capability) as launches:
        _of(module).CASES[case]()
    assert launches, f"{case} launched nothing"
    return list({launch.specialised(capability)[0]: launch for launch in launches}.values())


def facts_of_case(module: str, case: str, capability: int, compiling: bool) -> list[dict]:
    """Facts of each different kernel that the case launches, each with ``"kernel"``,
    ``"fingerprint"``, and whether it was compiled ``"anew"``; all are where ``compiling``.
    """
    found = []
    for launch in launches_of_case(module, case, capability):
        name = fingerprint(launch, capability)
        anew = compiling or name not in on_record()
        read = compiled_facts if anew else facts
        about = {"kernel": launch.kernel.__name__, "fingerprint": name, "anew": anew}
        found.append(about | read(launch, capability)._asdict())
    return found


def count_keys(module: str, case: str) -> dict[str, int]:
    """By kernel, the number of different compilations over all sizes of the case."""
    work, sizes = _of(module).SIZES[case]
    keys: dict[str, set[str]] = {}
    for size in sizes:
        with recorded() as launches:
            work(size)
        for launch in launches:
            keys.setdefault(launch.kernel.__name__, set()).add(launch.specialised(90)[0])
    return {kernel: len(different) for kernel, different in keys.items()}


def _of(module: str):
    return import_module(f"tests.helpers.launches.{module}")


def results(modules: Sequence[str], compiling: bool = False) -> dict[str, dict[str, dict]]:
    """By module, what is ``"compiled"``, by case and capability, and the ``"keys"`` by case."""
    found = {module: {"compiled": {}, "keys": {}} for module in modules}
    with get_context("fork").Pool(len(os.sched_getaffinity(0))) as pool:
        waiting = []
        for module in modules:
            for case in _of(module).CASES:
                found[module]["compiled"][case] = into = {}
                for capability in CAPABILITIES:
                    given = module, case, capability, compiling
                    waiting.append((into, str(capability), pool.apply_async(facts_of_case, given)))
            for case in _of(module).SIZES:
                task = pool.apply_async(count_keys, (module, case))
                waiting.append((found[module]["keys"], case, task))
        for into, name, task in waiting:
            into[name] = task.get()
    return found


def from_fresh_process(*arguments: str) -> dict[str, dict[str, dict]]:
    """``results`` from a process in which Triton compiles."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.counting.facts", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def launches_of_task(task: workloads.Task) -> tuple[dict[str, Facts], dict[str, Count]]:
    """Facts of an operation's launches by fingerprint, and for 9.0 their counts by name, all
    compiled here.
    """
    capability, case, e = task
    try:
        launches = workloads.launches_of(case, capability, e)
    except (NotImplementedError, ValueError):  # there are no kernels for it
        return {}, {}
    kernels = {fingerprint(x, capability): compiled_facts(x, capability) for x in launches}
    counted = launches if capability == 90 else []
    return kernels, {name_of_count(x, 90): counting.count(x, 90) for x in counted}


def record_all() -> None:
    """Compile everything on all cores, and write it; sections of other versions stay."""
    import triton

    by_module = results([path.stem for path in LAUNCHES.glob("[!_]*.py")], compiling=True)
    counts: dict[str, Sequence] = {}
    found = {
        entry["fingerprint"]: [entry[name] for name in Facts._fields]
        for of_module in by_module.values()
        for of_case in of_module["compiled"].values()
        for entries in of_case.values()
        for entry in entries
    }
    with get_context("fork").Pool(len(os.sched_getaffinity(0))) as pool:
        tasks = workloads.usual_tasks(workloads.OPERATIONS, CAPABILITIES, **USUAL)
        for kernels, counted in pool.imap_unordered(launches_of_task, tasks):
            found |= kernels
            counts |= {name: astuple(values) for name, values in counted.items()}
    whole = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    whole[triton.__version__] = {"kernels": found, "counts": counts}
    RECORD.write_text(_text_of(whole), encoding="utf-8")
    print(f"recorded {len(found)} kernels, {len(counts)} launches of Triton {triton.__version__}")


def _text_of(whole: dict[str, dict[str, dict[str, Sequence]]]) -> str:
    """The record as JSON, one kernel or launch in a line."""
    versions = []
    for version, sections in sorted(whole.items()):
        texts = []
        for title, entries in sections.items():
            lines = (f"{json.dumps(name)}: {json.dumps(entries[name])}" for name in sorted(entries))
            texts.append(f" {json.dumps(title)}: {{\n  " + ",\n  ".join(lines) + "}")
        versions.append(f"{json.dumps(version)}: {{\n" + ",\n".join(texts) + "}")
    return "{\n" + ",\n".join(versions) + "}\n"


if __name__ == "__main__":
    if sys.argv[1:] == ["--record"]:
        record_all()
    else:
        modules = [name for name in sys.argv[1:] if name != "--compiling"]
        print(json.dumps(results(modules, compiling="--compiling" in sys.argv)))
