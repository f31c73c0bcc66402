"""Score a model: `python -m training.score MODEL RECIPE.yaml [--split=validation] [--output=FILE] [--any.field=value]`.

The command translates a split of the recipe's data with the recipe's search, prints a table of scores with signatures
and, on request, writes it as JSON, and the translations as JSON Lines.
"""

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import torch
from datasets import Dataset, DatasetDict
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from training.data import check_lengths, count_seen, describe_seen, fingerprint, load_pairs
from training.evaluation import Evaluator, PairResult, TokenizedPair, mean_sums, write_translations
from training.fields import Recipe, to_dict
from training.learned import RECIPE, learned_pairs, run_of
from training.machine import commit, hardware, versions
from training.metrics import lm_scores
from training.recipe import load_recipe
from training.tasks import make_task
from vaswani_transformer.batching.inference import batches_by_length
from vaswani_transformer.support.command_line import CommandParser, positive_argument
from vaswani_transformer.support.errors import UserError, check_open, exit_on_user_error
from vaswani_transformer.support.files import check_new_file, write_atomically, write_errors
from vaswani_transformer.support.loading import LoadOptions, add_load_options, load_model_and_tokenizer
from vaswani_transformer.support.modes import has_likelihood
from vaswani_transformer.tokenizer import source_encoder

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
        help="tokens at once, of the longer side (2048)",
    )
    add_load_options(parser)
    return parser.parse_known_args(arguments)


def tokenized_pairs(tokenizer: PreTrainedTokenizerBase, pairs: Dataset) -> list[TokenizedPair]:
    """Return the pairs of a split as tokens."""
    sources = pairs["source"][:]
    encoded = source_encoder(tokenizer)(sources, text_target=pairs["target"][:], verbose=False)
    return list(map(TokenizedPair, encoded["input_ids"], encoded["labels"], sources))


def make_evaluator(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, recipe: Recipe, log_probabilities: bool
) -> Evaluator:
    """Return an evaluator with the recipe's search; a model of a different family has its own generation config."""
    search: dict[str, Any] = {}
    if model.config.model_type == recipe.family.model_class.config_class.model_type:
        config: Any = model.config
        search["generation_config"] = recipe.generation_config(config, tokenizer)
    constraint = make_task(recipe).constraint(model, tokenizer)
    return Evaluator(model, tokenizer, constraint, scores=log_probabilities, too_long="keep", **search)


def evaluate(
    evaluator: Evaluator, pairs: list[TokenizedPair], lengths: list[int], batch_tokens: int
) -> list[PairResult]:
    """Return the results of all pairs, which are batched by their lengths."""
    results: dict[int, PairResult] = {}
    for rows in batches_by_length(lengths, batch_tokens):
        results.update(zip(rows, evaluator([pairs[row] for row in rows]), strict=True))
    return [results[row] for row in range(len(pairs))]


def likelihood_and_speed(evaluator: Evaluator, results: list[PairResult]) -> dict[str, Any]:
    """Return the likelihood of the references, the speed and the search.

    The likelihood's keys are `loss` and `perplexity`; for a model that predicts a length it is `nll_at_gold_length`,
    the mean negative log-likelihood per token at the reference's length, which is not comparable with a perplexity.
    References that a CTC model cannot produce are counted in `impossible_targets`, and not in the likelihood.
    """
    translator = evaluator.translator
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


def check_outputs(options: argparse.Namespace) -> None:
    """Check that the scores can be written somewhere, before the minutes of the search."""
    for name in ("output", "translations"):
        check_new_file(name, getattr(options, name))
    if options.output is None:
        check_open("stdout", "set --output")


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


class ScoredSplit(NamedTuple):
    """The scores of a split, and what was scored."""

    scores: dict[str, Any]
    results: list[PairResult]
    sources: list[str]
    references: list[str]


def score(options: argparse.Namespace, recipe: Recipe) -> ScoredSplit:
    """Return all scores of a model, in the format of the JSON output, and its translations."""
    check_outputs(options)
    named = LoadOptions.of(options)
    model, tokenizer = load_model_and_tokenizer(named)  # before the data, which may take minutes to load
    splits = load_splits(options, recipe)
    pairs = splits[options.split]
    references = pairs["target"][:]
    task = make_task(recipe)
    task.all_scores(references[:1], references[:1])  # fails before the search if a scorer's package is missing

    # The translations.
    tokenized = tokenized_pairs(tokenizer, pairs)
    lengths = [max(len(pair.source), len(pair.target)) for pair in tokenized]
    check_lengths(options.split, lengths, recipe, model.config)
    evaluator = make_evaluator(model, tokenizer, recipe, log_probabilities=options.translations is not None)
    results = evaluate(evaluator, tokenized, lengths, options.batch_tokens)
    translations = [result.hypothesis.text for result in results]

    # What was scored.
    scores: dict[str, Any] = {"model": options.model, "digest": named.digest(), "recipe": recipe.name}
    if recipe.note:
        scores["note"] = recipe.note
    scores["data"] = {**to_dict(recipe)["data"], "fingerprint": fingerprint(pairs)}
    scores["split"] = options.split
    scores["sentences"] = len(pairs)
    if (run_of(options.model) / RECIPE).is_file():
        scores["seen_in_training"] = count_seen(pairs, learned_pairs([options.model]))

    # The scores.
    scores.update(task.all_scores(translations, references))
    scores.update(task.statistics(translations, references))
    if options.lm_score:
        scores["lm"] = lm_scores(splits["train"]["target"][:LM_TARGETS], translations, references)
    scores.update(likelihood_and_speed(evaluator, results))
    scores.update(origin(model, options))
    return ScoredSplit(scores, results, pairs["source"][:], references)


def report(scores: dict[str, Any]) -> None:
    """Print every score, with its signature or definition if it has one, and the search."""
    for name, value in scores.items():
        if isinstance(value, dict) and "score" in value:
            brevity = f"  BP {value['brevity_penalty']:.3f}" if "brevity_penalty" in value else ""
            print(f"{name:<24} {value['score']:>10.2f}  {value.get('signature') or value['definition']}{brevity}")
        elif isinstance(value, float):
            print(f"{name:<24} {value:>10.3f}")
    if "lm" in scores:
        print(f"{'lm of the references':<24} {scores['lm']['reference']:>10.2f}")
    print("search: " + ", ".join(f"{name} {value}" for name, value in scores["search"].items()))
    if "note" in scores:
        print(scores["note"])
    print(f"{scores['sentences']} sentences of {scores['split']} on {scores['device']}")
    seen = scores.get("seen_in_training", {"sources": 0})  # a model that is no run says nothing
    if warning := describe_seen(scores["split"], scores["sentences"], seen):
        print(f"{warning}.")


def main(arguments: list[str] | None = None) -> None:
    options, overrides = parse_arguments(arguments)
    logging.disable_progress_bar()
    datasets.disable_progress_bars()
    with exit_on_user_error(ValueError, OSError):
        scored = score(options, load_recipe(options.recipe, overrides, vars(options)))
        report(scored.scores)
        if options.output is not None:
            with write_errors(f"--output={options.output}", "the scores are printed above"):
                write_atomically(options.output, json.dumps(scored.scores, indent=2, ensure_ascii=False))
        if options.translations is not None:
            with write_errors(f"--translations={options.translations}", "the scores are printed above"):
                write_translations(options.translations, scored.results, scored.sources, scored.references)


if __name__ == "__main__":
    main()
