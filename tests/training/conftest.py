"""Data and settings of a run of a second or two."""

import pytest

from tests.training.runs import make_arguments


@pytest.fixture
def arguments(tmp_path):
    """Return the arguments of a short run on sixteen pairs of words and their letters reversed."""
    return make_arguments(tmp_path)
