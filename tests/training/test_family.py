"""Complete runs of the kinds that predict all words at once: their folders, resuming, and steps."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM, set_seed

from tests.helpers import load_tokenizer, save, tiny_model
from tests.training import gradients
from tests.training.runs import (
    LANGUAGE,
    TWO_PROCESSES,
    assert_same_checkpoints,
    assert_same_tensors,
    finish,
    make_arguments,
    prepare_run,
    recipe_in,
    rewound,
    start,
    train_in,
)
from training.publish import publish
from training.train import make_trainer
from training.trainer.draws import add_masks, pair_draws
from vaswani_transformer import (
    VaswaniCmlmForConditionalGeneration,
    VaswaniNatForConditionalGeneration,
    VaswaniTransformerTokenizer,
)

GLAT = ["--model.kind=nat", "--training.glancing=[0.9, 0.5]", "--decoding.length_beam_size=3"]
CMLM = ["--model.kind=cmlm", "--decoding.num_iterations=3", "--training.evaluation_iterations=2"]
# Its noise is drawn as dropout's is, by each process; at this temperature a latent depends neither on it nor on a hint.
ITERATIVE_VAE = [
    "--model.kind=iterative_vae",
    "--model.decoder_layers=2",
    "--model.gumbel_temperature=1e9",
    "--model.latent_dropout=0.0",
    "--training.kl_warmup_steps=3",
]
FLOWSEQ = [  # all three phases; in the first some weights have no gradient
    "--model.kind=flowseq",
    "--model.flow_steps=1",
    "--training.decoder_steps=4",
    "--training.kl_warmup_steps=5",
]
ENGINE = ["--model.kind=cmlm", "--training.energy_from={teacher}", "--tokenizer.path={teacher}"]
PARALLEL = [GLAT, CMLM, ITERATIVE_VAE, FLOWSEQ, ENGINE]
PARALLEL_NAMES = ["GLAT", "CMLM", "IterativeVAE", "FlowSeq", "ENGINE"]
KINDS = pytest.mark.parametrize("kind", [GLAT, CMLM], ids=["GLAT", "CMLM"])


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return make_arguments(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an autoregressive model with random weights, and its tokenizer."""
    folder = tmp_path_factory.mktemp("teacher")
    texts = [*LANGUAGE, *(text[::-1] for text in LANGUAGE)]
    tokenizer = VaswaniTransformerTokenizer.train_from_iterator(texts, 280)
    save(folder, tiny_model(vocab_size=len(tokenizer)), tokenizer)
    return folder


@pytest.fixture(scope="module")
def finished(arguments: list[str], tmp_path_factory: pytest.TempPathFactory) -> Callable[[list[str]], Path]:
    """Return the folders of runs of nine steps, by kind; an epoch has two steps, so step 3 is in the middle of one."""
    folders = {}

    def get(kind: list[str]) -> Path:
        if kind[0] not in folders:
            folders[kind[0]] = tmp_path_factory.mktemp("runs") / "whole"
            train_in(arguments, folders[kind[0]], *settings_of(kind))
        return folders[kind[0]]

    return get


def settings_of(kind: list[str]) -> list[str]:
    radam = ["--training.optimizer=radam", "--training.warmup_steps=null"]
    return [*kind, "--training.steps=9", *(radam if kind is GLAT else ())]


@pytest.mark.slow
@KINDS
def test_run_leaves_a_folder_that_loads_decodes_and_publishes(
    finished: Callable[[list[str]], Path], tmp_path: Path, kind: list[str]
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
    results = json.loads((folder / "results.json").read_text())
    steps = [entry for entry in results["curve"] if "loss" in entry]
    assert [entry["step"] for entry in steps] == list(range(1, 10))
    assert all(0 < entry["length_loss"] < entry["loss"] for entry in steps)
    assert all(("glancing_accuracy" in entry) == (kind is GLAT) for entry in steps)
    assert publish(folder, "owner/name", dry_run=tmp_path / "hub") == str(tmp_path / "hub")
    assert (tmp_path / "hub" / ("nat.py" if kind is GLAT else "cmlm.py")).exists()


@pytest.mark.slow
@KINDS
def test_validation_loss_is_that_of_a_pass_that_sees_no_word(
    finished: Callable[[list[str]], Path], kind: list[str]
) -> None:
    """The oracle, without the Trainer, is each pair by itself, in evaluation mode, with the length of the reference."""
    folder = finished(kind)
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder).eval(), load_tokenizer(folder)
    total, tokens = 0.0, 0
    for text in LANGUAGE:
        batch = tokenizer(text, text_target=text[::-1], return_tensors="pt")
        total += model(**batch).token_loss.item() * batch["labels"].numel()
        tokens += batch["labels"].numel()
    results = json.loads((folder / "results.json").read_text())
    losses = {entry["step"]: entry["eval_loss"] for entry in results["curve"] if "eval_loss" in entry}
    best = max((entry for entry in results["curve"] if "eval_bleu" in entry), key=lambda entry: entry["eval_bleu"])
    assert total / tokens == pytest.approx(results["validation"].get("loss", losses[best["step"]]), rel=1e-5)


@pytest.mark.slow
@KINDS
def test_run_resumes_to_the_bit_from_the_middle_of_an_epoch(
    arguments: list[str], finished: Callable[[list[str]], Path], tmp_path: Path, kind: list[str]
) -> None:
    """Dropout, masks, glancing and the optimizer are included; the process draws other random numbers before."""
    again = rewound(finished(kind), 3, tmp_path / "again")
    set_seed(99)
    results = train_in(arguments, again, *settings_of(kind))
    assert results["steps"] == 9
    assert_same_checkpoints(finished(kind), again)


@pytest.mark.slow
@pytest.mark.parametrize("kind", PARALLEL, ids=PARALLEL_NAMES)
def test_ten_steps_are_the_same_on_two_processes_in_two_micro_batches_each(
    arguments: list[str], teacher: Path, tmp_path: Path, kind: list[str]
) -> None:
    """Dropout is off; masks, shown words and latents depend on step and pair only.

    Gradients are compared at the first step. Adam makes a step of any gradient, also of one that is 0 but for
    rounding, as that of a key's constant part is.
    """
    kind = [argument.format(teacher=teacher) for argument in kind]
    steps = [*arguments, *kind, "--training.steps=10", "--training.evaluation_steps=10", "--model.dropout=0.0"]
    gradients.main([*steps, f"--output_dir={tmp_path / 'one'}"])
    parts = [*steps, "--training.device_tokens=15"]
    finish(start(parts, tmp_path / "two", launcher=TWO_PROCESSES, module="tests.training.gradients"))
    assert json.loads((tmp_path / "two" / "results.json").read_text())["processes"] == 2
    assert_same_tensors(*(load_file(tmp_path / name / "gradient.safetensors") for name in ("one", "two")))
    curves = [json.loads((tmp_path / name / "results.json").read_text())["curve"] for name in ("one", "two")]
    assert [entry["step"] for entry in curves[0] if "loss" in entry] == list(range(1, 11))
    for one, two in zip(*curves, strict=True):
        assert one.keys() == two.keys()
        names = {name for name in one if "loss" in name or name in ("energy", "eval_energy", "glancing_accuracy")}
        expected = {name: two[name] for name in names}
        assert {name: one[name] for name in names} == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.slow
def test_gradient_of_a_cmlms_step_is_that_of_the_mean_over_its_masked_tokens(
    arguments: list[str], tmp_path: Path
) -> None:
    """The step has three micro-batches.

    The oracle is the model's loss over all pairs of the step, without the Trainer.
    """
    step = [*arguments, *CMLM, "--training.steps=1", "--training.evaluation_steps=1", "--model.dropout=0.0"]
    gradients.main([*step, "--training.device_tokens=20", f"--output_dir={tmp_path / 'parts'}"])
    recipe = recipe_in(step, tmp_path / "run")
    trainer = make_trainer(recipe, prepare_run(recipe))
    batch = next(iter(trainer.get_train_dataloader()))
    del batch["number"]
    mask_and_pad = trainer.processing_class.mask_token_id, trainer.processing_class.pad_token_id
    batch = add_masks(batch, pair_draws(batch, recipe.seed, 0), *mask_and_pad)
    assert 0 < batch["labels"].ne(-100).sum() < batch["target_lengths"].sum()
    trainer.model.train()(**batch).loss.backward()
    gradient_of_run = load_file(tmp_path / "parts" / "gradient.safetensors")
    assert_same_tensors(gradient_of_run, {name: weight.grad for name, weight in trainer.model.named_parameters()})
