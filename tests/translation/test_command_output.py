"""The command's output file resumes after any interruption, and no other command changes it."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from signal import Signals

import pytest
from transformers import AutoModelForSeq2SeqLM, GenerationConfig

from tests.forks import ForkedCommand
from tests.helpers import Run, load_tokenizer, save
from tests.translation.commands import SOURCES, TARGETS, lines
from vaswani_transformer.translation import command, loading
from vaswani_transformer.translation.translator import Translation


def test_model_is_digested_only_for_an_output_that_can_resume(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    digested = []
    monkeypatch.setattr(loading, "digest_of_model", lambda folder: digested.append(folder) or "abc")
    run(stdin=b"cat\n")
    run("--interactive", stdin=b"cat\n")
    assert digested == []
    run("--output", tmp_path / "path", stdin=b"cat\n")
    assert len(digested) == 1


def interrupted(stop_at: int) -> Callable[[command.LineFormat, Translation, int], list[str]]:
    """Return a method that ends the command, like a signal, before it writes result number `stop_at`."""
    write = command.LineFormat.write

    def stop(form: command.LineFormat, translation: Translation, number: int) -> list[str]:
        if number == stop_at:
            raise KeyboardInterrupt
        return write(form, translation, number)

    return stop


@pytest.mark.parametrize("options", [[], ["--nbest=2", "--scores"], ["--format=jsonl", "--nbest=2", "--scores"]])
@pytest.mark.parametrize(("stop_at", "cut_off"), [(1, 0), (2, 0), (4, 3), (6, 9)])
def test_interrupted_output_resumes_to_the_bytes_of_an_uninterrupted_one(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], stop_at: int, cut_off: int
) -> None:
    source, uninterrupted, path = (tmp_path / name for name in ("source", "whole", "path"))
    rows = SOURCES if "--format=jsonl" not in options else [json.dumps({"text": text}) for text in SOURCES]
    source.write_text(lines(rows))
    arguments = [*options, "--window=4", "--batch_tokens=20", "--input", source]
    run(*arguments, "--output", uninterrupted)
    with monkeypatch.context() as patch:
        patch.setattr(command.LineFormat, "write", interrupted(stop_at))
        _, errors, status = run(*arguments, "--output", path)
    assert (errors, status) == ("Interrupted; the same command resumes it.\n", 130)
    path.write_bytes(path.read_bytes()[: path.stat().st_size - cut_off])
    _, errors, status = run(*arguments, "--output", path)
    assert status == 0
    assert ("resumes after line" in errors) == (path.stat().st_size > 0 and stop_at > 1)
    assert "other batches" not in errors
    assert path.read_bytes() == uninterrupted.read_bytes()
    assert run(*arguments, "--output", path) == ("", f"{path}: is finished already and stays unchanged.\n", 0)


@pytest.fixture
def unfinished(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Return an input, and the output of a command that was interrupted before line 5 of 6."""
    source, path = tmp_path / "source", tmp_path / "path"
    source.write_text(lines(SOURCES))
    with monkeypatch.context() as patch:
        patch.setattr(command.LineFormat, "write", interrupted(5))
        run("--input", source, "--output", path, "--window=4")
    assert path.read_text() == lines(TARGETS[:4])
    return source, path


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--beams=2", "without --beams, not with --beams=2"),
        ("--scores", "without --scores, not with --scores"),
        ("--too_long=keep", "with --too_long=truncate, not with --too_long=keep"),
        ("--nbest=1", "without --nbest, not with --nbest=1"),
        ("--dtype=bfloat16", "with --dtype=auto, not with --dtype=bfloat16"),
    ],
)
def test_unfinished_output_with_other_settings_is_an_error(
    run: Run, unfinished: tuple[Path, Path], option: str, message: str
) -> None:
    source, path = unfinished
    _, errors, status = run("--input", source, "--output", path, option)
    assert (status, path.read_text()) == (2, lines(TARGETS[:4]))
    assert errors.startswith(f"{path}: was made {message}; it stays unchanged: give the same command as then, an")


def test_unfinished_output_of_another_model_is_an_error(
    run: Run, unfinished: tuple[Path, Path], folder: str, tmp_path: Path
) -> None:
    source, path = unfinished
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    model.generation_config = GenerationConfig(num_beams=1, bos_token_id=0, pad_token_id=1, eos_token_id=2)
    save(tmp_path / "model", model, load_tokenizer(folder))
    _, errors, status = run("--input", source, "--output", path, model=tmp_path / "model")
    assert status == 2
    assert errors.startswith(f"{path}: was made by another model; it stays unchanged")


def test_unfinished_output_resumes_with_other_batches_and_says_so(run: Run, unfinished: tuple[Path, Path]) -> None:
    source, path = unfinished
    _, errors, status = run("--input", source, "--output", path, "--batch_tokens=10")
    assert (status, path.read_text()) == (0, lines(TARGETS))
    assert "was started with other batches" in errors


def test_finished_output_is_not_translated_again(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, path = tmp_path / "source", tmp_path / "path"
    source.write_text(lines(SOURCES))
    assert run("--input", source, "--output", path) == ("", "", 0)
    monkeypatch.setattr(command, "load_translator", lambda *_: pytest.fail("the model is loaded"))
    expected = ("", f"{path}: is finished already and stays unchanged.\n", 0)
    assert run("--input", source, "--output", path) == expected
    assert run("--output", path, stdin=source.read_bytes()) == expected
    assert path.read_text() == lines(TARGETS)


def test_output_can_be_a_device(run: Run) -> None:
    assert run("--output", "/dev/null", stdin=b"cat\n") == ("", "", 0)


def test_empty_output_file_is_filled_like_a_new_one(run: Run, tmp_path: Path) -> None:
    (tmp_path / "path").touch()
    assert run("--output", tmp_path / "path", stdin=lines(SOURCES).encode())[2] == 0
    assert (tmp_path / "path").read_text() == lines(TARGETS)


@pytest.mark.slow
@pytest.mark.parametrize(("sent", "status"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_signal_leaves_an_output_that_can_resume(
    run: Run, folder: str, tmp_path: Path, sent: Signals, status: int
) -> None:
    source, uninterrupted, path = (tmp_path / name for name in ("source", "whole", "path"))
    source.write_text(lines(SOURCES * 20))
    arguments = ("--window=7", "--nbest=2", "--scores", "--input", str(source))
    process = ForkedCommand("vaswani_transformer.translation", [folder, *arguments, "--output", str(path)])
    while not path.exists() or path.stat().st_size < 300:
        assert process.poll() is None
        time.sleep(0.01)
    os.kill(process.pid, sent)
    process.communicate()
    assert process.returncode == status
    assert 0 < path.read_text().count("\n") < 240
    assert run(*arguments, "--output", path)[2] == 0
    run(*arguments, "--output", uninterrupted)
    assert path.read_bytes() == uninterrupted.read_bytes()
