"""The launch determines the processes and devices of training, the recipe what they compute."""

import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env

from tests import ROOT
from tests.models import tiny_model
from tests.training import runs
from training import trainer as trainer_module
from training.checkpoints import load_weights
from training.machine import init_processes, uses_cpu
from vaswani_transformer.support.loading import KERNELS

FILES = {
    "one-gpu": (1, 1),
    "eight-gpus": (8, 1),
    "eight-gpus-fsdp2": (8, 1),
    "two-nodes": (16, 2),
    "two-cpu-processes": (2, 1),
}


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Restore the environment after a test."""
    with mock.patch.dict(os.environ):
        yield


def test_launch_files_are_listed_here_and_named_in_the_docs() -> None:
    assert {path.stem for path in (ROOT / "training" / "accelerate").iterdir()} == set(FILES)
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    assert all(f"training/accelerate/{name}.yaml" in page for name in FILES)


@pytest.mark.parametrize("name", FILES)
def test_accelerate_accepts_a_launch_file_and_it_sets_nothing_of_the_recipe(name: str) -> None:
    """The launcher parses and checks the file, and makes the environment of the processes."""
    options = ["--machine_rank=1", "--main_process_ip=10.0.0.1"] if name == "two-nodes" else []
    command = [f"--config_file={ROOT / 'training' / 'accelerate' / name}.yaml", *options, "-m", "training.train", "x"]
    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(command))
    assert (arguments.num_processes, arguments.num_machines) == FILES[name]
    if arguments.num_processes == 1:
        _, variables = prepare_simple_launcher_cmd_env(arguments)
    else:
        variables = prepare_multi_gpu_env(arguments)
    assert (variables["ACCELERATE_MIXED_PRECISION"], variables["ACCELERATE_DYNAMO_BACKEND"]) == ("no", "NO")
    assert ("ACCELERATE_USE_FSDP" in variables) == ("fsdp" in name)
    assert variables.get("FSDP_VERSION") == ("2" if "fsdp" in name else None)
    assert variables.get("CUDA_VISIBLE_DEVICES", "all") == ("-1,-1" if "cpu" in name else "all")


@pytest.mark.parametrize(
    ("device", "variables", "expected"),
    [
        (None, {}, True),
        ("cuda", {}, False),
        ("cuda", {"WORLD_SIZE": "8"}, False),
        ("cuda", {"ACCELERATE_USE_CPU": "True"}, True),
        ("cuda", {"ACCELERATE_USE_CPU": "False"}, False),
        ("mps", {}, False),
        ("mps", {"WORLD_SIZE": "2"}, True),
    ],
)
def test_training_uses_the_cpu_only_without_a_usable_accelerator(
    monkeypatch: pytest.MonkeyPatch, device: str | None, variables: dict[str, str], expected: bool
) -> None:
    accelerator = None if device is None else torch.device(device)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: accelerator)
    os.environ.update(variables)
    assert uses_cpu() is expected


def test_limits_of_cached_kernels_in_the_environment_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.machine.uses_cpu", lambda: True)
    for name in KERNELS:
        os.environ.pop(name, None)
    os.environ["LRU_CACHE_CAPACITY"] = "7"
    init_processes()
    assert {name: os.environ[name] for name in KERNELS} == KERNELS | {"LRU_CACHE_CAPACITY": "7"}


@pytest.mark.slow
@pytest.mark.parametrize(("launched", "recipe"), [("no", "bf16"), ("fp16", "fp32")])
def test_precision_of_the_recipe_wins_over_that_of_the_launch(
    arguments: list[str], tmp_path: Path, launched: str, recipe: str
) -> None:
    os.environ.update(ACCELERATE_MIXED_PRECISION=launched, ACCELERATE_DYNAMO_BACKEND="INDUCTOR")
    init_processes()
    trainer = runs.trainer_in(arguments, tmp_path / "run", "--training.steps=1", f"--training.precision={recipe}")
    model: Any = trainer.model
    precisions = set()

    def record_precision(*_: Any) -> None:
        if model.training:
            precisions.add(torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32)

    model.model.encoder.register_forward_hook(record_precision)
    trainer.train()
    assert precisions == {torch.bfloat16 if recipe == "bf16" else torch.float32}
    plugin = trainer.accelerator.state.dynamo_plugin
    assert plugin is not None
    assert plugin.backend.value == "NO"


@pytest.mark.slow
def test_run_in_bf16_learns_and_resumes_to_the_bit(arguments: list[str], tmp_path: Path) -> None:
    settings, whole = [*arguments, "--training.steps=9", "--training.precision=bf16"], tmp_path / "whole"
    losses = [entry["loss"] for entry in runs.entries(runs.train_in(settings, whole))]
    assert losses[-1] < losses[0] - 0.5
    runs.assert_resumes(settings, whole, 3, tmp_path / "resumed")


@pytest.mark.slow
def test_compiled_run_has_the_losses_of_a_plain_one(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All batches have one shape; a backend that compiles no C++ suffices to show that the graphs are right."""
    torch.compiler.reset()
    settings = [*arguments, "--training.source_tokens=600", "--training.target_tokens=600", "--training.steps=3"]
    settings = [*settings, "--data.test=null", "--model.dropout=0.0"]
    plain = runs.entries(runs.train_in(settings, tmp_path / "plain"))
    fast = functools.partial(trainer_module.Seq2SeqTrainingArguments, torch_compile_backend="aot_eager")
    monkeypatch.setattr(trainer_module, "Seq2SeqTrainingArguments", fast)
    compiled = runs.entries(runs.train_in(settings, tmp_path / "compiled", "--training.torch_compile=true"))
    assert [entry["loss"] for entry in compiled] == pytest.approx([entry["loss"] for entry in plain], rel=1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_complete_weights_load_with_a_tied_matrix_stored_once(tied: bool) -> None:
    model, other = tiny_model(tie_word_embeddings=tied), tiny_model(tie_word_embeddings=tied)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight))
    saved = {name: weight for name, weight in model.state_dict().items() if name not in model.all_tied_weights_keys}
    assert ("lm_head.weight" in saved) is not tied
    load_weights(other, saved)
    for name, weight in model.named_parameters():
        assert torch.equal(weight, other.get_parameter(name))
    assert (other.lm_head.weight is other.model.shared.weight) is tied
    assert other.model.encoder.embed_tokens.weight is other.model.shared.weight
