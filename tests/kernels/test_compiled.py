"""What the compiler says of every kernel for a Hopper GPU, without one."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="GPU kernels need Triton")

SHARED_BYTES = 227 * 1024
OF_CI = "3.9."
"""The Triton in which no kernel spills a register."""
FIRST = "kernelized 64 64 bf16 joint"
OTHERS = (
    "kernelized 128 128 fp16",
    "direct 64 64 bf16",
    "direct 40 24 fp16 joint",
    "efficient 64 128 bf16",
    "efficient 32 32 fp32",
)
"""Every kernel; ``python -m tests.helpers.kernel_launches`` compiles at more widths."""
PER_CASE = {"kernelized": 4, "direct": 3, "efficient": 4}
"""Kernels that each operation has at least."""


@pytest.mark.parametrize("cases", [[FIRST], pytest.param(OTHERS, marks=pytest.mark.slow)], ids=len)
def test_every_kernel_compiles_once_for_all_sizes_and_fits_into_shared_memory(cases):
    """In a process that does not interpret."""
    given = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.helpers.kernel_launches", "--cases", *cases]
    options = dict(capture_output=True, text=True, env=given, cwd=Path(__file__).parents[2])
    done = subprocess.run(command, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    for case, found in json.loads(done.stdout).items():
        assert len(found["kernels"]) >= PER_CASE[case.split()[0]], case
        assert found["anew"] == [], case
        for kernel in found["kernels"]:
            assert kernel["shared_bytes"] <= SHARED_BYTES, (case, kernel)
            if version("triton").startswith(OF_CI):
                assert kernel["spilled_bytes"] == 0, (case, kernel)
