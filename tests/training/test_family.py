"""Complete runs of the kinds that predict all words at once: their folders, resuming, and steps."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM

from tests.helpers import load_tokenizer
from tests.training import runs
from tests.training.changed_run import train_with_gradient
from training.publish import publish
from training.trainer.draws import add_masks, pair_draws
from vaswani_transformer import VaswaniCmlmForConditionalGeneration, VaswaniNatForConditionalGeneration

FolderOf = Callable[[list[str]], Path]  # of the run of a kind
GLAT = ["--model.kind=nat", "--training.glancing=[0.9, 0.5]", "--decoding.length_beam_size=3"]
CMLM = ["--model.kind=cmlm", "--decoding.num_iterations=3", "--training.evaluation_iterations=2"]
EVERY_KIND = {
    "autoregressive": [],
    "GLAT": GLAT,
    "CMLM": CMLM,
    # Noise is drawn as dropout's is, by each process; at this temperature a latent depends neither on it nor on a hint.
    "IterativeVAE": [
        *("--model.kind=iterative_vae", "--model.decoder_layers=2", "--model.latent_sample=relaxed"),
        "--model.gumbel_temperature=1e9",
        *("--model.latent_dropout=0.0", "--training.kl_warmup_steps=3"),
    ],
    # all three phases; in the first some weights have no gradient
    "FlowSeq": [
        *("--model.kind=flowseq", "--model.flow_steps=1"),
        *("--training.decoder_steps=4", "--training.kl_warmup_steps=5"),
    ],
    "ENGINE": ["--model.kind=cmlm", "--training.energy_from={teacher}", "--tokenizer.path={teacher}"],
}
KINDS = pytest.mark.parametrize("kind", [GLAT, CMLM], ids=["GLAT", "CMLM"])


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return runs.make_arguments(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def finished(arguments: list[str], tmp_path_factory: pytest.TempPathFactory) -> FolderOf:
    """Return the folders of runs of nine steps, by kind; an epoch has two steps, so step 3 is in the middle of one."""
    folders = {}

    def get(kind: list[str]) -> Path:
        if kind[0] not in folders:
            folders[kind[0]] = tmp_path_factory.mktemp("runs") / "whole"
            runs.train_in(arguments, folders[kind[0]], *settings_of(kind))
        return folders[kind[0]]

    return get


def settings_of(kind: list[str]) -> list[str]:
    radam = ["--training.optimizer=radam", "--training.warmup_steps=null"]
    return [*kind, "--training.steps=9", *(radam if kind is GLAT else ())]


@pytest.mark.slow
@KINDS
def test_run_leaves_a_folder_that_loads_decodes_and_publishes(
    finished: FolderOf, tmp_path: Path, kind: list[str]
) -> None:
    folder = finished(kind)
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder), load_tokenizer(folder)
    classes = {"--model.kind=nat": VaswaniNatForConditionalGeneration, CMLM[0]: VaswaniCmlmForConditionalGeneration}
    assert type(model) is classes[kind[0]]
    assert len(tokenizer) == model.config.vocab_size
    for saved in (folder, *(folder / "checkpoints").iterdir()):
        search = json.loads((saved / "generation_config.json").read_text())
        assert search["length_beam_size"] == (3 if kind is GLAT else 1)
        assert search.get("num_iterations") == (None if kind is GLAT else 3)
        assert not search.keys() & {"max_length", "num_beams", "length_penalty", "max_source_relative_length"}
    steps = runs.entries(runs.results_in(folder))
    assert [entry["step"] for entry in steps] == list(range(1, 10))
    assert all(0 < entry["length_loss"] < entry["loss"] for entry in steps)
    assert all(("glancing_accuracy" in entry) == (kind is GLAT) for entry in steps)
    assert publish(folder, "owner/name", dry_run=tmp_path / "hub") == str(tmp_path / "hub")
    assert (tmp_path / "hub" / ("nat.py" if kind is GLAT else "cmlm.py")).exists()


@pytest.mark.slow
@KINDS
def test_validation_loss_is_that_of_a_pass_that_sees_no_word(finished: FolderOf, kind: list[str]) -> None:
    """The oracle, without the Trainer, is each pair by itself, in evaluation mode, with the length of the reference."""
    folder = finished(kind)
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder).eval(), load_tokenizer(folder)
    total, tokens = 0.0, 0
    for text in runs.LANGUAGE:
        batch = tokenizer(text, text_target=text[::-1], return_tensors="pt")
        total += model(**batch).token_loss.item() * batch["labels"].numel()
        tokens += batch["labels"].numel()
    results = runs.results_in(folder)
    losses = {entry["step"]: entry["eval_loss"] for entry in runs.entries(results, "eval_loss")}
    best = max(runs.entries(results, "eval_bleu"), key=lambda entry: entry["eval_bleu"])
    assert total / tokens == pytest.approx(results["validation"].get("loss", losses[best["step"]]), rel=1e-5)


@pytest.mark.slow
@KINDS
def test_run_resumes_to_the_bit_from_the_middle_of_an_epoch(
    arguments: list[str], finished: FolderOf, tmp_path: Path, kind: list[str]
) -> None:
    """Dropout, masks, glancing and the optimizer are included."""
    runs.assert_resumes(arguments, finished(kind), 3, tmp_path / "again", *settings_of(kind))


@pytest.mark.slow
@pytest.mark.parametrize("kind", EVERY_KIND)
def test_ten_steps_are_the_same_on_two_processes_in_two_micro_batches_each(
    arguments: list[str], teacher: Path, tmp_path: Path, kind: str
) -> None:
    """Dropout is off; masks, shown words and latents depend on step and pair only.

    Gradients are compared at the first step. Adam makes a step of any gradient, also of one that is 0 but for
    rounding, as that of a key's constant part is.
    """
    of_kind = [argument.format(teacher=teacher) for argument in EVERY_KIND[kind]]
    steps = [*arguments, *of_kind, "--training.steps=10", "--training.evaluation_steps=10", "--model.dropout=0.0"]
    train_with_gradient([*steps, f"--output_dir={tmp_path / 'one'}"])
    launch: dict[str, Any] = {"launcher": runs.TWO_PROCESSES, "change": "gradient"}
    runs.run_to_end(steps, tmp_path / "two", "--training.device_tokens=15", **launch)
    runs.assert_same_tensors(*(load_file(tmp_path / name / "gradient.safetensors") for name in ("one", "two")))
    first, second = (runs.results_in(tmp_path / name) for name in ("one", "two"))
    assert second["processes"] == 2
    assert [entry["step"] for entry in runs.entries(first)] == list(range(1, 11))
    bound = 1e-4 if of_kind else 1e-3  # a tiny model's largest learning rate multiplies rounding
    for one, two in zip(first["curve"], second["curve"], strict=True):
        assert one.keys() == two.keys()
        names = {name for name in one if "loss" in name or name in ("energy", "eval_energy", "glancing_accuracy")}
        expected = {name: two[name] for name in names}
        assert {name: one[name] for name in names} == pytest.approx(expected, rel=bound, abs=1e-6)


@pytest.mark.slow
def test_gradient_of_a_cmlms_step_is_that_of_the_mean_over_its_masked_tokens(
    arguments: list[str], tmp_path: Path
) -> None:
    """The step has three micro-batches.

    The oracle is the model's loss over all pairs of the step, without the Trainer.
    """
    step = [*arguments, *CMLM, "--training.steps=1", "--training.evaluation_steps=1", "--model.dropout=0.0"]
    train_with_gradient([*step, "--training.device_tokens=20", f"--output_dir={tmp_path / 'parts'}"])
    trainer = runs.trainer_in(step, tmp_path / "run")
    batch = next(iter(trainer.get_train_dataloader()))
    del batch["number"]
    mask_and_pad = trainer.processing_class.mask_token_id, trainer.processing_class.pad_token_id
    batch = add_masks(batch, pair_draws(batch, trainer.recipe.seed, 0), *mask_and_pad)
    assert 0 < batch["labels"].ne(-100).sum() < batch["target_lengths"].sum()
    trainer.model.train()(**batch).loss.backward()
    gradient_of_run = load_file(tmp_path / "parts" / "gradient.safetensors")
    runs.assert_same_tensors(gradient_of_run, {name: weight.grad for name, weight in trainer.model.named_parameters()})
