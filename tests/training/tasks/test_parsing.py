"""Parsing as a task: trees in files become pairs, labels become tokens, and a run ends with F1."""

import dataclasses
import gzip
import json
from pathlib import Path

import pytest

from tests.helpers import load_tokenizer, save, tiny_model, user_error
from tests.training.runs import TINY
from tests.trees import GOLD, PREDICTED, read
from training.data.distilled import Distillation
from training.data.files import read_file
from training.data.pairs import load_pairs
from training.data.tokenizing import token_ids
from training.data.vocabulary import make_tokenizer
from training.distill import main as distill
from training.recipe.fields import DataRecipe, Recipe, TokenizerRecipe, load_recipe
from training.report.results import strip_local_paths
from training.tasks import make_task
from training.train import run
from vaswani_transformer import VaswaniTransformerTokenizer
from vaswani_transformer.parsing import delinearize, linearize, read_trees, score_trees
from vaswani_transformer.parsing.linear import linear_tokens

GOLD_TREES = read(GOLD)
WORDS = [" ".join(tree.words) for tree in GOLD_TREES]
TARGETS = [linearize(tree) for tree in GOLD_TREES]


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    """Return a recipe of trees: training trees in two sections of many lines, the other splits with a tree a line."""
    for section in ("02", "03"):
        (tmp_path / section).mkdir()
        text = GOLD.replace("(TOP ", "( ").replace("(VP ", "\n    (VP ")
        (tmp_path / section / "wsj_1.mrg").write_text(text, encoding="utf-8")
    with gzip.open(tmp_path / "validation.ptb.gz", "wt", encoding="utf-8") as file:
        file.write(GOLD)
    (tmp_path / "test.ptb").write_text(GOLD, encoding="utf-8")
    data = DataRecipe(
        kind="trees", path=str(tmp_path), target="trees", train="0[2-9]/*.mrg", validation="validation.ptb.gz",
        test="test.ptb",
    )  # fmt: skip
    return Recipe(name="trees", data=data, tokenizer=TokenizerRecipe(vocab_size=340))


def test_bracketed_files_become_sentences_and_linear_trees(recipe: Recipe) -> None:
    pairs = load_pairs(recipe.data)
    assert pairs["train"].to_dict() == {"source": WORDS * 2, "target": TARGETS * 2}
    assert pairs["validation"].to_dict() == pairs["test"].to_dict() == {"source": WORDS, "target": TARGETS}


def test_pattern_may_be_absolute(recipe: Recipe, tmp_path: Path) -> None:
    for pattern in ("0[2-9]/*.mrg", f"{tmp_path}/0[2-9]/*.mrg"):
        assert list(read_file(recipe.data, pattern)) == list(zip(WORDS * 2, TARGETS * 2, strict=True))


def test_list_of_files_may_be_longer_than_the_name_of_one(recipe: Recipe) -> None:
    names = " ".join(["validation.ptb.gz"] * 20)
    assert list(read_file(recipe.data, names)) == list(zip(WORDS, TARGETS, strict=True)) * 20
    train = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, train=names))
    assert strip_local_paths(train)["data"]["train"] == names


def test_pattern_without_a_file_and_broken_tree_are_named(recipe: Recipe, tmp_path: Path) -> None:
    with user_error(r"no file matches '24/\*.mrg'"):
        list(read_file(recipe.data, "02/*.mrg 24/*.mrg"))
    with user_error(r"02: is a folder; name its files by a pattern such as '02/\*.mrg'"):
        list(read_file(recipe.data, "02"))
    (tmp_path / "03" / "wsj_1.mrg").write_text("( (S (NN dog)))\n( (S (NN dog))\n", encoding="utf-8")
    with user_error(r"wsj_1.mrg, line 2: the tree that starts here is not closed"):
        load_pairs(recipe.data)


def test_every_label_is_one_token_and_no_word_is_a_label(recipe: Recipe) -> None:
    pairs = load_pairs(recipe.data)
    tokenizer = make_tokenizer(recipe, pairs)
    assert len(tokenizer) <= 340
    sources, targets = token_ids(tokenizer, WORDS, TARGETS)
    labels = {tokenizer.convert_tokens_to_ids(token) for token in linear_tokens(TARGETS)}
    assert all(set(row[:-1]) <= labels and row[-1] == tokenizer.eos_token_id for row in targets)
    assert not any(set(row) & labels for row in sources)
    assert tokenizer.batch_decode(targets, skip_special_tokens=True) == TARGETS
    assert tokenizer.batch_decode(sources, skip_special_tokens=True) == WORDS


def test_vocabulary_counts_the_labels(recipe: Recipe) -> None:
    small = Recipe(data=recipe.data, tokenizer=TokenizerRecipe(vocab_size=280))
    with user_error(r"tokenizer.vocab_size: \d+ of 280 entries are the targets' labels"):
        make_tokenizer(small, load_pairs(recipe.data))


def test_loaded_tokenizer_must_have_the_labels(recipe: Recipe, tmp_path: Path) -> None:
    pairs = load_pairs(recipe.data)
    tokenizer = make_tokenizer(recipe, pairs)
    tokenizer.save_pretrained(tmp_path / "whole")
    loaded = make_tokenizer(Recipe(data=recipe.data, tokenizer=TokenizerRecipe(path=str(tmp_path / "whole"))), pairs)
    assert loaded.get_vocab() == tokenizer.get_vocab()
    plain = VaswaniTransformerTokenizer.train_from_iterator(WORDS, 300)
    plain.save_pretrained(tmp_path / "plain")
    with user_error(r"tokenizer.path: .*plain lacks \d+ labels of the trees"):
        make_tokenizer(Recipe(data=recipe.data, tokenizer=TokenizerRecipe(path=str(tmp_path / "plain"))), pairs)


def test_scores_of_linear_trees_are_those_of_the_trees(recipe: Recipe) -> None:
    task, predicted = make_task(recipe), read(PREDICTED)
    measured, expected = task.test([linearize(tree) for tree in predicted], TARGETS), score_trees(GOLD_TREES, predicted)
    for metric in task.metrics:
        assert measured[metric.key] == getattr(expected, metric.key)
        assert measured[metric.signature_key].startswith(
            "evalb:COLLINS.prm|punctuation:gold-tags|sentences:6|skipped:1"
        )
    assert measured["repaired"] == 0
    scores = task.all_scores([linearize(tree) for tree in predicted], TARGETS)
    assert scores["evalb_f1"]["score"] == score_trees(GOLD_TREES, predicted, own_punctuation=True).f1
    assert "errors:1" in scores["evalb_f1"]["signature"]


def test_share_of_repaired_outputs_is_reported(recipe: Recipe) -> None:
    task = make_task(recipe)
    assert task.statistics(["", TARGETS[1], "(S", TARGETS[3]], TARGETS[:4]) == {"repaired": 50}
    assert task.display("The dog", "(NP()DT") == "(TOP (NP (DT The) (XX dog)))"


def test_distilled_trees_are_well_formed(recipe: Recipe, tmp_path: Path) -> None:
    """The teacher has random weights."""
    tokenizer, folder = make_tokenizer(recipe, load_pairs(recipe.data)), tmp_path / "distilled"
    save(tmp_path / "teacher", tiny_model(vocab_size=len(tokenizer)), tokenizer)
    fields = {name: value for name, value in vars(recipe.data).items() if name != "subset"}
    (tmp_path / "own.yaml").write_text(json.dumps({"data": fields}), encoding="utf-8")
    distill([str(tmp_path / "teacher"), str(tmp_path / "own.yaml"), f"--output_dir={folder}"])
    pairs = list(Distillation.load(folder).pairs())
    assert pairs
    assert not any(delinearize(target, source.split(" ")).is_repaired for source, target in pairs)


@pytest.mark.slow
def test_run_ends_with_f1(recipe: Recipe, tmp_path: Path) -> None:
    fields = {name: value for name, value in vars(recipe.data).items() if name != "subset"}
    path = tmp_path / "own.yaml"
    path.write_text(json.dumps({"name": "trees", "note": "Made by hand.", "data": fields} | TINY), encoding="utf-8")
    more = ["--tokenizer.vocab_size=340", "--training.steps=3", f"--output_dir={tmp_path / 'run'}"]
    results = run(load_recipe(path, ["--training.source_tokens=200", "--training.target_tokens=200", *more]))
    assert 0 <= results["test"]["f1"] <= 100
    assert results["test"]["repaired"] == 0
    assert results["validation"]["f1"] == results["best_validation_f1"]
    assert results["recipe"]["note"] == "Made by hand."
    for example in results["test"]["examples"]:
        ((_, tree),) = read_trees([(1, example["translation"])], "example")
        assert " ".join(tree.words) == example["source"]
    tokenizer = load_tokenizer(tmp_path / "run")
    assert tokenizer.decode(token_ids(tokenizer, WORDS, TARGETS)[1][0], skip_special_tokens=True) == TARGETS[0]
