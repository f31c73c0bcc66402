"""One optimizer step is the mean over its target tokens, for any number of processes and micro-batches."""

from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM

from tests.training import runs
from tests.training.changed_run import train_with_gradient
from training.run.checkpoints import step_of
from training.run.distributed import init_distributed

Reference = tuple[list[str], Path]  # the arguments and the folder of a run
ONE_STEP = ["--training.steps=1", "--training.evaluation_steps=1", "--model.dropout=0.0"]


def gradient(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "gradient.safetensors")


@pytest.fixture(scope="module")
def reference_run(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Return the arguments of a run of one step, and its folder with one process and one micro-batch."""
    arguments = [*runs.make_arguments(tmp_path_factory.mktemp("data")), *ONE_STEP]
    folder = tmp_path_factory.mktemp("runs") / "one"
    train_with_gradient([*arguments, f"--output_dir={folder}"])
    return arguments, folder


@pytest.mark.slow
def test_gradient_of_a_step_is_that_of_the_mean_over_its_target_tokens(
    reference_run: Reference, tmp_path: Path
) -> None:
    """The oracle, without the Trainer, is the model's loss over all pairs of the first batch."""
    arguments, folder = reference_run
    init_distributed()
    trainer = runs.trainer_in(arguments, tmp_path / "run")
    batch = next(iter(trainer.get_train_dataloader()))
    del batch["number"]
    trainer.model.train()(**batch).loss.backward()
    runs.assert_same_tensors(gradient(folder), {name: weight.grad for name, weight in trainer.model.named_parameters()})


@pytest.mark.slow
def test_step_in_three_micro_batches_equals_the_step_in_one(reference_run: Reference, tmp_path: Path) -> None:
    arguments, folder = reference_run
    train_with_gradient([*arguments, "--training.device_tokens=20", f"--output_dir={tmp_path / 'run'}"])
    runs.assert_same_tensors(gradient(tmp_path / "run"), gradient(folder))
    runs.assert_same_tensors(runs.weights(tmp_path / "run"), runs.weights(folder))


@pytest.mark.slow
def test_step_of_two_sharded_processes_in_two_micro_batches_each_equals_the_step_in_one(
    reference_run: Reference, tmp_path: Path
) -> None:
    """The comparison covers the gradient and the weights after the step; test_family has the same of DDP."""
    arguments, folder = reference_run
    settings = [*arguments, "--training.device_tokens=15"]
    runs.run_to_end(settings, tmp_path / "run", launcher=runs.TWO_SHARDS, change="gradient")
    assert runs.results_in(tmp_path / "run")["processes"] == 2
    runs.assert_same_tensors(gradient(tmp_path / "run"), gradient(folder))
    runs.assert_same_tensors(runs.weights(tmp_path / "run"), runs.weights(folder))


@pytest.mark.slow
def test_uneven_batches_and_a_single_validation_sentence_hang_no_process(tmp_path: Path) -> None:
    """Of five pairs, four make a batch and one remains; the second process has no validation sentence."""
    five = ["one", "two trees", "three", "four dogs", "the sea"]
    arguments = runs.make_arguments(tmp_path, train=five, validation=["one tree"], test=["two", "dogs"])
    settings = [*arguments, "--training.steps=5", "--training.source_tokens=20", "--training.target_tokens=20"]
    settings += ["--training.device_tokens=5", "--model.dropout=0.0"]
    runs.run_to_end(settings, tmp_path / "two", launcher=runs.TWO_PROCESSES)
    one, two = runs.train_in(settings, tmp_path / "one"), runs.results_in(tmp_path / "two")
    assert (two["processes"], two["steps"], two["test"]["sentences"]) == (2, 5, 2)
    assert two["validation"]["loss"] == pytest.approx(one["validation"]["loss"], rel=1e-3)


@pytest.mark.slow
def test_killed_sharded_run_equals_an_unsharded_run_to_the_bit(tmp_path: Path) -> None:
    """FSDP2 against DDP: weights, losses on batches of several lengths, and translations by beam search.

    A sum of two addends has one order, so no bit differs.
    """
    sentences = ["tree " * (1 + number % 7) for number in range(130)]  # three batches, unlike on the two processes
    arguments = runs.make_arguments(tmp_path, validation=sentences)
    settings = [*arguments, "--training.steps=9", "--training.evaluation_beams=2", "--score.examples=16"]
    unsharded, sharded = tmp_path / "whole", tmp_path / "sharded"
    runs.run_to_end(settings, unsharded, launcher=runs.TWO_PROCESSES)
    assert step_of(runs.kill_after(0, runs.start(settings, sharded, launcher=runs.TWO_SHARDS), sharded)) < 9
    runs.run_to_end(settings, sharded, launcher=runs.TWO_SHARDS)
    runs.assert_same_checkpoints(unsharded, sharded)
    results = [runs.results_in(folder) for folder in (unsharded, sharded)]
    for name in ("validation", "steps", "processes"):
        assert results[0][name] == results[1][name]
    assert results[0]["test"]["examples"] == results[1]["test"]["examples"]
    model = AutoModelForSeq2SeqLM.from_pretrained(sharded)
    assert model.lm_head.weight is model.model.shared.weight
    assert type(model).__name__ == model.config.architectures[0] == "VaswaniTransformerForConditionalGeneration"
