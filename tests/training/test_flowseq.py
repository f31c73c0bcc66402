"""Training FlowSeq by a recipe: its fields, operations, phases, start, log, and resuming across the phases."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers import random_tokens, run_main, user_error
from tests.nar_models import FAMILY, targets
from tests.training.runs import assert_resumes, entries, train_in, weights
from training.recipe.fields import load_recipe
from training.run.checks import check_model_trains
from training.train import main
from training.trainer.draws import GOLDEN_GAMMA, add_latent_draws, draw_latents, mix, pair_states
from training.trainer.flow_start import FlowStart, gather_pairs

KIND = "--model.kind=flowseq"
PHASES = [KIND, "--model.flow_steps=1", "--training.decoder_steps=4", "--training.kl_warmup_steps=3"]


def test_sharding_is_an_error_before_the_data_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.yaml").write_text("data: {kind: grammar}")
    recipe = load_recipe(tmp_path / "own.yaml", [KIND])
    check_model_trains(recipe)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with user_error(r"^model\.kind: the flow of flowseq starts from data, .* got FSDP2\. Launch"):
        check_model_trains(recipe)


def test_flow_starts_once_from_all_pairs_of_a_step() -> None:
    """However the pairs are split into micro-batches; a flow with a start keeps it."""
    batch: dict[str, Any] = {"input_ids": random_tokens(3, 6), "attention_mask": torch.ones(3, 6, dtype=torch.long)}
    batch = add_latent_draws({**batch, "labels": targets(2, 5, 3)}, 1, 4)
    parts = [{name: tensor[rows] for name, tensor in batch.items()} for rows in (slice(0, 1), slice(1, 3))]
    parts[0] |= {name: parts[0][name][:, :2] for name in ("labels", "word_draws")}
    joined = gather_pairs(parts)
    assert all(torch.equal(joined[name], batch[name]) for name in joined)
    model, again = FAMILY["flowseq"](), FAMILY["flowseq"]()
    model.flow.started.zero_()
    before = model.flow.layers[0].shift.clone()
    start = FlowStart(model.train(), 4, torch.device("cpu"))
    for step, batches in ((3, [batch]), (4, [])):
        start(step, batches, torch.autocast("cpu", enabled=False))
        assert torch.equal(model.flow.layers[0].shift, before)
    start(4, parts, torch.autocast("cpu", enabled=False))
    assert model.training
    assert not torch.equal(model.flow.layers[0].shift, before)
    again.start_flow(**draw_latents(batch, 32))
    for mine, expected in zip(model.flow.parameters(), again.flow.parameters(), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)
    kept = FlowStart(again, 0, torch.device("cpu"))
    expected = again.flow.layers[0].shift.clone()
    kept(0, [add_latent_draws(batch, 2, 5)], torch.autocast("cpu", enabled=False))
    assert torch.equal(again.flow.layers[0].shift, expected)


@pytest.mark.parametrize("d_model", [32, 33])
def test_latents_are_those_of_split_mix_and_box_and_muller(d_model: int) -> None:
    """NumPy's integers, which have no sign, and float64 are the oracle; another pair and padding change nothing."""
    batch = {"input_ids": random_tokens(3, 6), "attention_mask": torch.ones(3, 6, dtype=torch.long)}
    batch |= {"labels": targets(5, 2, 3)}
    noise = draw_latents(add_latent_draws(batch, 1, 4), d_model)["latent_noise"]
    halves = -(-d_model // 2)
    places = np.arange(2**32, 2**32 + 5 * halves, dtype=np.uint64).reshape(5, halves)
    bits = mix(pair_states(batch, 1, 4)[:, None, None] + places * GOLDEN_GAMMA)
    first, second = ((bits >> np.uint64(shift)) % np.uint64(2**24) for shift in (40, 16))
    radius, angle = np.sqrt(-2 * np.log((first + 1.0) / 2**24)), 2 * np.pi * second / 2**24
    expected = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)], axis=-1)[..., :d_model]
    np.testing.assert_allclose(noise.numpy(), expected, atol=1e-4)  # float32 rounds an angle of 6 by up to 2e-7
    alone = {name: tensor[1:2, :2] if name == "labels" else tensor[1:2] for name, tensor in batch.items()}
    assert torch.equal(draw_latents(add_latent_draws(alone, 1, 4), d_model)["latent_noise"][0], noise[1, :2])


def test_latents_have_the_moments_of_the_normal_distribution() -> None:
    states = torch.arange(200) * 2**40
    noise = draw_latents({"labels": torch.zeros(200, 50), "latent_states": states}, 64)["latent_noise"].double()
    moments = [(noise**power).mean().item() for power in (1, 2, 3, 4)]
    assert moments == pytest.approx([0, 1, 0, 3], abs=0.07)  # 5 standard deviations of the fourth, of 640,000 numbers
    for dim in range(3):  # neighbors do not depend on each other
        neighbors = noise * noise.roll(1, dim)
        assert neighbors.mean().item() == pytest.approx(0, abs=0.007)


@pytest.mark.slow
def test_run_logs_its_phases_and_resumes_to_the_bit_across_their_borders(arguments: list[str], tmp_path: Path) -> None:
    """Step 3 is in the first phase; at step 4 the flow starts; at step 6 the weight still rises."""
    settings = [*arguments, *PHASES, "--training.steps=9", "--training.checkpoint_steps=4"]
    whole = tmp_path / "whole"
    by_step = {entry["step"]: entry for entry in entries(train_in(settings, whole))}
    for step, scale in ((1, 0), (4, 0), (5, 1 / 3), (6, 2 / 3), (9, 1)):
        entry = by_step[step]
        assert ("kl_loss" in entry, "log_determinant" in entry) == (scale > 0, scale > 0)
        total = entry["token_loss"] + entry["length_loss"] + scale * entry.get("kl_loss", 0)
        assert entry["loss"] == pytest.approx(total, rel=1e-5)
    for step, has_started in ((3, 0), (4, 0), (6, 1)):
        assert float(weights(whole, step)["flow.started"]) == has_started
        assert_resumes(settings, whole, step, tmp_path / f"from-{step}")


@pytest.mark.slow
def test_scores_by_drawn_latents_do_not_depend_on_a_kill_before_them(arguments: list[str], tmp_path: Path) -> None:
    settings = [*arguments, *PHASES, "--training.steps=7", "--decoding.latent_temperature=5"]
    first = train_in(settings, tmp_path / "run")["test"]
    (tmp_path / "run" / "results.json").unlink()
    again = train_in(settings, tmp_path / "run")["test"]
    assert again | {"seconds": 0} == first | {"seconds": 0}


@pytest.mark.slow
def test_flow_without_a_density_ends_the_run_with_one_line(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FlowStart, "__call__", lambda *_: None)
    given = [*arguments, *PHASES, "--training.steps=9", f"--output_dir={tmp_path / 'run'}"]
    _, errors, status = run_main(main, given, capsys)
    assert ("flow: its actnorms have no start" in errors.splitlines()[-1], status) == (True, 2)
