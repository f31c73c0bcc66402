"""Training IterativeVAE by a recipe: its fields, operations, warm-up of the divergences, log, and resuming."""

import json
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import TrainerControl, TrainerState

from tests.helpers import random_tokens
from tests.nar_models import tiny_iterative_vae
from tests.training.runs import UNREAD, assert_same_checkpoints, rewound, train_in
from training.recipe.families import FAMILIES, family_of
from training.recipe.fields import load_recipe, to_dict
from training.trainer.callbacks import TrainingRateCallback
from training.trainer.trainer import by_layer
from vaswani_transformer import latent
from vaswani_transformer.support.errors import UserError

KIND = "--model.kind=iterative_vae"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([KIND, "--training.kl_scale=-1"], r"^training\.kl_scale: -1 is negative; give 0 or more"),
        ([KIND, "--training.kl_warmup_steps=0"], r"^training\.kl_warmup_steps: 0 is not positive"),
        ([KIND, "--training.glancing=[0.5, 0.3]"], r"^training\.glancing: a model of kind iterative_vae has no such"),
        ([KIND, "--model.kl_weights=[1.0]"], r"^model: .*kl_weights .* must be 5 finite numbers"),
        (
            ["--training.kl_scale=1"],
            r"^training\.kl_scale: a model of kind autoregressive has no such field, kind iter",
        ),
    ],
)
def test_bad_field_is_an_error_of_one_line(arguments: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("data: {kind: grammar}")
    with pytest.raises(UserError, match=message) as refusal:
        load_recipe(tmp_path / "own.yaml", arguments)
    assert "\n" not in str(refusal.value)


def test_kind_is_found_by_the_configuration_and_saved_with_its_fields(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("data: {kind: grammar}")
    recipe = load_recipe(tmp_path / "own.yaml", [KIND, "--training.kl_scale=0.1"])
    assert family_of(tiny_iterative_vae().config) is recipe.family
    assert to_dict(recipe)["training"]["kl_scale"] == 0.1
    assert recipe.model_config(vocab_size=99).layer_kl_weights == [25, 16, 9, 4, 1]


def test_flops_are_those_that_torch_counts_but_for_the_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no padding and no recomputation. Positional queries and keys are computed once a batch."""
    monkeypatch.setattr(latent, "checkpoint", lambda run, *inputs, use_reentrant: run(*inputs))
    model = tiny_iterative_vae(decoder_layers=3).train()
    model.set_attn_implementation("eager")
    batch = {"input_ids": random_tokens(3, 7), "attention_mask": torch.ones(3, 7), "labels": random_tokens(3, 5)}
    positions = 4 * model.config.decoder_layers * 2 * model.config.num_heads * model.config.head_dim * 32 * 5
    with FlopCounterMode(display=False) as counter:
        model(**batch, skip_logits=False).loss.backward()
    assert FAMILIES["iterative_vae"].flops(model, batch) == counter.get_total_flops() - positions


def test_divergences_weigh_more_by_the_step_and_stay_at_their_full_weight() -> None:
    model, state = tiny_iterative_vae(), TrainerState()
    callback, scales = TrainingRateCallback(model, "kl_scale", 0.0, 0.4, 10), []
    for state.global_step in (0, 5, 10, 15, 2):  # at any step from which a run resumes
        callback.on_step_begin(UNREAD, state, TrainerControl())
        scales.append(model.kl_scale)
    assert scales == pytest.approx([0.0, 0.2, 0.4, 0.4, 0.08])


def test_values_of_layers_are_named_by_the_layer() -> None:
    config = tiny_iterative_vae(decoder_layers=3).config
    assert by_layer("loss", torch.tensor(2.0), config) == [("loss", torch.tensor(2.0))]
    assert [name for name, _ in by_layer("kl", torch.ones(2), config)] == ["kl_2", "kl_3"]
    assert [name for name, _ in by_layer("loss", torch.ones(3), config)] == ["loss_1", "loss_2", "loss_3"]


@pytest.mark.slow
def test_run_logs_its_layers_and_resumes_to_the_bit(arguments: list[str], tmp_path: Path) -> None:
    """Noise and dropout are those of an uninterrupted run, and the warm-up depends on the step."""
    more = [KIND, "--model.decoder_layers=2", "--training.kl_warmup_steps=8", "--training.steps=6"]
    whole = tmp_path / "whole"
    first = train_in(arguments, whole, *more)
    entry = next(entry for entry in first["curve"] if "loss" in entry)
    names = {"layer_loss_1", "layer_loss_2", "layer_kl_2", "prior_weight_2", "hint_weight_2", "kl_loss", "length_loss"}
    assert names <= entry.keys()
    assert entry["layer_kl_2"] > 0
    assert entry["kl_loss"] == pytest.approx(entry["layer_kl_2"], rel=1e-5)  # the last layer's weight is 1
    total = sum(entry[f"layer_loss_{layer}"] for layer in (1, 2)) + entry["length_loss"]
    assert entry["step"] == 1
    assert entry["loss"] == pytest.approx(total, rel=1e-5)  # kl_scale is 0 at the first step
    resumed = rewound(whole, 3, tmp_path / "resumed")
    assert train_in(arguments, resumed, *more)["steps"] == 6
    assert_same_checkpoints(whole, resumed)
    assert json.loads((resumed / "config.json").read_text())["model_type"] == "vaswani_iterative_vae"
