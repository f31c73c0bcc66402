"""Data and settings of a run of a second or two."""

from pathlib import Path

import pytest

from tests.models import save, tiny_model
from tests.training.runs import LANGUAGE, FinishedRun, make_arguments, train_in
from training.prepare import PREPARED
from vaswani_transformer import VaswaniTransformerTokenizer


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """Return the arguments of a short run on sixteen pairs of words and their letters reversed."""
    return make_arguments(tmp_path)


@pytest.fixture(scope="session")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save an autoregressive model with random weights, and a tokenizer of the language, which no test changes."""
    texts = [*LANGUAGE, *(text[::-1] for text in LANGUAGE)]
    tokenizer = VaswaniTransformerTokenizer.train_from_iterator(texts, 280)
    return save(tmp_path_factory.mktemp("teacher"), tiny_model(vocab_size=len(tokenizer)), tokenizer)


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """Return a run of nine steps, in epochs of two, that no test changes; its checkpoints are of steps 3, 6 and 9."""
    made = tmp_path_factory.mktemp("made")
    arguments = [*make_arguments(made), "--training.steps=9"]
    (made / "data" / PREPARED).write_text('{"name": "gum"}')
    folder = tmp_path_factory.mktemp("runs") / "whole"
    return FinishedRun(arguments, folder, train_in(arguments, folder))
