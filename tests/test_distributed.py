"""The model split over two processes by its plans has the logits and the training step of the complete model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tensor", "fsdp"])
def test_model_split_over_two_processes_equals_the_complete_model(kind: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    finished = subprocess.run(
        [*command, str(ROOT / "tests" / "distributed_worker.py"), kind, str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert finished.returncode == 0, finished.stderr
    differences = json.loads(finished.stdout.splitlines()[-1])
    assert differences.pop("is_split") == "DTensor"
    assert differences.pop("is_tied")
    for name, difference in differences.items():  # sums of float32 in another order
        assert difference < 1e-5, name
