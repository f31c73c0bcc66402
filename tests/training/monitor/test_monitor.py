"""The progress and the metrics of a run, and the time that they count, also after an interruption."""

import itertools
import json
import os
import pty
import re
import shlex
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import DataCollatorForSeq2Seq, TrainerControl, TrainerState, set_seed

from tests.helpers import ROOT, load_tokenizer
from tests.training import runs
from tests.training.monitor.fake_stopwatch import FakeStopwatch
from training.monitor.monitor import MONITOR_FILE, TrainingMonitor
from training.monitor.progress import format_time_left
from training.monitor.stopwatch import PHASES
from training.recipe.fields import Recipe, TrainingRecipe
from training.recipe.flops import training_flops
from training.run.checkpoints import checkpoint_at, mark_complete
from training.run.checks import config_for_tokenizer
from training.trainer.callbacks import LossTieBreaker, RecipeFlowCallback
from vaswani_transformer import VaswaniTransformerForConditionalGeneration
from vaswani_transformer.batching import TokenBudgetBatchSampler
from vaswani_transformer.batching.schedule import learning_rate, paper_adam, paper_schedule

CPU = torch.device("cpu")


def test_metrics_cover_the_steps_since_the_last_entry_and_training_time_only() -> None:
    seen = TrainingMonitor(CPU, "fp32")
    seen.stopwatch = FakeStopwatch()
    seen.peak = 1e-9
    args = TrainerState(), TrainerControl()
    seen.on_train_begin(runs.UNREAD, *args)
    batch = {
        "input_ids": torch.tensor([[5, 6, 2], [7, 2, 1]]),
        "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]),
        "labels": torch.tensor([[5, 2, -100, -100], [5, 6, 7, 2]]),
    }
    for step in (1, 2):
        for phase in ("data", "forward", "backward", "optimizer", "evaluation", "other", "saving"):
            seen.stopwatch.enter(phase)
            seen.stopwatch.now += 100 if phase in ("evaluation", "saving") else 2
        seen.count(batch)
        seen.add_loss(torch.tensor(12.0 * step), 0)
        seen.on_save(runs.UNREAD, *args)
        assert seen.metrics(flops=4000.0 * step) == {
            "loss": pytest.approx(2.0 * step),
            "target_tokens_per_second": pytest.approx(0.6),
            "padding_share": pytest.approx(3 / 14),
            "teraflops_per_second": pytest.approx(4e-10),
            "mfu": pytest.approx(0.4),
        }


def batches_of_rank(rank: int, ranks: int, parts: int, pairs: list[dict[str, Any]], seed: int) -> Iterator[list[int]]:
    """Yield the batches of one process, epoch after epoch."""
    lengths = [[len(pair[name]) for pair in pairs] for name in ("input_ids", "labels")]
    sampler = TokenBudgetBatchSampler(*lengths, 60, 60, num_processes=ranks, rank=rank, accumulation=parts, seed=seed)
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        yield from sampler


def trained_by_hand(recipe: Recipe, folder: Path, ranks: int, parts: int) -> Iterator[tuple[Any, ...]]:
    """Train without the Trainer; yield summed loss, target tokens, tokens, positions and FLOPs of each step."""
    tokenizer = load_tokenizer(folder)
    set_seed(recipe.seed)
    model = VaswaniTransformerForConditionalGeneration(config_for_tokenizer(recipe, tokenizer)).train()
    optimizer = paper_adam(model.parameters())
    schedule = paper_schedule(optimizer, model.config.d_model, recipe.training.warmup_steps)
    collate = DataCollatorForSeq2Seq(tokenizer, model)
    pairs = [dict(tokenizer(text, text_target=text[::-1])) for text in runs.LANGUAGE]
    everyone = [batches_of_rank(rank, ranks, parts, pairs, recipe.seed) for rank in range(ranks)]
    while True:
        phase_shares = [[pairs[index] for index in next(batches)] for batches in everyone for _ in range(parts)]
        positions = sum(collate(share)[name].numel() for share in phase_shares for name in ("input_ids", "labels"))
        step_batch = collate([pair for share in phase_shares for pair in share])
        lengths = step_batch["attention_mask"].sum(1), step_batch["labels"].ne(-100).sum(1)
        source, target = (int(side.sum()) for side in lengths)
        loss = model(**step_batch).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        yield loss.item() * target, target, source + target, positions, training_flops(model.config, *lengths)


@pytest.mark.slow
def test_log_of_two_processes_with_micro_batches_equals_one_computed_by_hand(
    arguments: list[str], tmp_path: Path
) -> None:
    """An entry covers two steps with different numbers of target tokens, so a mean of the steps' means would differ.

    Dropout is off, because its masks differ by process; the order of sums makes a difference that Adam multiplies.
    """
    folder = tmp_path / "run"
    more = ["--training.steps=6", "--training.log_steps=2", "--training.device_tokens=15", "--model.dropout=0.0"]
    arguments = [*arguments, *more]
    runs.run_to_end(arguments, folder, launcher=runs.TWO_PROCESSES)
    results = runs.results_in(folder)
    logged = runs.entries(results)
    assert [entry["step"] for entry in logged] == [2, 4, 6]

    by_hand, means_of_means, flops = trained_by_hand(runs.recipe_in(arguments, folder), folder, ranks=2, parts=2), [], 0
    for entry in logged:
        steps = [next(by_hand), next(by_hand)]
        loss, target, tokens, positions, made = (sum(figures) for figures in zip(*steps, strict=True))
        assert entry["loss"] == pytest.approx(loss / target, rel=1e-5)
        assert entry["padding_share"] == pytest.approx(1 - tokens / positions)
        assert entry["learning_rate"] == learning_rate(entry["step"], 16, 10)
        means_of_means.append(sum(loss / target for loss, target, *_ in steps) / 2)
        flops += made
    assert max(abs(entry["loss"] - mean) for entry, mean in zip(logged, means_of_means, strict=True)) > 1e-3
    assert results["flops"] == pytest.approx(flops)


@pytest.mark.slow
def test_tensorboard_holds_every_metric_of_the_log(finished_run: runs.FinishedRun) -> None:
    written = {}
    for path in (finished_run.folder / "tensorboard").iterdir():
        events = EventAccumulator(str(path)).Reload()
        for tag in events.Tags()["scalars"]:
            written |= {(tag, event.step): event.value for event in events.Scalars(tag)}
    for kind, names in {
        "train": ("loss", "learning_rate", "target_tokens_per_second", "padding_share", "teraflops_per_second"),
        "eval": ("loss", "perplexity", "bleu"),
    }.items():
        prefix = "eval_" if kind == "eval" else ""
        logged = runs.entries(finished_run.results, f"{prefix}loss")
        assert len(logged) == {"train": 9, "eval": 3}[kind]
        for entry, name in itertools.product(logged, names):
            assert written[f"{kind}/{name}", entry["step"]] == pytest.approx(entry[prefix + name], rel=1e-6)
    assert not any("perplexity" in tag for tag, _ in written if tag.startswith("train/"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "verbosity"), [((), "error"), (runs.TWO_PROCESSES, "warning")], ids=["one process", "two processes"]
)
def test_log_file_gets_a_line_per_entry_from_the_main_process_and_no_bar(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: tuple[str, ...], verbosity: str
) -> None:
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", verbosity)
    process = runs.start([*arguments, "--training.steps=3"], tmp_path / "run", launcher=launcher, is_fork=False)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    lines = [line for line in errors.splitlines() if line.startswith("Step ")]
    number = r"[\d.,e+]+"
    for line, step in zip(lines[:-1], (1, 2, 3), strict=True):
        left = "" if step == 3 else r", at most \d+ (s|min) left"
        assert re.fullmatch(rf"Step {step} of 3: loss {number}, tokens/s {number}{left}", line)
    assert re.fullmatch(rf"Step 3 of 3: BLEU {number}, perplexity {number}", lines[-1])
    assert "\r" not in errors
    assert "%|" not in errors
    assert output.splitlines()[-2].startswith("Time: ")
    first, targets, *_, translate, figures = [line for line in errors.splitlines() if line]
    assert first.startswith("own trains a model for 3 steps, then translates the test set")
    assert targets == "Training targets: those of the data."
    assert translate == f"vaswani-translate {tmp_path / 'run'} --interactive"
    assert shlex.split(figures)[:4] == ["python", "-m", "vaswani_transformer.figures", str(tmp_path / "run")]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (89, "89 s"), (90, "2 min"), (59.4 * 60, "59 min"), (60 * 60, "1 h 0 min"), (7500, "2 h 5 min")],
)
def test_time_left_is_given_in_a_readable_unit(seconds: float, text: str) -> None:
    assert format_time_left(seconds) == text


@pytest.mark.slow
def test_terminal_gets_a_bar_with_the_latest_metrics(arguments: list[str], tmp_path: Path) -> None:
    terminal, end = pty.openpty()
    command = [sys.executable, "-m", "training.train", *arguments, f"--output_dir={tmp_path}/run"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    termios.tcsetwinsize(terminal, (24, 160))
    process = subprocess.Popen(
        [*command, "--training.steps=4"], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=end
    )
    os.close(end)
    shown = b""
    try:
        while part := os.read(terminal, 4096):
            shown += part
    except OSError:  # the other end is closed
        pass
    assert process.wait(timeout=300) == 0
    number = rb"[\d.,e+]+"
    bar = rb"\| 4/4 .*, loss=%b, tokens/s=%b, BLEU=%b, perplexity=%b\]" % (number, number, number, number)
    assert re.search(bar, shown)
    assert b"{'loss'" not in shown


@pytest.mark.slow
def test_phases_of_a_run_sum_to_its_time(finished_run: runs.FinishedRun) -> None:
    time = finished_run.results["time"]
    assert finished_run.results["seconds"] == sum(time.values()) <= finished_run.seconds
    assert list(time) == list(PHASES)
    assert min(time.values()) > 0


@pytest.mark.slow
def test_time_and_minutes_continue_after_an_interruption(arguments: list[str], tmp_path: Path) -> None:
    """The checkpoint records nearly an hour of training, so the recipe's minutes leave one step."""
    folder, more = tmp_path / "run", ["--training.steps=9", "--training.minutes=59"]
    runs.train_in(arguments, folder, *more)
    runs.rewind(folder, 6)
    saved = checkpoint_at(folder, 6) / MONITOR_FILE
    before = json.loads(saved.read_text())
    assert 0 < before["trained"] < 60
    assert before["time"]["forward"] > 0
    saved.write_text(json.dumps({"trained": 3600.0, "time": before["time"] | {"forward": 3000.0}}))
    mark_complete(saved.parent)  # with the current file
    results = runs.train_in(arguments, folder, *more)
    assert results["steps"] == 7
    assert 3000 < results["time"]["forward"] < 3060
    assert results["seconds"] > 3000

    (folder / "results.json").unlink()  # killed while the test set was translated
    again = runs.train_in(arguments, folder, *more)
    assert again["steps"] == 7
    assert again["time"]["forward"] == results["time"]["forward"]


def test_minutes_before_an_interruption_count() -> None:
    seen = TrainingMonitor(CPU, "fp32")
    seen.trained_before = 59.0
    state, control = TrainerState(), TrainerControl()
    seen.on_train_begin(runs.UNREAD, state, control)
    RecipeFlowCallback(TrainingRecipe(minutes=2), seen).on_step_end(runs.UNREAD, state, control)
    assert not control.should_training_stop
    RecipeFlowCallback(TrainingRecipe(minutes=0.98), seen).on_step_end(runs.UNREAD, state, control)
    assert control.should_training_stop
    assert control.should_save


@pytest.mark.parametrize(
    ("bleu", "loss", "is_better"),
    [(0.0, 3.9, True), (0.0, 4.0, False), (0.0, 4.1, False), (0.0, float("nan"), False), (-0.1, 3.9, False)],
)
def test_equal_bleu_at_a_lower_loss_is_better(bleu: float, loss: float, is_better: bool) -> None:
    best = {"step": 3, "eval_bleu": 0.0, "eval_loss": 4.0}
    state = TrainerState(best_metric=0.0, best_global_step=3, log_history=[{"step": 3, "loss": 1.0}, best])
    metrics = {"eval_bleu": bleu, "eval_loss": loss}
    LossTieBreaker("bleu").on_evaluate(runs.UNREAD, state, TrainerControl(), metrics=metrics)
    assert state.best_metric is not None
    assert (bleu > state.best_metric) == is_better
    assert state.best_metric == pytest.approx(0.0)


@pytest.mark.slow
def test_best_checkpoint_has_the_lowest_loss_if_bleu_is_equal(arguments: list[str], tmp_path: Path) -> None:
    """Every BLEU is 0 at the beginning of a run, and patience does not end it then."""
    folder = tmp_path / "run"
    results = runs.train_in(arguments, folder, "--training.steps=9", "--training.patience=1")
    evaluations = runs.entries(results, "eval_bleu")
    assert {entry["eval_bleu"] for entry in evaluations} == {0.0}
    assert results["best_validation_bleu"] == 0.0
    state = json.loads((folder / "trainer_state.json").read_text())
    assert state["best_global_step"] == min(evaluations, key=lambda entry: entry["eval_loss"])["step"] == 9
