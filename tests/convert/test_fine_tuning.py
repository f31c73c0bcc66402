"""The page of pretrained models: a Marian model is imported, scored, trained on own pairs, and translates."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import MarianMTModel

from tests import ROOT
from tests.command_parsers import blocks_of, commands_of
from tests.commands import run_main, user_error
from tests.forks import run_forked
from training import score, train
from training.recipe import load_recipe
from vaswani_transformer.convert import command as convert
from vaswani_transformer.translation import command as translate

SIZES = ("d_model", "d_ff", "num_heads", "encoder_layers", "decoder_layers", "max_position_embeddings")


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
    page = ROOT / "docs" / "fine-tuning.md"
    with_recipe = [words for words in commands_of(page) if "training/recipes/opus-mt.yaml" in words]
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
    (block,) = [block for block in blocks_of(page, "python") if "runs/opus-en-de" in block]
    (tmp_path / "block.py").write_text(block)
    assert run_forked("block.py", folder=tmp_path).endswith("nats a token\n")
