"""Kernels compiled ahead without a GPU: each once among the processes, and as a launch asks for
them.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from visionattn.lab.gpu import compile as gpu_compile
from visionattn.lab.gpu import rehearsal
from visionattn.lab.gpu.compile import CompileOnly, compiling_alone, run_share, works
from visionattn.lab.target_table import KINDS, gpu_operation
from visionattn.ops.gpu import launch

pytest.importorskip("triton", reason="GPU kernels need Triton")
ROOT = Path(__file__).parents[2]
OF_NO_GPU = """
import contextlib, json, sys
from pathlib import Path
from unittest import mock
import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from visionattn.lab.gpu import compile as gpu_compile, rehearsal
from visionattn.lab.target_table import gpu_operation
from visionattn.ops.gpu import launch, machine

class OfNoGpu:
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0

driver.set_active(OfNoGpu())
patch = mock.patch.object
cases = [gpu_operation("kernelized", 200, 16, backward=True, batch=1)]
found = gpu_compile.works(rehearsal.make_bench(), [], cases)
shown, compiled = [], []
def as_launched(launch_one, kernel, grid, *args, **meta):
    compiled.append(kernel.run(*args, grid=grid, warmup=True, **meta).hash)
here = patch(machine, "why_not_here", lambda *x: None)
with here, patch(launch, "capability", lambda device: "9.0"):
    if sys.argv[1] == "launch":
        with launch.launching_with(run=as_launched):
            gpu_compile.run_share(found, 0, 1, shown.append)
        names = []
    else:
        with gpu_compile.compiling_alone(Path(sys.argv[1])) as names:
            gpu_compile.run_share(found, 0, 1, shown.append)
print(json.dumps({"names": names, "shown": shown, "compiled": compiled}))
"""


def compiled(what, cache):
    """What a fresh process that compiles for capability 9.0 says, and the kernels in the cache
    then.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", OF_NO_GPU, str(what)],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["shown"] == []
    return found, {path.parent.name for path in cache.rglob("*.cubin")}


def test_what_is_compiled_ahead_is_what_launches_ask_for_and_compiled_once(tmp_path):
    claims, cache = tmp_path / "claims", tmp_path / "cache"
    claims.mkdir()
    first, cached = compiled(claims, cache)
    assert len(first["names"]) == len(cached) == len(list(claims.iterdir())) >= 4
    assert any(
        name.startswith("visionattn.ops.kernelized.kernels.bidirectional.")
        for name in first["names"]
    )
    second, nothing = compiled(claims, tmp_path / "another")
    assert second["names"] == [] and nothing == set()  # what is claimed is left alone
    launched, after = compiled("launch", cache)
    assert len(set(launched["compiled"])) == len(cached) and after == cached  # all from the cache


def test_the_first_kernel_is_right_or_one_line_says_what_is_wrong(monkeypatch, capsys):
    eager = replace(rehearsal.make_bench(), impl="eager")
    monkeypatch.setattr(rehearsal, "make_bench", lambda: eager)
    assert gpu_compile.main(["--first", "--rehearse"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "the first kernel is right"
    monkeypatch.setattr(
        gpu_compile, "check", lambda *given: ("wrong: error 1.0e-01 of out, allowed 4e-03", 0.1, [])
    )
    assert gpu_compile.main(["--first", "--rehearse"]) == 1
    told = capsys.readouterr().out.splitlines()[-1]
    assert (
        told
        == "error: the first kernel is wrong: error 1.0e-01 of out, allowed 4e-03 (largest error "
        "1.0e-01)"
    )

    def fail(*given):
        raise RuntimeError("no kernel\nimage is available")

    monkeypatch.setattr(gpu_compile, "check", fail)
    assert gpu_compile.main(["--first", "--rehearse"]) == 1
    told = capsys.readouterr().out.splitlines()[-1]
    assert (
        told == "error: the first kernel does not run: failed: RuntimeError: no kernel image is "
        "available"
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_compile.main(["--first"]) == 1
    (told,) = capsys.readouterr().out.splitlines()
    assert told == "error: no GPU here that PyTorch can use (torch.cuda.is_available() is False)"


def test_launches_within_compile_and_launch_nothing(tmp_path):
    calls = []

    class Kernel:
        __name__ = "_kernel"

        def run(self, *args, grid, warmup, **meta):
            calls.append((args, grid, warmup, meta))

    x = torch.ones(2)
    before = launch._launch
    with compiling_alone(tmp_path) as names:
        launch.run(Kernel(), (3, 1), x, 5, BLOCK=16)
        launch.run(Kernel(), (0, 1), x, 5, BLOCK=16)  # nothing to do, so nothing to compile
    assert calls == [((x, 5), (3, 1), True, {"BLOCK": 16})] and names == []
    assert launch._launch is before
    assert CompileOnly(Kernel()).__name__ == "_kernel"


def test_works_are_every_row_once_models_first():
    bench, (figures, cases) = rehearsal.make_bench(), rehearsal.all_rows()
    names = [work.name for work in works(bench, figures, cases)]
    assert "scaleformer_vit_s+identity at" in names[2]
    assert names[0].startswith("scaleformer_vit_s at")
    for kind in (
        "scaleformer_vit_b at",
        "vit_base_patch16_224 at",
        "flex_attention of",
        "direct of",
        "+joint efficient of",
    ):
        assert any(kind in name for name in names), kind
    assert len(names) > 20


def test_a_work_that_fails_is_shown_and_the_others_are_done():
    done, shown = [], []

    def fail():
        raise RuntimeError("out of\nresource")

    todo = [
        gpu_compile.Work(str(i), fail if i == 2 else lambda i=i: done.append(i)) for i in range(5)
    ]
    assert run_share(todo, 0, 2, shown.append) == 1 and done == [0, 4]
    assert shown == ["not compiled ahead: 2: failed: RuntimeError: out of resource"]
    assert run_share(todo, 1, 2, shown.append) == 0 and done == [0, 4, 1, 3]


def test_rehearsed_cases_keep_what_tells_them_apart():
    sizes = [
        rehearsal.shrink(gpu_operation("kernelized", n, 16)).size
        for n in (196, 1024, 4096, 16_384, 65_536)
    ]
    assert sizes == sorted(set(sizes)) and sizes[-1] < 64
    figures, cases = rehearsal.all_rows()
    assert {figure.case.precision for figure in figures} == {"float16", "amp_fp16"}
    assert {figure.kind for figure in figures} == set(KINDS)
    wide = next(figure.case for figure in figures if figure.case.image_width)
    assert wide.image_size[1] > wide.image_size[0]
    assert replace(wide, image_width=None).image_size[0] == wide.size
    assert {"kernelized+causal", "kernelized+masked"} <= {case.name for case in cases}
