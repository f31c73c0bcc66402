"""Files and folders are written completely or not at all; locks keep others out; digests name contents."""

import hashlib
import os
import shutil
from pathlib import Path

import pytest

from tests.helpers import user_error
from vaswani_transformer.support.errors import OutputError, UserError
from vaswani_transformer.support.files import (
    TextDigest,
    atomic_folder,
    check_new_folder,
    digest_of_file,
    digest_of_model,
    free_megabytes,
    lock,
    read_errors,
    read_json,
    staged_files,
    write_atomically,
    write_errors,
)


def write_model(folder: Path, text: str = "new") -> None:
    (folder / "config.json").write_text(text)


def test_folder_appears_at_the_end_and_not_before(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "a" / "b") as folder:
        write_model(folder)
        assert not (tmp_path / "a" / "b").exists()
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]
    assert (tmp_path / "a" / "b" / "config.json").read_text() == "new"


def test_file_that_cannot_move_into_its_folder_leaves_none_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[Path] = []

    def move(path: Path, target: Path) -> Path:
        if len(moved) == 2:
            raise OSError(5, "Input/output error")
        moved.append(target)
        return Path(shutil.move(path, target))

    monkeypatch.setattr(Path, "replace", move)

    def stage() -> None:
        with staged_files(tmp_path, last="a") as staging:
            assert staging.parent == tmp_path  # a file moves within a disk only
            for name in "abcd":
                (staging / name).write_text(name)

    with pytest.raises(OSError, match="Input/output"):
        stage()
    assert [path.name for path in moved] == ["b", "c"]
    assert not list(tmp_path.iterdir())


def test_folder_below_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with user_error(r"file/a/b: \S+file is not a writable folder; name a folder elsewhere"):
        check_new_folder(tmp_path / "file" / "a" / "b", force=True)


def test_mount_point_is_an_error_before_any_work() -> None:
    with user_error("is a mount point, whose place no new folder can take; name a folder in it"):
        check_new_folder(Path(Path.cwd().anchor))


def test_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with atomic_folder(tmp_path / "out") as folder:
        write_model(folder)
    assert (tmp_path / "out" / "config.json").is_file()


def test_folder_of_a_killed_process_with_the_same_number_is_no_obstacle(tmp_path: Path) -> None:
    left = tmp_path / f".out.new-{os.getpid()}"
    left.mkdir()
    with atomic_folder(tmp_path / "out") as folder:
        write_model(folder)
    assert sorted(tmp_path.iterdir()) == [left, tmp_path / "out"]


@pytest.mark.parametrize("exists", [False, True])
def test_link_stays_and_leads_to_the_new_folder(tmp_path: Path, exists: bool) -> None:
    real, link = tmp_path / "disk" / "out", tmp_path / "out"
    if exists:
        real.mkdir(parents=True)
    link.symlink_to(real, target_is_directory=True)
    with atomic_folder(link) as folder:
        write_model(folder)
    assert link.is_symlink()
    assert [path.name for path in real.iterdir()] == ["config.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "out"]


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_error_leaves_the_folder_as_it_was(tmp_path: Path, error: type[BaseException], force: bool) -> None:
    if force:
        with atomic_folder(tmp_path / "out") as folder:
            write_model(folder, "old")

    def fail() -> None:
        with atomic_folder(tmp_path / "out", force) as folder:
            write_model(folder)
            raise error

    with pytest.raises(error):
        fail()
    assert [path.name for path in tmp_path.iterdir()] == (["out"] if force else [])
    assert not force or (tmp_path / "out" / "config.json").read_text() == "old"


def test_force_replaces_the_complete_model(tmp_path: Path) -> None:
    for name in ("first", "second"):
        with atomic_folder(tmp_path / "out", force=True) as folder:
            write_model(folder, name)
            (folder / name).touch()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "second"]


def test_folder_without_a_model_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    for path, force, message in [
        (tmp_path, False, "the folder is in use; name another, or replace the model in it with --force"),
        (tmp_path, True, r"the folder has no config\.json, so it holds no model to replace"),
        (tmp_path / "notes.txt", True, "is a file; name a folder"),
    ]:
        with user_error(message), atomic_folder(path, force):
            pass
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


FULL = "No space left on device (os error 28)"


def hiding(error: Exception, later: Exception) -> Exception:
    """Return an error that was raised while another one was."""
    later.__context__ = error
    return later


@pytest.mark.parametrize(
    ("error", "expected", "message"),
    [
        (OSError(28, "No space left", "other"), OutputError, r"^out: cannot be written: No space left; make room\.$"),
        (RuntimeError("torn"), OutputError, r"^out: cannot be written: torn; make room\.$"),
        (Exception(FULL), OutputError, r"^out: cannot be written: No space"),  # of a library
        (hiding(OSError(28, "No space left"), ValueError("closed")), OutputError, "^out: cannot be written: No space"),
        (hiding(FileNotFoundError(2, "No such file"), ValueError("no number")), ValueError, "^no number$"),
        (UserError(f"in: cannot be read: {FULL}"), UserError, "^in: cannot be read"),
        (KeyError("key"), KeyError, "^'key'$"),
        (BrokenPipeError("closed"), BrokenPipeError, "^closed$"),
    ],
)
def test_failed_write_is_an_output_error_and_another_failure_is_not(
    error: Exception, expected: type[Exception], message: str
) -> None:
    with pytest.raises(expected, match=message), write_errors("out", "make room", RuntimeError):
        raise error


def test_failed_read_is_a_user_error() -> None:
    with user_error(r"^in: cannot be read: Is a directory; name a"), read_errors("in"):
        raise IsADirectoryError(21, "Is a directory")


def test_failed_write_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_atomically(path, "ä")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "\ud800")
    assert path.read_text(encoding="utf-8") == "ä"


def test_lock_keeps_others_out_until_the_file_is_closed(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    path = tmp_path / "a"
    with path.open("a") as first:
        lock(first, "taken")
        with path.open("a") as second, user_error(r"^taken$"):
            lock(second, "taken")
    with path.open("a") as third:
        lock(third, "taken")


def test_missing_locks_are_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fcntl, warnings = pytest.importorskip("fcntl"), []
    monkeypatch.setattr(fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError(38, "not implemented")))
    monkeypatch.setattr(
        "vaswani_transformer.support.files.logger.warning", lambda text, *values: warnings.append(text % values)
    )
    with (tmp_path / "a").open("a") as file:
        lock(file, "taken")
    assert len(warnings) == 1
    assert "its file system has no locks" in warnings[0]


def test_digest_of_texts_is_that_of_their_bytes_with_zeros() -> None:
    digest = TextDigest()
    for text in ("a", "", "ä"):
        digest.add(text)
    assert (digest.count, digest.hexdigest()) == (3, hashlib.sha256(b"a\0\0\xc3\xa4\0").hexdigest())


def test_digest_of_a_file_has_its_size(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    assert digest_of_file(tmp_path / "a") == [3, hashlib.sha256(b"abc").hexdigest()]


def test_digest_of_a_model_changes_with_the_files_of_the_model_only(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "config.json").write_text("{}")
    before = digest_of_model(tmp_path)
    (tmp_path / "README.md").write_text("a card")
    for name in ("results.json", "trainer_state.json", "translations.json", "out.txt", "out.txt.record"):
        (tmp_path / name).write_text("what was made by the model")
    (tmp_path / "checkpoints").mkdir()
    assert digest_of_model(tmp_path) == before
    for name in ("model.safetensors", "generation_config.json", "tokenizer.json", "merges.txt", "model.py"):
        (tmp_path / name).write_bytes(b"other")
        assert digest_of_model(tmp_path) != before
        before = digest_of_model(tmp_path)


def test_free_space_is_that_of_the_nearest_folder(tmp_path: Path) -> None:
    assert free_megabytes(tmp_path / "a" / "b") > 0


def test_replaced_folder_comes_back_where_the_new_one_cannot_take_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename

    def fail_for_the_new_one(path: Path, target: Path) -> Path:
        if ".new-" in path.name:
            raise OSError("the disk is gone")
        return rename(path, target)

    with atomic_folder(tmp_path / "out") as folder:
        write_model(folder, "old")
    monkeypatch.setattr(Path, "rename", fail_for_the_new_one)
    with pytest.raises(OSError, match="the disk is gone"), atomic_folder(tmp_path / "out", force=True) as folder:
        write_model(folder)
    assert (tmp_path / "out" / "config.json").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_field_of_another_type_is_an_error_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"sizes": [1]}')
    assert read_json(tmp_path / "a.json", "restore it.", sizes=list) == {"sizes": [1]}
    with user_error(r"a\.json: sizes is damaged; got \[1\], expected dict; restore it\.$"):
        read_json(tmp_path / "a.json", "restore it.", sizes=dict)
