"""A folder is written whole or not at all, and replaces nothing but a model."""

import pytest

from vaswani_transformer.folders import loading, new_folder, refuse_folder


def write(folder, text="new"):
    (folder / "config.json").write_text(text)


def test_the_folder_stands_there_at_the_end_and_not_before(tmp_path):
    with new_folder(tmp_path / "a" / "b") as folder:
        write(folder)
        assert not (tmp_path / "a" / "b").exists()
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]
    assert (tmp_path / "a" / "b" / "config.json").read_text() == "new"


def test_a_place_behind_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match=r"file/a/b: \S+file is no folder that may be written to; name a place in an"):
        refuse_folder(tmp_path / "file" / "a" / "b", force=True)


def test_whatever_stops_a_model_from_loading_is_told_in_a_line():
    with pytest.raises(ValueError, match=r"^some/model: cannot be loaded: KeyError$"), loading("some/model"):
        raise KeyError


def test_an_empty_folder_is_filled(tmp_path):
    (tmp_path / "out").mkdir()
    with new_folder(tmp_path / "out") as folder:
        write(folder)
    assert (tmp_path / "out" / "config.json").is_file()


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_an_error_on_the_way_leaves_what_stood_there(tmp_path, error, force):
    if force:
        with new_folder(tmp_path / "out") as folder:
            write(folder, "old")

    def fail():
        with new_folder(tmp_path / "out", force) as folder:
            write(folder)
            raise error

    with pytest.raises(error):
        fail()
    assert [path.name for path in tmp_path.iterdir()] == (["out"] if force else [])
    assert not force or (tmp_path / "out" / "config.json").read_text() == "old"


def test_force_replaces_the_whole_model(tmp_path):
    for name in ("first", "second"):
        with new_folder(tmp_path / "out", force=True) as folder:
            write(folder, name)
            (folder / name).touch()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "second"]


def test_what_is_no_model_is_never_replaced(tmp_path):
    (tmp_path / "notes.txt").touch()
    for path, force, message in [
        (tmp_path, False, "the folder is in use; name another, or replace the model in it with --force"),
        (tmp_path, True, "the folder holds no config.json, so no model that could be replaced"),
        (tmp_path / "notes.txt", True, "a file; name a folder"),
    ]:
        with pytest.raises(ValueError, match=message), new_folder(path, force):
            pass
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
