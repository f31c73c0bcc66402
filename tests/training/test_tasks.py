"""Tasks: parsing, whose trees become pairs and whose runs end with F1, and dialogue with its scores and names."""

import dataclasses
import gzip
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT
from tests.commands import user_error
from tests.models import save, tiny_model
from tests.training.runs import TINY
from tests.trees import GOLD, PREDICTED, read
from training.data import load_data, load_pairs, make_tokenizer
from training.distill import main as distill
from training.recipe import FileData, Recipe, ScoreRecipe, load_recipe, recipe_of
from training.tasks import bleu, make_task
from training.train import report, run
from vaswani_transformer import VaswaniTransformerTokenizer
from vaswani_transformer.parsing import delinearize, linearize, read_trees, score_trees
from vaswani_transformer.parsing.linear import linear_tokens

GOLD_TREES = read(GOLD)
WORDS = [" ".join(tree.words) for tree in GOLD_TREES]
TARGETS = [linearize(tree) for tree in GOLD_TREES]
RECIPES = sorted((ROOT / "training" / "recipes").glob("dialogue-*.yaml"))
REPLIES, REFERENCES = ["yes yes , i do", "no"], ["yes , i do too", "no idea"]


@pytest.fixture
def fields(tmp_path: Path) -> dict[str, Any]:
    """Return the fields of a recipe of trees: training trees of many lines, the other splits with a tree a line."""
    (tmp_path / "02").mkdir()
    text = GOLD.replace("(TOP ", "( ").replace("(VP ", "\n    (VP ")
    (tmp_path / "02" / "wsj_1.mrg").write_text(text, encoding="utf-8")
    with gzip.open(tmp_path / "validation.ptb.gz", "wt", encoding="utf-8") as file:
        file.write(GOLD)
    (tmp_path / "test.ptb").write_text(GOLD, encoding="utf-8")
    names = {"train": "0[2-9]/*.mrg", "validation": "validation.ptb.gz", "test": "test.ptb"}
    data = {"kind": "trees", "path": str(tmp_path), "target": "trees"} | names
    return {"name": "trees", "note": "Made by hand.", "data": data, "tokenizer": {"vocab_size": 340}}


@pytest.fixture
def recipe(fields: dict[str, Any]) -> Recipe:
    return recipe_of(fields)


def test_every_label_is_one_token_and_no_word_is_a_label(recipe: Recipe) -> None:
    data = load_data(recipe)
    tokenizer, train = data.tokenizer, data.tokens["train"]
    assert len(tokenizer) <= 340
    labels = {tokenizer.convert_tokens_to_ids(token) for token in linear_tokens(TARGETS)}
    assert all(set(row[:-1]) <= labels and row[-1] == tokenizer.eos_token_id for row in train["labels"])
    assert not any(set(row) & labels for row in train["input_ids"])
    assert tokenizer.batch_decode(train["labels"][:], skip_special_tokens=True) == TARGETS
    assert tokenizer.batch_decode(train["input_ids"][:], skip_special_tokens=True) == WORDS


def test_loaded_tokenizer_must_have_the_labels(recipe: Recipe, fields: dict[str, Any], tmp_path: Path) -> None:
    train = load_pairs(recipe)["train"]
    whole, plain = make_tokenizer(recipe, train), VaswaniTransformerTokenizer.train_from_iterator(WORDS, 300)
    for name, tokenizer in (("whole", whole), ("plain", plain)):
        tokenizer.save_pretrained(tmp_path / name)
    loaded = recipe_of(fields | {"tokenizer": {"path": str(tmp_path / "whole")}})
    assert make_tokenizer(loaded, train).get_vocab() == whole.get_vocab()
    with user_error(r"tokenizer.path: .*plain does not contain all labels of the trees"):
        make_tokenizer(recipe_of(fields | {"tokenizer": {"path": str(tmp_path / "plain")}}), train)


def test_scores_of_linear_trees_are_those_of_the_trees(recipe: Recipe) -> None:
    task, predicted = make_task(recipe), read(PREDICTED)
    measured = task.scores([linearize(tree) for tree in predicted], TARGETS, *task.metrics)
    expected = score_trees(GOLD_TREES, predicted)
    for metric in task.metrics:
        assert measured[metric.key] == getattr(expected, metric.key)
        assert str(measured[metric.signature_key]).startswith(
            "evalb:COLLINS.prm|punctuation:gold-tags|sentences:6|skipped:1"
        )
    scores = task.all_scores([linearize(tree) for tree in predicted], TARGETS)
    assert scores["evalb_f1"]["score"] == score_trees(GOLD_TREES, predicted, own_punctuation=True).f1
    assert "errors:1" in scores["evalb_f1"]["signature"]


def test_share_of_repaired_outputs_is_reported(recipe: Recipe) -> None:
    task = make_task(recipe)
    assert task.statistics(["", TARGETS[1], "(S", TARGETS[3]], TARGETS[:4]) == {"repaired": 50}
    assert task.display("The dog", "(NP()DT") == "(TOP (NP (DT The) (XX dog)))"


def test_distilled_trees_are_well_formed(recipe: Recipe, fields: dict[str, Any], tmp_path: Path) -> None:
    """The teacher has random weights."""
    tokenizer, folder = make_tokenizer(recipe, load_pairs(recipe)["train"]), tmp_path / "distilled"
    save(tmp_path / "teacher", tiny_model(vocab_size=len(tokenizer)), tokenizer)
    (tmp_path / "own.yaml").write_text(json.dumps(fields), encoding="utf-8")
    distill([str(tmp_path / "teacher"), str(tmp_path / "own.yaml"), f"--output_dir={folder}"])
    distilled = fields | {"data": fields["data"] | {"distilled": str(folder)}}
    pairs = load_pairs(recipe_of(distilled))["train"]
    for pair in pairs:
        assert not delinearize(pair["target"], pair["source"].split(" ")).is_repaired


@pytest.mark.slow
def test_run_ends_with_f1(fields: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(json.dumps(TINY | fields), encoding="utf-8")
    more = ["--training.source_tokens=200", "--training.target_tokens=200", f"--output_dir={tmp_path / 'run'}"]
    results = run(load_recipe(path, ["--training.steps=3", *more]))
    assert 0 <= results["test"]["f1"] <= 100
    assert results["test"]["repaired"] == 0
    assert results["validation"]["f1"] == results["best_validation_f1"]
    assert results["recipe"]["note"] == "Made by hand."
    for example in results["test"]["examples"]:
        ((_, tree),) = read_trees([(1, example["translation"])], "example")
        assert " ".join(tree.words) == example["source"]


@pytest.mark.parametrize(
    ("column", "language", "tokenize"),
    [
        *((name, "ja", "char") for name in ("ja", "JA", "ja_JP", "jp", "Japanese", "target_ja", "tgt-japanese")),
        *((name, "zh", "zh") for name in ("zh", "zh-CN", "zh_hans", "zh_Hant_HK", "cn", "chinese", "text_zh")),
        *(("jpn", "jpn", "char"), ("zho_Hans", "zho", "zh"), ("yue", "yue", "zh"), ("burmese", "my", "char")),
        *(("pt-br", "pt", "13a"), ("de_DE", "de", "13a"), ("deu_Latn", "deu", "13a"), ("sentence_de", "de", "13a")),
        *((name, None, "13a") for name in ("my_translation", "lo_res", "km_text", "thread", "zhtext", "target", "src")),
        *((name, None, "13a") for name in ("out", "trg", "txt", "l1", "ja1", "translation", "bo_xyz")),
    ],
)
def test_tokenizer_of_bleu_is_that_of_a_column_that_names_a_language(
    column: str, language: str | None, tokenize: str
) -> None:
    recipe = Recipe(data=FileData(target=column))
    assert recipe.data.languages[1] == language
    assert make_task(recipe).tokenize == tokenize
    assert make_task(Recipe(data=FileData(target=column, target_language="th-TH"))).tokenize == "char"


def test_dialogue_is_scored_by_bleu_1_and_2_and_described_by_its_variety() -> None:
    task = make_task(Recipe(task="dialogue", score=ScoreRecipe(tokenize="none")))
    scores = task.scores(REPLIES, REFERENCES, *task.metrics)
    for order in (1, 2):
        expected = bleu(REPLIES, REFERENCES, "none", order)
        assert scores[f"bleu_{order}"] == expected["score"]
        assert scores[f"bleu_{order}_signature"] == expected["signature"]
    statistics = task.statistics(REPLIES, REFERENCES)
    assert (statistics["distinct_1"], statistics["repeats"]) == (5 / 6, 1 / 6)
    assert task.scores(REPLIES, REFERENCES, task.best_metric).items() <= scores.items()


def test_command_calls_a_reply_no_translation(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    recipe = load_recipe(RECIPES[0], ["--data.path=somewhere"])
    example = {"source": "hi", "translation": "hello", "reference": "hey"}
    signature = {"bleu_2": 1.0, "bleu_2_signature": "s"}
    seen = {"test": {"pairs": 0, "sources": 1}}
    results = {"test": {"examples": [example], "sentences": 1} | signature, "seen_in_training": seen}
    with caplog.at_level(logging.INFO):
        report(results | {"seconds": 1.0}, dataclasses.replace(recipe, output_dir="run"))
    output = capsys.readouterr().out
    assert output.startswith("prompt       hi\nreply        hello\nreference    hey\n")
    assert "test set: the training data contain 0 of its 1 pairs, and 1 of its sources, so its scores" in output
    assert "Next, answer what you type" in caplog.text
    assert "vaswani-translate run --interactive\n" in caplog.text  # else it would wait for the end of the input
    assert "translat" not in output.lower()
