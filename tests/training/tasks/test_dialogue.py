"""Dialogue: the scores of a recipe of prompts and replies, and the command's names for its texts."""

import dataclasses
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import ROOT
from tests.hub_state import metadata_errors
from training.recipe.fields import Recipe, ScoreRecipe, load_recipe, to_dict
from training.report.card import make_card
from training.report.terminal import opening_line, report
from training.tasks import DialogueTask, make_task
from training.tasks.metrics import bleu

RECIPES = sorted((ROOT / "training" / "recipes").glob("dialogue-*.yaml"))
REPLIES, REFERENCES = ["yes yes , i do", "no"], ["yes , i do too", "no idea"]


def dialogue(tokenize: Any = "none") -> DialogueTask:
    recipe = dataclasses.replace(Recipe(), task="dialogue")
    task = make_task(dataclasses.replace(recipe, score=ScoreRecipe(tokenize=tokenize)))
    assert isinstance(task, DialogueTask)
    return task


def test_dialogue_is_scored_by_bleu_1_and_2_and_described_by_its_variety() -> None:
    scores = dialogue().test(REPLIES, REFERENCES)
    for order in (1, 2):
        expected = bleu(REPLIES, REFERENCES, "none", order)
        assert scores[f"bleu_{order}"] == expected["bleu"]
        assert scores[f"bleu_{order}_signature"] == expected["signature"]
    assert scores["distinct_1"] == 5 / 6
    assert scores["repeats"] == 1 / 6
    assert dialogue().evaluate(REPLIES, REFERENCES).items() <= scores.items()


def test_every_score_of_dialogue_is_a_metric_with_a_signature() -> None:
    task = dialogue("13a")
    scores = task.all_scores(REPLIES, REFERENCES)
    assert list(scores) == [metric.key for metric in task.metrics]
    assert task.best_metric in task.metrics
    for name, score in scores.items():
        assert score["score"] == task.test(REPLIES, REFERENCES)[name]
        assert f"order:{name[-1]}" in score["signature"]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_dialogue_recipes_share_data_and_shape(path: Path) -> None:
    first, recipe = (load_recipe(each, ["--data.path=somewhere"]) for each in (RECIPES[0], path))
    assert isinstance(make_task(recipe), DialogueTask)
    assert (recipe.data, recipe.tokenizer, recipe.score) == (first.data, first.tokenizer, first.score)
    shape = ("d_model", "d_ff", "num_heads", "encoder_layers", "decoder_layers")
    assert [recipe.model[name] for name in shape] == [first.model[name] for name in shape]


def test_every_kind_of_model_has_a_dialogue_recipe() -> None:
    names = {path.stem.removeprefix("dialogue-") for path in RECIPES}
    assert names == {"autoregressive", "nat", "glat", "cmlm", "iterative-vae", "flowseq"}


def test_command_calls_a_reply_no_translation(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    recipe = load_recipe(RECIPES[0], ["--data.path=somewhere"])
    example = {"source": "hi", "translation": "hello", "reference": "hey"}
    signature = {"bleu_2": 1.0, "bleu_2_signature": "s"}
    results = {"test": {"examples": [example], "sentences": 1} | signature}
    with caplog.at_level(logging.INFO):
        report(results | {"time": {"forward": 1.0}}, dataclasses.replace(recipe, output_dir="run"))
    output = capsys.readouterr().out
    assert output.startswith("prompt       hi\nreply        hello\nreference    hey\n")
    assert "Next, answer what you type" in caplog.text
    assert "vaswani-translate run --interactive\n" in caplog.text  # else it would wait for the end of the input
    assert "then answers the test set" in opening_line(recipe)
    assert "translat" not in (output + opening_line(recipe)).lower()


def test_card_of_a_dialogue_model_names_no_translation() -> None:
    results = json.loads((ROOT / "training" / "recipes" / "results" / "multi30k.json").read_text(encoding="utf-8"))
    recipe = to_dict(load_recipe(RECIPES[0], ["--data.path=self-dialogue"]))
    scores = {"bleu_1": 9.0, "bleu_1_signature": "s", "bleu_2": 3.0, "bleu_2_signature": "s"}
    curve = [{"step": 3, "loss": 1.0, "eval_loss": 1.0, "eval_perplexity": 2.7, "eval_bleu_2": 3.0}]
    best = {"loss": 1.0, "perplexity": 2.7, "bleu_2": 3.0, "bleu_2_signature": "s"}
    shown = {"name": "dialogue", "recipe": recipe, "curve": curve, "validation": best}
    card = make_card(results | shown | {"test": results["test"] | scores}, "somebody/dialogue")
    assert card.data.get("language") is None
    assert card.data.get("pipeline_tag") == "text-generation"
    assert "trained with\nvaswani-transformer to answer prompts with replies." in card.text
    assert "BLEU-2 3.00" in card.text
    assert metadata_errors(str(card)) == []
    assert not re.search("translation|translates", card.text)
