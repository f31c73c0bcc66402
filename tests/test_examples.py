"""Each script of examples/ runs in a folder outside the checkout."""

import ast
import json
import runpy
from collections.abc import Sequence
from pathlib import Path

import pytest
from transformers import Seq2SeqTrainingArguments

from tests.forks import run_forked
from tests.helpers import ROOT, model_of_pairs, tiny_model
from tests.training.runs import TWO_PROCESSES


def run_example(name: str, folder: Path, *arguments: str, launch: Sequence[str] = ()) -> list[str]:
    """Return the lines that an example prints."""
    return run_forked(str(ROOT / "examples" / name), *arguments, folder=folder, launch=launch).splitlines()


def test_every_example_is_run_here_and_listed() -> None:
    scripts = {path.name for path in (ROOT / "examples").glob("*.py")}
    assert scripts == {"trainer_script.py", "own_data.py", "adapters.py"}
    listed = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in listed for name in scripts)


@pytest.mark.slow
def test_trainer_script_learns_its_task_on_two_processes(tmp_path: Path) -> None:
    launch = TWO_PROCESSES
    output = run_example("trainer_script.py", tmp_path, "--output_dir=model", launch=launch)
    assert sum("numbers are right" in line for line in output) == 1
    assert int(output[-1].split()[0]) >= 80  # all of them with two seeds; rounding decides about the last few
    assert (tmp_path / "model" / "model.safetensors").exists()


def test_trainer_script_shuffles_in_every_epoch(tmp_path: Path) -> None:
    pairs = [{"input_ids": [5] * (1 + index % 20), "labels": [5] * 4} for index in range(200)]
    trainer_class = runpy.run_path(str(ROOT / "examples" / "trainer_script.py"))["TokenBudgetTrainer"]
    arguments = Seq2SeqTrainingArguments(str(tmp_path), report_to="none", use_cpu=True)
    trainer = trainer_class(tiny_model(), arguments, train_dataset=pairs)
    batches = trainer.get_train_dataloader().batch_sampler
    first, again = list(batches), list(batches)
    trainer.state.epoch = 1.0
    assert first == again != list(batches)


@pytest.mark.slow
def test_own_data_becomes_a_run_that_translates(tmp_path: Path) -> None:
    output = run_example("own_data.py", tmp_path, "--folder=own")
    results = json.loads((tmp_path / "own" / "run" / "results.json").read_text(encoding="utf-8"))
    losses = [entry["loss"] for entry in results["curve"] if "loss" in entry]
    assert losses[-1] < losses[0] / 2
    assert all(output[-2:])


@pytest.mark.slow
def test_adapter_learns_and_merges(tmp_path: Path) -> None:
    for saved in model_of_pairs():
        saved.save_pretrained(tmp_path / "plain")
    output = run_example("adapters.py", tmp_path, "--model=plain", "--output_dir=adapted")
    assert sum(line.startswith("adapted:") for line in output) == 1
    before, after = (ast.literal_eval(output[row].partition(":")[2].strip()) for row in (0, -1))
    assert before != after
    assert (tmp_path / "adapted" / "merged" / "model.safetensors").exists()
