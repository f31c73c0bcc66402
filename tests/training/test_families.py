"""Complete runs of the models that predict all words at once: their folders, logs, schedules, resuming and steps."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM

from tests.batches import FLOAT32, source_batch, targets
from tests.commands import run_main
from tests.models import load_tokenizer, tiny_iterative_vae
from tests.training import runs
from training.families import CTC, DAG, FlowTrainer, LatentTrainer
from training.train import main
from vaswani_transformer.registration import FAMILIES
from vaswani_transformer.support.loading import eval_mode

FolderOf = Callable[[str], Path]  # of the run of a family
SETTINGS = {
    "GLAT": [
        *("--model.kind=nat", "--training.glancing=[0.9, 0.5]", "--decoding.length_beam_size=3"),
        "--training.optimizer=radam",
    ],
    "CTC": ["--model.kind=ctc", "--training.glancing=[0.9, 0.5]"],
    "DAG": ["--model.kind=dag", "--training.glancing=[0.9, 0.5]", "--decoding.decoding_strategy=viterbi"],
    "CMLM": ["--model.kind=cmlm", "--decoding.num_iterations=3", "--training.evaluation_iterations=2"],
    "IterativeVAE": ["--model.kind=iterative_vae", "--model.decoder_layers=2"],
    "discrete": [
        *("--model.kind=iterative_vae", "--model.latent=discrete", "--model.decoder_layers=2"),
        "--training.kl_warmup_steps=8",
    ],
    "FlowSeq": [
        *("--model.kind=flowseq", "--model.flow_steps=1"),
        *("--training.decoder_steps=4", "--training.kl_warmup_steps=3"),
    ],
}
LOGGED = {
    "GLAT": {"length_loss", "glancing_accuracy"},
    "CTC": {"glancing_accuracy"},
    "DAG": {"glancing_accuracy"},
    "CMLM": {"length_loss"},
    "IterativeVAE": {"length_loss", "bound", "layer_loss_1", "layer_loss_2", "layer_kl_2"},
    "discrete": {"length_loss", "kl_loss", "layer_loss_1", "layer_loss_2", "layer_kl_2"}
    | {"prior_weight_2", "hint_weight_2"},
    "FlowSeq": {"length_loss", "token_loss"},
}
FAMILY = pytest.mark.parametrize("family", SETTINGS)
WITHOUT_LENGTH = ("CTC", "DAG")


def given(arguments: list[str], family: str) -> list[str]:
    """Return the arguments of a run of nine steps; RAdam has no warm-up."""
    arguments = arguments[:1] if family == "GLAT" else arguments
    return runs.last_of_each(*arguments, *SETTINGS[family], "--training.steps=9")


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return runs.make_arguments(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, arguments: list[str]) -> FolderOf:
    """Return the folders of runs of nine steps; an epoch has two steps, so step 3 is in the middle of one."""
    folders = {}

    def get(family: str) -> Path:
        if family not in folders:
            folders[family] = tmp_path_factory.mktemp("runs") / "whole"
            runs.train_in(given(arguments, family), folders[family])
        return folders[family]

    return get


@pytest.mark.slow
@FAMILY
def test_run_leaves_a_folder_that_loads_and_decodes(finished: FolderOf, family: str) -> None:
    folder = finished(family)
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder), load_tokenizer(folder)
    kind = SETTINGS[family][0].partition("=")[2]
    assert type(model) is FAMILIES[kind].model_class
    assert len(tokenizer) == model.config.vocab_size
    for saved in (folder, *(folder / "checkpoints").iterdir()):
        search = json.loads((saved / "generation_config.json").read_text())
        assert search.get("length_beam_size") == {"GLAT": 3, "CTC": None, "DAG": None}.get(family, 1)
        assert search.get("num_iterations") == (3 if family == "CMLM" else None)
        assert search.get("num_beams") == (1 if family == "CTC" else None)
        assert search.get("decoding_strategy") == ("viterbi" if family == "DAG" else None)
        assert search.get("length_penalty") == (1 if family == "DAG" else None)
        assert not search.keys() & {"max_length", "max_source_relative_length"}
    assert model.generate(**tokenizer(["one tree"], return_tensors="pt")).shape[0] == 1


@pytest.mark.slow
@FAMILY
def test_log_has_the_parts_of_the_loss_at_every_step(finished: FolderOf, family: str) -> None:
    entries = runs.entries(runs.results_in(finished(family)))
    assert [entry["step"] for entry in entries] == list(range(1, 10))
    for entry in entries:
        assert LOGGED[family] <= entry.keys()
        assert family in WITHOUT_LENGTH or 0 < entry["length_loss"] < entry["loss"]
    if family == "FlowSeq":
        assert ["kl_loss" in entry for entry in entries] == [False] * 4 + [True] * 5
        for entry, scale in zip(entries, [0, 0, 0, 0, 1 / 3, 2 / 3, 1, 1, 1], strict=True):
            total = entry["token_loss"] + entry["length_loss"] + scale * entry.get("kl_loss", 0)
            assert entry["loss"] == pytest.approx(total, rel=1e-5)
    if family == "IterativeVAE":
        for entry in entries:
            total = entry["layer_loss_1"] + entry["layer_loss_2"] + entry["length_loss"]
            assert entry["loss"] == pytest.approx(total, rel=1e-5)
            assert entry["bound"] == pytest.approx(entry["layer_loss_1"] + entry["layer_loss_2"], rel=1e-5)
            assert entry["layer_kl_2"] == entry["layer_loss_1"]
        validation = runs.results_in(finished(family))["validation"]
        assert 0 < validation["layer_kl_2"] < validation["bound"]
    if family == "discrete":
        first = entries[0]
        assert first["kl_loss"] == pytest.approx(first["layer_kl_2"], rel=1e-5)  # the last layer's weight is 1
        for step, entry in enumerate(entries):
            total = entry["layer_loss_1"] + entry["layer_loss_2"] + entry["length_loss"]
            assert entry["loss"] == pytest.approx(total + min(1, (step + 1) / 8) * entry["kl_loss"], rel=1e-5)


def test_bound_of_revealed_latents_does_not_depend_on_the_batches_of_an_evaluation() -> None:
    model = tiny_iterative_vae()
    trainer: Any = SimpleNamespace(
        model=model, recipe=SimpleNamespace(seed=7), args=SimpleNamespace(device=model.device)
    )
    trainer.reveal_draws = LatentTrainer.reveal_draws
    labels = targets(5, 4, 2)
    batch = source_batch([3, 6, 4], labels=labels)

    def bounds(rows: list[int]) -> Tensor:
        inputs = {name: values[rows] for name, values in batch.items()}
        longest = inputs["labels"].ne(-100).sum(1).max()
        inputs["labels"] = inputs["labels"][:, :longest]
        return LatentTrainer.sentence_statistics(trainer, torch.empty(0), inputs)["bound"].sum()

    torch.testing.assert_close(bounds([0, 1, 2]), bounds([2]) + bounds([1, 0]), **FLOAT32)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["CMLM", *WITHOUT_LENGTH])
def test_validation_loss_is_that_of_a_pass_that_sees_no_word(finished: FolderOf, family: str) -> None:
    """The oracle, without the Trainer, is each pair by itself, in evaluation mode; a CMLM gets the reference's length.

    The loss of a CTC or DAG model is a likelihood, and so has a perplexity.
    """
    folder = finished(family)
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder).eval(), load_tokenizer(folder)
    total, tokens = 0.0, 0
    for text in runs.LANGUAGE:
        batch = tokenizer(text, text_target=text[::-1], return_tensors="pt")
        total += model(**batch).token_loss.item() * batch["labels"].numel()
        tokens += batch["labels"].numel()
    validation = runs.results_in(folder)["validation"]
    assert total / tokens == pytest.approx(validation["loss"], rel=1e-5)
    perplexity = pytest.approx(math.exp(total / tokens), rel=1e-4) if family in WITHOUT_LENGTH else None
    assert validation.get("perplexity") == perplexity


@pytest.mark.slow
@pytest.mark.parametrize(("family", "step"), [*((family, 3) for family in list(SETTINGS)[:-1]), ("FlowSeq", 6)])
def test_run_resumes_to_the_bit_from_the_middle_of_an_epoch(
    arguments: list[str], finished: FolderOf, tmp_path: Path, family: str, step: int
) -> None:
    """Dropout, noise, masks, glancing, the optimizer and FlowSeq's phases are included; its flow starts at step 4."""
    folder = finished(family)
    runs.assert_resumes(given(arguments, family), folder, step, tmp_path / "again")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["nat", "--training.glancing=[0.9, 0.5]"], {0: 0.9, 5: 0.7, 10: 0.5, 99: 0.5}),
        (["nat", "--training.glancing=[0.9, 0.5]", "--training.glancing_steps=4"], {0: 0.9, 1: 0.8, 4: 0.5, 9: 0.5}),
        (["iterative_vae", "--training.kl_warmup_steps=0"], {0: 1.0}),
        (["iterative_vae", "--training.kl_scale=0.5", "--training.kl_warmup_steps=4"], {0: 0.125, 1: 0.25, 9: 0.5}),
        (
            ["flowseq", "--training.decoder_steps=4", "--training.kl_scale=2.0", "--training.kl_warmup_steps=4"],
            {0: 0.0, 3: 0.0, 4: 0.5, 5: 1.0, 7: 2.0, 99: 2.0},
        ),
    ],
)
def test_rate_of_a_schedule_depends_on_the_step_alone(
    arguments: list[str], tmp_path: Path, settings: list[str], expected: dict[int, float]
) -> None:
    kind, *more = settings
    trainer = runs.trainer_in(arguments, tmp_path / "run", f"--model.kind={kind}", "--training.steps=10", *more)
    for step, value in expected.items():
        assert list(trainer.step_attributes(step).values()) == [pytest.approx(value)]


# The slots of CTC and the vertices of DAG


def test_pair_fits_if_its_words_and_repetitions_fit_into_the_slots(arguments: list[str], tmp_path: Path) -> None:
    """The end token needs no slot, and a repetition within a target needs a blank; a pair's end and start do not."""
    recipe = runs.recipe_in(arguments, tmp_path, "--model.kind=ctc")
    sources = [[5, 2], [5, 2], [5, 2], [5, 2], [2]]
    labels = [[7, 8, 9, 7, 2], [7, 8, 9, 7, 8, 2], [7, 7, 8, 2], [7, 7, 8, 8, 2], [2]]
    pairs = Dataset.from_dict({"input_ids": sources, "labels": labels})
    fits = CTC.fits
    assert fits is not None
    assert fits(recipe, pairs).tolist() == [True, False, True, False, True]
    assert fits(recipe, pairs.select([3, 0])).tolist() == [False, True]
    assert fits(replace(recipe, model={"kind": "ctc", "upsampling": 3}), pairs).all()


def test_pair_fits_if_its_words_fit_between_the_first_and_the_last_vertex(arguments: list[str], tmp_path: Path) -> None:
    recipe = runs.recipe_in(arguments, tmp_path, "--model.kind=dag", "--model.upsampling=2")
    pairs = Dataset.from_dict({"input_ids": [[5, 2], [5, 2], [2]], "labels": [[7, 7, 2], [7, 7, 7, 2], [2]]})
    assert DAG.fits is not None
    assert DAG.fits(recipe, pairs).tolist() == [True, False, True]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ctc", "dag"])
def test_targets_that_a_model_cannot_produce_are_counted_and_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """They are dropped from training only; elsewhere they have no loss, and their tokens do not count."""
    texts = [*runs.LANGUAGE, "0011"]
    arguments = runs.make_arguments(tmp_path, train=texts, validation=texts)
    given = [*arguments, f"--model.kind={kind}", "--model.upsampling=1", "--training.steps=3"]
    with caplog.at_level("WARNING"):
        runs.train_in(given, tmp_path / "run")
    lines = [record.getMessage() for record in caplog.records]
    (dropped,) = [line for line in lines if line.startswith("Dropped: in training, ")]
    (left_out,) = [line for line in lines if line.startswith("No loss: in validation, ")]
    assert dropped.partition("training, ")[2] == left_out.partition("validation, ")[2]
    assert math.isfinite(runs.results_in(tmp_path / "run")["validation"]["loss"])


# The start of FlowSeq's flow


def test_flow_starts_once_from_all_pairs_of_a_step(arguments: list[str], tmp_path: Path) -> None:
    """The start is that of one batch, however the pairs are split into micro-batches, and comes after the phase."""
    settings = ["--model.kind=flowseq", "--model.flow_steps=1", "--training.decoder_steps=4", "--model.dropout=0.0"]
    trainer = runs.trainer_in(arguments, tmp_path / "run", *settings)
    assert isinstance(trainer, FlowTrainer)
    model: Any = trainer.model
    batch = next(iter(trainer.get_train_dataloader()))
    batch = trainer.add_draws(batch, list(range(len(batch["labels"]))))
    again = type(model)(model.config)
    again.load_state_dict(model.state_dict())
    before = model.flow.layers[0].shift.clone()
    trainer.state.global_step = 3
    parts = [{name: value[rows] for name, value in batch.items()} for rows in (slice(0, 3), slice(3, None))]
    trainer.get_batch_samples(iter(parts), 2, trainer.args.device)
    assert torch.equal(model.flow.layers[0].shift, before)
    model.train()
    trainer.start_flow(parts)
    assert model.training
    assert not torch.equal(model.flow.layers[0].shift, before)
    names = ("input_ids", "attention_mask", "labels", "word_draws", "latent_noise")
    with eval_mode(again):
        again.start_flow(**{name: batch[name] for name in names})
    for mine, expected in zip(model.flow.parameters(), again.flow.parameters(), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)
    trainer.state.global_step, started = 5, model.flow.layers[0].shift.clone()
    trainer.get_batch_samples(iter(parts[:1]), 1, trainer.args.device)
    assert torch.equal(model.flow.layers[0].shift, started)


@pytest.mark.slow
def test_flow_without_a_start_ends_the_run_with_one_line(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FlowTrainer, "start_flow", lambda *_: None)
    settings = [*given(arguments, "FlowSeq"), f"--output_dir={tmp_path / 'run'}"]
    _, errors, status = run_main(main, settings, capsys)
    assert ("flow: its ActNorm layers are not initialized" in errors.splitlines()[-1], status) == (True, 2)


@pytest.mark.slow
def test_scores_by_drawn_latents_do_not_depend_on_a_kill_before_them(arguments: list[str], tmp_path: Path) -> None:
    settings = [*given(arguments, "FlowSeq"), "--decoding.latent_temperature=5"]
    first = runs.train_in(settings, tmp_path / "run")["test"]
    (tmp_path / "run" / "results.json").unlink()
    again = runs.train_in(settings, tmp_path / "run")["test"]
    assert again | {"seconds": 0} == first | {"seconds": 0}


# Several processes


@pytest.mark.slow
def test_flowseq_on_two_processes_starts_one_flow_and_resumes_to_the_bit(arguments: list[str], tmp_path: Path) -> None:
    settings, whole, killed = given(arguments, "FlowSeq"), tmp_path / "whole", tmp_path / "killed"
    runs.run_to_end(settings, whole, launch=runs.TWO_PROCESSES)
    assert bool(runs.weights(whole, 6)["flow.started"])
    runs.rewound(whole, 6, killed)
    runs.run_to_end(settings, killed, launch=runs.TWO_PROCESSES)
    runs.assert_same_checkpoints(whole, killed)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["AR", "IterativeVAE", "FlowSeq", "ENGINE"])
def test_steps_are_the_same_on_two_processes_in_two_micro_batches_each(
    arguments: list[str], teacher: Path, tmp_path: Path, family: str
) -> None:
    """Masks, glancing and latents belong to a pair. A discrete latent draws in its layers, as dropout does."""
    settings = {
        "AR": [],
        "IterativeVAE": [*SETTINGS["IterativeVAE"], "--model.latent_dropout=0.0"],
        "FlowSeq": [*SETTINGS["FlowSeq"], "--training.decoder_steps=1"],
        "ENGINE": ["--model.kind=cmlm", f"--training.energy_from={teacher}", f"--tokenizer.path={teacher}"],
    }[family]
    settings = runs.last_of_each(*arguments, *settings, "--training.steps=3", "--model.dropout=0.0")
    runs.run_to_end(settings, tmp_path / "one", change="gradient")
    two: dict[str, Any] = {"launch": runs.TWO_PROCESSES, "change": "gradient"}
    runs.run_to_end(settings, tmp_path / "two", "--training.device_tokens=15", **two)
    runs.assert_same_tensors(*(load_file(tmp_path / name / "gradient.safetensors") for name in ("one", "two")))
    first, second = (runs.results_in(tmp_path / name) for name in ("one", "two"))
    assert (first["processes"], second["processes"]) == (1, 2)
    for one, two in zip(first["curve"], second["curve"], strict=True):
        names = {name for name in one if "loss" in name or name in ("energy", "eval_energy")}
        assert {name: one[name] for name in names} == pytest.approx({name: two[name] for name in names}, rel=1e-3)
