"""Small runs of the training command, in this process or in others."""

import json
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor
from transformers import set_seed

from tests import ROOT
from tests.batches import FLOAT32
from tests.commands import write_pairs
from tests.forks import ForkedCommand
from training.checkpoints import CHECKPOINTS, complete_checkpoints, step_of
from training.data import Data, load_data
from training.machine import init_processes
from training.models import make_model
from training.recipe import Recipe, load_recipe
from training.train import begin_run, open_run, run
from training.trainer import PaperTrainer

LAUNCHES = f"--config_file={ROOT}/training/accelerate"  # of `accelerate launch`
TWO_PROCESSES = (f"{LAUNCHES}/two-cpu-processes.yaml", "-m")
TWO_SHARDS = (f"{LAUNCHES}/eight-gpus-fsdp2.yaml", "--num_processes=2", "-m")
SPLITS = ("train", "validation", "test")
LANGUAGE = [
    f"{number} {noun}" for number in ("one", "two", "three", "four") for noun in ("tree", "dog", "house", "sea")
]
TINY: dict[str, Any] = {
    "tokenizer": {"vocab_size": 280},
    "model": {"d_model": 16, "d_ff": 16, "num_heads": 2, "encoder_layers": 1, "decoder_layers": 1, "dropout": 0.1},
    "training": {
        **{"source_tokens": 60, "target_tokens": 60},
        **{"evaluation_steps": 3, "log_steps": 1, "keep_checkpoints": 10},
    },
}


SHORT = "--decoding.max_source_relative_length=2"  # a model that has learned little goes on to the usual limit of 50


class FinishedRun(NamedTuple):
    """The arguments of a run, its folder and its results."""

    arguments: list[str]
    folder: Path
    results: dict[str, Any]


def make_arguments(folder: Path, **texts: Sequence[str]) -> list[str]:
    """Return the arguments of a TINY run on pairs of texts, or of LANGUAGE, and their letters reversed."""
    data = folder / "data"
    data.mkdir()
    for split in SPLITS:
        write_pairs(data / f"{split}.jsonl", [(text, text[::-1]) for text in texts.get(split, LANGUAGE)])
    recipe = folder / "own.yaml"
    files = {split: f"{split}.jsonl" for split in SPLITS}
    recipe.write_text(yaml.safe_dump({"name": "own", "data": {"kind": "json", "path": str(data)} | files} | TINY))
    return [str(recipe), "--training.warmup_steps=10", SHORT]


def last_of_each(*arguments: str) -> list[str]:
    """Return arguments of which a later one overrides an earlier one of its field; only one kind has SHORT."""
    fields = {argument.partition("=")[0]: argument for argument in arguments}
    return [argument for argument in fields.values() if argument != SHORT or "--model.kind" not in fields]


def recipe_in(arguments: list[str], folder: Path, *more: str) -> Recipe:
    """Return the recipe of a run in a folder."""
    return load_recipe(arguments[0], last_of_each(*arguments[1:], *more, f"--output_dir={folder}"))


def train_in(arguments: list[str], folder: Path, *more: str) -> dict[str, Any]:
    """Train in this process by arguments, of which a later one overrides an earlier one; return the results."""
    return run(recipe_in(arguments, folder, *more))


def begin_in(arguments: list[str], folder: Path, *more: str) -> tuple[Recipe, Data]:
    """Begin a run as the command does, up to its model, and return its recipe and data."""
    recipe = recipe_in(arguments, folder, *more)
    init_processes()
    with open_run(recipe):
        data = load_data(recipe, folder if (folder / "recipe.yaml").exists() else None)
        begin_run(recipe, folder, data)
    return recipe, data


def trainer_in(arguments: list[str], folder: Path, *more: str) -> PaperTrainer:
    """Return the trainer of a run in a folder, which has not taken a step."""
    recipe, data = begin_in(arguments, folder, *more)
    model = make_model(recipe, data.tokenizer)
    return recipe.family.recipe.make_trainer(recipe, model, data, folder)


def start(
    arguments: list[str],
    folder: Path,
    *more: str,
    launch: Sequence[str] = (),
    module: str = "training.train",
    change: str | None = None,
) -> ForkedCommand:
    """Start the command, another module or a changed run with its arguments, in one process or as launched."""
    arguments = last_of_each(*arguments, *more, f"--output_dir={folder}")
    if change is not None:
        module, arguments = "tests.training.changed_run", [change, *arguments]
    return ForkedCommand(module, arguments, launch=launch)


def checkpoint_at(folder: Path, step: int) -> Path:
    return folder / CHECKPOINTS / f"checkpoint-{step}"


def last_step(folder: Path) -> int:
    """Return the step of a run's last checkpoint; 0 before the first."""
    return max(map(step_of, complete_checkpoints(folder)), default=0)


def wait_for_checkpoint(process: ForkedCommand | subprocess.Popen[bytes], folder: Path, step: int = 1) -> None:
    """Wait until a run has a complete checkpoint of this step or a later one, or has ended."""
    while last_step(folder) < step and process.poll() is None:
        time.sleep(0.02)


def results_in(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))


def entries(results: dict[str, Any], name: str = "loss") -> list[dict[str, Any]]:
    """Return the entries of a curve that have a value of this name: of training, or of evaluations."""
    return [entry for entry in results["curve"] if name in entry]


def run_to_end(arguments: list[str], folder: Path, *more: str, **launch: Any) -> str:
    """Start the command, which must succeed, and return its output."""
    process = start(arguments, folder, *more, **launch)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return output


def weights(folder: Path, step: int | None = None) -> dict[str, Tensor]:
    """Return the weights of a run, or of its checkpoint of a step."""
    return load_file((folder if step is None else checkpoint_at(folder, step)) / "model.safetensors")


def equal(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def assert_same_tensors(first: Mapping[str, Tensor], second: Mapping[str, Tensor | None]) -> None:
    """Assert equal names, and equal tensors up to the order of sums."""
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(first[name], second[name], **FLOAT32)


def assert_same_checkpoints(first: Path, second: Path) -> None:
    """Assert that two runs have complete checkpoints of the same steps, with the same bits there and at the end."""
    names = [[path.name for path in complete_checkpoints(run)] for run in (first, second)]
    assert names[0] == names[1]
    folders = [*zip(complete_checkpoints(first), complete_checkpoints(second), strict=True), (first, second)]
    for folder, expected in folders:
        assert equal(weights(folder), weights(expected)), folder


def rewound(folder: Path, step: int, copy: Path) -> Path:
    """Copy a finished run as one that was killed after its checkpoint of this step."""
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("results.json"))
    (copy / "model.safetensors").unlink()
    for checkpoint in complete_checkpoints(copy):
        if step_of(checkpoint) > step:
            shutil.rmtree(checkpoint)
    return copy


def assert_resumes(arguments: list[str], whole: Path, step: int, copy: Path, *more: str) -> None:
    """Assert that a run that was killed after this step ends with the bits of the whole one.

    The process draws other random numbers before.
    """
    rewound(whole, step, copy)
    set_seed(99)
    assert train_in(arguments, copy, *more)["steps"] == results_in(whole)["steps"]
    assert_same_checkpoints(whole, copy)
