"""One step, its log and an evaluation are means over target tokens, for any number of processes and micro-batches."""

import contextlib
import io
import math
import re
import shutil
import sys
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from sacrebleu.metrics import BLEU
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoModelForSeq2SeqLM,
    Seq2SeqTrainer,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    trainer_callback,
)

from tests.commands import no_space, user_error
from tests.models import LENGTH_FAMILY, LargestTensor
from tests.training import runs
from training.callbacks import Patience, Progress, ProgressBar
from training.checkpoints import (
    CHECKPOINTS,
    COMPLETE,
    INTERRUPTED,
    SECONDS,
    complete_checkpoints,
    step_of,
)
from training.evaluation import sentence_losses
from training.trainer import PaperTrainer


@pytest.mark.slow
def test_gradient_of_a_step_is_that_of_the_mean_over_its_target_tokens(arguments: list[str], tmp_path: Path) -> None:
    """The oracle, without the Trainer, is the model's loss over all pairs of the first batch."""
    settings = [*arguments, "--training.steps=1", "--model.dropout=0.0"]
    runs.run_to_end(settings, tmp_path / "one", change="gradient")
    trainer = runs.trainer_in(settings, tmp_path / "run")
    trainer.model.train()(**next(iter(trainer.get_train_dataloader()))).loss.backward()
    gradients = {name: weight.grad for name, weight in trainer.model.named_parameters()}
    runs.assert_same_tensors(load_file(tmp_path / "one" / "gradient.safetensors"), gradients)


@pytest.mark.slow
def test_uneven_batches_and_a_single_validation_sentence_hang_no_process(tmp_path: Path) -> None:
    """Of five pairs, four make a batch and one remains; the second process has no validation sentence."""
    five = ["one", "two trees", "three", "four dogs", "the sea"]
    arguments = runs.make_arguments(tmp_path, train=five, validation=["one tree"], test=["two", "dogs"])
    settings = [*arguments, "--training.steps=5", "--training.source_tokens=20", "--training.target_tokens=20"]
    settings += ["--training.device_tokens=5", "--model.dropout=0.0"]
    settings = runs.last_of_each(*settings)
    runs.run_to_end(settings, tmp_path / "two", launch=runs.TWO_PROCESSES)
    one, two = runs.train_in(settings, tmp_path / "one"), runs.results_in(tmp_path / "two")
    assert (two["processes"], two["steps"], two["test"]["sentences"]) == (2, 5, 2)
    assert two["validation"]["loss"] == pytest.approx(one["validation"]["loss"], rel=1e-3)
    for first, second in zip(runs.entries(one), runs.entries(two), strict=True):
        assert first["loss"] == pytest.approx(second["loss"], rel=1e-3)


@pytest.mark.slow
def test_killed_sharded_run_equals_an_unsharded_run_to_the_bit(tmp_path: Path) -> None:
    """FSDP2 against DDP: weights, losses on batches of several lengths, and translations by beam search.

    A sum of two addends has one order, so no bit differs.
    """
    sentences = ["tree " * (1 + number % 7) for number in range(130)]  # three batches, unlike on the two processes
    arguments = runs.make_arguments(tmp_path, validation=sentences)
    settings = [*arguments, "--training.steps=9", "--training.evaluation_beams=2", "--score.examples=16"]
    unsharded, sharded = tmp_path / "whole", tmp_path / "sharded"
    runs.run_to_end(settings, unsharded, launch=runs.TWO_PROCESSES)
    launch: Any = {"launch": runs.TWO_SHARDS, "change": "none"}
    process = runs.start(settings, sharded, **launch)
    runs.wait_for_checkpoint(process, sharded)
    process.kill()
    assert 0 < runs.last_step(sharded) < 9
    runs.run_to_end(settings, sharded, **launch)
    runs.assert_same_checkpoints(unsharded, sharded)
    results = [runs.results_in(folder) for folder in (unsharded, sharded)]
    for name in ("validation", "steps", "processes"):
        assert results[0][name] == results[1][name]
    assert results[0]["test"]["examples"] == results[1]["test"]["examples"]
    model = AutoModelForSeq2SeqLM.from_pretrained(sharded)
    assert model.lm_head.weight is model.model.shared.weight


def test_checkpoint_that_is_written_again_has_no_mark_meanwhile_and_the_seconds_of_the_whole_run(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, marks = runs.trainer_in(arguments, tmp_path / "run"), []
    checkpoint = tmp_path / "run" / CHECKPOINTS / "checkpoint-0"
    checkpoint.mkdir(parents=True)
    for mark in (COMPLETE, INTERRUPTED):
        (checkpoint / mark).touch()
    monkeypatch.setattr(Seq2SeqTrainer, "_save_checkpoint", lambda *_: marks.extend(checkpoint.iterdir()))
    trainer.progress.seconds, trainer.progress.begun = 100.0, time.monotonic() - 5
    trainer._save_checkpoint(trainer.model, None)
    assert marks == []
    assert complete_checkpoints(tmp_path / "run", with_interrupted=False) == [checkpoint]
    assert 105 <= float((checkpoint / SECONDS).read_text()) < 165


def test_log_of_a_step_has_its_loss_and_its_parts(arguments: list[str], tmp_path: Path) -> None:
    """The oracle is the model's loss of the batch."""
    trainer = runs.trainer_in(arguments, tmp_path / "run", "--model.kind=cmlm", "--model.dropout=0.0")
    (batch,), tokens = trainer.get_batch_samples(iter(trainer.get_train_dataloader()), 1, trainer.args.device)
    expected = trainer.model.train()(**batch)
    trainer.training_step(trainer.model, batch, tokens)
    trainer.log({"loss": 0.0})
    logged = trainer.state.log_history[-1]
    assert logged["loss"] == pytest.approx(expected.loss.item(), rel=1e-5)
    assert logged["length_loss"] == pytest.approx(expected.length_loss.item(), rel=1e-5)
    assert logged["target_tokens_per_second"] > 0


@pytest.mark.parametrize(
    ("kind", "more", "names"),
    [
        ("cmlm", [], ["labels", "decoder_input_ids"]),
        ("nat", ["--training.glancing=[0.5,0.3]"], ["glancing_draws"]),
        ("ctc", ["--training.glancing=[0.5,0.3]"], ["glancing_draws"]),
        ("dag", ["--training.glancing=[0.5,0.3]"], ["glancing_draws"]),
        ("iterative_vae", ["--model.decoder_layers=2"], ["reveal_draws"]),
        ("flowseq", ["--training.decoder_steps=1"], ["word_draws", "latent_noise"]),
    ],
)
def test_random_choices_depend_on_the_seed_the_step_and_the_pair_alone(
    arguments: list[str], tmp_path: Path, kind: str, more: list[str], names: list[str]
) -> None:
    """They are the same in one batch and in two micro-batches, each with every second pair."""
    trainer = runs.trainer_in(arguments, tmp_path / "run", f"--model.kind={kind}", *more)
    batch = next(iter(trainer.get_train_dataloader()))

    def choices(step: int, *batches: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        trainer.state.global_step = step
        torch.rand(3)  # of the process, which decides nothing
        chosen, _ = PaperTrainer.get_batch_samples(trainer, iter(batches), len(batches), trainer.args.device)
        return chosen

    halves = []
    for first in range(2):
        half = {name: values[first::2] for name, values in batch.items()}
        half["labels"] = half["labels"][:, : half["labels"].ne(-100).sum(1).max()]
        halves.append(half)
    (whole,), (again,), (other,) = choices(5, batch), choices(5, batch), choices(6, batch)
    parts = choices(5, *halves)
    for name in names:
        assert torch.equal(again[name], whole[name])
        assert not torch.equal(other[name], whole[name])
        for first, part in enumerate(parts):
            assert torch.equal(part[name], whole[name][first::2, : part[name].shape[1]])


@pytest.mark.parametrize("is_sharded", [False, True])
def test_sharded_model_is_autocast_by_the_trainer(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_sharded: bool
) -> None:
    """Accelerate wraps the forward pass of any other model."""
    trainer = runs.trainer_in(arguments, tmp_path / "run", "--training.precision=bf16")
    monkeypatch.setattr(trainer, "is_fsdp_enabled", is_sharded)
    with trainer.compute_loss_context_manager():
        assert torch.is_autocast_enabled(trainer.args.device.type) == is_sharded


@pytest.mark.slow
def test_loss_that_is_not_finite_stops_the_run_before_its_weights_are_saved(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = PaperTrainer.compute_loss

    def poisoned(trainer: PaperTrainer, *given: Any, **named: Any) -> Any:
        return compute(trainer, *given, **named) * (math.nan if trainer.state.global_step == 4 else 1.0)

    monkeypatch.setattr(PaperTrainer, "compute_loss", poisoned)
    with user_error(r"training: the loss or its gradient is not finite, at or before step 6; the last checkpoint"):
        runs.train_in([*arguments, "--training.steps=9", "--training.log_steps=100"], tmp_path / "run")
    assert [step_of(path) for path in complete_checkpoints(tmp_path / "run")] == [3]
    assert not (tmp_path / "run" / CHECKPOINTS / "checkpoint-6").exists()


def test_each_epoch_has_its_own_order(arguments: list[str], tmp_path: Path) -> None:
    trainer = runs.trainer_in(arguments, tmp_path / "run")
    loader = trainer.get_train_dataloader()
    orders = []
    for epoch in range(3):
        trainer.state.global_step = epoch * len(loader)
        orders.append([batch["input_ids"].tolist() for batch in loader])
    assert orders[0] != orders[1] != orders[2] != orders[0]


def saved_steps(trainer: PaperTrainer, *steps: int, interrupted: tuple[int, ...] = ()) -> None:
    """Save checkpoints whose weights are all equal to their step."""
    for step in steps:
        trainer.state.global_step = step
        trainer.progress.is_interrupted = step in interrupted
        for weight in trainer.model.parameters():
            torch.nn.init.constant_(weight, float(step))
        trainer._save_checkpoint(trainer.model, None)


def test_final_model_is_the_mean_of_the_last_checkpoints_that_no_signal_asked_for(
    arguments: list[str], tmp_path: Path
) -> None:
    trainer = runs.trainer_in([*arguments, "--training.average_last=2"], tmp_path / "run")
    saved_steps(trainer, 3, 5, 9, 11, interrupted=(11,))
    assert trainer.save_final_model() == [5, 9]
    assert all((weight == 7).all() for weight in runs.weights(tmp_path / "run").values())


@pytest.mark.parametrize(
    ("score", "loss", "expected"), [(0.5, 9.0, [3]), (0.5, 0.0, [3]), (0.0, 0.0, [3]), (0.0, 99.0, [5, 9])]
)
def test_final_model_is_the_mean_or_the_best_checkpoint_whichever_is_better(
    arguments: list[str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    score: float,
    loss: float,
    expected: list[int],
) -> None:
    """The mean of constant weights has BLEU 0 and a loss between."""
    trainer = runs.trainer_in(
        [*arguments, "--training.average_last=2", "--training.keep_checkpoints=3"], tmp_path / "run"
    )
    saved_steps(trainer, 3)
    evaluate(trainer, 3, score, loss)
    saved_steps(trainer, 4, 5, 9)
    with caplog.at_level("INFO", logger="training.trainer"):
        assert trainer.save_final_model() == expected
    value = sum(expected) / len(expected)
    assert all((weight == value).all() for weight in runs.weights(tmp_path / "run").values())
    chosen = "best checkpoint" if expected == [3] else "mean"
    line = f"Validation BLEU: 0.00 with the mean, {score:.2f} with the best checkpoint, of step 3; the {chosen} becomes"
    assert line in caplog.text


def test_mean_is_the_final_model_of_a_run_that_has_lost_its_best_checkpoint(
    arguments: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = runs.trainer_in([*arguments, "--training.average_last=2"], tmp_path / "run")
    saved_steps(trainer, 3)
    evaluate(trainer, 3, 99.0, 0.0)
    saved_steps(trainer, 5, 9)
    shutil.rmtree(runs.checkpoint_at(tmp_path / "run", 3))
    assert trainer.save_final_model() == [5, 9]
    assert "checkpoint-3, the best checkpoint: complete is missing." in caplog.text


@pytest.mark.parametrize(("last", "averaged"), [(11, [5, 9, 11]), (4, [3, 4])])
def test_weights_before_the_flow_starts_are_not_averaged_with_later_ones(
    arguments: list[str], tmp_path: Path, last: int, averaged: list[int]
) -> None:
    settings = [
        "--model.kind=flowseq",
        "--model.flow_steps=1",
        "--training.decoder_steps=4",
        "--training.average_last=9",
    ]
    trainer = runs.trainer_in([*arguments, *settings], tmp_path / "run")
    saved_steps(trainer, *(step for step in (3, 4, 5, 9, 11) if step <= last))
    assert trainer.save_final_model() == averaged


@pytest.mark.parametrize("file", ["model.safetensors", "trainer_state.json"])
def test_final_model_from_an_altered_checkpoint_is_an_error(arguments: list[str], tmp_path: Path, file: str) -> None:
    trainer = runs.trainer_in(arguments, tmp_path / "run")
    saved_steps(trainer, 3, 6)
    trainer.state.best_global_step = 3
    (runs.checkpoint_at(tmp_path / "run", 3) / file).write_bytes(b"{}")
    with user_error(rf"checkpoint-3: {file} was altered; restore it, or average others"):
        trainer.save_final_model()
    assert not (tmp_path / "run" / "model.safetensors").exists()


def evaluate(trainer: PaperTrainer, step: int, bleu: float, loss: float) -> None:
    """Report an evaluation in the order of the Trainer: log, callbacks, best metric."""
    trainer.state.global_step = step
    metrics = {"eval_bleu": bleu, "eval_loss": loss}
    trainer.log(dict(metrics))
    trainer.callback_handler.on_evaluate(trainer.args, trainer.state, trainer.control, metrics)
    trainer._determine_best_metric(metrics, None)


def test_equal_scores_keep_the_checkpoint_with_the_lower_loss_and_exhaust_no_patience(
    arguments: list[str], tmp_path: Path
) -> None:
    trainer = runs.trainer_in([*arguments, "--training.patience=2"], tmp_path / "run")
    best = []
    for step, (bleu, loss) in enumerate([(0, 5), (0, 4), (0, 4.5), (0, 3), (2, 6), (2, 6), (1, 1)], start=1):
        assert not trainer.control.should_training_stop
        evaluate(trainer, step, float(bleu), float(loss))
        best.append(trainer.state.best_global_step)
    assert best == [1, 2, 2, 4, 5, 5, 5]
    assert trainer.state.best_metric == 2
    assert trainer.control.should_training_stop


def test_patience_does_not_warn_that_the_best_checkpoint_would_not_be_loaded(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run restores it after training, without `load_best_model_at_end`."""
    trainer = runs.trainer_in([*arguments, "--training.patience=2"], tmp_path / "run")
    (patience,) = [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, Patience)]
    warnings: list[str] = []
    monkeypatch.setattr(trainer_callback.logger, "warning", warnings.append)
    patience.on_train_begin(trainer.args, trainer.state, trainer.control)
    assert warnings == []


def test_score_that_is_not_a_number_is_never_the_best(arguments: list[str], tmp_path: Path) -> None:
    trainer = runs.trainer_in(arguments, tmp_path / "run")
    evaluate(trainer, 1, math.nan, 5.0)
    evaluate(trainer, 2, 0.0, 9.0)
    evaluate(trainer, 3, math.nan, 1.0)
    assert trainer.state.best_global_step == 2


def test_evaluation_before_the_flow_starts_is_never_the_best(arguments: list[str], tmp_path: Path) -> None:
    settings = ["--model.kind=flowseq", "--model.flow_steps=1", "--training.decoder_steps=4", "--training.patience=1"]
    trainer = runs.trainer_in([*arguments, *settings], tmp_path / "run")
    for step, bleu in [(2, 8.0), (4, 7.0), (6, 5.0)]:
        evaluate(trainer, step, bleu, 5.0)
        assert not trainer.control.should_training_stop
    evaluate(trainer, 8, 4.0, 5.0)
    assert trainer.control.should_training_stop
    assert (trainer.state.best_global_step, trainer.state.best_metric) == (6, 5.0)


WITHOUT_PRIOR = ["--training.steps=9", "--training.decoder_steps=9"]
TOO_MANY_LENGTHS = [
    ([f"--model.kind={family}", "--decoding.length_beam_size=999"], r"^decoding\.length_beam_size: .*at most \d+")
    for family in LENGTH_FAMILY
]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--training.source_tokens=5"], r"^training\.source_tokens, .*more than a batch of 5 and 60; drop it or "),
        (["--training.device_tokens=1"], r"^training\..*device_tokens: 16 pairs cannot be split over the 60 micro"),
        (["--score.tokenize=ja-mecab"], r"^score\.tokenize: ja-mecab cannot be used; Japanese tokenization needs"),
        (["--model.kind=flowseq", "--decoding.num_latent_samples=2"], r"^decoding\.num_latent_samples: .*the same"),
        (
            ["--model.kind=flowseq", "--decoding.latent_temperature=1", *WITHOUT_PRIOR],
            r"^decoding\.latent_temperature: .*no prior; got 1\.0 with training\.decoder_steps 9 of training\.steps 9",
        ),
        *TOO_MANY_LENGTHS,
    ],
)
def test_setting_that_evaluations_or_batches_cannot_have_is_an_error_before_the_first_step(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str], message: str
) -> None:
    class WithoutPackages(BLEU):
        def __init__(self, tokenize: str, **settings: Any) -> None:
            if tokenize == "ja-mecab":
                raise RuntimeError("Japanese tokenization needs\nextra dependencies")
            super().__init__(tokenize=tokenize, **settings)

    monkeypatch.setattr("sacrebleu.BLEU", WithoutPackages)
    monkeypatch.setattr(PaperTrainer, "training_step", no_space)
    settings = runs.last_of_each(*arguments, *more, f"--output_dir={tmp_path / 'run'}")
    with user_error(message):
        runs.train_in(settings, tmp_path / "run")


def summed(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits.float().transpose(1, 2), labels, reduction="none").sum(1)


@pytest.mark.parametrize(("warmup", "is_logged"), [(5, False), (6, True)])
def test_warm_up_longer_than_the_run_is_logged(
    arguments: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture, warmup: int, is_logged: bool
) -> None:
    settings = runs.last_of_each(*arguments, "--training.steps=5", f"--training.warmup_steps={warmup}")
    runs.trainer_in(settings, tmp_path / "run").create_optimizer_and_scheduler(5)
    lines = [message for message in caplog.messages if message.startswith("training.warmup_steps: ")]
    assert len(lines) == is_logged


def test_sentence_losses_are_the_same_in_chunks_and_make_no_copy_of_all_logits() -> None:
    batch, length, vocab_size = 19, 7, 50
    logits = torch.randn(batch, length, vocab_size).bfloat16()
    labels = torch.randint(vocab_size, (batch, length)).masked_fill(torch.rand(batch, length) < 0.3, -100)
    with LargestTensor() as largest:
        losses = sentence_losses(logits, labels)
    assert largest.numel == 8 * length * vocab_size
    torch.testing.assert_close(losses, summed(logits, labels), rtol=0, atol=0)


def test_evaluation_of_any_batch_size_gives_the_same_loss(arguments: list[str], tmp_path: Path) -> None:
    scores = []
    for size in (1, 5, 64):
        trainer = runs.trainer_in(arguments, tmp_path / f"run-{size}", f"--training.evaluation_batch_size={size}")
        results, metrics = trainer.translate_split("validation", trainer.search)
        scores.append((metrics["loss"], len(results)))
    np.testing.assert_allclose([loss for loss, _ in scores], scores[0][0], rtol=1e-5)
    assert {count for _, count in scores} == {16}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("errors", "text"), [(Terminal, r".*\r 83% .* 5/6, loss 2\n"), (io.StringIO, "")])
def test_progress_bar_of_a_resumed_run_begins_at_its_step_and_ends_its_line_at_an_error(
    monkeypatch: pytest.MonkeyPatch, errors: type[io.StringIO], text: str
) -> None:
    monkeypatch.setattr("sys.stderr", errors())
    bar, arguments, control = ProgressBar(), TrainingArguments(report_to="none"), TrainerControl()
    with contextlib.suppress(FloatingPointError), bar.above():
        bar.on_train_begin(arguments, TrainerState(global_step=5, max_steps=6), control)
        bar.show("loss 2")
        raise FloatingPointError
    assert re.fullmatch(text, cast(io.StringIO, sys.stderr).getvalue(), flags=re.DOTALL)


@pytest.mark.parametrize(("minutes", "left"), [(None, 9.0), (5.0, 3.0), (60.0, 9.0), (1.0, 0.0)])
def test_time_left_ends_at_the_limit_of_steps_or_minutes(
    arguments: list[str], tmp_path: Path, minutes: float | None, left: float
) -> None:
    """The run has trained for one minute before it was resumed, and takes a minute for each step since."""
    progress = Progress(runs.recipe_in(arguments, tmp_path / "run", f"--training.minutes={minutes or 'null'}"))
    progress.first_step = 90
    progress.seconds = 60.0
    progress.begun = time.monotonic() - 60
    state = TrainerState(global_step=91, max_steps=100)
    assert progress.minutes_left(state) == pytest.approx(left, abs=0.01)


def test_run_says_at_its_start_what_it_does(
    arguments: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    more = ["--training.steps=7", "--training.minutes=20"]
    trainer = runs.trainer_in(arguments, tmp_path / "run", *more)
    caplog.clear()  # of what reading the data says
    with caplog.at_level("INFO", logger="training.trainer"):
        trainer.get_train_dataloader()
    assert [" ".join(message.split()) for message in caplog.messages] == [
        "Training own",
        f"folder {tmp_path / 'run'}",
        "device cpu, fp32",
        "processes 1",
        f"threads {torch.get_num_threads()} in each process",
        f"parameters {trainer.model.num_parameters():,}",
        "data 16 training pairs, 2 steps an epoch, 7.1% padding",
        "limits 7 steps (3.5 epochs) or 20 minutes, whichever comes first",
    ]


@pytest.mark.parametrize(
    ("report_to", "names"), [("none", []), ("tensorboard", ["tensorboard"]), ("[tensorboard]", ["tensorboard"])]
)
def test_curves_go_to_the_tools_that_the_recipe_names(
    arguments: list[str], tmp_path: Path, report_to: str, names: list[str]
) -> None:
    trainer = runs.trainer_in(arguments, tmp_path / "run", f"--training.report_to={report_to}")
    assert trainer.args.report_to == names


def test_tool_that_is_not_installed_is_an_error(arguments: list[str], tmp_path: Path) -> None:
    with user_error(r"^training\.report_to: sheets is not installed or unknown; got 'sheets', expected .*tensorboard"):
        runs.trainer_in(arguments, tmp_path / "run", "--training.report_to=sheets")
