"""The lines that a run prints: its plan and its targets before training, its scores and what to type next after it."""

import logging
import shlex
from typing import Any

from training.data.distilled import Distillation
from training.monitor.stopwatch import time_line
from training.recipe.fields import Recipe
from training.tasks import make_task

logger = logging.getLogger(__name__)


def opening_line(recipe: Recipe) -> str:
    """Return what a run is going to do, and what its recipe gives without changes: score and time."""
    training, subject, verb = recipe.training, recipe.name or "This recipe", make_task(recipe).verb
    limit = "" if training.minutes is None else f" in at most {training.minutes:g} minutes"
    split = "validation" if recipe.data.test is None else "test"
    plan = f"{subject} trains a model for {training.steps:,d} steps{limit}, then {verb}s the {split} set"
    return f"{plan}. The recipe as shipped: {recipe.expected}." if recipe.expected else f"{plan}."


def targets_line(recipe: Recipe, distillation: Distillation | None) -> str:
    """Return which targets a run learns from: those of its data, or a teacher's."""
    use = "Training targets" if recipe.training.energy_from is None else "Training targets, for their lengths only"
    if distillation is None:
        return f"{use}: those of the data."
    teacher, kept = distillation.record["teacher"]["name"], distillation.totals["kept"]
    return (
        f"{use}: written by {teacher} for {kept:,d} of {distillation.sources:,d} sources, in {recipe.data.distilled}."
    )


def report(results: dict[str, Any], recipe: Recipe) -> None:
    """Print a few translations, the time of each phase, and the best metric on the last line; log what to type next."""
    scores, task = results.get("test"), make_task(recipe)
    for example in scores["examples"] if scores else []:
        for role, name in zip(task.roles, ("source", "translation", "reference"), strict=True):
            print(f"{role:<12} {example[name]}")
        print()
    print(time_line(results["time"]))
    best = task.best_metric
    if scores is None:
        print(f"{best.title} {results['validation'][best.key]:.2f} on the validation set")
        return
    if recipe.note:
        logger.info("%s", recipe.note)
    signature = scores[best.signature_key]
    print(f"{best.title} {scores[best.key]:.2f} on {scores['sentences']} unseen sentences ({signature})", flush=True)
    if scores["examples"]:
        folder, source = shlex.quote(str(recipe.output_dir)), shlex.quote(scores["examples"][0]["source"])
        what, command = "publish", f"training.publish {folder} OWNER/NAME"
        if recipe.family.is_autoregressive:
            what, command = "see attention", f"vaswani_transformer.figures {folder} {source}"
        logger.info("Next, %s what you type, and %s:", task.verb, what)
        logger.info("%s %s --interactive", task.command, folder)
        logger.info("python -m %s", command)
