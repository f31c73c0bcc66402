"""Data and settings of a run of a second or two."""

from pathlib import Path

import pytest

from tests.training.runs import make_arguments


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """Return the arguments of a short run on sixteen pairs of words and their letters reversed."""
    return make_arguments(tmp_path)
