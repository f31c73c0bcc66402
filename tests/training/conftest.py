"""The data and the settings of a run that takes a second or two."""

import pytest

from tests.training.runs import make_arguments


@pytest.fixture
def arguments(tmp_path):
    """The arguments of a run of a second or two on sixteen pairs of words and their letters turned round."""
    return make_arguments(tmp_path)
