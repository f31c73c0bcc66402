import itertools

import pytest
from datasets import DatasetDict

from training.toy_task.grammar import Sentence, generate_sentences
from training.toy_task.splits import make_splits


@pytest.fixture(scope="package")
def splits() -> DatasetDict:
    return make_splits()


@pytest.fixture(scope="package")
def sample() -> list[Sentence]:
    return list(itertools.islice(generate_sentences(seed=7), 30_000))
