"""Write the model card of a run: `python -m training.card RUN OWNER/NAME [--output=FILE]`."""

import contextlib
import json
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.utils import HFValidationError, validate_repo_id
from transformers.models.whisper.tokenization_whisper import LANGUAGES

from training.data import describe_seen
from training.families import GlancingTraining
from training.models import STARTS, starts
from training.prepare import PUBLIC_SETS
from training.recipe import HubData, Recipe, recipe_of, to_dict
from training.tasks import Metric, Task, make_task
from training.train import RESULTS, flat
from vaswani_transformer.support.command import CommandParser, UserError, exit_on_user_error
from vaswani_transformer.support.files import check_new_file, read_json

FOLDERS = (
    "data.path",
    "data.distilled",
    "tokenizer.path",
    *(f"training.{name}" for name in (*STARTS, "energy_from")),
)
"""Fields of a recipe that name a folder; all but `data.path` may also name a model on the Hub."""
TEMPLATE = Path(__file__).parent / "card_template.md"
EXAMPLE = "Two dogs play in the snow."  # for results without a test sentence


def read_results(run: Path) -> dict[str, Any]:
    """Return the content of results.json in the folder of a run, or of that file."""
    path = run / RESULTS if run.is_dir() else run
    fix = "rerun the training command to finish the run."
    results = read_json(path, fix)
    for name, content in {"name": str, "recipe": dict}.items():
        if not isinstance(results.get(name), content):
            raise UserError(f"{path}: is damaged; got {results.get(name)!r} for {name}; {fix}")
    return results


def language_codes(recipe: Recipe) -> list[str]:
    """Return the codes of the languages that a recipe tells, each once."""
    return list(dict.fromkeys(code for code in recipe.data.languages if code is not None))


def language_name(code: str | None) -> str | None:
    """Return a language's English name, or its code if the name is not known."""
    if code is None:
        return None
    return LANGUAGES[code].title() if code in LANGUAGES else f"`{code}`"


def purpose(recipe: Recipe, task: Task) -> str:
    """Return the task that a model was trained for, with the names of the languages that its recipe tells."""
    source, target = map(language_name, recipe.data.languages)
    if task.verb == "parse":
        sentences = f"{source} sentences" if source else "sentences"
        return f"parse {sentences} into constituency trees"
    if task.verb == "answer":
        return f"reply to prompts in {source}" if source else "reply to prompts"
    if source is None and target is None:
        return "translate. Its recipe names no languages"
    unnamed = "a language that its recipe does not name"
    return f"translate {source or unnamed} into {target or unnamed}"


def variant(recipe: Recipe) -> str:
    """Return the kind of a recipe's model, or "glat" for a NAT that glancing trains."""
    has_glancing = isinstance(recipe.training, GlancingTraining) and recipe.training.glancing is not None
    return "glat" if recipe.kind == "nat" and has_glancing else recipe.kind


def is_hub_id(name: str) -> bool:
    """Return whether a name is an OWNER/NAME of the Hub; without an owner it may be that of a folder."""
    with contextlib.suppress(HFValidationError):
        validate_repo_id(name)
        return "/" in name
    return False


def base_models(recipe: Recipe) -> str | list[str] | None:
    """Return the start models that are on the Hub, or None."""
    names = list(dict.fromkeys(name for name in starts(recipe).values() if is_hub_id(name)))
    return names[0] if len(names) == 1 else names or None


def folder_options(recipe: Recipe) -> list[str]:
    """Return an option for each folder that a recipe names, which the reader of a card must give."""
    fields = dict(flat(to_dict(recipe)))
    on_hub = {name for name, value in fields.items() if name != "data.path" and "/" in str(value)}
    if isinstance(recipe.data, HubData):
        on_hub.add("data.path")
    return [f"--{name}=FOLDER" for name in FOLDERS if fields.get(name) is not None and name not in on_hub]


def make_card(
    results: dict[str, Any], repository: str, license: str | None = None, has_example: bool = True
) -> ModelCard:
    """Return the model card of a run.

    If the data are public, its metadata has a `model-index` of the scores and signatures, which needs their id.

    Args:
        results: the run's `results.json`.
        repository: OWNER/NAME.
        license: the Hub's name for the weights' license; None to name none.
        has_example: whether to show a sentence of the test set.
    """
    recipe = recipe_of(results["recipe"])
    task = make_task(recipe)
    data, data_license, hub_name = describe_data(recipe, results.get("source"))

    # The metadata, by which the Hub finds and compares models.
    model_type = recipe.family.model_class.config_class.model_type
    head = ModelCardData(
        language=language_codes(recipe) or None,
        license=license,
        base_model=base_models(recipe),
        library_name="transformers",
        pipeline_tag=task.hub_name,
        tags=["transformer", variant(recipe).replace("_", "-"), model_type, task.hub_name],
        datasets=[hub_name] if hub_name else None,
        metrics=[metric.key for metric in task.metrics],
        model_name=results["name"],
        eval_results=evaluation_results(results, recipe, data, hub_name or known_set(results)),
    )

    # The page.
    examples = results.get("test", {}).get("examples") if has_example else None
    source = examples[0]["source"] if examples else EXAMPLE
    return ModelCard.from_template(
        head,
        template_path=str(TEMPLATE),
        results=results,
        recipe=recipe,
        task=task,
        purpose=purpose(recipe, task),
        metric=task.selection,
        variant=variant(recipe),
        data=data,
        license=license,
        data_license=data_license,
        starts=starts(recipe),
        parts=STARTS,
        start_licenses=results.get("start_licenses", {}),
        folders=folder_options(recipe),
        repository=json.dumps(repository),
        example=json.dumps(source, ensure_ascii=False),
        scores=[*score_lines(results, recipe), *(example_lines(results) if has_example else [])],
        name=repository.rpartition("/")[2],
    )


def known_set(results: dict[str, Any]) -> str | None:
    """Return the name of the public data set that a run was trained on, or None."""
    name = results.get("source")
    return name if name in PUBLIC_SETS else None


def evaluation_results(
    results: dict[str, Any], recipe: Recipe, data: str, data_id: str | None
) -> list[EvalResult] | None:
    """Return each score of a run as an entry of the `model-index`; None for data of one's own.

    `data` is the name of the data set, and `data_id` its id, or None.
    """
    if data_id is None:
        return None
    task = make_task(recipe)
    entries = []
    for split in ("test", "validation"):
        scores = results.get(split, {})
        for metric in task.metrics:
            if metric.key not in scores:
                continue
            entry = EvalResult(
                task_type=task.hub_name,
                task_name=f"{task.verb} {'-'.join(language_codes(recipe))}".strip(),
                dataset_type=data_id,
                dataset_name=data,
                dataset_split=split,
                metric_type=metric.key,
                metric_name=metric.title,
                metric_value=round(scores[metric.key], 2),
                metric_args={"signature": scores[metric.signature_key]},
            )
            entries.append(entry)
    return entries


def describe_data(recipe: Recipe, prepared: str | None) -> tuple[str, str, str | None]:
    """Return the name and source of a run's data, its license, and its id on the Hub or None."""
    data = recipe.data
    if isinstance(data, HubData) and is_hub_id(str(data.path)):
        return f"{data.path} {data.subset or ''}".strip(), "on its page on the Hub", data.path
    source = PUBLIC_SETS.get(prepared or "")
    if source is not None:
        return f"{prepared}, from {source['page']}", source["license"], source.get("hub")
    return str(data.path), "its owners'", None


def score_lines(results: dict[str, Any], recipe: Recipe) -> list[str]:
    """Return each score with its signature as a line; the `|` of a signature would break a table."""
    task = make_task(recipe)
    lines = []
    if "test" in results:
        test = results["test"]
        lines += split_lines(f"test set, {test['sentences']:,} sentences", test, task.metrics)
        seen = results.get("seen_in_training", {}).get("test")
        if seen and (warning := describe_seen("test", test["sentences"], seen)):
            lines.append(warning)
        if recipe.published:
            lines.append(f"published on the same test set: {recipe.published}")
    lines += split_lines("validation set", results.get("validation", {}), (task.best_metric,))
    if not lines:
        lines.append("not measured")
    if "chosen_search" in results:
        search = describe_search({"search": results["chosen_search"]})
        lines.append(f"`generation_config.json` has a different search, the best one on the validation set: {search}")
    if recipe.note:
        lines.append(recipe.note)
    return lines


def example_lines(results: dict[str, Any]) -> list[str]:
    """Return a line with the first test sentence, if there is one."""
    examples = results.get("test", {}).get("examples", [])[:1]
    return [f"the first test sentence, `{each['source']}`, becomes `{each['translation']}`" for each in examples]


def split_lines(split: str, scores: dict[str, Any], metrics: tuple[Metric, ...]) -> list[str]:
    """Return a line for each metric that a split was scored by."""
    return [
        f"{split}, {describe_search(scores)}: {metric.title} {scores[metric.key]:.2f}, `{scores[metric.signature_key]}`"
        for metric in metrics
        if metric.key in scores
    ]


def describe_search(scores: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in scores["search"].items() if "token_id" not in name)


def main(arguments: list[str] | None = None) -> None:
    parser = CommandParser(
        prog="python -m training.card", description="Write the model card of a run.", allow_abbrev=False
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a finished run, or its results.json")
    parser.add_argument("repository", metavar="OWNER/NAME", help="the repository that the card is for")
    parser.add_argument("--output", type=Path, metavar="FILE", default=Path("card.md"), help="the card (card.md)")
    parser.add_argument("--license", help="the Hub's name for the weights' license (none)")
    options = parser.parse_args(arguments)
    with exit_on_user_error(OSError):
        check_new_file("output", options.output)
        results = read_results(options.run)
        make_card(results, options.repository, options.license).save(options.output)


if __name__ == "__main__":
    main()
