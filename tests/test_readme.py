"""Every Python block of the README runs as it stands."""

import re

import pytest

from tests.helpers import ROOT, run_python
from training.recipe import load_recipe
from training.train import run

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def block_with(text):
    (block,) = [block for block in BLOCKS if text in block]
    return block


def test_every_block_is_run_here():
    assert len(BLOCKS) == 2


@pytest.mark.slow
def test_a_quickstart_run_is_used_as_the_readme_says(tmp_path):
    """The run is cut short: what it translates is not looked at, only that it does."""
    more = ["--training.steps=2", "--training.evaluation_steps=2", f"--output_dir={tmp_path}/runs/quickstart"]
    run(load_recipe(ROOT / "training" / "recipes" / "quickstart.yaml", more))
    output = run_python(block_with("runs/quickstart"), folder=tmp_path, PYTHONPATH=str(ROOT))
    assert output.startswith("[")


@pytest.mark.slow
def test_the_script_with_the_stock_trainer_learns_its_three_pairs(tmp_path):
    output = run_python(block_with("Seq2SeqTrainer"), folder=tmp_path, PYTHONPATH=str(ROOT))
    assert output.splitlines()[-1] == "['hola mundo', 'te amo', 'buenos dias']"


def test_the_script_of_ones_own_is_some_twenty_lines():
    assert len(block_with("Seq2SeqTrainer").strip().splitlines()) <= 28
