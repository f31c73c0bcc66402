"""results.json: the facts of a run in addition to scores."""

import hashlib
import json
import re
import statistics
import subprocess
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies._internal.random import ArtificialRandom

import vaswani_transformer
from tests.helpers import ROOT
from tests.training.runs import LANGUAGE, FinishedRun, dataset_of
from training.recipe.fields import Recipe, load_recipe, to_dict
from training.recipe.reading import Scope
from training.report import results
from training.report.results import commit, fingerprint, hardware, strip_local_paths, to_json_values, versions
from training.run.folder import diff_trees, scope_of
from training.tasks import make_task

RESULTS = sorted((ROOT / "training" / "recipes" / "results").glob("*.json"))
FAMILY = sorted((ROOT / "training" / "recipes" / "results").glob("*-family/*.json"))


def texts(node: Any) -> list[str]:
    """Yield every text in a tree, keys included."""
    if isinstance(node, dict):
        return [text for key, value in node.items() for text in (key, *texts(value))]
    if isinstance(node, list):
        return [text for value in node for text in texts(value)]
    return [node] if isinstance(node, str) else []


def test_fingerprint_is_the_digest_of_the_texts_in_order() -> None:
    pairs = [(f"tree {number}", f"Baum {number} \u00e4\r") for number in range(2001)]
    joined = b"".join(text.encode() + b"\0" for pair in pairs for text in pair)
    assert fingerprint(dataset_of(pairs)) == {"pairs": 2001, "sha256": hashlib.sha256(joined).hexdigest()}


@given(st.lists(st.tuples(st.text("ab"), st.text("ab")), min_size=1, max_size=5), st.randoms())
def test_other_pairs_or_another_order_have_another_fingerprint(
    pairs: list[tuple[str, str]], random: ArtificialRandom
) -> None:
    other = list(pairs)
    random.shuffle(other)
    assert (fingerprint(dataset_of(other)) == fingerprint(dataset_of(pairs))) == (other == pairs)
    moved = [(source + target, "") for source, target in pairs]
    assert (fingerprint(dataset_of(moved)) == fingerprint(dataset_of(pairs))) == (moved == pairs)


def test_fingerprint_leaves_out_filtered_pairs() -> None:
    pairs = dataset_of([("a", "x"), ("b", "y"), ("c", "z")])
    kept = pairs.filter(lambda pair: pair["source"] != "b")
    assert fingerprint(kept) == fingerprint(dataset_of([("a", "x"), ("c", "z")]))


def test_commit_is_the_checkouts_and_says_whether_it_was_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = tmp_path / "results.py"
    code.write_text("1")
    monkeypatch.setattr(results, "__file__", str(code))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert commit() is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    assert commit() is None  # a repository that does not track the code
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "one"], check=True)
    made: Any = commit()
    assert re.fullmatch("[0-9a-f]{40}", made["hash"])
    assert made["dirty"] is False
    (tmp_path / "notes").write_text("mine")
    assert commit() == made
    code.write_text("2")
    assert commit() == made | {"dirty": True}


def test_commit_is_none_without_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert commit() is None


def test_versions_and_hardware_are_those_in_use() -> None:
    recorded = versions()
    assert recorded["torch"] == torch.__version__
    assert recorded["datasets"] == datasets.__version__
    assert recorded["vaswani_transformer"] == vaswani_transformer.__version__
    machine = hardware(torch.device("cpu"))
    assert machine["cpu"]
    assert machine["cores"] >= 1
    assert machine["threads"] == torch.get_num_threads()
    assert machine["memory"] > 0.1
    assert machine["accelerators"] == {}
    assert hardware(torch.device("mps"))["accelerators"] == {"mps": 1}


@pytest.mark.parametrize(
    ("group", "path", "name"),
    [
        ("data", "/home/somebody/corpora/europarl", "europarl"),
        ("data", "../corpora/europarl/", "europarl"),
        ("data", "~/europarl", "europarl"),
        ("data", "wmt/wmt14", "wmt/wmt14"),
        ("tokenizer", "/home/somebody/vocabulary", "vocabulary"),
        ("tokenizer", "somebody/vocabulary", "somebody/vocabulary"),
    ],
)
def test_published_recipe_has_no_path_of_its_files(tmp_path: Path, group: str, path: str, name: str) -> None:
    recipe = tmp_path / "own.yaml"
    recipe.write_text("data: {kind: hub, path: somewhere}")
    loaded = load_recipe(recipe, [f"--{group}.path={path}"])
    tree = to_dict(loaded)
    assert strip_local_paths(loaded) == tree | {group: tree[group] | {"path": name}}


@pytest.mark.parametrize(
    ("names", "published"),
    [
        ("02/*.mrg 03/wsj_0301.mrg", "02/*.mrg 03/wsj_0301.mrg"),
        ("02/*.mrg /home/somebody/more/*.mrg", "02/*.mrg *.mrg"),
        ("/home/some body/train.ptb", "train.ptb"),
    ],
)
def test_published_recipe_has_no_path_of_one_file_among_others(tmp_path: Path, names: str, published: str) -> None:
    recipe = tmp_path / "own.yaml"
    recipe.write_text("data: {kind: trees, path: somewhere}")
    assert strip_local_paths(load_recipe(recipe, [f"--data.train={names}"]))["data"]["train"] == published


def test_metric_that_is_not_a_number_is_null_in_json() -> None:
    tree = {"loss": float("nan"), "curve": [{"loss": float("inf")}, {"loss": 1.5}], "steps": 3, "name": "x"}
    assert to_json_values(tree) == {"loss": None, "curve": [{"loss": None}, {"loss": 1.5}], "steps": 3, "name": "x"}


@pytest.mark.slow
def test_results_have_the_data_and_no_absolute_path(finished_run: FinishedRun) -> None:
    results = json.loads((finished_run.folder / "results.json").read_text())
    assert results["recipe"]["data"]["path"] == "data"
    assert results["data"]["train"] == fingerprint(dataset_of([(text, text[::-1]) for text in LANGUAGE]))
    assert set(results["data"]) == {"train", "validation", "test"}
    assert not [text for text in texts(results) if Path(text).is_absolute()]


RENAMED = {"overlong": "too_long", "unusable": "empty", "pool": "buffer", "refuse": "error"}


def in_todays_words(recipe: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe of kept results with the present names of its keys and of its choices of data."""
    data = {RENAMED.get(name, name): RENAMED.get(value, value) for name, value in recipe["data"].items()}
    return recipe | {"data": data}


def completed(recipe: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe of kept results with the defaults of newer fields."""
    return {
        name: completed(recipe[name], default)
        if isinstance(default, dict) and name != "model"
        else recipe.get(name, default)
        for name, default in defaults.items()
    } | {name: value for name, value in recipe.items() if name not in defaults}


def shipped_recipe(name: str, *arguments: str) -> Recipe:
    return load_recipe(str(ROOT / "training" / "recipes" / f"{name}.yaml"), ["--data.path=anywhere", *arguments])


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_kept_result_is_of_the_shipped_recipe_and_in_the_docs(path: Path) -> None:
    kept = json.loads(path.read_text(encoding="utf-8"))
    chosen = f"--training.precision={kept['recipe']['training']['precision']}"  # the recipe leaves it to the machine
    recipe = shipped_recipe(kept["name"], chosen)
    before = completed(in_todays_words(kept["recipe"]), to_dict(Recipe()))
    changed = {name for name in diff_trees(strip_local_paths(recipe), before) if scope_of(name) != Scope.DESCRIPTION}
    if path.stem == f"{kept['name']}-{before['seed']}":  # another seed of a recipe has a file of its name
        changed -= {"seed"}
    if kept["steps"] == recipe.training.steps:  # a limit that did not end the run may have been another
        changed -= {"training.steps", "training.patience"}
    assert changed <= {"training.minutes", "data.path"}
    assert not kept["commit"]["dirty"]
    assert "examples" not in kept["test"]  # kept results hold no text of a data set
    page = (ROOT / "docs" / ("parsing.md" if recipe.data.kind == "trees" else "results.md")).read_text(encoding="utf-8")
    rows = [set(re.findall(r"\d+\.\d\d", line)) for line in page.splitlines() if line.startswith("|")]
    is_dialogue = recipe.task == "dialogue"
    names = ("bleu_1", "bleu_2", "perplexity") if is_dialogue else ("bleu", "chrf", "f1", "precision", "recall")
    scores = {f"{kept['test'][name]:.2f}" for name in names if name in kept["test"]}
    assert any(scores <= row for row in rows)
    signature = kept["test"][make_task(recipe).best_metric.signature_key]
    for fact in (kept["commit"]["hash"][:7], f"{kept['steps']:,d} steps", signature):
        assert fact in page


@pytest.mark.parametrize("name", sorted({json.loads(path.read_text(encoding="utf-8"))["name"] for path in RESULTS}))
def test_recipe_and_readme_give_the_mean_of_the_kept_scores(name: str) -> None:
    recipe = shipped_recipe(name)
    key = "perplexity" if recipe.task == "dialogue" else make_task(recipe).best_metric.key
    kept = [json.loads(path.read_text(encoding="utf-8")) for path in RESULTS]
    mean = f"{statistics.mean(run['test'][key] for run in kept if run['name'] == name):.2f}"
    score = f"perplexity {mean}" if key == "perplexity" else f"{mean} {key.upper()}"
    assert recipe.expected.startswith((score, f"{mean} "))
    assert score in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", FAMILY, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_kept_result_of_the_family_is_of_the_shipped_recipe_and_in_its_table(path: Path) -> None:
    kept = json.loads(path.read_text(encoding="utf-8"))
    training = kept["recipe"]["training"]
    chosen = [f"--training.{name}={training[name]}" for name in ("precision", "energy_from") if training.get(name)]
    recipe = shipped_recipe(kept["name"], *chosen)
    changed = {
        name for name in diff_trees(strip_local_paths(recipe), kept["recipe"]) if scope_of(name) != Scope.DESCRIPTION
    }
    files = {"data.path", "data.distilled", "tokenizer.path"}
    assert changed <= files | {f"training.{name}" for name in ("encoder_from", "energy_from", "start_from")}
    assert not kept["commit"]["dirty"]
    assert "examples" not in kept["test"]  # kept results hold no text of a data set
    is_dialogue = recipe.task == "dialogue"
    page = (ROOT / "docs" / ("results.md" if is_dialogue else "non-autoregressive.md")).read_text(encoding="utf-8")
    rows = [set(re.findall(r"\d+\.\d\d", line)) for line in page.splitlines() if line.startswith("|")]
    names = ("bleu_1", "bleu_2", "loss") if is_dialogue else ("bleu", "chrf")
    scores = {f"{kept['test'][name]:.2f}" for name in names}
    assert any(scores <= row for row in rows)
    assert f"{kept['commit']['hash'][:7]}" in page
    expected = f"{kept['test']['loss']:.2f} nats" if is_dialogue else f"{kept['test']['bleu']:.2f} BLEU"
    is_of_the_recipe = not path.stem.endswith("-references")  # the recipes expect a teacher's translations
    assert recipe.expected.startswith(expected) == is_of_the_recipe
