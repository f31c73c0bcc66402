"""The model card of a run: `python -m training.report.card RESULTS.json OWNER/NAME [--output=FILE]`.

It is made from the run's results: `card_template.md` holds the words, `results.json` the facts.
"""

import html
import json
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from training.data.sources import SOURCES
from training.data.tokenizing import describe_unknown
from training.monitor.stopwatch import phase_shares
from training.recipe.fields import DataRecipe, Recipe, TrainingRecipe
from training.report.licenses import check_license
from training.report.results import read_results, recipe_of, results_errors
from training.tasks import Metric, make_task, selection_metric
from vaswani_transformer.config import TOKEN_IDS
from vaswani_transformer.support.command_line import ArgumentParser
from vaswani_transformer.support.errors import UserError, exit_on_user_error, printable
from vaswani_transformer.support.files import write_errors

TEMPLATE = Path(__file__).parent / "card_template.md"
CURVE_ROWS = 12
OTHER_MODELS = {  # what a recipe takes from other models, and its placeholder in a command
    "data.distilled": "DISTILLED",
    "data.teacher": "TEACHER",
    "training.encoder_from": "TEACHER",
    "training.start_from": "MODEL",
    "training.energy_from": "TEACHER",
}
AT_ONCE = "which predicts all words of an output at once"
INTRODUCTIONS = {  # what a card says first, by kind of model; "glat" is kind nat with glancing
    "autoregressive": 'The original Transformer of ["Attention Is All You Need"](https://arxiv.org/abs/1706.03762)',
    "nat": f"A non-autoregressive Transformer (NAT, [Gu et al. 2018](https://arxiv.org/abs/1711.02281)), {AT_ONCE}",
    "glat": f"A Glancing Transformer (GLAT, [Qian et al. 2021](https://arxiv.org/abs/2008.07905)), {AT_ONCE}",
    "cmlm": "A conditional masked language model (CMLM, "
    f"[Ghazvininejad et al. 2019](https://arxiv.org/abs/1904.09324)), {AT_ONCE} and replaces the least likely ones in "
    "each further pass",
    "flowseq": f"A FlowSeq ([Ma et al. 2019](https://arxiv.org/abs/1909.02480)), {AT_ONCE} from latents that an "
    "invertible flow draws",
    "iterative_vae": f"An IterativeVAE, {AT_ONCE} from a latent that its layers refine",
}
NAMES = {"nat": "NAT", "glat": "GLAT", "cmlm": "CMLM", "iterative_vae": "IterativeVAE", "flowseq": "FlowSeq"}
FALLBACK_EXAMPLE = "Two dogs play in the snow."  # for results without a test sentence


def as_markdown(tree: Any) -> Any:
    """Return nested values whose texts are one line each and hold no HTML; a recipe may hold any text."""
    if isinstance(tree, dict):
        return {as_markdown(name): as_markdown(value) for name, value in tree.items()}
    if isinstance(tree, list):
        return [as_markdown(value) for value in tree]
    return html.escape(printable(" ".join(tree.split())), quote=False) if isinstance(tree, str) else tree


def make_card(results: dict[str, Any], repository: str, license: str = "apache-2.0") -> ModelCard:
    """Return the card of a run; its metadata have a `model-index` of each score with its signature.

    For an unfinished run the `results` may lack `validation`, `test`, `data` and `time`.
    """
    head, printed = metadata(results, license), results.get("test", {}).get("examples", [])
    example = python_literal(printed[0]["source"] if printed else FALLBACK_EXAMPLE)
    sample = describe_sample(**printed[0]) if printed else ""
    results = as_markdown(results)
    recipe = recipe_of(results)
    data, data_license, _ = describe_data(results, recipe.data)
    is_distilled = recipe.data.distilled is not None
    return ModelCard.from_template(
        head,
        template_path=str(TEMPLATE),
        name=results["name"],
        introduction=INTRODUCTIONS[variant(recipe)],
        **make_task(recipe).card_words,
        data=data + ("; training targets replaced by a teacher's outputs" if is_distilled else ""),
        license=license,
        data_license=data_license,
        parameters=f"{results['parameters']:,}",
        model=describe_model(recipe),
        training=describe_training(results, recipe.training),
        weights=describe_weights(results, recipe),
        hardware=describe_hardware(results),
        time=describe_time(results),
        software=", ".join(f"{name} {version}" for name, version in results["versions"].items()),
        scores=("\n".join(f"- {line}" for line in score_lines(results, recipe)) or "Not yet measured.") + sample,
        repository=python_literal(repository),
        example=example,
        search=describe_search(results.get("test", {}).get("search", recipe.search)),
        longest=recipe.data.max_length,
        losses=describe_losses(recipe),
        curve=curve_table(results["curve"], make_task(recipe).best_metric),
        fingerprints=fingerprint_table(results.get("data", {})) + unknown_line(results),
        code=describe_code(results),
        command=training_command(recipe, repository),
    )


def variant(recipe: Recipe) -> str:
    """Return the kind of a recipe's model, or "glat" for a NAT that glancing trains."""
    return "glat" if recipe.kind == "nat" and recipe.training.glancing is not None else recipe.kind


def tags(recipe: Recipe) -> list[str]:
    """Return the tags by which the Hub finds the model."""
    family_tags = ["non-autoregressive", variant(recipe).replace("_", "-")]
    if recipe.family.is_autoregressive:
        family_tags = ["attention-is-all-you-need"]
    return ["transformer", *family_tags, recipe.family.config_class.model_type, make_task(recipe).hub_name]


def metadata(results: dict[str, Any], license: str) -> ModelCardData:
    """Return the head of the card, which the Hub reads."""
    recipe = recipe_of(results)
    task, (*_, hub_name) = make_task(recipe), describe_data(results, recipe.data)
    return ModelCardData(
        language=list(dict.fromkeys(task.languages)) or None,
        license=license,
        library_name="transformers",
        pipeline_tag=task.hub_name,
        tags=tags(recipe),
        datasets=[hub_name] if hub_name else None,
        metrics=[metric.key for metric in (task.metrics if "test" in results else (task.best_metric,))],
        model_name=results["name"],
        eval_results=list(eval_results(results, recipe)),
    )


def eval_results(results: dict[str, Any], recipe: Recipe) -> Iterator[EvalResult]:
    """Yield every score of `results` with its signature, those of the test set first."""
    data, task = recipe.data, make_task(recipe)
    for split in ("test", "validation"):
        scores = results.get(split, {})
        for metric in task.metrics:
            if metric.key in scores:
                yield EvalResult(
                    task_type=task.hub_name,
                    task_name=task.title,
                    dataset_type=data.path or data.kind,
                    dataset_name=data_name(data),
                    dataset_config=data.subset,
                    dataset_split=getattr(data, split) if data.kind == "hub" else split,
                    metric_type=metric.key,
                    metric_name=metric.title,
                    metric_value=round(scores[metric.key], 2),
                    metric_args={"signature": scores[metric.signature_key]},
                )


def data_name(data: DataRecipe) -> str:
    if data.kind == "grammar":
        return "vaswani-transformer's own English-Spanish task, sentences of a small grammar"
    return " ".join(name for name in (data.path, data.subset) if name)


def describe_data(results: dict[str, Any], data: DataRecipe) -> tuple[str, str, str | None]:
    """Return the name of a run's data with its source, its license, and its name on the Hub."""
    name = data_name(data)
    if (source := SOURCES.get(results.get("source", ""))) is not None:
        return f"{name}, from {source.page}", source.license, source.hub
    if data.kind == "hub":
        return name, "on its page on the Hub", data.path
    return name, "Apache-2.0" if data.kind == "grammar" else "its owners'", None


def describe_sample(source: str, translation: str, **_: str) -> str:
    """Return the first test sentence and the model's output."""
    texts = f"{python_literal(source)}\n{python_literal(translation)}"
    return f"\n\nThe first test sentence, and what the model makes of it:\n\n```text\n{texts}\n```"


def describe_model(recipe: Recipe) -> str:
    """Return the recipe's model: the paper's, the fields that differ from it, and whose weights it began with."""
    fields = recipe.model
    changes = ", ".join(f"{name} {value}" for name, value in fields.items() if name not in ("paper", "kind"))
    shape = f"the paper's {fields.get('paper', 'base')}" + (f" with {changes}" if changes else "")
    if not recipe.family.is_autoregressive:
        shape = f"{NAMES[variant(recipe)]} in the shape of {shape}"
    origins = {
        "encoder_from": "; encoder and embeddings began as a teacher's",
        "start_from": "; all weights began as another trained model's",
    }
    return shape + "".join(text for name, text in origins.items() if getattr(recipe.training, name))


def describe_training(results: dict[str, Any], training: TrainingRecipe) -> str:
    scale = "" if training.learning_rate_scale == 1 else f", times {training.learning_rate_scale}"
    schedule = f"the paper's Adam and learning rate with {training.warmup_steps:,} steps of warm-up{scale}"
    if training.optimizer == "radam":
        rate = f"learning rate {training.learning_rate}"
        is_constant = training.learning_rate_decay == 1
        schedule = f"RAdam, constant {rate}" if is_constant else f"RAdam, {rate} decaying exponentially"
    if training.energy_from:
        schedule += "; the loss is the energy under a teacher, ENGINE (Tu et al. 2020)"
    return (
        f"{results['steps']:,} steps of about {training.source_tokens:,} source and {training.target_tokens:,} "
        f"target tokens, {results['flops']:.2g} floating-point operations; {schedule}; {training.precision}"
    )


def describe_losses(recipe: Recipe) -> str:
    plain = (
        "`loss` is the label-smoothed training loss and `validation loss` the plain one, both in nats per target token."
    )
    if recipe.family.is_autoregressive:
        return plain
    return (
        "`loss` is the training loss with that of the length. `validation loss` is the negative log-likelihood of a "
        "target token in nats at the reference's length, each predicted without the others; it is no perplexity."
    )


def describe_weights(results: dict[str, Any], recipe: Recipe) -> str:
    if steps := results.get("averaged_steps"):
        return f"the mean of the last {len(steps)} checkpoints, of steps {steps[0]:,} to {steps[-1]:,}"
    if (last := recipe.training.average_last) is not None:
        return f"the mean of the last checkpoints, at most {last}"  # not averaged yet
    return f"the checkpoint with the best validation {selection_metric(recipe).title}"


def describe_hardware(results: dict[str, Any]) -> str:
    machine, processes = results["hardware"], results["processes"]
    parts = [f"{count} {name}" for name, count in machine["accelerators"].items()]
    cores = "1 core" if machine["cores"] == 1 else f"{machine['cores']} cores"
    parts.append(f"{cores} of {machine['cpu']}, {machine['memory']} GiB")
    return ", ".join(parts) + f"; {processes} process{'' if processes == 1 else 'es'}"


def describe_time(results: dict[str, Any]) -> str:
    if "time" not in results:
        return "not yet at its end"
    minutes, seconds = divmod(round(results["seconds"]), 60)
    hours, minutes = divmod(minutes, 60)
    shares = phase_shares(results["time"])
    phases = ", ".join(f"{phase} {percent}%" for phase, percent in shares if percent)
    return f"{hours} h {minutes} min {seconds} s in all: {phases}"


def score_lines(results: dict[str, Any], recipe: Recipe) -> Iterator[str]:
    """Yield each score with its signature; a signature contains `|` and does not fit into a table."""
    task = make_task(recipe)
    first, *other_metrics = task.metrics
    if (scores := results.get("test")) is not None:
        how = describe_search(scores.get("search", recipe.search))
        yield f"test set, {scores['sentences']:,} sentences, {how}: {scored(scores, first)}"
        for metric in other_metrics:
            yield f"the same outputs: {scored(scores, metric)}"
        if recipe.published:
            yield f"published on the same test set: {recipe.published}"
    if (scores := results.get("validation")) is not None:
        how = describe_search(scores.get("search", recipe.evaluation_search))
        yield f"validation set, {how}: {scored(scores, task.best_metric)}"
    if recipe.note:
        yield recipe.note


def scored(scores: dict[str, Any], metric: Metric) -> str:
    return f"{metric.title} {scores[metric.key]:.2f}, `{scores[metric.signature_key]}`"


def describe_search(search: dict[str, Any]) -> str:
    """Describe a complete search, as records have it; settings without a sentence of their own have their names."""
    rest = {name: value for name, value in search.items() if name not in TOKEN_IDS}
    if "length_beam_size" in rest:
        passes, lengths = rest.pop("num_iterations", 1), rest.pop("length_beam_size")
        tried = "the predicted length" if lengths == 1 else f"each of the {lengths} likeliest lengths"
        samples, temperature = rest.pop("num_latent_samples", 1), rest.pop("latent_temperature", 0)
        if samples > 1:
            tried += f" with {samples} latents of temperature {temperature}"
        parts = [f"{passes} pass{'' if passes == 1 else 'es'} over {tried}"]
    else:
        beams, alpha = rest.pop("num_beams", 1), rest.pop("length_penalty", 1.0)
        formulas = {"gnmt": "lp(Y) with alpha", "power": "length to the power of"}
        formula = formulas[rest.pop("length_penalty_type", "power")]
        parts = ["greedy" if beams == 1 else f"{beams} beams, length penalty {formula} {alpha}"]
    if (relative := rest.pop("max_source_relative_length", None)) is not None:
        parts.append(f"at most source length + {relative} tokens")
    return ", ".join(parts + [f"{name} {value}" for name, value in rest.items()])


def python_literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def format_figure(value: float | None, spec: str) -> str:
    return "" if value is None else format(value, spec)


def curve_table(curve: list[dict[str, Any]], metric: Metric) -> str:
    """Return a table with a row for some evaluations, among them the first, the last and the best."""
    losses = {entry["step"]: entry["loss"] for entry in curve if "loss" in entry}
    evaluated = [entry for entry in curve if "eval_loss" in entry]
    columns = {"validation loss": ("eval_loss", ".3f"), "perplexity": ("eval_perplexity", ",.2f")}
    columns[metric.title] = (score := f"eval_{metric.key}", ".2f")
    if not any("eval_perplexity" in entry for entry in evaluated):
        del columns["perplexity"]
    rows = [f"| step | loss | {' | '.join(columns)} |", "| ---: " * (2 + len(columns)) + "|"]
    for entry in sample_entries(evaluated, score):
        before = [step for step in losses if step <= entry["step"]]
        loss = losses[max(before)] if before else None
        cells = [format_figure(entry.get(key), spec) for key, spec in columns.values()]
        rows.append(f"| {entry['step']:,} | {format_figure(loss, '.3f')} | {' | '.join(cells)} |")
    return "\n".join(rows)


def sample_entries(entries: list[dict[str, Any]], score: str) -> list[dict[str, Any]]:
    """Return at most `CURVE_ROWS` of the entries, evenly spaced, and the best one."""
    if len(entries) <= CURVE_ROWS:
        return entries
    kept = {round(row * (len(entries) - 1) / (CURVE_ROWS - 1)) for row in range(CURVE_ROWS)}
    best = max(range(len(entries)), key=lambda index: entries[index][score])
    return [entries[index] for index in sorted(kept | {best})]


def fingerprint_table(data: dict[str, Any]) -> str:
    """Return a table of each split's pairs and digest, by which other people can compare their files."""
    if not data:
        return ""
    rows = []
    for split, print_of_split in data.items():
        name = f"{split}, the first of a stream" if print_of_split.get("first_of_stream") else split
        rows.append(f"| {name} | {print_of_split['pairs']:,} | `{print_of_split['sha256']}` |")
    head = ["| split | pairs | SHA-256 of its texts, each followed by a zero byte |", "| --- | ---: | --- |"]
    return "\n".join(head + rows)


def unknown_line(results: dict[str, Any]) -> str:
    return f"\n\nUnknown tokens: {describe_unknown(results['tokens'])}." if "tokens" in results else ""


def describe_code(results: dict[str, Any]) -> str:
    version = f"vaswani-transformer {results['versions']['vaswani_transformer']}"
    if (commit := results["commit"]) is None:
        return f"{version}, commit unknown"
    return f"{version}, commit {commit['hash']}{', with uncommitted changes' if commit['dirty'] else ''}"


def training_command(recipe: Recipe, repository: str) -> str:
    """Return the command that trains the recipe again; local paths have placeholders."""
    parts = ["python -m training.train recipe.yaml", "--output_dir=runs/again"]
    if recipe.data.kind in ("json", "text", "trees"):
        parts.append("--data.path=FOLDER")
    if recipe.tokenizer.path is not None:
        parts.append(f"--tokenizer.path={repository}")
    parts += [f"--{name}={model}" for name, model in OTHER_MODELS.items() if attrgetter(name)(recipe) is not None]
    return " ".join(parts)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line: write the card of a `results.json`; a user's error ends it with one line and status 2."""
    parser = ArgumentParser(prog="python -m training.report.card", description="Write the model card of a run.")
    parser.add_argument("results", type=Path, help="the results.json of a run")
    parser.add_argument("repository", help="the repository that the card's example loads, OWNER/NAME")
    parser.add_argument("--output", type=Path, default=Path("model_card.md"), help="a new file (model_card.md)")
    parser.add_argument("--license", default="apache-2.0", help="the Hub's name for the weights' license (apache-2.0)")
    options = parser.parse_args(arguments)
    output = options.output
    with exit_on_user_error(OSError):
        check_license(options.license)
        if output.exists():
            raise UserError(f"--output={output}: exists already; give a new file.")
        results = read_results(options.results)
        with results_errors(options.results):
            card = make_card(results, options.repository, options.license)
        with write_errors(f"--output={output}", "give another"):
            card.save(output)


if __name__ == "__main__":
    main()
