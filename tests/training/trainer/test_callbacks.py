"""The callbacks of a recipe, called at steps of the test."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import TrainerCallback, TrainerControl, TrainerState

from tests.training import runs
from training.monitor.monitor import TrainingMonitor
from training.trainer.callbacks import recipe_callbacks


def callbacks_of(arguments: list[str], model: Any, *more: str) -> list[TrainerCallback]:
    recipe = runs.recipe_in(arguments, Path("unused"), *more)
    return list(recipe_callbacks(recipe, model, TrainingMonitor(torch.device("cpu"), "fp32")))


def test_steps_that_log_and_save_are_those_of_the_recipe(arguments: list[str]) -> None:
    callbacks = callbacks_of(arguments, None, "--training.log_steps=2", "--training.checkpoint_steps=3")
    logged, saved = [], []
    for step in range(1, 7):
        control = TrainerControl()
        for callback in callbacks:
            callback.on_step_end(runs.UNREAD, TrainerState(global_step=step), control)
        logged += [step] if control.should_log else []
        saved += [step] if control.should_save else []
    assert (logged, saved) == ([2, 4, 6], [3, 6])


@pytest.mark.parametrize(
    ("kind", "fields", "expected"),
    [
        ("nat", ["glancing=[0.9, 0.5]"], {"glancing_ratio": [0.9, 0.8, 0.7, 0.5]}),
        ("nat", ["glancing=[0.9, 0.5]", "glancing_steps=4"], {"glancing_ratio": [0.9, 0.7, 0.5, 0.5]}),
        ("iterative_vae", ["kl_warmup_steps=4", "kl_scale=0.5"], {"kl_scale": [0.125, 0.375, 0.5, 0.5]}),
        (
            "iterative_vae",
            ["glancing=[0.9, 0.5]", "kl_warmup_steps=0"],
            {"kl_scale": [1] * 4, "glancing_ratio": [0.9, 0.8, 0.7, 0.5]},
        ),
        ("flowseq", ["kl_warmup_steps=4", "decoder_steps=2"], {"kl_scale": [0, 0.25, 0.75, 1]}),
        ("autoregressive", [], {}),
    ],
)
def test_rates_of_a_model_follow_its_recipe(
    arguments: list[str], kind: str, fields: list[str], expected: dict[str, list[float]]
) -> None:
    """The rates are those of steps 0, 2, 4 and 8 of eight."""
    model = SimpleNamespace()
    settings = [f"--training.{field}" for field in ("steps=8", *fields)]
    callbacks = callbacks_of(arguments, model, f"--model.kind={kind}", *settings)
    rates: dict[str, list[float]] = {name: [] for name in expected}
    for step in (0, 2, 4, 8):
        for callback in callbacks:
            callback.on_step_begin(runs.UNREAD, TrainerState(global_step=step), TrainerControl())
        assert vars(model).keys() == expected.keys()
        for name, rate in vars(model).items():
            rates[name].append(rate)
    assert rates == {name: pytest.approx(values) for name, values in expected.items()}
