"""Summary of runs that differ in their seed: mean, standard deviation, lowest and highest of each metric."""

import json
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.card import read_results
from training.tasks import Metric, task_class
from training.train import FREE, flat
from vaswani_transformer.support.command import UserError

DETERMINE_SCORES = {"training.steps", "training.minutes", "data.distilled"}
IGNORED = (FREE - DETERMINE_SCORES) | {"seed"}
"""Fields in which runs of one recipe may differ."""
OF_LEARNING = {"tokenizer.algorithm", "tokenizer.vocab_size", "tokenizer.sample"}
"""Fields that a run with a loaded vocabulary does not use."""


@dataclass(frozen=True)
class ScoredRun:
    """A finished run.

    path: its folder.
    name, seed: those of its recipe.
    recipe: fields of its recipe that runs of one group have in common, by dotted name.
    data: name, number of pairs and SHA-256 of the split that was scored.
    scores, signatures: by title of the metric.
    """

    path: str
    name: str
    seed: int
    recipe: dict[str, Any]
    data: dict[str, Any]
    scores: dict[str, float]
    signatures: dict[str, str]


def load_run(path: Path) -> ScoredRun:
    """Return a finished run with the scores of its test set, or of its validation set if it has no test set."""
    results = read_results(path)
    tree = results["recipe"]
    task = task_class(tree["data"]["kind"], tree.get("task", "translation"))
    split = "test" if "test" in results else "validation"
    candidates: Iterable[Metric] = (*task.metrics, *task.more_metrics)
    metrics = [metric for metric in candidates if metric.key in results[split]]
    unused = IGNORED if tree["tokenizer"]["path"] is None else IGNORED | OF_LEARNING
    return ScoredRun(
        path=str(path),
        name=results["name"],
        seed=tree["seed"],
        recipe={name: value for name, value in flat(tree) if name not in unused},
        data={"split": split, **results["data"][split]},
        scores={metric.title: results[split][metric.key] for metric in metrics},
        signatures={metric.title: results[split][metric.signature_key] for metric in metrics},
    )


def group_runs(runs: list[ScoredRun]) -> dict[str, list[ScoredRun]]:
    """Return the runs of each recipe by the letters A, B, ...

    All must have been scored on the same pairs, and the runs of a recipe must differ in their seeds.
    """
    first = runs[0]
    by_recipe: dict[str, list[ScoredRun]] = {}
    for run in runs:
        if run.data != first.data:
            raise UserError(
                f"{run.path}: was scored on different pairs than {first.path}. Use one test set for all runs; for one "
                "that is held out, set data.split_seed in the recipe."
            )
        group = by_recipe.setdefault(json.dumps(run.recipe, sort_keys=True), [])
        for other in group:
            if other.seed == run.seed:
                raise UserError(f"{run.path}: has the recipe and the seed of {other.path}; got seed {run.seed} twice.")
        group.append(run)
    return {chr(ord("A") + index): group for index, group in enumerate(by_recipe.values())}


def spread(values: list[float]) -> dict[str, float | None]:
    """Return mean, sample standard deviation (None for one value), lowest and highest."""
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.mean(values), "sd": deviation, "lowest": min(values), "highest": max(values)}


def differing_fields(groups: dict[str, list[ScoredRun]]) -> dict[str, dict[str, Any]]:
    """Return the fields in which the recipes of the groups differ, each with its value in every group."""
    recipes = {letter: group[0].recipe for letter, group in groups.items()}
    names = sorted({name for recipe in recipes.values() for name in recipe})
    values = {name: {letter: recipe.get(name) for letter, recipe in recipes.items()} for name in names}
    return {name: row for name, row in values.items() if len({json.dumps(value) for value in row.values()}) > 1}


def summarize(runs: list[ScoredRun]) -> dict[str, Any]:
    """Return the groups, what differs between their recipes, and the spread of each metric in each group.

    For two groups a metric also has `difference`, the mean of B minus that of A, and its `standard_error`.
    """
    groups = group_runs(runs)
    metrics: dict[str, Any] = {}
    shared_titles = [title for title in runs[0].scores if all(title in run.scores for run in runs)]
    for title in shared_titles:
        scores = {letter: [run.scores[title] for run in group] for letter, group in groups.items()}
        metrics[title] = {letter: spread(values) for letter, values in scores.items()}
        if len(groups) == 2:
            means = [statistics.mean(values) for values in scores.values()]
            metrics[title]["difference"] = means[1] - means[0]
            metrics[title]["standard_error"] = standard_error(*scores.values())
        metrics[title]["signatures"] = sorted({run.signatures[title] for run in runs})
    return {
        **runs[0].data,
        "groups": {
            letter: {"name": group[0].name, "runs": {run.path: {"seed": run.seed, **run.scores} for run in group}}
            for letter, group in groups.items()
        },
        "differing_fields": differing_fields(groups),
        "metrics": metrics,
    }


def standard_error(*samples: list[float]) -> float | None:
    """Return the standard error of the difference of two means; None for a sample of one value."""
    if any(len(values) < 2 for values in samples):
        return None
    return sum(statistics.variance(values) / len(values) for values in samples) ** 0.5


def report_summary(summary: dict[str, Any]) -> None:
    """Print the runs, what differs, and a table of the metrics."""
    # The groups.
    for letter, group in summary["groups"].items():
        print(f"{letter} {group['name']}")
        for path, run in group["runs"].items():
            print(f"    {path}, seed {run['seed']}")
    for name, values in summary["differing_fields"].items():
        shown = [f"{letter} {'not set' if value is None else value}" for letter, value in values.items()]
        print(f"{name}: {', '.join(shown)}")

    # The metrics.
    print(f"\n{summary['pairs']:,} pairs of {summary['split']}")
    print(f"{'':<18} {'':<5} {'runs':>5} {'mean':>8} {'sd':>8} {'lowest':>8} {'highest':>8}")
    for title, metric in summary["metrics"].items():
        for letter, group in summary["groups"].items():
            values = metric[letter]
            deviation = "" if values["sd"] is None else f"{values['sd']:.2f}"
            ends = f"{values['lowest']:8.2f} {values['highest']:8.2f}"
            print(f"{title:<18} {letter:<5} {len(group['runs']):>5} {values['mean']:8.2f} {deviation:>8} {ends}")
        if "difference" in metric:
            error = metric["standard_error"]
            precision = "" if error is None else f"  (standard error {error:.2f})"
            print(f"{title:<18} {'B - A':<5} {'':>5} {metric['difference']:+8.2f}{precision}")
    print()
    for title, metric in summary["metrics"].items():
        for signature in metric["signatures"]:
            print(f"{title} {signature}")
