"""The commands in README and docs run, each page in a folder of its own, from top to bottom."""

import os
import re
import subprocess
import sys

import pytest
import timm

from tests.helpers.documented_commands import PAGES, ROOT, commands_of_page
from tests.helpers.documented_inputs import (
    NOT_RUN,
    Inputs,
    link_repository,
    reason_not_to_run,
    short_flags,
)
from tests.helpers.tools import load_tool
from visionattn.command import main

IN_BLOCKS = {
    str(page.relative_to(ROOT)): [
        each for each in commands_of_page(page, page.read_text()) if each.in_block
    ]
    for page in PAGES
}
RUN = [
    name
    for name, commands in IN_BLOCKS.items()
    if any(reason_not_to_run(each.text) is None for each in commands)
]


def test_each_reason_not_to_run_is_for_a_command_of_the_pages():
    texts = [each.text for page in PAGES for each in commands_of_page(page, page.read_text())]
    unused = [pattern for pattern in NOT_RUN if not any(re.search(pattern, text) for text in texts)]
    left_out = [text for text in texts if reason_not_to_run(text)]
    assert unused == [] and len(left_out) < len(texts) / 3


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder of the trainings that pages presuppose."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(autouse=True)
def no_downloads(monkeypatch):
    """Models of timm with random weights in place of downloaded ones."""
    create = timm.create_model

    def without_weights(name, pretrained=False, **args):
        ours = name.startswith(("scaleformer", "taylorshift", "local-dir"))
        return create(name, pretrained=pretrained and ours, **args)

    monkeypatch.setattr(timm, "create_model", without_weights)


def run(words):
    """Run a subcommand in this process."""
    try:
        code = main(words)
    except SystemExit as end:
        code = end.code
    assert code == 0, " ".join(words)


def run_processes(words):
    """Run ``torchrun`` with two processes."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "torch.distributed.run", *words]
    done = subprocess.run(words, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the alpha channel")  # of the figures in docs
@pytest.mark.parametrize("page", RUN)
def test_commands_of_a_page_run(page, runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    link_repository(tmp_path)
    inputs = Inputs(runs, run)
    for command in IN_BLOCKS[page]:
        if reason_not_to_run(command.text):
            continue
        words = command.words()
        if words[0] == "torchrun":
            place = words.index("--")
            name, rest = load_tool("train").args[0], words[place + 2 :]
            rest = inputs.provide(name, rest) + short_flags(name, rest)
            started = ["--standalone", "--nproc-per-node", "2", "--", words[place + 1], *rest]
            run_processes(started)
            continue
        assert words[0] == "visionattn", f"{command.text}: run it here, or say why not in NOT_RUN"
        name, *rest = words[1:]
        if "SUBSTITUTED" in rest:
            from visionattn.models import shipped

            rest[rest.index("SUBSTITUTED")] = str(shipped.FILES["scaleformer_vit_digits"])
        rest = inputs.provide(name, rest)
        run([name, *rest, *short_flags(name, rest)])
