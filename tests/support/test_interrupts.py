"""Ctrl-C ends a command of this project at once while it imports, and reaches every other program as an exception."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

import training  # noqa: F401 - the package of a command is imported first
from vaswani_transformer.support.interrupts import running_command


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["-m", "training.train", "recipe.yaml"], "training.train"),
        (["-m", "vaswani_transformer.parsing"], "vaswani_transformer.parsing"),
        (["/usr/bin/vaswani-parse", "model"], "vaswani-parse"),
        (["training.py"], ""),
        (["vaswani-data.py"], ""),
        (["/usr/bin/pytest", "-m", "not slow"], ""),
        (["-m", "tests.gpu"], ""),
    ],
)
def test_command_is_one_of_this_project(words: list[str], command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["python", *words])
    monkeypatch.setattr(sys, "argv", words)
    assert running_command() == command


def test_package_of_a_user_with_the_name_training_has_no_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = ModuleType("training")
    package.__path__ = [str(tmp_path / "training")]
    monkeypatch.setitem(sys.modules, "training", package)
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "training.train"])
    assert running_command() == ""
