"""A run before its first step and after its last one: its trainer, the model that it leaves, and its scores."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Seq2SeqTrainingArguments

from tests.helpers import user_error
from tests.training import runs
from training.data.stream import PairStream
from training.monitor.monitor import trained_seconds
from training.run.checkpoints import checkpoint_at, mark_complete
from training.trainer import lifecycle
from vaswani_transformer.batching import TokenBudgetBatches


@pytest.mark.parametrize(("attention", "is_checkpointed"), [("eager", False), ("sdpa", True)])
def test_attention_and_gradient_checkpointing_are_those_of_the_recipe(
    arguments: list[str], tmp_path: Path, attention: str, is_checkpointed: bool
) -> None:
    """A layer computes twice where its activations are not kept for the gradient."""
    more = [f"--training.attention={attention}", f"--training.gradient_checkpointing={str(is_checkpointed).lower()}"]
    model, calls = runs.trainer_in(arguments, tmp_path / "run", *more).model, []
    assert model.config._attn_implementation == attention
    model.get_submodule("model.encoder.layers.0.feed_forward").register_forward_pre_hook(lambda *_: calls.append(1))
    tokens = torch.tensor([[5, 6, 2]])
    model.train()(input_ids=tokens, labels=tokens).loss.backward()
    assert len(calls) == (2 if is_checkpointed else 1)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_training_pairs_are_streamed_only_if_the_recipe_says_so(
    arguments: list[str], tmp_path: Path, is_streamed: bool
) -> None:
    more = [f"--data.streaming={str(is_streamed).lower()}", "--data.max_length=40"]
    trainer = runs.trainer_in(arguments, tmp_path / "run", *more)
    assert (trainer.stream is not None) == is_streamed
    if isinstance(trainer.train_dataset, TokenBudgetBatches):
        assert isinstance(trainer.train_dataset.source, PairStream)
    else:
        assert len(trainer.train_dataset) == len(runs.LANGUAGE)


def test_process_takes_one_of_several_gpus_and_says_how_to_take_all(
    arguments: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Seq2SeqTrainingArguments, "_n_gpu", 2, raising=False)
    monkeypatch.setattr(Seq2SeqTrainingArguments, "_setup_devices", torch.device("cpu"))
    with caplog.at_level(logging.INFO):
        made = lifecycle.training_arguments(runs.recipe_in(arguments, tmp_path / "run"), tmp_path / "run")
    assert made.n_gpu == 1
    assert "2 GPUs are here, and this run takes one; `accelerate launch -m` in place of" in caplog.text


def test_trained_run_is_loaded_with_its_time_and_not_trained_again(arguments: list[str], tmp_path: Path) -> None:
    first = runs.trainer_in(arguments, tmp_path / "run")
    first.monitor.trained_before = 3600.0
    first.state.global_step = 7
    with torch.no_grad():
        for weight in first.model.parameters():
            weight.fill_(0.5)
    lifecycle.save_trained(first)
    again = runs.trainer_in(arguments, tmp_path / "run")
    lifecycle.train_or_resume(again)
    assert again.state.global_step == 7
    assert 3600 < again.monitor.trained_before == trained_seconds(tmp_path / "run") < 3660
    assert runs.equal(again.model.state_dict(), first.model.state_dict())


def test_checkpoint_with_weights_that_are_not_finite_is_an_error_before_training(
    arguments: list[str], tmp_path: Path
) -> None:
    trainer = runs.trainer_in(arguments, tmp_path / "run")
    with torch.no_grad():
        trainer.model.get_parameter("model.encoder.layers.0.feed_forward.fc1.weight")[0, 0] = torch.nan
    checkpoint = checkpoint_at(tmp_path / "run", 3)
    trainer.model.save_pretrained(checkpoint)
    mark_complete(checkpoint)
    with user_error(r"NaN or infinite numbers in model\.encoder.*; restore it, or move checkpoint-3 elsewhere"):
        lifecycle.train_from_last_checkpoint(trainer)


def test_results_have_the_scores_of_both_sets_and_the_test_set_is_searched_by_the_recipe(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evaluations search with one beam in training, and so does the last one of the validation set."""
    more = ["--decoding.num_beams=3", "--decoding.max_source_relative_length=2", "--score.examples=2"]
    recipe = runs.recipe_in(arguments, tmp_path / "run", *more)
    prepared = runs.prepare_run(recipe)
    trainer, beams = lifecycle.make_trainer(recipe, prepared), []
    generate: Any = trainer.model.generate

    def watched(**options: Any) -> Any:
        beams.append(options["generation_config"].num_beams)
        return generate(**options)

    monkeypatch.setattr(trainer.model, "generate", watched)
    results = lifecycle.write_results(trainer, prepared)
    assert beams == [1, 3]
    assert results["validation"].keys() == {"loss", "perplexity", "bleu", "signature", "search"}
    test = results["test"]
    limit = {"max_source_relative_length": 2, "bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
    assert results["validation"]["search"] == {"num_beams": 1} | limit
    assert test["search"] == {"num_beams": 3, "length_penalty": 0.6, "length_penalty_type": "gnmt"} | limit
    assert test["sentences"] == len(runs.LANGUAGE)
    assert test["loss"] == pytest.approx(results["validation"]["loss"])  # the same pairs
    assert [example["source"] for example in test["examples"]] == [runs.LANGUAGE[0], runs.LANGUAGE[8]]
    assert runs.results_in(tmp_path / "run")["test"]["bleu"] == test["bleu"]
