"""Every command in the pages and in the headers of configurations is right."""

import re
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from tests.helpers.documented_commands import (
    HEADERS,
    PAGES,
    ROOT,
    commands_of_header,
    commands_of_page,
    parse_command,
)
from visionattn.command import SUBCOMMANDS, main
from visionattn.lab.benchmark import COMMANDS

FOUND = [each for page in PAGES for each in commands_of_page(page, page.read_text())]
FOUND += [each for config in HEADERS for each in commands_of_header(config)]


def inputs_of(words, page):
    """Files that the parsers open: checkpoints, configurations of runs, and files that a command
    of the same page writes.
    """
    written = {
        path
        for each in FOUND
        if each.page == page
        for path in re.findall(r"--output (\S+\.yaml)", each.text)
    }
    for flag, value in zip(words, words[1:], strict=False):
        of_run = re.fullmatch(r"checkpoints/\S+\.yaml", value) or value in written
        if flag == "--checkpoint" or (flag == "--config" and of_run):
            yield Path(value)


@pytest.mark.parametrize("command", dict.fromkeys(FOUND), ids=lambda each: f"{each[0]}:{each[1]}")
def test_every_command_is_parsed(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("configs", "tools"):
        Path(name).symlink_to(ROOT / name)
    words = command.words()
    for path in inputs_of(words, command.page):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    parse_command(words)


PAGE = """Run `visionattn train
--epochs two` or `make demos`.
```
visionattn train --config digitz
$ visionattn train --data.img_sise 32 \\
    --epochs 1   # comment
torchrun --nprocs 2 -- tools/train.py
for k in 1 2; do visionattn train --config digits --data.fold $k of 2; done
visionattn sweeps --base digits
visionattn sweep --base digitz
visionattn distil --teacher vit_smal_patch16_224 --data.root path
python -m tests.kills --counts 20
pip install 'visionattn[format]'
a line of output
```
```python
visionattn = 1
```
"""


def test_wrong_commands_are_found_and_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tools").symlink_to(ROOT / "tools")
    found = commands_of_page(ROOT / "README.md", PAGE)
    assert len(found) == 11 and "--data.img_sise 32 --epochs 1 " in found[3].text
    assert found[0].words() == ["visionattn", "train", "--epochs", "two"]
    for command in found:
        with pytest.raises((Exception, SystemExit)) as error:
            parse_command(command.words())
        assert getattr(error.value, "code", 1) != 0, command


def test_every_flag_in_a_sentence_is_an_option(capsys):
    known = {"dependency", "every"}  # of Slurm, and of tests/malformed
    known |= {flag[2:].replace("-", "_") for flag in get_args_parser()._option_string_actions}
    for name in SUBCOMMANDS:
        for words in [[word] for word in COMMANDS] if name == "benchmark" else [[]]:
            with pytest.raises(SystemExit):
                main([name, *words, "--help"])
            known |= set(re.findall(r"--([\w.]+)", capsys.readouterr().out))
    unknown = []
    for page in PAGES:
        text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.S | re.M)
        for flag in re.findall(r"`--([A-Za-z][\w.-]*)", text):
            name = flag.rstrip(".").replace("-", "_")
            if not any(name == each or name.startswith(f"{each}.") for each in known):
                unknown.append((str(page.relative_to(ROOT)), flag))
    assert unknown == []
