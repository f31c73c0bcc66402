"""Complete small runs of the training command, and the files that they leave."""

import json
import logging
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForSeq2SeqLM

from tests.helpers import ROOT, error_line, load_tokenizer, run_main, user_error
from tests.training import runs
from training import train
from training.run.checkpoints import checkpoint_at
from vaswani_transformer import VaswaniTransformerForConditionalGeneration, VaswaniTransformerTokenizer
from vaswani_transformer.tokenizer import unknown_words


@pytest.mark.slow
def test_run_leaves_a_folder_that_loads_and_says_what_it_is(finished_run: runs.FinishedRun) -> None:
    """Evaluations, which search with one beam, change nothing in how its models decode."""
    arguments, folder, results, *_ = finished_run
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    tokenizer = load_tokenizer(folder)
    assert isinstance(model, VaswaniTransformerForConditionalGeneration)
    assert isinstance(tokenizer, VaswaniTransformerTokenizer)
    assert len(tokenizer) == model.config.vocab_size
    search = model.generation_config
    assert (search.num_beams, search.length_penalty, search.length_penalty_type) == (4, 0.6, "gnmt")
    assert search.max_source_relative_length == 50

    assert runs.results_in(folder) == json.loads(json.dumps(results))
    assert results["steps"] == 9
    assert results["source"] == "gum"
    assert [entry["step"] for entry in runs.entries(results)] == list(range(1, 10))
    assert [entry["step"] for entry in runs.entries(results, "eval_bleu")] == [3, 6, 9]
    assert re.fullmatch(r"nrefs:1\|.*tok:13a.*", results["test"]["signature"])
    assert list((folder / "tensorboard").glob("events.*"))
    assert {path.suffix for path in folder.iterdir() if path.is_file()} == {".json", ".yaml", ".safetensors"}
    checkpoints = set((folder / "checkpoints").iterdir())
    assert {path.name for path in checkpoints} == {f"checkpoint-{step}" for step in (3, 6, 9)}
    for saved in (folder, *checkpoints):
        settings = json.loads((saved / "generation_config.json").read_text())
        assert settings["length_penalty_type"] == "gnmt"
        assert "max_length" not in settings

    with user_error(r"holds a finished run; give another --output_dir"):
        runs.train_in(arguments, folder)


@pytest.mark.slow
def test_validation_loss_is_a_mean_over_target_tokens(finished_run: runs.FinishedRun) -> None:
    """The oracle, without the Trainer, is the sum of -log P of all target tokens divided by their number."""
    model = AutoModelForSeq2SeqLM.from_pretrained(checkpoint_at(finished_run.folder, 9)).eval()
    tokenizer = load_tokenizer(finished_run.folder)
    total, tokens = 0.0, 0
    for text in runs.LANGUAGE:
        batch = tokenizer(text, text_target=text[::-1], return_tensors="pt")
        log_probs = model(**batch).logits.log_softmax(-1)[0]
        total -= log_probs.gather(1, batch["labels"][0][:, None]).sum().item()
        tokens += batch["labels"].numel()
    last = finished_run.results["curve"][-1]
    assert last["eval_loss"] == pytest.approx(total / tokens, rel=1e-5)
    assert last["eval_perplexity"] == pytest.approx(math.exp(total / tokens), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("last", [3, 5])
def test_run_ends_with_the_mean_of_its_last_checkpoints_and_says_which(
    arguments: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture, last: int
) -> None:
    """It says so at its start and its end where there are fewer than the recipe names."""
    folder, steps = tmp_path / "run", [3, 6, 9, 12][-last:]
    with caplog.at_level(logging.WARNING):
        results = runs.train_in(arguments, folder, "--training.steps=12", f"--training.average_last={last}")
    checkpoints = [runs.weights(folder, step) for step in steps]
    for name, weight in runs.weights(folder).items():
        torch.testing.assert_close(weight, sum(state[name] for state in checkpoints) / len(steps))
    assert (results["steps"], results["averaged_steps"]) == (12, steps)
    said = [line for line in caplog.messages if "average_last" in line]
    if last == 3:
        assert said == []
    else:
        assert "got 4 in 12 steps, expected at least 5" in said[0]
        assert said[1:] == [
            "The model is the mean of the last 4 checkpoints, and training.average_last is 5: steps 3, 6, 9, 12."
        ]


@pytest.mark.slow
def test_checkpoints_are_also_written_by_the_clock(arguments: list[str], tmp_path: Path) -> None:
    more = ["--training.steps=4", "--training.evaluation_steps=4", "--training.checkpoint_minutes=0.00001"]
    runs.train_in(arguments, tmp_path / "run", *more)
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) > 2


@pytest.mark.slow
def test_quickstart_passes_99_bleu_and_ends_with_its_line(tmp_path: Path) -> None:
    recipe = str(ROOT / "training" / "recipes" / "quickstart.yaml")
    output = runs.run_to_end([recipe], tmp_path / "run", seconds=800)
    line = output.splitlines()[-1]
    match = re.fullmatch(r"BLEU (\d+\.\d\d) on 1000 unseen sentences \((nrefs:1\|.*)\)", line)
    assert match
    assert float(match[1]) > 99
    assert output.count("translation  ") == 5


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        ["--training.evaluation_beams=3", "--data.test=null"],
        [
            *("--model.position_embedding=learned", "--model.tie_word_embeddings=false"),
            *("--model.decoder_start_token_id=2", "--tokenizer.algorithm=wordpiece"),
        ],
    ],
)
def test_run_with_other_settings_leaves_a_model_that_decodes(
    arguments: list[str], tmp_path: Path, more: list[str]
) -> None:
    folder = tmp_path / "run"
    results = runs.train_in(arguments, folder, "--training.steps=3", *more)
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder), load_tokenizer(folder)
    first = model.config.decoder_start_token_id or tokenizer.bos_token_id
    assert model.generate(**tokenizer("one tree", return_tensors="pt"))[0, 0] == first
    assert ("test" in results) == ("--data.test=null" not in more)


def test_given_tokenizer_is_used_if_it_has_the_special_tokens(arguments: list[str], tmp_path: Path) -> None:
    tokenizer, given = VaswaniTransformerTokenizer.train_from_iterator(runs.LANGUAGE, 2900), tmp_path / "own"
    tokenizer.save_pretrained(given)
    runs.prepare_run(runs.recipe_in(arguments, tmp_path / "run", f"--tokenizer.path={given}"))
    trained: Any = load_tokenizer(tmp_path / "run")
    assert trained.get_vocab() == tokenizer.get_vocab()
    assert unknown_words(trained, trained(["unheard"]), ["unheard"]) == [[]]  # the run learns from other texts
    tokenizer.pad_token = None
    tokenizer.save_pretrained(given)
    for path, message in ((given, r".* has no pad token"), ("/nowhere/x", "there is no folder /nowhere/x")):
        with user_error(rf"tokenizer\.path: {message}"):
            runs.train_in(arguments, tmp_path / "other", f"--tokenizer.path={path}")


def test_tokenizer_that_ends_no_text_is_an_error(arguments: list[str], tmp_path: Path) -> None:
    tokenizer = VaswaniTransformerTokenizer.train_from_iterator(runs.LANGUAGE, 290)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="$A", special_tokens=[])
    tokenizer.save_pretrained(tmp_path / "own")
    with user_error(r"^tokenizer\.path: .*own does not end a text with '</s>', so a model never learns to stop"):
        runs.train_in(arguments, tmp_path / "run", f"--tokenizer.path={tmp_path / 'own'}")


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("nowhere.yaml", r"nowhere\.yaml: there is no such recipe; .*quickstart\.yaml"),
        ("x" * 256, "x{256}: File name too long"),  # as a folder without permission, an error of the system
    ],
)
def test_bad_recipe_ends_the_command_with_one_line_and_status_2(
    recipe: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert re.match(message, error_line(run_main(train.main, [recipe], capsys)))
