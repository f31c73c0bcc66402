"""Score a model: `python -m training.score MODEL RECIPE.yaml [--split=validation] [--output=FILE] [--any.field=value]`.

The command translates a split of the recipe's data with the recipe's search. It prints the score to read first, then
all scores with signatures, and writes them on request as JSON, and the translations as JSON Lines. With several values
of `--num_beams` and `--length_penalty` it prints a table of all searches, and `--save` makes the best the model's own.
"""

import argparse
import itertools
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import torch
from datasets import Dataset, DatasetDict
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from training.data import check_lengths, count_seen, describe_seen, fingerprint, load_pairs
from training.evaluation import Evaluator, PairResult, TokenizedPair, mean_sums, write_translations
from training.machine import commit, hardware, versions
from training.models import RECIPE, learned_pairs, run_of
from training.recipe import Recipe, load_recipe, to_dict
from training.tasks import Task, lm_scores, make_task
from training.train import RESULTS
from vaswani_transformer.support.command import (
    CommandParser,
    UserError,
    check_open,
    exit_on_user_error,
    number_argument,
    positive_argument,
)
from vaswani_transformer.support.files import check_new_file, write_atomically, write_errors
from vaswani_transformer.support.loading import (
    GENERATION_CONFIG,
    LoadOptions,
    add_load_options,
    has_likelihood,
    load_model_and_tokenizer,
)
from vaswani_transformer.tokenizer import source_encoder
from vaswani_transformer.translation.translator import Translator, batches_by_length

SEARCHED = ("num_beams", "length_penalty")  # settings of which several values can be given
LM_TARGETS = 1_000_000  # largest number of training targets for the language model


def parse_arguments(arguments: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    parser = CommandParser(prog="python -m training.score", description=__doc__, allow_abbrev=False)
    parser.add_argument("model", metavar="MODEL", help="the folder of a run or any saved model, or a name on the Hub")
    parser.add_argument("recipe", metavar="RECIPE", help="the YAML file that names the data and the search")
    parser.add_argument("--split", choices=("validation", "test"), default="test", help="the split to score (test)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="a new file for the scores as JSON")
    parser.add_argument(
        "--translations",
        type=Path,
        metavar="FILE",
        help="a new file of JSON Lines for sources, translations, references and log-probabilities",
    )
    parser.add_argument("--lm_score", action="store_true", help="also score by a trigram model of the training targets")
    parser.add_argument(
        "--batch_tokens",
        type=positive_argument,
        default=2048,
        metavar="N",
        help="source or target tokens in a batch (2048)",
    )
    searches = parser.add_argument_group("several searches", "in place of the recipe's values; a table compares them")
    searches.add_argument(
        "--num_beams", type=positive_argument, nargs="+", metavar="N", help="numbers of beams; 1 for greedy search"
    )
    searches.add_argument(
        "--length_penalty",
        type=number_argument,
        nargs="+",
        metavar="ALPHA",
        help="length penalties, tried with each number of beams",
    )
    searches.add_argument(
        "--save", action="store_true", help="save the best search on the validation set as the model's own"
    )
    add_load_options(parser)
    return parser.parse_known_args(arguments)


def searches_of(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the settings of each search; greedy search has no length penalty, so it occurs once."""
    searches: list[dict[str, Any]] = []
    for beams, alpha in itertools.product(options.num_beams or [None], options.length_penalty or [None]):
        values = {"num_beams": beams, "length_penalty": 1.0 if beams == 1 else alpha}
        search = {name: value for name, value in values.items() if value is not None}
        if search not in searches:
            searches.append(search)
    return searches


def tokenized_pairs(tokenizer: PreTrainedTokenizerBase, pairs: Dataset) -> list[TokenizedPair]:
    """Return the pairs of a split as tokens."""
    sources = pairs["source"][:]
    encoded = source_encoder(tokenizer)(sources, text_target=pairs["target"][:], verbose=False)
    return list(map(TokenizedPair, encoded["input_ids"], encoded["labels"], sources))


class TimedTranslator(Translator):
    """Translator that measures the time of its searches in `seconds`, without that of the scores."""

    seconds = 0.0

    def generate(self, **inputs: Any) -> Any:
        start = time.perf_counter()
        output = super().generate(**inputs)
        if self.model.device.type != "cpu":
            torch.accelerator.synchronize(self.model.device)
        self.seconds += time.perf_counter() - start
        return output


def make_evaluator(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, recipe: Recipe, log_probabilities: bool, **search: Any
) -> Evaluator:
    """Return an evaluator with the recipe's search; a model of a different family has its own generation config.

    The settings of `search` replace those of either.
    """
    if model.config.model_type == recipe.family.model_class.config_class.model_type:
        config: Any = model.config
        search["generation_config"] = recipe.generation_config(config, tokenizer)
    constraint = make_task(recipe).constraint(model, tokenizer)
    return Evaluator(
        *(model, tokenizer, constraint),
        scores=log_probabilities,
        make_translator=TimedTranslator,
        too_long="keep",
        **search,
    )


def likelihood_and_speed(evaluator: Evaluator, results: list[PairResult]) -> dict[str, Any]:
    """Return the likelihood of the references, the speed and the search.

    The likelihood's keys are `loss` and `perplexity`; for a model that predicts a length it is `nll_at_gold_length`,
    the mean negative log-likelihood per token at the reference's length, which is not comparable with a perplexity.
    References that a CTC or DAG model cannot produce are counted in `impossible_targets`, and not in the likelihood.
    """
    translator: Any = evaluator.translator
    scores = mean_sums(results, has_likelihood(translator.model))
    if not has_likelihood(translator.model):
        scores = {"nll_at_gold_length": scores["loss"]}
    output_tokens = sum(result.hypothesis.tokens for result in results)
    return {
        **scores,
        "target_tokens": sum(result.sums["tokens"] for result in results),
        "seconds": translator.seconds,
        "output_tokens": output_tokens,
        "sentences_per_second": len(results) / translator.seconds,
        "output_tokens_per_second": output_tokens / translator.seconds,
        "search": translator.settings.search(),
    }


def is_comparison(options: argparse.Namespace) -> bool:
    """Return whether the command compares searches."""
    return options.save or len(searches_of(options)) > 1


def check_options(options: argparse.Namespace) -> None:
    """Check that options fit each other and the scores can be written, before the minutes of the search."""
    for name in ("output", "translations"):
        check_new_file(name, getattr(options, name))
    if options.output is None:
        check_open("stdout", "set --output")
    elif options.output == options.translations:
        raise UserError(f"--translations: the file of --output; got {options.output} for both. Name two files.")
    if options.save and options.split != "validation":
        problem = "a search scores too high on the set where it was chosen"
        raise UserError(f"--save: {problem}; got --split={options.split}, expected validation. Add --split=validation.")
    if options.save and not (Path(options.model) / GENERATION_CONFIG).is_file():
        raise UserError(f"--save: {options.model}: has no {GENERATION_CONFIG} to change. Name the folder of a model.")
    for name in ("translations", "lm_score"):
        if getattr(options, name) and is_comparison(options):
            raise UserError(f"--{name}: is for a single search; leave it out, or give one search without --save.")


def load_splits(options: argparse.Namespace, recipe: Recipe) -> DatasetDict:
    """Return the split to score, and for `--lm_score` the training pairs."""
    splits = load_pairs(recipe, [options.split, *(["train"] if options.lm_score else [])])
    if options.split not in splits:
        raise UserError(
            f"data.{options.split}: not in the recipe {recipe.name}; set it, or choose a different --split."
        )
    return splits


def origin(model: PreTrainedModel, options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings, versions and hardware that rounding and speed depend on."""
    return {
        "batch_tokens": options.batch_tokens,
        "device": str(model.device),
        "dtype": str(model.dtype).removeprefix("torch.") if options.dtype == "auto" else options.dtype,
        "threads": torch.get_num_threads(),
        "commit": commit(),
        "versions": versions(),
        "hardware": hardware(model.device),
    }


class Loaded(NamedTuple):
    """What is scored: a model, and the split with its tokens and their lengths."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    splits: DatasetDict
    pairs: Dataset
    tokenized: list[TokenizedPair]
    lengths: list[int]


def load(options: argparse.Namespace, recipe: Recipe) -> Loaded:
    """Load and check what the options name."""
    check_options(options)
    named = LoadOptions.of(options)
    model, tokenizer = load_model_and_tokenizer(named)  # before the data, which may take minutes to load
    splits = load_splits(options, recipe)
    pairs = splits[options.split]
    reference = pairs["target"][:1]
    make_task(recipe).all_scores(reference, reference)  # fails before the search if a scorer's package is missing

    tokenized = tokenized_pairs(tokenizer, pairs)
    lengths = [max(len(pair.source), len(pair.target)) for pair in tokenized]
    check_lengths(options.split, lengths, recipe, model.config)
    return Loaded(model, tokenizer, splits, pairs, tokenized, lengths)


def describe(options: argparse.Namespace, recipe: Recipe, pairs: Dataset) -> dict[str, Any]:
    """Return all scores, in the format of the JSON output."""
    scores: dict[str, Any] = {
        "model": options.model,
        "digest": LoadOptions.of(options).digest(),
        "recipe": recipe.name,
    }
    if recipe.note:
        scores["note"] = recipe.note
    scores["data"] = {**to_dict(recipe)["data"], "fingerprint": fingerprint(pairs)}
    scores["split"] = options.split
    scores["sentences"] = len(pairs)
    if (run_of(options.model) / RECIPE).is_file():
        scores["seen_in_training"] = count_seen(pairs, learned_pairs([options.model]))
    return scores


class ScoredSplit(NamedTuple):
    """The scores of a split, and what was scored."""

    scores: dict[str, Any]
    results: list[PairResult]
    sources: list[str]
    references: list[str]


def score(options: argparse.Namespace, recipe: Recipe) -> ScoredSplit:
    """Return all scores of a model, in the format of the JSON output, and its translations."""
    loaded = load(options, recipe)
    (search,) = searches_of(options)
    log_probabilities = options.translations is not None
    evaluator = make_evaluator(loaded.model, loaded.tokenizer, recipe, log_probabilities, **search)
    results = evaluator.evaluate(loaded.tokenized, list(batches_by_length(loaded.lengths, options.batch_tokens)))
    translations = [result.hypothesis.text for result in results]
    references = loaded.pairs["target"][:]

    task = make_task(recipe)
    scores = describe(options, recipe, loaded.pairs)
    scores.update(task.all_scores(translations, references))
    scores.update(task.statistics(translations, references))
    if options.lm_score:
        scores["lm"] = lm_scores(loaded.splits["train"]["target"][:LM_TARGETS], translations, references)
    scores.update(likelihood_and_speed(evaluator, results))
    scores.update(origin(loaded.model, options))
    return ScoredSplit(scores, results, loaded.pairs["source"][:], references)


def compare_searches(options: argparse.Namespace, recipe: Recipe) -> tuple[dict[str, Any], GenerationConfig]:
    """Return the scores of several searches, in the format of the JSON output, and the settings of the best."""
    loaded = load(options, recipe)
    task = make_task(recipe)
    references = loaded.pairs["target"][:]
    rows: list[dict[str, Any]] = []
    configs = []
    for search in searches_of(options):
        evaluator = make_evaluator(loaded.model, loaded.tokenizer, recipe, log_probabilities=False, **search)
        texts: dict[int, str] = {}
        for batch in batches_by_length(loaded.lengths, options.batch_tokens):
            hypotheses = evaluator.translate([loaded.tokenized[index] for index in batch])
            texts.update(zip(batch, (hypothesis.text for hypothesis in hypotheses), strict=True))
        translator: Any = evaluator.translator
        scored = task.all_scores([texts[index] for index in range(len(references))], references)
        rows.append({"search": translator.settings.search(), **scored, "seconds": translator.seconds})
        configs.append(GenerationConfig(**settings_to_save(translator.settings.values)))

    name = main_score(task, rows[0])
    best = max(range(len(rows)), key=lambda index: rows[index][name]["score"])  # the first of equals
    scores = describe(options, recipe, loaded.pairs)
    return {**scores, "searches": rows, "best": best, **origin(loaded.model, options)}, configs[best]


def settings_to_save(values: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a search that a generation config has, without what Transformers keeps for itself."""
    return {name: value for name, value in values.items() if not name.startswith(("_", "transformers_version"))}


def save_search(folder: Path, config: GenerationConfig, search: dict[str, Any]) -> None:
    """Save a search as that of the model in a folder, and in the results of a run as `chosen_search`."""
    with write_errors(folder / GENERATION_CONFIG, "the scores are printed above"):
        write_atomically(folder / GENERATION_CONFIG, config.to_json_string())
        if (path := folder / RESULTS).is_file():
            results = json.loads(path.read_text(encoding="utf-8"))
            write_atomically(path, json.dumps({**results, "chosen_search": search}, indent=2, ensure_ascii=False))


def main_score(task: Task, scores: dict[str, Any]) -> str:
    """Return the name of the score to read first."""
    return next(name for name in (task.best_metric.key, "sacrebleu", "tokenized_bleu") if name in scores)


def report_searches(scores: dict[str, Any], task: Task) -> None:
    """Print a table of the searches, and the options of the best one on the validation set."""
    rows = scores["searches"]
    name = main_score(task, rows[0])
    titles = {name: task.best_metric.title}
    titles |= {metric.key: metric.title for metric in task.metrics if metric.key in rows[0]}
    has_brevity = "brevity_penalty" in rows[0][name]
    heads = [*titles.values(), *(["BP"] if has_brevity else []), "seconds"]
    print(f"{'num_beams':>9} {'length_penalty':>14}" + "".join(f" {head:>8}" for head in heads))
    for row in rows:
        numbers = [f"{row[each]['score']:.2f}" for each in titles]
        numbers += [f"{row[name]['brevity_penalty']:.3f}"] if has_brevity else []
        beams, alpha = (row["search"].get(setting, "") for setting in SEARCHED)
        cells = "".join(f" {number:>8}" for number in [*numbers, f"{row['seconds']:.1f}"])
        print(f"{beams:>9} {alpha:>14}{cells}")
    report_split(scores)
    if scores["split"] == "validation":  # a choice on the test set would make its score too high
        search = rows[scores["best"]]["search"]
        chosen = [setting for setting in (*SEARCHED, "length_penalty_type") if setting in search]
        settings = [f"--decoding.{setting}={search[setting]}" for setting in chosen]
        print(f"best: {' '.join(settings)}")


def report(scores: dict[str, Any], task: Task) -> None:
    """Print the score to read first, then every score with its signature or definition if any, and the search."""
    value = scores[main_score(task, scores)]["score"]
    print(f"{task.best_metric.title} {value:.2f} on {scores['sentences']} sentences of the {scores['split']} set")
    print("\nAll scores, which docs/results.md defines:")
    for name, value in scores.items():
        if isinstance(value, dict) and "score" in value:
            brevity = f"  BP {value['brevity_penalty']:.3f}" if "brevity_penalty" in value else ""
            print(f"{name:<24} {value['score']:>10.2f}  {value.get('signature') or value['definition']}{brevity}")
        elif isinstance(value, float):
            print(f"{name:<24} {value:>10.3f}")
    if "lm" in scores:
        print(f"{'lm of the references':<24} {scores['lm']['reference']:>10.2f}")
    print("search: " + ", ".join(f"{name} {value}" for name, value in scores["search"].items()))
    report_split(scores)


def report_split(scores: dict[str, Any]) -> None:
    """Print what was scored, and whether the model has seen it in training."""
    if "note" in scores:
        print(scores["note"])
    print(f"{scores['sentences']} sentences of the {scores['split']} set on {scores['device']}")
    seen = scores.get("seen_in_training", {"sources": 0})  # a model that is no run says nothing
    if warning := describe_seen(scores["split"], scores["sentences"], seen):
        print(f"{warning}.")


def main(arguments: list[str] | None = None) -> None:
    options, overrides = parse_arguments(arguments)
    logging.disable_progress_bar()
    datasets.disable_progress_bars()
    with exit_on_user_error(ValueError, OSError):
        recipe = load_recipe(options.recipe, overrides, vars(options))
        task = make_task(recipe)
        if is_comparison(options):
            scores, config = compare_searches(options, recipe)
            report_searches(scores, task)
            if options.save:
                save_search(Path(options.model), config, scores["searches"][scores["best"]]["search"])
                print(f"{Path(options.model) / GENERATION_CONFIG} has the best search.")
        else:
            scored = score(options, recipe)
            scores = scored.scores
            report(scores, task)
        if options.output is not None:
            with write_errors(f"--output={options.output}", "the scores are printed above"):
                write_atomically(options.output, json.dumps(scores, indent=2, ensure_ascii=False))
        if options.translations is not None:
            with write_errors(f"--translations={options.translations}", "the scores are printed above"):
                write_translations(options.translations, scored.results, scored.sources, scored.references)


if __name__ == "__main__":
    main()
