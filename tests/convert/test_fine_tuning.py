"""An imported model is trained further on own pairs by a recipe, scored, and translates."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import MarianMTModel

from tests.command_parsers import blocks_of, commands_of
from tests.convert.originals import CODES, WORDS, V, fairseq_state, fsmt, save_checkpoint
from tests.forks import run_forked
from tests.helpers import ROOT, run_main, user_error, write_pairs
from training import score, train
from training.recipe import load_recipe
from vaswani_transformer.convert import command as convert
from vaswani_transformer.translation import command as translate

PAIRS = {"low lowest": "est low", "lower": "er west", "est lowest": "lower low"}
SIZES = ("d_model", "d_ff", "num_heads", "encoder_layers", "decoder_layers", "max_position_embeddings")
SHAPE = (*SIZES, "attention_bias", "layer_norm_eps", "position_embedding", "scale_embedding", "activation_function")
SHAPE += ("decoder_start_token_id",)


@pytest.fixture
def imported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """Return the folder of a fairseq model with random weights that was imported."""
    words = [*WORDS, *(f"madeupword{number:04}" for number in range(1, V - 3 - len(WORDS)))]
    (tmp_path / "dict.txt").write_text("".join(f"{word} 7\n" for word in words))
    (tmp_path / "codes").write_text(CODES)
    checkpoint = save_checkpoint(tmp_path / "c.pt", fairseq_state(fsmt()))
    call = ["fairseq", checkpoint, f"--dict={tmp_path / 'dict.txt'}", f"--codes={tmp_path / 'codes'}"]
    assert run_main(convert.main, [*call, tmp_path / "imported"], capsys)[2] == 0
    return tmp_path / "imported"


@pytest.mark.slow
def test_imported_model_is_trained_further_scored_and_translates(
    imported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for split in ("train", "validation", "test"):
        write_pairs(tmp_path / f"{split}.jsonl", PAIRS.items())
    config = json.loads((imported / "config.json").read_text())
    files = {split: f"{split}.jsonl" for split in ("train", "validation", "test")}
    settings = {
        "name": "own",
        "data": {"kind": "json", "path": str(tmp_path), **files},
        "model": {"dropout": 0.0, **{field: config[field] for field in SHAPE}},
        "training": {"steps": 300, "warmup_steps": 50, "evaluation_steps": 300, "average_last": 1},
        "decoding": {"max_source_relative_length": 5},
    }
    recipe, trained = tmp_path / "own.yaml", tmp_path / "trained"
    recipe.write_text(yaml.safe_dump(settings))
    given = (f"--training.start_from={imported}", f"--tokenizer.path={imported}", f"--output_dir={trained}")
    train.main([str(recipe), *given])
    capsys.readouterr()
    table, errors, status = run_main(score.main, [trained, recipe], capsys)
    assert (status, errors) == (0, "")
    assert "chrf                   100.00" in table
    (tmp_path / "sources.txt").write_text("\n".join(PAIRS))
    call = [trained, f"--input={tmp_path / 'sources.txt'}", f"--output={tmp_path / 'targets.txt'}"]
    assert run_main(translate.main, call, capsys)[2] == 0
    assert (tmp_path / "targets.txt").read_text().splitlines() == [*PAIRS.values()]


@pytest.fixture
def opus(marian_folder: Path, tmp_path: Path) -> Path:
    """Return a small Marian model with what OPUS-MT's have: swish, scaled embeddings, and a bias of the logits."""
    folder = Path(shutil.copytree(marian_folder, tmp_path / "opus"))
    model: Any = MarianMTModel.from_pretrained(folder)
    model.final_logits_bias.normal_()
    model.config.update({"activation_function": "swish", "scale_embedding": True})
    model.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_page_of_pretrained_models_runs_from_the_import_to_a_translation(
    opus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = ROOT / "docs" / "own-data.md"
    commands = [words for block in blocks_of(page, "bash") for words in commands_of(block)]
    with_recipe = [words for words in commands if "training/recipes/opus-mt.yaml" in words]
    scoring, training = (words[3:] for words in with_recipe)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "training").symlink_to(ROOT / "training")
    (tmp_path / "pairs").mkdir()
    for name, texts in (("source", "the cat is black\ngood morning\n"), ("target", "el gato es negro\nbuenos dias\n")):
        (tmp_path / "pairs" / f"{name}.txt").write_text(texts)
        (tmp_path / f"{name}.txt").write_text(texts)
    files = [f"--data.{split}={{language}}.txt" for split in ("validation", "test")]
    assert run_main(convert.main, ["marian", opus, "runs/opus-en-de"], capsys)[2] == 0
    assert "sacrebleu" in run_main(score.main, [*scoring, *files], capsys)[0]
    config = json.loads(Path("runs/opus-en-de/config.json").read_text())
    training = [text.replace("58100", str(config["decoder_start_token_id"])) for text in training]
    small = [*files, "--training.steps=2", "--training.evaluation_steps=2", "--training.precision=fp32"]
    small += [f"--model.{size}={config[size]}" for size in SIZES]
    model = load_recipe(training[0], [*training[1:], *small]).model
    assert {name: config[name] for name in model} == model
    for field, value in (("tie_word_embeddings", "true"), ("decoder_start_token_id", "1")):
        with user_error(rf"training\.start_from: .*; set model\.{field}\."):
            train.run(
                load_recipe(training[0], [*training[1:], *small, f"--model.{field}={value}", f"--output_dir={field}"])
            )
    train.main([*training, *small])
    translating = ["runs/own-en-de", "--input=source.txt", "--output=translations.txt"]
    assert run_main(translate.main, translating, capsys)[2] == 0
    (tmp_path / "block.py").write_text(blocks_of(page, "python")[0])
    assert run_forked("block.py", folder=tmp_path).endswith("nats a token\n")
