"""Before any test: where there is no GPU, Triton interprets its kernels on the processor. It reads
this when it is imported.

After the tests: what the rule of accuracy leaves kernels to spare, where tests have recorded it.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_terminal_summary(terminalreporter) -> None:
    """One line for each operation and dtype whose accuracy was tested: the smallest margin, and
    where it was found.
    """
    reports = (
        report for kind in ("passed", "failed") for report in terminalreporter.getreports(kind)
    )
    recorded = [
        value for report in reports for name, value in report.user_properties if name == "accuracy"
    ]
    worst = {}
    for operation, dtype, margin, error in recorded:
        worst[operation, dtype] = min(
            worst.get((operation, dtype), (margin, error)), (margin, error)
        )
    if worst:
        terminalreporter.section("accuracy of kernels: smallest margin, allowed over found")
    for (operation, dtype), (margin, error) in worst.items():
        terminalreporter.write_line(f"{operation:33}{dtype:9}{margin:8.2f}  ({error})")
