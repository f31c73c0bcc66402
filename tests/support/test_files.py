"""Files and folders are written completely or not at all."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.commands import user_error
from tests.models import model_of_pairs
from vaswani_transformer.support.errors import OutputError, UserError
from vaswani_transformer.support.files import atomic_folder, staged_files, write_atomically, write_errors


def write_model(folder: Path, text: str = "new") -> None:
    (folder / "config.json").write_text(text)


def test_folder_appears_at_the_end_and_not_before(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "a" / "b") as folder:
        write_model(folder)
        assert not (tmp_path / "a" / "b").exists()
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]
    assert (tmp_path / "a" / "b" / "config.json").read_text() == "new"


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
        (tmp_path, False, "the folder is in use; choose a different one, or replace the model in it with --force"),
        (tmp_path, True, r"the folder does not contain a model \(config\.json is missing\)"),
        (tmp_path / "notes.txt", True, "is a file; choose a folder"),
    ]:
        with user_error(message), atomic_folder(path, force):
            pass
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("error", "expected", "message"),
    [
        (OSError(28, "No space left", "other"), OutputError, r"^out: cannot be written: No space left; make room\.$"),
        (RuntimeError("torn"), RuntimeError, "^torn$"),
        (UserError("in: cannot be read"), UserError, "^in: cannot be read"),
        (KeyError("key"), KeyError, "^'key'$"),
        (BrokenPipeError("closed"), BrokenPipeError, "^closed$"),
    ],
)
def test_failed_write_is_an_output_error_and_another_failure_is_not(
    error: Exception, expected: type[Exception], message: str
) -> None:
    with pytest.raises(expected, match=message), write_errors("out", "make room"):
        raise error


@pytest.mark.parametrize("library", ["torch", "safetensors", "tokenizers"])
def test_full_disk_under_a_library_is_an_output_error(tmp_path: Path, library: str) -> None:
    """Their exceptions have no common class; a limit of a file's size has the effect of a full disk."""
    resource = pytest.importorskip("resource")  # not on Windows
    weights = {"x": torch.ones(2000)}
    save = {
        "torch": lambda: torch.save(weights, tmp_path / "x.pt"),
        "safetensors": lambda: save_file(weights, tmp_path / "x.safetensors"),
        "tokenizers": lambda: model_of_pairs()[1].save_pretrained(tmp_path),
    }[library]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, limits[1]))
    try:
        with user_error(r"^out: cannot be written: .*; make room\.$"), write_errors("out", "make room"):
            save()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_failed_write_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_atomically(path, "ä")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "\ud800")
    assert path.read_text(encoding="utf-8") == "ä"


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


def test_staged_files_replace_those_of_a_folder_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")

    def fail() -> None:
        with staged_files(tmp_path) as staging:
            (staging / "a").write_text("torn")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert (tmp_path / "a").read_text() == "old"
    with staged_files(tmp_path) as staging:
        (staging / "a").write_text("new")
        (staging / "b").touch()
    assert (tmp_path / "a").read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
