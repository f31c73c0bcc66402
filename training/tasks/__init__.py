"""The tasks that models train for: their metrics, and what the card says of them."""

from training.recipe.fields import Recipe
from training.tasks.dialogue import DialogueTask
from training.tasks.parsing import ParsingTask
from training.tasks.task import Metric, Task
from training.tasks.translation import TranslationTask

ENERGY = Metric("energy", "energy", greater_is_better=False)


def make_task(recipe: Recipe) -> Task:
    if recipe.data.kind == "trees":
        return ParsingTask(recipe.data.source)
    if recipe.task == "dialogue":
        return DialogueTask(recipe.score.tokenize)
    return TranslationTask(recipe.data.source, recipe.data.target, recipe.score.tokenize)


def selection_metric(recipe: Recipe) -> Metric:
    """Return the metric that chooses the best checkpoint of a recipe: the task's, or a teacher's energy."""
    return make_task(recipe).best_metric if recipe.training.energy_from is None else ENERGY
