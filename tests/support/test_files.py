"""Files and folders are written completely or not at all."""

import contextlib
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from tests.commands import user_error
from tests.models import model_of_pairs
from vaswani_transformer.support.command import OutputError, UserError
from vaswani_transformer.support.files import (
    ResumableFile,
    atomic_folder,
    check_new_folder,
    staged_files,
    write_atomically,
    write_errors,
)
from vaswani_transformer.support.loading import LoadOptions


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


def test_folder_that_is_filled_meanwhile_stays(tmp_path: Path) -> None:
    with user_error("the folder is in use; choose a different one"), atomic_folder(tmp_path / "out") as first:
        write_model(first, "first")
        with atomic_folder(tmp_path / "out") as second:
            write_model(second, "second")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "config.json").read_text() == "second"


def test_run_is_never_replaced(tmp_path: Path) -> None:
    write_model(tmp_path, "first")
    (tmp_path / "checkpoints").mkdir()
    with user_error("contains more than a model; got the folder checkpoints. Choose a different one"):
        check_new_folder(tmp_path, force=True)


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


SETTINGS = {"model": "m", "beams": 4}


def write_all(path: Path, texts: list[str], settings: dict[str, Any] = SETTINGS, windows: int = 99) -> bool:
    """Write each text twice as its result, in up to `windows` windows of three; return whether the file was finished.

    An interrupted file ends with a part of a window.
    """
    with contextlib.closing(ResumableFile(path, settings)) as output:
        remaining = iter(texts)
        output.skip(remaining)
        if output.is_finished:
            return True
        output.save_record()
        while window := list(itertools.islice(remaining, 3)):
            if not windows:
                output.stream.write(b"par")
                return False
            output.write(window, [text for text in window for _ in range(2)])
            windows -= 1
        output.finish()
        return False


@given(texts=st.lists(st.text("ab", max_size=3), min_size=1, max_size=10), windows=st.lists(st.integers(0, 3)))
def test_file_interrupted_anywhere_resumes_to_the_bytes_of_an_uninterrupted_one(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], windows: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("output")
    uninterrupted, path = folder / "whole", folder / "path"
    for count in windows:
        write_all(path, texts, windows=count)
    for each in (uninterrupted, path):
        write_all(each, texts)
    assert path.read_bytes() == uninterrupted.read_bytes() == "".join(f"{text}\n{text}\n" for text in texts).encode()
    assert {each.name for each in folder.iterdir()} == {"whole", "path", "whole.record", "path.record"}
    assert write_all(path, texts)


def test_changed_texts_are_an_error_and_later_ones_may_differ(tmp_path: Path) -> None:
    path, texts = tmp_path / "out", list("abcdef")
    write_all(path, texts, windows=1)
    before = b"a\na\nb\nb\nc\nc\n"
    for other in (["x", *texts[1:]], [*texts[:2], "x", *texts[3:]], texts[:2], texts[:1]):
        with user_error("out: was written from a different input: the first 3 texts differ; it stays unchanged"):
            write_all(path, other)
        assert path.read_bytes() == before
    write_all(path, [*texts[:5], "x"])
    assert path.read_text().split() == [text for text in [*texts[:5], "x"] for _ in range(2)]


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    write_all(tmp_path / "out", list("abcd"))
    return tmp_path / "out"


@pytest.mark.parametrize(
    ("settings", "texts", "message"),
    [
        ({"model": "n", "beams": None}, "abcd", r"out: was written with different settings \(model, beams\); it stays"),
        (SETTINGS, "abcde", "out: is finished, and the input has more than its 4 texts; it stays unchanged"),
    ],
)
def test_finished_file_of_other_texts_or_settings_is_an_error(
    finished: Path, settings: dict[str, Any], texts: str, message: str
) -> None:
    before = finished.read_bytes()
    with user_error(message):
        write_all(finished, list(texts), settings)
    assert finished.read_bytes() == before


@pytest.mark.parametrize(
    ("windows", "changed"),
    [(99, "a\na\nb\nb\nc\nc\nd\nd\ne\n"), (99, "a\na\n"), (1, "a\na\n")],
)
def test_file_that_another_program_made_longer_or_shorter_is_an_error(
    tmp_path: Path, windows: int, changed: str
) -> None:
    path = tmp_path / "out"
    write_all(path, list("abcd"), windows=windows)
    path.write_text(changed)
    with user_error("out: was changed by a different program; it stays unchanged"):
        write_all(path, list("abcd"))
    assert path.read_text() == changed


@pytest.mark.parametrize(
    ("leave", "problem"),
    [
        (lambda record: record.unlink(), r"cannot be read \(.*\)"),
        (lambda record: record.write_text("{"), r"cannot be read \(.*\)"),
        (lambda record: record.write_text("[1]"), "is damaged; got list, expected an object"),
    ],
)
def test_file_without_a_readable_record_is_an_error(finished: Path, leave: Callable[[Path], Any], problem: str) -> None:
    leave(finished.with_name("out.record"))
    with user_error(rf"out\.record: {problem}; its output file stays unchanged"):
        write_all(finished, list("abcd"))
    assert finished.read_text() == "a\na\nb\nb\nc\nc\nd\nd\n"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("size", 10**6, "was changed by a different program"),
        ("size", -5, "was changed by a different program"),
        ("size", 16.0, r"has a damaged record with size 16\.0"),
        ("texts", "4", "has a damaged record with texts '4'"),
        ("texts", 0, "was written from a different input"),
        ("texts", -1, "was written from a different input"),
        ("texts", 10**9, "was written from a different input"),
        ("settings", [], r"has a damaged record with settings \[\]"),
        ("layouts", None, "has a damaged record with layouts None"),
        ("is_finished", "no", "has a damaged record with is_finished 'no'"),
        ("texts_sha256", 5, "has a damaged record with texts_sha256 5"),
    ],
)
def test_damaged_record_is_an_error_and_the_file_stays_unchanged(
    finished: Path, name: str, value: object, message: str
) -> None:
    before, record = finished.read_bytes(), finished.with_name("out.record")
    for is_finished in (True, False):
        fields = json.loads(record.read_text()) | {"is_finished": is_finished} | {name: value}
        record.write_text(json.dumps(fields))
        with user_error(f"out: {message}.*; it stays unchanged"):
            write_all(finished, list("abcd"))
        assert finished.read_bytes() == before


def test_record_of_an_emptied_file_protects_nothing(finished: Path) -> None:
    finished.write_text("")
    write_all(finished, list("xy"), {"model": "n", "beams": 1})
    assert finished.read_text().split() == list("xxyy")


def test_full_disk_is_an_error_and_the_output_resumes(tmp_path: Path) -> None:
    """A limit on the size of files simulates a full disk."""
    resource = pytest.importorskip("resource")
    uninterrupted, path, texts = tmp_path / "uninterrupted", tmp_path / "path", [letter * 100 for letter in "abcdef"]
    write_all(uninterrupted, texts)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OutputError, match=r"path: cannot be written: File too large; make room, and the same"):
            write_all(path, texts)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.stat().st_size == 1000
    write_all(path, texts)
    assert path.read_bytes() == uninterrupted.read_bytes()


def test_two_commands_do_not_write_the_same_file(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    first = ResumableFile(tmp_path / "out", {})
    with user_error(r"out: a different command is writing it; wait until it ends, or choose a different"):
        ResumableFile(tmp_path / "out", {})
    first.close()
    ResumableFile(tmp_path / "out", {}).close()


def test_digest_of_a_model_changes_with_the_files_of_the_model_only(tmp_path: Path) -> None:
    options = LoadOptions(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    before = options.digest()
    for name in ("README.md", "results.json", "trainer_state.json", "out.txt", "out.txt.record"):
        (tmp_path / name).write_text("what was made by the model")
    (tmp_path / "checkpoints").mkdir()
    assert options.digest() == before
    for name in ("model.safetensors", "generation_config.json", "tokenizer.json", "merges.txt", "model.py"):
        (tmp_path / name).write_bytes(b"other")
        assert options.digest() != before
        before = options.digest()
