"""Files that appear whole, places that are refused, and locks, against other processes."""

import errno
import multiprocessing
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from visionattn.cli import interruption
from visionattn.cli.files import (
    add_line,
    added_to,
    check_folder,
    check_free,
    is_unfinished,
    lock,
    locked,
    target_of,
    unfinished,
    whole_folder,
    write_text,
    write_whole,
)

HOLD = """
import fcntl, sys
file = open(sys.argv[1], "a")
try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
except OSError:
    sys.exit("taken")
print("held", flush=True)
sys.stdin.read()
"""


def other(path):
    """Another process that takes the lock by the system's own call, and what it says of it."""
    command, pipe = [sys.executable, "-c", HOLD, str(path)], subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    return process, process.stdout.readline().strip()


def end(process):
    process.communicate("")
    return process.returncode


def test_a_lock_keeps_others_out_until_all_that_have_its_file_close_it(tmp_path):
    path = tmp_path / "lock"
    file = lock(path, "taken")
    wait = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    child = subprocess.Popen(wait, stdin=subprocess.PIPE, pass_fds=[file.fileno()])
    file.close()
    with pytest.raises(ValueError, match="^somebody is at work$"):
        lock(path, "somebody is at work")
    child.communicate(b"")
    lock(path, "taken").close()


def test_what_is_locked_is_so_for_others_until_its_end_and_not_by_forks_that_outlive_it(tmp_path):
    path = tmp_path / "lock"
    process, said = other(path)
    assert said == "held"
    with (
        pytest.raises(ValueError, match="^somebody is at work$"),
        locked(path, "somebody is at work"),
    ):
        pass
    assert end(process) == 0
    with locked(path, "taken"):
        process, said = other(path)
        assert (said, end(process)) == ("", 1)
        fork = multiprocessing.get_context("fork").Process(target=time.sleep, args=(30,))
        fork.start()
    with locked(path, "taken"):
        fork.kill()
    fork.join()
    assert not path.exists()


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


@pytest.fixture
def others(tmp_path):
    """Things in a folder that are no regular files, by what they are."""
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        (tmp_path / "link").symlink_to(tmp_path / "pipe")
        yield {name: tmp_path / name for name in ("pipe", "socket", "link")} | {
            "device": Path("/dev/null"),
            "standard output": Path("/dev/stdout"),
        }


def test_what_is_no_regular_file_is_refused_and_never_replaced_by_any_writer(others, capfd):
    writers = {
        "whole": lambda path: write_text(path, "x"),
        "free": lambda path: check_free(path, overwrite=True),
        "line": lambda path: add_line(path, {"a": 1}),
        "end": lambda path: added_to(path),
        "lock": lambda path: lock(path, "taken"),
    }
    for what, path in others.items():
        kind = stat.S_IFMT(os.stat(path).st_mode)
        for name, write in writers.items():
            with pytest.raises(OSError, match="a device, a pipe|command prints") as raised:
                write(path)
            assert raised.value.filename == str(path), (what, name)
            assert stat.S_IFMT(os.stat(path).st_mode) == kind, (what, name)
    assert os.stat("/dev/null").st_rdev == os.makedev(1, 3)
    assert not unfinished(others["pipe"].parent) and capfd.readouterr().out == ""


def test_a_folder_is_refused_and_stays(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        write_text(tmp_path / "folder", "x")
    assert os.listdir(tmp_path) == ["folder"]


PRINTING = """
import sys
from visionattn.cli.files import write_text
stream = getattr(sys, sys.argv[2])
print("said", flush=True, file=stream)
try:
    write_text(sys.argv[1], "x")
except OSError as error:
    print(error.strerror, file=stream)
"""


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_the_file_to_which_a_command_prints_is_not_replaced(tmp_path, started_quickly, stream):
    for given in (str(tmp_path / "out"), f"/dev/{stream}"):
        with open(tmp_path / "out", "w") as out:
            command = [sys.executable, "-c", PRINTING, given, stream]
            done = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL} | {stream: out}
            subprocess.run(command, **done, check=True, cwd=Path(__file__).parents[2])
        said = (tmp_path / "out").read_text()
        assert said == "said\nis where this command prints; name another file\n"
    assert os.listdir(tmp_path) == ["out"]


def test_what_is_written_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    done, sync, replace = [], os.fsync, os.replace

    def synced(descriptor):
        done.append(("on disk", os.fstat(descriptor).st_size))
        sync(descriptor)

    def replaced(old, new):
        done.append(("named", os.stat(old).st_size))
        replace(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    write_text(tmp_path / "out", "four")
    assert done == [("on disk", 4), ("named", 4)]
    add_line(tmp_path / "lines", {"a": 1})
    assert done[2:] == [("on disk", 9)]


def test_a_process_that_is_ended_from_aside_leaves_nothing_half_written(tmp_path):
    def ended(place):
        place.write_text("half")
        for undo in reversed(interruption._undone):
            undo()
        assert os.listdir(tmp_path) == []
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "out", ended)
    assert os.listdir(tmp_path) == [] and not interruption._undone


def test_a_link_named_like_what_is_being_written_is_not_touched(tmp_path):
    link = tmp_path / f".out.{'a' * 16}.visionattn.tmp"
    (tmp_path / "theirs").write_text("theirs")
    link.symlink_to(tmp_path / "theirs")
    write_text(tmp_path / "out", "x")
    assert link.is_symlink() and link.read_text() == "theirs"


def test_a_link_stays_and_the_file_behind_it_is_replaced_also_where_there_is_none_yet(tmp_path):
    (tmp_path / "behind").mkdir()
    target, link = tmp_path / "behind" / "file", tmp_path / "link"
    link.symlink_to(Path("behind") / "file")
    for text in ("new", "newer"):
        check_free(link, overwrite=True)
        write_text(link, text)
        assert link.is_symlink() and target.read_text() == text and not target.is_symlink()
    assert os.listdir(tmp_path / "behind") == ["file"]
    with pytest.raises(ValueError, match="link exists; --overwrite replaces it"):
        check_free(link, overwrite=False)
    link.unlink()
    link.symlink_to(tmp_path / "nowhere" / "file")
    with pytest.raises(ValueError, match=f"no folder {tmp_path}/nowhere for link"):
        check_free(link, overwrite=True)
    with pytest.raises(FileNotFoundError) as raised:
        write_text(link, "x")
    assert raised.value.filename == str(link) and link.is_symlink()
    link.unlink()
    link.symlink_to(link)
    with pytest.raises(OSError, match="Too many levels"):
        write_text(link, "x")


def test_what_others_have_beside_a_file_is_not_touched(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("theirs")
    (tmp_path / "out.tmp").symlink_to(elsewhere)
    mine = [tmp_path / name for name in ("out.csv.tmp", ".out.tmp", ".out.abc.visionattn.tmp")]
    for path in mine:
        path.write_text("mine")
    before = sorted(os.listdir(tmp_path))
    for name in ("out", "out.csv"):
        write_text(tmp_path / name, "x")
    assert sorted(os.listdir(tmp_path)) == sorted([*before, "out", "out.csv"])
    assert elsewhere.read_text() == "theirs" and {path.read_text() for path in mine} == {"mine"}


def test_names_of_what_is_being_written_are_random_hidden_and_made_anew(tmp_path, monkeypatch):
    seen = []

    def write(place):
        seen.append(place.name)
        assert place.read_text() == "" and is_unfinished(place) and place.name[0] == "."
        place.write_text("x")

    for _ in range(3):
        write_whole(tmp_path / ("long name " * 24), write)
    assert len(set(seen)) == 3 and all(len(name) < 100 for name in seen)
    monkeypatch.setattr("secrets.token_hex", lambda count: "0" * 2 * count)
    taken = tmp_path / ".out.0000000000000000.visionattn.tmp"
    taken.symlink_to(tmp_path / "theirs")
    with pytest.raises(FileExistsError):
        write_text(tmp_path / "out", "x")
    assert taken.is_symlink() and not (tmp_path / "theirs").exists()


def test_files_have_the_usual_permissions_and_those_that_are_there_keep_theirs(tmp_path):
    def private(place):  # as safetensors does, which puts another file in its place
        place.unlink()
        os.close(os.open(place, os.O_CREAT | os.O_WRONLY, 0o600))

    def looked_at(place):
        assert stat.S_IMODE(place.stat().st_mode) & 0o077 == 0

    before = os.umask(0o027)
    try:
        for name in ("new", "old", "secret"):
            path = tmp_path / name
            if name != "new":
                path.write_text("")
                path.chmod(0o664 if name == "old" else 0o400)
            wanted = 0o640 if name == "new" else stat.S_IMODE(path.stat().st_mode)
            for write in (private, lambda place: place.write_text("x")):
                write_whole(path, write)
                assert stat.S_IMODE(path.stat().st_mode) == wanted, name
        write_whole(tmp_path / "secret", looked_at)
    finally:
        os.umask(before)


KILLED = """
import os, signal, sys
from visionattn.cli.files import write_whole
def write(place):
    place.write_text("half")
    print(place.name, flush=True)
    if sys.argv[2] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.stdin.read()
write_whole(sys.argv[1], write)
"""


def test_what_a_killed_process_left_goes_when_the_file_is_written_again_and_that_of_a_living_stays(
    tmp_path, started_quickly
):
    path, pipe = tmp_path / "out", subprocess.PIPE

    def writer(how):
        words = [sys.executable, "-c", KILLED, str(path), how]
        root = Path(__file__).parents[2]
        process = subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True, cwd=root)
        return process, process.stdout.readline().strip()

    killed, left = writer("killed")
    assert killed.wait() == -signal.SIGKILL and os.listdir(tmp_path) == [left]
    killed.communicate()
    write_text(tmp_path / "other", "x")
    assert left in os.listdir(tmp_path)
    living, at_work = writer("living")
    assert sorted(os.listdir(tmp_path)) == [at_work, "other"]
    write_text(path, "mine")
    assert path.read_text() == "mine" and at_work in os.listdir(tmp_path)
    living.communicate("")
    assert living.returncode == 0 and path.read_text() == "half"
    assert sorted(os.listdir(tmp_path)) == ["other", "out"]


def test_a_lock_whose_file_was_deleted_meanwhile_is_taken_anew(tmp_path, monkeypatch):
    import fcntl

    path, real = tmp_path / "lock", fcntl.flock

    def late(file, how):
        if path.exists() and not late.done:  # whoever had it deletes it before we have it
            late.done = path.unlink() is None
        return real(file, how)

    late.done = False
    monkeypatch.setattr(fcntl, "flock", late)
    with locked(path, "taken"):
        assert late.done and path.exists()
        process, said = other(path)
        assert (said, end(process)) == ("", 1)
    assert not path.exists()


def test_a_line_that_the_disk_has_no_room_for_is_an_error_with_the_name_of_its_file(tmp_path):
    path, (soft, hard) = tmp_path / "rows", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(OSError) as raised:
            add_line(path, {"text": "x" * 60_000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert raised.value.filename == str(path)


def test_only_files_count_as_targets(tmp_path):
    assert target_of(tmp_path / "new") == tmp_path / "new"
    assert target_of(str(tmp_path / "file" / "new")) == tmp_path / "file" / "new"


def test_a_folder_is_there_whole_or_not_at_all(tmp_path):
    target = tmp_path / "folder"
    with whole_folder(target) as place:
        (place / "a").write_text("x")
        (place / "a").chmod(0o600)
        assert not target.exists() and place.parent == tmp_path and is_unfinished(place)
        assert unfinished(tmp_path) == [] and unfinished(tmp_path, folders=True) == [place]
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    usual = tmp_path / "usual"
    usual.touch()
    assert (target / "a").stat().st_mode == usual.stat().st_mode
    with (
        pytest.raises(OSError, match="No space left") as error,
        whole_folder(tmp_path / "b") as place,
    ):
        (place / "c").write_text("x")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(place / "d"))
    assert error.value.filename == str(tmp_path / "b")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "usual"]


def test_a_folder_replaces_nothing_not_even_what_appears_meanwhile(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "dangling").symlink_to("gone")
    for name in ("empty", "dangling"):
        with pytest.raises(ValueError, match=f"{name} exists"), whole_folder(tmp_path / name):
            raise AssertionError("begun")
    with pytest.raises(ValueError, match="later exists"), whole_folder(tmp_path / "later") as place:
        (place / "a").write_text("x")
        (tmp_path / "later").mkdir()
    assert os.listdir(tmp_path / "later") == []
    with pytest.raises(ValueError, match="no folder .*no for b"), whole_folder(tmp_path / "no/b"):
        raise AssertionError("begun")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "empty", "later"]


def fill(path, there):
    with whole_folder(path) as place:
        (place / "a").write_text("x")
        there.send(place)
        there.recv()


def test_what_a_killed_process_left_of_a_folder_goes_and_a_living_one_keeps_its_own(tmp_path):
    places, others, fork = [], [], multiprocessing.get_context("fork")
    for _ in range(2):
        here, there = fork.Pipe()
        process = fork.Process(target=fill, args=(tmp_path / "folder", there), daemon=True)
        process.start()
        others.append((process, here))
        places.append(here.recv())
    others[0][0].kill()
    others[0][0].join()
    with whole_folder(tmp_path / "folder") as place:
        assert not places[0].exists() and (places[1] / "a").exists() and place not in places
    others[1][1].send("go on")
    others[1][0].join()
    assert others[1][0].exitcode == 1  # the name is taken by now
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_folder_is_replaced_where_it_holds_the_file_that_says_so(tmp_path, monkeypatch):
    target = tmp_path / "out"

    def write(text, **options):
        with whole_folder(target, **options) as place:
            (place / "mark").write_text(text)
            (place / text).write_text(text)

    write("a")
    with pytest.raises(ValueError, match="out exists"):
        write("b")
    with pytest.raises(ValueError, match="out exists"):
        write("b", replaces="other")
    assert sorted(os.listdir(target)) == ["a", "mark"]
    write("b", replaces="mark")
    assert sorted(os.listdir(target)) == ["b", "mark"] and os.listdir(tmp_path) == ["out"]
    with (
        pytest.raises(RuntimeError),
        whole_folder(target, replaces="mark") as place,
    ):
        (place / "mark").write_text("c")
        raise RuntimeError
    assert (target / "mark").read_text() == "b" and os.listdir(tmp_path) == ["out"]
    # Where the new folder does not get the name, the old one keeps it.
    rename = os.rename

    def refused(source, goal):
        if goal == target and (source / "c").exists():
            raise OSError(5, "no")
        rename(source, goal)

    monkeypatch.setattr(os, "rename", refused)
    with pytest.raises(OSError, match="no"):
        write("c", replaces="mark")
    assert (target / "mark").read_text() == "b" and os.listdir(tmp_path) == ["out"]
    (tmp_path / "link").symlink_to(target)
    with (
        pytest.raises(ValueError, match="link exists"),
        whole_folder(tmp_path / "link", replaces="mark"),
    ):
        pass
