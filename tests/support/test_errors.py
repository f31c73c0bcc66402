"""User-facing errors are one line, and commands end with status 2 after it."""

import importlib
from pathlib import Path
from unittest.mock import Mock

import pytest

import training
from vaswani_transformer.support.errors import OutputError, UserError, exit_on_user_error, one_line


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("problems:\n  one\n\ttwo"), "problems: one two"),
        (KeyError(), "KeyError"),
        (FileNotFoundError(2, "No such file or directory", "a.txt"), "a.txt: No such file or directory"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (UserError("got the fields \x1b[2J\x9b1m, \u202ea"), r"got the fields \x1b[2J\x9b1m, \u202ea"),
        (FileNotFoundError(2, "No such file", "\x1b]0;a.txt\udc80"), r"\x1b]0;a.txt\udc80: No such file"),
    ],
)
def test_message_is_one_line(error: Exception, line: str) -> None:
    assert one_line(error) == line


@pytest.mark.parametrize("error", [UserError, OutputError, KeyError])
def test_command_ends_with_one_line_and_status_2(error: type[Exception], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"), exit_on_user_error(KeyError):
        raise error("a: problem; fix.\nmore")
    output, errors = capsys.readouterr()
    assert (output, errors.count("\n")) == ("", 1)
    assert "a: problem; fix." in errors


def test_interrupted_command_ends_with_one_line_and_status_130(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="130"), exit_on_user_error(what_now="; the same command resumes it"):
        raise KeyboardInterrupt
    assert capsys.readouterr() == ("", "Interrupted; the same command resumes it.\n")


@pytest.mark.parametrize(
    ("module", "work", "arguments"),
    [
        ("vaswani_transformer.convert.command", "check_other_folder", ["fsmt", "somebody/model", "new"]),
        ("vaswani_transformer.figures.__main__", "load_tokenizer", ["model", "a text"]),
    ],
)
def test_every_command_of_the_package_ends_so_after_an_interruption(
    module: str,
    work: str,
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(f"{module}.{work}", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(SystemExit, match="130"):
        importlib.import_module(module).main(arguments)
    assert capsys.readouterr().err == "Interrupted.\n"


def test_other_errors_pass_through_a_command() -> None:
    with pytest.raises(RuntimeError, match="bug"), exit_on_user_error(KeyError):
        raise RuntimeError("bug")


def test_training_command_without_its_packages_ends_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("training.find_spec", lambda name: None if name == "datasets" else object())
    for command in ("", "vaswani_transformer.translation"):
        training.check_packages(command)
    with pytest.raises(SystemExit) as ended:
        training.check_packages("training.train")
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        'training.train: the package datasets is missing. Run pip install -e ".[train]".\n'
    )
