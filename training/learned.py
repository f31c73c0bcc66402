"""The pairs that a trained model has learned from, which may be in the test set of a later run or score."""

import contextlib
from collections.abc import Iterable
from pathlib import Path

from training.checkpoints import CHECKPOINTS
from training.data import Learned, fingerprint, load_pairs
from training.fields import HubData, Recipe
from training.models import starts
from training.recipe import read_yaml, recipe_of
from vaswani_transformer.support.command import UserError
from vaswani_transformer.support.files import read_json

RECIPE = "recipe.yaml"
DATA = "data.json"


def run_of(model: str) -> Path:
    """Return the folder with the recipe of a model: its own, or the run's if the model is a checkpoint."""
    folder = Path(model).absolute()
    return folder.parents[1] if folder.parent.name == CHECKPOINTS else folder


def learned_pairs(models: Iterable[str], downloaded: Recipe | None = None) -> Learned:
    """Return the training pairs of runs in folders, and of the runs that these started from.

    Pairs are not known if they are missing, differ from the run's data.json, or would be downloaded and are not those
    of the recipe `downloaded`. Those of a model without a recipe are not known either.
    """
    runs = [run_of(model) for model in models]
    known = []
    for run in runs:  # to which the loop adds
        with contextlib.suppress(UserError):
            recipe = recipe_of(read_yaml(run / RECIPE))
            runs += [start for start in map(run_of, starts(recipe).values()) if start not in runs]
            if isinstance(recipe.data, HubData) and (downloaded is None or recipe.data != downloaded.data):
                continue
            pairs = load_pairs(recipe, ["train"])["train"]
            record = read_json(run / DATA, "restore it.") if (run / DATA).exists() else {}
            if record.get("train") in (None, fingerprint(pairs)):
                known.append(pairs)
    return Learned(known, len(known) == len(runs))
