"""A run that diverges stops, or skips the steps, and keeps all weights finite."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TrainerControl, TrainerState, TrainingArguments

from tests.helpers import tiny_model, user_error
from tests.training import runs
from tests.training.changed_run import poison
from training.recipe.fields import TrainingRecipe
from training.run.checkpoints import all_checkpoints, checkpoint_at, complete_checkpoints, step_of
from training.trainer.divergence import DivergenceGuard, is_finite
from training.trainer.trainer import RecipeTrainer
from vaswani_transformer.batching.schedule import paper_adam
from vaswani_transformer.support.errors import UserError

Poison = Callable[..., None]  # of the numbers of steps
BAD_STEP = 5


def all_finite(folder: Path) -> bool:
    return all(is_finite(list(runs.weights(path).values())) for path in complete_checkpoints(folder))


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Poison:
    """Return a function that makes the losses of given steps NaN, in one micro-batch or all."""

    def poison_steps(*steps: int, micro_batch: int | None = None) -> None:
        def is_bad(step: int, number: int, rank: int) -> bool:
            return step in steps and micro_batch in (None, number)

        monkeypatch.setattr(RecipeTrainer, "compute_loss", poison(RecipeTrainer.compute_loss, is_bad))

    return poison_steps


@pytest.mark.slow
def test_training_stops_at_a_gradient_that_is_not_finite_and_keeps_the_checkpoint_before(
    finished_run: runs.FinishedRun, arguments: list[str], tmp_path: Path, poisoned: Poison
) -> None:
    folder, uninterrupted = tmp_path / "run", finished_run.folder
    poisoned(BAD_STEP)
    with pytest.raises(UserError) as stop:
        runs.train_in(arguments, folder, "--training.steps=9")
    assert re.fullmatch(
        r"step 5: the loss or its gradient is not finite, of the training pairs (\d+, )+\d+( and \d+ more)? \(one is "
        r"'\w+ \w+'\); checkpoint 3 is kept; start over with a smaller training\.learning_rate_scale, or leave such "
        r"steps out by --training\.on_divergence=skip\.",
        str(stop.value),
    )
    assert [step_of(path) for path in all_checkpoints(folder)] == [3]
    assert not (folder / "results.json").exists()
    assert runs.equal(runs.weights(folder, step=3), runs.weights(uninterrupted, step=3))


@pytest.mark.slow
def test_pairs_of_the_micro_batch_that_failed_are_named(arguments: list[str], tmp_path: Path, poisoned: Poison) -> None:
    poisoned(1, micro_batch=2)
    with pytest.raises(UserError) as stop:
        runs.train_in(arguments, tmp_path / "run", "--training.steps=9", "--training.device_tokens=15")
    match = re.search(r"the training pairs ([\d, ]+)( and \d+ more)? \(one is '(\w+ \w+)'\)", str(stop.value))
    assert match is not None
    lines = (tmp_path / "data" / "train.jsonl").read_text().splitlines()
    texts = [json.loads(lines[int(number) - 1])["translation"]["en"] for number in match[1].split(",")]
    assert match[3] in texts
    assert len(texts) < 5
    assert "no checkpoint was written yet" in str(stop.value)


@pytest.mark.slow
def test_skipped_step_changes_neither_weights_nor_moments(
    arguments: list[str], tmp_path: Path, poisoned: Poison, caplog: pytest.LogCaptureFixture
) -> None:
    poisoned(BAD_STEP)
    more = ["--training.on_divergence=skip", "--training.steps=6", "--training.checkpoint_steps=1"]
    results = runs.train_in(arguments, tmp_path / "run", *more)
    states = {}
    for step in (4, 5, 6):
        path = checkpoint_at(tmp_path / "run", step)
        optimizer = torch.load(path / "optimizer.pt", weights_only=True)["state"]
        states[step] = runs.weights(path) | {
            f"{name} of {of}": value for of, state in optimizer.items() for name, value in state.items()
        }
    assert runs.equal(states[4], states[5])
    assert not runs.equal(states[5], states[6])
    assert is_finite(list(states[6].values()))
    assert results["steps"] == 6
    assert "Step 5: the loss or its gradient is not finite, of the training pairs" in caplog.text
    losses = {entry["step"]: entry["loss"] for entry in runs.entries(results)}
    assert all(loss == loss for step, loss in losses.items() if step != BAD_STEP)


@pytest.mark.slow
def test_run_that_skips_too_many_steps_in_a_row_stops(arguments: list[str], tmp_path: Path, poisoned: Poison) -> None:
    poisoned(4, 6, 7, 8, 9)
    more = ["--training.on_divergence=skip", "--training.skip_limit=2", "--training.steps=12"]
    with user_error(r"^step 8: .* after 2 such steps in a row; checkpoint 6 is kept; start over"):
        runs.train_in(arguments, tmp_path / "run", *more)
    assert all_finite(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize(("scale", "precision"), [("1e9", "fp32"), ("1e38", "bf16")])
def test_learning_rate_far_too_large_leaves_no_checkpoint_that_is_not_finite(
    arguments: list[str], tmp_path: Path, scale: str, precision: str
) -> None:
    more = [f"--training.learning_rate_scale={scale}", f"--training.precision={precision}", "--training.steps=30"]
    with user_error(r"^step \d+: .* not finite.*start over with a smaller"):
        runs.train_in(arguments, tmp_path / "run", *more, "--training.checkpoint_steps=1")
    assert all_finite(tmp_path / "run")
    assert not (tmp_path / "run" / "results.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [runs.TWO_PROCESSES, runs.TWO_SHARDS], ids=["DDP", "FSDP2"])
def test_processes_stop_together_name_their_pairs_once_and_resume_by_skipping(
    arguments: list[str], tmp_path: Path, launcher: tuple[str, ...]
) -> None:
    """The loss of one micro-batch of the second process is NaN in the fifth step."""
    settings = [*arguments, "--training.steps=7", "--training.device_tokens=15"]
    process = runs.start(settings, tmp_path / "run", launcher=launcher, change="poison")
    _, errors = process.communicate(timeout=300)
    assert process.returncode != 0
    messages = re.findall(r"^step 5: the loss or its gradient is not finite, of the training pairs.*$", errors, re.M)
    assert len(messages) == 1
    assert "checkpoint 3 is kept" in messages[0]
    assert all_finite(tmp_path / "run")
    skipping = [*settings, "--training.on_divergence=skip"]
    runs.run_to_end(skipping, tmp_path / "run", launcher=launcher, change="poison")
    assert runs.results_in(tmp_path / "run")["steps"] == 7
    assert is_finite(list(runs.weights(tmp_path / "run").values()))


def guarded(tmp_path: Path, steps: list[float], **settings: Any) -> tuple[list[dict[str, Tensor]], DivergenceGuard]:
    """Return a model after steps on a device slower than the host, its weights after each step, and the guard."""
    model = tiny_model()
    tokenizer: Any = SimpleNamespace(decode=lambda tokens, skip_special_tokens: " ".join(map(str, tokens)))
    guard = DivergenceGuard(TrainingRecipe(**settings), tokenizer, torch.device("cpu"))
    guard.on_train_begin(TrainingArguments(str(tmp_path)), TrainerState(), TrainerControl())
    optimizer, seen = paper_adam(model.parameters()), []
    guard.guard(optimizer)
    for value in steps:
        for weight in model.parameters():
            weight.grad = torch.full_like(weight, value)
        guard.add(None, torch.tensor([5, 6]), torch.tensor(value))
        gradients: list[Any] = [weight.grad for weight in model.parameters()]
        guard.inspect(torch.nn.utils.get_total_norm(gradients))
        optimizer.step()
        seen.append({name: weight.detach().clone() for name, weight in model.named_parameters()})
    return seen, guard


def test_no_update_follows_a_gradient_that_is_not_finite_until_the_host_learns_of_it(tmp_path: Path) -> None:
    seen, guard = guarded(tmp_path, [1.0, float("nan"), 1.0])
    assert runs.equal(seen[0], seen[1])
    assert runs.equal(seen[1], seen[2])
    with user_error(r"^step 2: .* of a batch of the pair '5 6'; no checkpoint was written yet;"):
        guard.read_flags(tmp_path)


@pytest.mark.parametrize(("optimizer", "rate"), [("paper", "learning_rate_scale"), ("radam", "learning_rate")])
def test_run_that_diverges_names_the_learning_rate_that_its_optimizer_has(
    tmp_path: Path, optimizer: str, rate: str
) -> None:
    _, guard = guarded(tmp_path, [float("nan")], optimizer=optimizer)
    with user_error(rf"; start over with a smaller training\.{rate}, or leave such steps out by"):
        guard.read_flags(tmp_path)


@pytest.mark.parametrize("is_fused", [True, False])
def test_only_the_skipped_update_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, is_fused: bool
) -> None:
    if not is_fused:
        monkeypatch.setattr("vaswani_transformer.batching.schedule.FUSED_DEVICES", ())
    seen, guard = guarded(tmp_path, [1.0, float("inf"), 1.0], on_divergence="skip")
    assert runs.equal(seen[0], seen[1])
    assert not runs.equal(seen[1], seen[2])
    guard.read_flags(tmp_path)
    assert "Step 2: the loss or its gradient is not finite, of a batch of the pair '5 6'; its update" in caplog.text
    assert guard.skipped == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_are_finite_only_if_each_of_them_is(value: float) -> None:
    model = tiny_model()
    assert is_finite(list(model.parameters()))
    with torch.no_grad():
        list(model.parameters())[-1].view(-1)[-1] = value
    assert not is_finite(list(model.parameters()))
