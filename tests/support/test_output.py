"""A file of results resumes as if it had never been interrupted, and protects what it holds."""

import contextlib
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.commands import user_error
from vaswani_transformer.support.errors import OutputError
from vaswani_transformer.support.loading import LoadOptions
from vaswani_transformer.support.output import ResumableFile

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


def test_file_whose_texts_have_no_results_is_finished_and_keeps_its_settings(tmp_path: Path) -> None:
    """Such as the translations of a share of pairs that are all dropped."""
    path = tmp_path / "out"
    with contextlib.closing(ResumableFile(path, SETTINGS)) as output:
        output.write(["a", "b"], [])
        output.finish()
    with contextlib.closing(ResumableFile(path, SETTINGS)) as output:
        assert (output.done, output.is_finished) == (2, True)
    with user_error(r"out: was written with different settings \(model\)"):
        ResumableFile(path, {**SETTINGS, "model": "n"})


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
    [(99, "b\na\nb\nb\nc\nc\nd\nd\n"), (99, "a\na\nb\nb\nc\nc\nd\nd\ne\n"), (1, "a\n" * 20), (1, "a\na\n")],
)
def test_file_that_another_program_changed_is_an_error(tmp_path: Path, windows: int, changed: str) -> None:
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
        ("results_sha256", 5, "has a damaged record with results_sha256 5"),
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
