"""Training IterativeVAE by a recipe: its fields, operations, warm-up of the divergences, log, and resuming."""

import json
from pathlib import Path

import pytest
import torch

from tests.nar_models import tiny_iterative_vae
from tests.training.runs import assert_resumes, entries, results_in, train_in, trainer_in
from training.trainer.trainer import by_layer

KIND = "--model.kind=iterative_vae"


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
    entry = entries(train_in(arguments, whole, *more))[0]
    names = {"layer_loss_1", "layer_loss_2", "layer_kl_2", "prior_weight_2", "hint_weight_2", "kl_loss", "length_loss"}
    assert names <= entry.keys()
    assert entry["layer_kl_2"] > 0
    assert entry["kl_loss"] == pytest.approx(entry["layer_kl_2"], rel=1e-5)  # the last layer's weight is 1
    assert entry["bound"] == pytest.approx(entry["layer_loss_2"] + entry["layer_kl_2"], rel=1e-5)
    total = sum(entry[f"layer_loss_{layer}"] for layer in (1, 2)) + entry["length_loss"]
    assert entry["step"] == 1
    assert entry["loss"] == pytest.approx(total + entry["kl_loss"] / 8, rel=1e-5)  # kl_scale of the first step
    assert json.loads((whole / "config.json").read_text())["model_type"] == "vaswani_iterative_vae"
    assert_resumes(arguments, whole, 3, tmp_path / "resumed", *more)
    bounds = [results_in(tmp_path / name)["validation"]["bound"] for name in ("whole", "resumed")]
    assert bounds[0] == bounds[1] > 0


@pytest.mark.slow
def test_evaluation_of_the_bound_repeats_itself_and_moves_no_generator(arguments: list[str], tmp_path: Path) -> None:
    """The oracle of two equal evaluations is a pass over each pair, with other samples: within a tenth of a nat."""
    trainer = trainer_in([*arguments, KIND, "--model.decoder_layers=2"], tmp_path / "run")
    state = torch.get_rng_state()
    bounds = [trainer.evaluate()["eval_bound"] for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), state)
    assert bounds[0] == bounds[1]
    model, total, tokens = trainer.model.eval(), 0.0, 0
    for row in trainer.eval_dataset.select_columns(["input_ids", "labels"]).with_format("torch"):
        labels = row["labels"][None].repeat(50, 1)
        bound = model(input_ids=row["input_ids"][None], labels=labels, has_hint=True).bound.detach()
        total, tokens = total + float(bound) * labels.shape[1], tokens + labels.shape[1]
    assert bounds[0] == pytest.approx(total / tokens, abs=0.1)
