"""The benchmarks that no other test runs, in their `--tiny` form."""

import pytest

from tests.forks import run_forked
from tests.helpers import ROOT

COMMANDS: dict[str, list[str]] = {
    "decode_before_after": [str(ROOT)],
    "dialects_by_layer": [],
    "dialects_of_flowseq": [],
    "first_step": [],
    "memory": [],
    "train_against_marian": [],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_benchmark_runs_in_its_tiny_form(name: str) -> None:
    output = run_forked(f"tests.benchmarks.{name}", "--tiny", *COMMANDS[name], folder=ROOT)
    assert output.rstrip().endswith("}")  # of the figures, as JSON
