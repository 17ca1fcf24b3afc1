"""Files and folders that appear whole, places that are refused, and locks."""

import errno
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from visionattn.cli.files import (
    add_line,
    added_to,
    check_folder,
    check_free,
    is_unfinished,
    lock,
    locked,
    read_lines,
    unfinished,
    whole_folder,
    write_text,
    write_whole,
)

FORK = multiprocessing.get_context("fork")


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_locked_place_is_free_at_the_end_also_of_forks_that_outlive_it(tmp_path):
    path = tmp_path / "lock"
    with locked(path, "taken"):
        with pytest.raises(ValueError, match="^somebody is running$"):
            lock(path, "somebody is running")
        fork = FORK.Process(target=time.sleep, args=(30,))
        fork.start()
    with locked(path, "taken"):
        fork.kill()
    fork.join()
    assert not path.exists()


def test_places_that_cannot_be_written_to_are_refused_with_a_way_out(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    check_folder(tmp_path / "a" / "b", "elsewhere")
    check_free(tmp_path / "new", overwrite=False)
    check_free(tmp_path / "file", overwrite=True)
    with pytest.raises(ValueError, match=r"file is a file, so .*file/a cannot be a folder; away$"):
        check_folder(tmp_path / "file" / "a", "away")
    for path, overwrite, part in (
        ("file", False, "file exists; pass --overwrite to replace it"),
        ("no/file", True, "no folder .*no for file"),
        (".", True, "expected a file to write, got the folder"),
    ):
        with pytest.raises(ValueError, match=part):
            check_free(tmp_path / path, overwrite)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ValueError, match=f"no permission to write to {tmp_path}; away$"):
        check_folder(tmp_path / "a", "away")
    with pytest.raises(ValueError, match="new cannot be written"):
        check_free(tmp_path / "new", overwrite=True)


def test_what_is_no_regular_file_is_refused_by_every_writer_and_stays(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    writers = (
        lambda path: write_text(path, "x"),
        lambda path: add_line(path, {"a": 1}),
        lambda path: added_to(path),
        lambda path: lock(path, "taken"),
    )
    for path in (*(tmp_path / name for name in ("pipe", "link", "folder")), Path("/dev/null")):
        before = os.stat(path)
        for write in writers:
            with pytest.raises(OSError, match="a device, a pipe|directory") as raised:
                write(path)
            assert raised.value.filename == str(path)
        assert os.path.samestat(os.stat(path), before)
    assert unfinished(tmp_path) == []


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
    add_line(tmp_path / "lines", {"a": 1})
    assert done == [("on disk", 4), ("named", 4), ("on disk", 9)]


def test_a_link_stays_and_the_file_behind_it_is_replaced_also_where_there_is_none_yet(tmp_path):
    (tmp_path / "behind").mkdir()
    target, link = tmp_path / "behind" / "file", tmp_path / "link"
    link.symlink_to(Path("behind") / "file")
    for text in ("new", "newer"):
        write_text(link, text)
        assert link.is_symlink() and target.read_text() == text
    assert names(tmp_path / "behind") == ["file"]
    link.unlink()
    link.symlink_to(tmp_path / "nowhere" / "file")
    with pytest.raises(FileNotFoundError) as raised:
        write_text(link, "x")
    assert raised.value.filename == str(link) and link.is_symlink()


def test_unfinished_files_have_random_hidden_names_and_go_with_their_writer(tmp_path):
    seen, mine = [], [tmp_path / name for name in (".out.tmp", "out.visionattn.tmp")]
    for path in mine:
        path.write_text("mine")

    def write(place):
        seen.append(place.name)
        write_text(target, "of another writer, who leaves this one alone")
        assert place.read_text() == "" and is_unfinished(place)

    target = tmp_path / ("out " * 60)
    for _ in range(3):
        write_whole(target, write)
    assert len(set(seen)) == 3 and all(len(name) < 100 for name in seen)
    left = tmp_path / seen[0]
    left.write_text("half")  # as a process that was killed leaves it
    write_text(target, "x")
    assert not left.exists()
    assert all(path.read_text() == "mine" and not is_unfinished(path) for path in mine)


def test_files_have_the_usual_permissions_and_those_that_are_there_keep_theirs(tmp_path):
    def private(place):  # as safetensors does, which puts another file in its place
        place.unlink()
        os.close(os.open(place, os.O_CREAT | os.O_WRONLY, 0o600))

    for name in ("usual", "old"):
        (tmp_path / name).touch()
    (tmp_path / "old").chmod(0o640)
    for name, like in (("new", "usual"), ("old", "old")):
        wanted = (tmp_path / like).stat().st_mode
        for write in (private, lambda place: place.write_text("x")):
            write_whole(tmp_path / name, write)
            assert (tmp_path / name).stat().st_mode == wanted


def test_a_line_behind_a_torn_one_is_whole(tmp_path):
    path = tmp_path / "rows"
    for number in range(2):
        add_line(path, {"number": number})
    os.truncate(path, path.stat().st_size - 2)
    for number in range(2, 4):
        add_line(path, {"number": number})
    assert read_lines(path) == [{"number": number} for number in (0, 2, 3)]
    assert path.read_bytes().count(b"\n") == 4


def test_a_folder_is_there_whole_or_not_at_all_and_replaces_nothing(tmp_path):
    target, usual = tmp_path / "folder", tmp_path / "usual"
    usual.touch()
    with whole_folder(target) as place:
        (place / "a").write_text("x")
        (place / "a").chmod(0o600)
        assert not target.exists() and is_unfinished(place) and unfinished(tmp_path) == []
    assert (target / "a").stat().st_mode == usual.stat().st_mode
    for path, part in ((target, "folder exists"), (tmp_path / "no" / "b", "no folder .*no for b")):
        with pytest.raises(ValueError, match=part), whole_folder(path):
            raise AssertionError("begun")
    with pytest.raises(ValueError, match="later exists"), whole_folder(tmp_path / "later"):
        (tmp_path / "later").mkdir()
    assert names(tmp_path) == ["folder", "later", "usual"]


def test_a_folder_is_replaced_where_it_holds_the_file_that_says_so(tmp_path, monkeypatch):
    target, rename = tmp_path / "out", os.rename

    def write(text, **options):
        with whole_folder(target, **options) as place:
            (place / "mark").write_text(text)

    write("a")
    with pytest.raises(ValueError, match="out exists"):
        write("b", replaces="other")
    write("b", replaces="mark")
    assert (target / "mark").read_text() == "b" and names(tmp_path) == ["out"]

    def refused(old, new):
        if new == target and Path(old, "mark").read_text() == "c":
            raise PermissionError(errno.EACCES, "not now", str(old))
        rename(old, new)

    monkeypatch.setattr(os, "rename", refused)
    with pytest.raises(PermissionError):
        write("c", replaces="mark")
    assert (target / "mark").read_text() == "b" and names(tmp_path) == ["out"]


def replace_folder(target, text, renames=None):
    """Replace a folder; the process is killed before rename number ``renames``."""
    rename, left = os.rename, iter(range(renames or 3))

    def counted(old, new):
        if next(left) + 1 == renames:
            os.kill(os.getpid(), signal.SIGKILL)
        rename(old, new)

    with pytest.MonkeyPatch.context() as patch, whole_folder(target, replaces="mark") as place:
        (place / "mark").write_text(text)
        patch.setattr(os, "rename", counted)


@pytest.mark.parametrize("renames", [1, 2])
def test_a_kill_between_the_renames_leaves_the_former_folder(tmp_path, renames):
    target = tmp_path / ("ä" * 120)
    replace_folder(target, "old")
    process = FORK.Process(target=replace_folder, args=(target, "new", renames))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    with pytest.raises(ValueError, match="exists"), whole_folder(target):
        pass  # not allowed to replace it
    assert (target / "mark").read_text() == "old"
    replace_folder(target, "newer")
    assert (target / "mark").read_text() == "newer" and names(tmp_path) == [target.name]
