"""The kept results are those of the shipped recipes, and what pages and recipes say of them is in them."""

import json
import re
import statistics
from pathlib import Path

import pytest

from tests import ROOT
from training.recipe import Recipe, load_recipe, to_dict
from training.tasks import make_task
from training.train import flat, without_folders

KEPT = ROOT / "training" / "recipes" / "results"
PATHS = [*sorted(KEPT.glob("*.json")), *sorted(ROOT.glob("models/*/results.json"))]
FAMILY = sorted(KEPT.glob("*-family/*.json"))
DESCRIPTIONS = {"name", "task", "expected", "published", "note", "output_dir"}
OF_A_MACHINE = {"data.path", "data.distilled", "tokenizer.path", "training.precision", "training.minutes", "seed"}
OF_A_MACHINE |= {f"training.{name}" for name in ("encoder_from", "energy_from", "start_from")}
WRITTEN_OTHERWISE = {"score.tokenize", "training.energy_inputs", "training.energy_outputs", "training.glancing_steps"}
"""Fields whose default is another word for the same."""
SHORT = {"model.dropout", "training.steps"}
FAST = {*SHORT, "training.learning_rate_scale"}
VARIANTS = {
    "nat-longer": {"training.steps"},
    "nat-40-minutes": FAST,
    "glat-40-minutes": FAST,
    "glat-by-layer-40-minutes": {"model.latent", "model.hint", "training.glancing", "training.steps"},
    "ctc-references": {"training.glancing", "training.steps"},
    "ctc-with-glancing": {"training.glancing", "training.steps"},
    "ctc-without-glancing": {"training.steps"},
    "cmlm-40-minutes": {"training.steps"},
    "iterative-vae-discrete": {*SHORT, "model.label_smoothing", "model.latent", "training.average_last"},
    "iterative-vae-discrete-2018": {*SHORT, "model.label_smoothing"},
    "iterative-vae-without-hint": {*SHORT, "model.label_smoothing", "model.hint"},
}
"""Fields that the runs of kept results changed."""


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def shipped_recipe(name: str) -> Recipe:
    return load_recipe(ROOT / "training" / "recipes" / f"{name}.yaml", ["--data.path=anywhere"])


@pytest.mark.parametrize("path", [*PATHS, *FAMILY], ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_kept_result_is_of_the_shipped_recipe_and_in_a_table_of_the_docs(path: Path) -> None:
    """Its recipe has the keys of its commit, of which those that are still there must be equal."""
    text = path.read_text(encoding="utf-8")
    kept, is_family = json.loads(text), path in FAMILY
    recipe = shipped_recipe(kept["name"])
    before, now = dict(flat(kept["recipe"])), dict(flat(without_folders(to_dict(recipe))))
    free = DESCRIPTIONS | OF_A_MACHINE | WRITTEN_OTHERWISE | VARIANTS.get(path.stem, set())
    if kept["steps"] == recipe.training.steps:  # a limit that did not end the run may have been another
        free |= {"training.steps", "training.patience"}
    assert {name for name in before.keys() & now.keys() - free if before[name] != now[name]} == set()
    assert not kept["commit"]["dirty"]
    assert "examples" not in kept["test"]  # kept results hold no text of a data set
    assert all("eval_loss" in entry for entry in kept["curve"])
    assert text.count("\n") < 150

    is_dialogue, is_trees = recipe.task == "dialogue", recipe.data.kind == "trees"
    docs = page("docs/results.md")
    if is_trees:
        docs = page("docs/parsing.md") + page("training/recipes/results/parsing-gum.md")
    elif is_dialogue:
        docs = page("training/recipes/results/dialogue-family/README.md")
    elif is_family:
        docs = page("docs/non-autoregressive.md") + page("training/recipes/results/multi30k-family/README.md")
    names = ("bleu_1", "bleu_2", "loss" if is_family else "perplexity")
    names = names if is_dialogue else ("bleu", "chrf", "f1", "precision", "recall")
    scores = {f"{kept['test'][name]:.2f}" for name in names if name in kept["test"]}
    assert any(scores <= set(re.findall(r"\d+\.\d\d", line)) for line in docs.splitlines() if line.startswith("|"))
    assert kept["commit"]["hash"][:7] in docs
    if is_family:
        expected = f"{kept['test']['loss']:.2f} nats" if is_dialogue else f"{kept['test']['bleu']:.2f} BLEU"
        if kept["name"].endswith(path.stem):  # not a variant of the recipe
            assert recipe.expected.startswith(expected)
    else:
        assert f"{kept['steps']:,d} steps" in docs
        assert kept["test"][make_task(recipe).best_metric.signature_key] in docs


@pytest.mark.parametrize("name", sorted({json.loads(path.read_text(encoding="utf-8"))["name"] for path in PATHS}))
def test_recipe_and_page_give_the_mean_of_the_kept_scores(name: str) -> None:
    recipe = shipped_recipe(name)
    key = "perplexity" if recipe.task == "dialogue" else make_task(recipe).best_metric.key
    kept = [json.loads(path.read_text(encoding="utf-8")) for path in PATHS]
    mean = f"{statistics.mean(run['test'][key] for run in kept if run['name'] == name):.2f}"
    score = f"perplexity {mean}" if key == "perplexity" else f"{mean} {key.upper()}"
    assert recipe.expected.startswith((score, f"{mean} "))
    assert score in page("docs/results.md")
