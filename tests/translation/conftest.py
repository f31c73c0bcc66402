"""A saved model, and the command that runs it in this process."""

from pathlib import Path

import pytest

from tests.helpers import Run, paper_model_of_pairs, save
from tests.translation.commands import run_on
from vaswani_transformer.translation import command


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Save the model of pairs with the paper's search."""
    return str(save(tmp_path_factory.mktemp("model"), *paper_model_of_pairs()))


@pytest.fixture
def run(folder: str, capsysbinary: pytest.CaptureFixture[bytes]) -> Run:
    """Return a function that runs the command in this process and returns its output, errors and status."""

    def run(*arguments: object, stdin: bytes = b"", model: str | Path = folder) -> tuple[str, str, str | int | None]:
        return run_on(stdin, command.main, [model, *arguments], capsysbinary)

    return run
