"""The tasks that models train for: their metrics, and what the card says of them."""

from training.recipe.fields import Recipe
from training.tasks.dialogue import DialogueTask
from training.tasks.parsing import ParsingTask
from training.tasks.task import Metric, Task
from training.tasks.translation import TranslationTask, choose_tokenizer

ENERGY = Metric("energy", "energy", greater_is_better=False)


def make_task(recipe: Recipe) -> Task:
    if recipe.data.kind == "trees":
        return ParsingTask(recipe.data.source)
    tokenize = choose_tokenizer(recipe.score.tokenize, recipe.data.target)
    if recipe.task == "dialogue":
        return DialogueTask(tokenize)
    return TranslationTask(recipe.data.source, recipe.data.target, tokenize)


def selection_metric(recipe: Recipe) -> Metric:
    """Return the metric that chooses the best checkpoint of a recipe: the task's, or a teacher's energy."""
    return make_task(recipe).best_metric if recipe.training.energy_from is None else ENERGY
