"""A folder that takes another one's place: a kill at any moment leaves the one or the other."""

import os

import pytest

from visionattn.cli.files import whole_folder


def replace_folder(target, content):
    with whole_folder(target, replaces="mark") as place:
        (place / "mark").write_text(content)


def killed_at(number, target):
    """Replace a folder in a process that is killed before its rename of this number."""
    process = os.fork()
    if process:
        return os.waitpid(process, 0)[1]
    real, seen = os.rename, [0]

    def rename(old, new):
        seen[0] += 1
        if seen[0] == number:
            os._exit(9)
        real(old, new)

    os.rename = rename
    try:
        replace_folder(target, "new")
    finally:
        os._exit(0)


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("name", ["folder", "ä" * 120])
def test_a_kill_amid_the_renames_leaves_the_former_folder(tmp_path, number, name):
    target = tmp_path / name
    replace_folder(target, "old")
    assert killed_at(number, target)
    with pytest.raises(ValueError, match="exists"), whole_folder(target):
        pass  # without leave to replace it, the former folder stays
    assert (target / "mark").read_text() == "old"
    replace_folder(target, "newer")
    assert (target / "mark").read_text() == "newer" and os.listdir(tmp_path) == [name]


def test_what_a_kill_left_beside_the_new_folder_goes(tmp_path, monkeypatch):
    target = tmp_path / "folder"
    replace_folder(target, "old")
    with monkeypatch.context() as patch:
        patch.setattr("visionattn.cli.files.shutil.rmtree", lambda *args, **kwargs: None)
        replace_folder(target, "new")
    assert len(os.listdir(tmp_path)) == 2 and (target / "mark").read_text() == "new"
    replace_folder(target, "newer")
    assert os.listdir(tmp_path) == ["folder"] and (target / "mark").read_text() == "newer"
