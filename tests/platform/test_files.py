"""A file is replaced as a whole, or not at all."""

import pytest

from jaxembed.platform.files import is_copy_of, remove_unfinished, replacing, unfinished


def test_the_new_file_takes_the_place_of_the_old_one_at_the_end(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("old")
    with replacing(path) as partial:
        partial.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failure_keeps_the_old_file_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("old")

    def write() -> None:
        with replacing(path) as partial:
            partial.write_text("ne")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_two_that_write_at_once_do_not_meet(tmp_path):
    path = tmp_path / "a.json"
    with replacing(path) as first, replacing(path) as second:
        assert first != second
        first.write_text("1")
        second.write_text("2")
    assert path.read_text() == "1"  # the block that ended last


def test_a_file_and_its_unfinished_copies_are_told_from_all_others(tmp_path):
    with replacing(tmp_path / "a.json") as partial:
        partial.write_text("new")
        assert is_copy_of(partial, "a.json")
        assert not is_copy_of(partial, "b.json")
    assert is_copy_of(tmp_path / "a.json", "a.json")
    assert not is_copy_of(tmp_path / "aa.json", "a.json")


def test_only_what_is_unfinished_is_removed_when_the_process_ends(tmp_path):
    finished, folder, file = (tmp_path / name for name in ("finished", "folder", "file"))
    with unfinished(finished):
        finished.touch()
    with unfinished(folder), unfinished(file):
        folder.mkdir()
        (folder / "part").touch()
        file.touch()
        remove_unfinished()
        assert list(tmp_path.iterdir()) == [finished]
