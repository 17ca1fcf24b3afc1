"""Files that appear whole, places that are refused, and locks, against other processes."""

import errno
import os
import subprocess
import sys

import pytest

from visionattn.cli.files import check_folder, check_free, lock, write_text, write_whole

HOLD = """
import fcntl, sys
file = open(sys.argv[1], "a")
try:
    fcntl.{call}(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
except OSError:
    sys.exit("taken")
print("held", flush=True)
sys.stdin.read()
"""
CALLS = {True: "flock", False: "lockf"}


def other(path, inherited):
    """Another process that takes the lock by the system's own call, and what it says of it."""
    command = [sys.executable, "-c", HOLD.format(call=CALLS[inherited]), str(path)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    return process, process.stdout.readline().strip()


def end(process):
    process.communicate("")
    return process.returncode


@pytest.mark.parametrize("inherited", [True, False])
def test_a_lock_keeps_others_out_until_it_is_closed(tmp_path, inherited):
    path = tmp_path / "lock"
    with lock(path, "taken", inherited=inherited):
        process, said = other(path, inherited)
        assert (said, end(process)) == ("", 1)
    process, said = other(path, inherited)
    assert said == "held"
    with pytest.raises(ValueError, match="^somebody is at work$"):
        lock(path, "somebody is at work", inherited=inherited)
    assert end(process) == 0
    lock(path, "taken", inherited=inherited).close()


@pytest.mark.parametrize("inherited", [True, False])
def test_an_inherited_lock_is_also_that_of_a_process_that_has_the_file(tmp_path, inherited):
    path = tmp_path / "lock"
    file = lock(path, "taken", inherited=inherited)
    wait = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    child = subprocess.Popen(wait, stdin=subprocess.PIPE, pass_fds=[file.fileno()])
    file.close()
    process, said = other(path, inherited)
    assert said == ("" if inherited else "held")
    end(process), child.communicate(b"")
    lock(path, "taken", inherited=inherited).close()


def test_a_file_whose_check_fails_leaves_it_and_the_previous_one_as_they_were(tmp_path):
    path, previous = tmp_path / "new", tmp_path / "old"
    for text in ("one", "two"):
        write_whole(path, lambda place, text=text: place.write_text(text), previous=previous)
    assert (path.read_text(), previous.read_text()) == ("two", "one")

    def check(place):
        assert place.read_text() == "three"
        raise OSError(errno.EIO, "does not read back")

    with pytest.raises(OSError, match="read back") as raised:
        write_whole(path, lambda place: place.write_text("three"), check=check, previous=previous)
    assert raised.value.filename == str(path) and sorted(os.listdir(tmp_path)) == ["new", "old"]
    assert (path.read_text(), previous.read_text()) == ("two", "one")


def test_an_error_names_the_file_that_was_wanted_and_not_the_one_beside_it(tmp_path):
    path = tmp_path / "nowhere" / "text"
    with pytest.raises(FileNotFoundError) as raised:
        write_text(path, "x")
    assert raised.value.filename == str(path)
    with pytest.raises(FileNotFoundError) as raised:  # of another file, which the writer reads
        write_whole(tmp_path / "copy", lambda place: path.read_text())
    assert raised.value.filename == str(path)


def test_places_that_cannot_be_written_to_are_refused_with_a_way_out(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    check_folder(tmp_path / "a" / "b", "elsewhere")
    check_free(tmp_path / "new", overwrite=False)
    check_free(tmp_path / "file", overwrite=True)
    with pytest.raises(ValueError, match=r"file is a file, so .*file/a cannot be a folder; away$"):
        check_folder(tmp_path / "file" / "a", "away")
    for path, overwrite, part in (
        ("file", False, "file exists; --overwrite replaces it"),
        ("no/file", True, "no folder .*no for file"),
        (".", True, "cannot be written"),
    ):
        with pytest.raises(ValueError, match=part):
            check_free(tmp_path / path, overwrite)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ValueError, match=f"no permission to write to {tmp_path}; away$"):
        check_folder(tmp_path / "a", "away")
    with pytest.raises(ValueError, match="new cannot be written"):
        check_free(tmp_path / "new", overwrite=True)
