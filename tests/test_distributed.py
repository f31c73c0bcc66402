"""The model split over two processes by its plans has the logits and the training step of the complete model."""

import json
from pathlib import Path

import pytest

from tests.forks import ForkedCommand
from tests.helpers import ROOT
from tests.training.runs import TWO_PROCESSES


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tensor", "fsdp"])
def test_model_split_over_two_processes_equals_the_complete_model(kind: str, tmp_path: Path) -> None:
    worker = str(ROOT / "tests" / "distributed_worker.py")
    command = ForkedCommand(worker, [kind, str(tmp_path)], launch=TWO_PROCESSES[1:])
    output, errors = command.communicate(timeout=300)
    assert command.returncode == 0, errors
    differences = json.loads(output.splitlines()[-1])
    assert differences.pop("is_split") == "DTensor"
    assert differences.pop("is_tied")
    for name, difference in differences.items():  # sums of float32 in another order
        assert difference < 1e-5, name
