"""The models that a run begins from or learns from, by digest: recorded when it begins, checked when it resumes."""

import json
from pathlib import Path

from training.recipe.fields import Recipe
from training.run.distributed import RunError
from training.run.encoder import has_trained
from vaswani_transformer.support.files import read_json, write_atomically
from vaswani_transformer.translation.loading import LoadOptions

MODELS_FILE = "models.json"
FIELDS = ("encoder_from", "start_from", "energy_from")


def recorded_models(folder: Path) -> dict[str, str]:
    """Return the digests that the run in a folder has recorded, by the recipe's field; nothing where it names none."""
    path = folder / MODELS_FILE
    return read_json(path, "restore it, or give another --output_dir.") if path.exists() else {}


def record_models(recipe: Recipe, folder: Path) -> None:
    """Write the digests of the models that a recipe names, as long as the run has no checkpoint made from others.

    Raises:
        UserError: the model does not exist.
    """
    if has_trained(folder):
        return
    models = {f"training.{name}": getattr(recipe.training, name) for name in FIELDS}
    digests = {name: LoadOptions(model).digest() for name, model in models.items() if model is not None}
    if digests != recorded_models(folder):
        write_atomically(folder / MODELS_FILE, json.dumps(digests, indent=2))


def check_same_energy(recipe: Recipe, folder: Path) -> None:
    """Check that a run with a checkpoint resumes under the teacher whose energy it began with.

    Raises:
        RunError: the teacher is another one.
    """
    name, model = "training.energy_from", recipe.training.energy_from
    before = recorded_models(folder).get(name)
    if model is None or before is None or not has_trained(folder):
        return
    if (digest := LoadOptions(model).digest()) != before:
        raise RunError(
            f"{name}: {model} is not the teacher that the run in {folder} was begun with; got digest {digest[:12]}, "
            f"expected {before[:12]}. Restore it, or give another --output_dir."
        )
