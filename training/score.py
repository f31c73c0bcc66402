"""Score a model: `python -m training.score MODEL RECIPE.yaml [--split=validation] [--output=FILE] [--any.field=value]`.

The command translates a split of the recipe's data with the recipe's search, prints a table of scores with signatures
and, on request, writes it as JSON.
"""

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import datasets
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from training.data import fingerprint, load_pairs
from training.machine import commit, hardware, versions
from training.metrics import lm_scores
from training.recipe import Recipe, load_recipe, to_dict
from training.tasks import make_task
from vaswani_transformer.support.command_line import positive_argument
from vaswani_transformer.support.errors import UserError, check_open, exit_on_user_error
from vaswani_transformer.support.files import write_atomically, write_errors
from vaswani_transformer.support.modes import eval_mode, is_non_autoregressive
from vaswani_transformer.tokenizer import source_encoder
from vaswani_transformer.translation.loading import LoadOptions, add_load_options, load_model_and_tokenizer
from vaswani_transformer.translation.translator import Translator, batches_by_length, log_probabilities, pad_rows

LM_TARGETS = 1_000_000  # largest number of training targets for the language model


def parse_arguments(arguments: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog="python -m training.score", description=__doc__, allow_abbrev=False)
    parser.add_argument("model", metavar="MODEL", help="the folder of a run or any saved model, or a name on the Hub")
    parser.add_argument("recipe", metavar="RECIPE", help="the YAML file that names the data and the search")
    parser.add_argument("--split", choices=("validation", "test"), default="test", help="the split to score (test)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="a new file for the scores as JSON")
    parser.add_argument("--lm_score", action="store_true", help="also score by a trigram model of the training targets")
    parser.add_argument(
        "--batch_tokens", type=positive_argument, default=2048, metavar="N", help="source tokens at once (2048)"
    )
    add_load_options(parser)
    return parser.parse_known_args(arguments)


def likelihood(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sources: list[str], targets: list[str], tokens: int
) -> dict[str, Any]:
    """Return the likelihood of the targets, including `</s>`, computed in batches of `tokens` tokens.

    The keys are `loss` and `perplexity`. For a non-autoregressive model the key is `nll_at_gold_length`, the mean
    negative log-likelihood per token at the reference's length, which is not comparable with a perplexity.
    """
    encoded = source_encoder(tokenizer)(sources, text_target=targets, verbose=False)
    pairs = list(zip(encoded["input_ids"], encoded["labels"], strict=True))
    total, pad = 0.0, tokenizer.pad_token_id
    with eval_mode(model):
        for batch in batches_by_length([max(map(len, pair)) for pair in pairs], tokens):
            rows, labels = zip(*(pairs[index] for index in batch), strict=True)
            source = pad_rows(list(rows), pad, model.device)  # (B, S)
            mask = pad_rows([[1] * len(row) for row in rows], 0, model.device)  # (B, S)
            target = pad_rows(list(labels), -100, model.device)  # (B, T)
            total -= log_probabilities(model, source, mask, target).double().sum().item()
    count = sum(len(labels) for _, labels in pairs)
    if is_non_autoregressive(model):
        return {"nll_at_gold_length": total / count, "target_tokens": count}
    return {"loss": total / count, "perplexity": math.exp(min(total / count, 700)), "target_tokens": count}


def translate_all(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sources: list[str], recipe: Recipe, tokens: int
) -> tuple[list[str], dict[str, Any]]:
    """Return the hypotheses, and speed and search; a model of another family uses its own generation config."""
    is_own = model.config.model_type == recipe.family.model_class.config_class.model_type
    config: Any = model.config
    settings: Any = {"generation_config": recipe.generation_config(config, tokenizer)} if is_own else {}
    constraint = make_task(recipe).constraint(model, tokenizer)
    settings |= {"batch_tokens": tokens, "too_long": "keep", "constraint": constraint}
    translate = Translator(model, tokenizer, **settings)
    start = time.perf_counter()
    hypotheses = [translation.hypotheses[0] for translation in translate(sources)]
    seconds, output_tokens = time.perf_counter() - start, sum(hypothesis.tokens for hypothesis in hypotheses)
    return [hypothesis.text for hypothesis in hypotheses], {
        "seconds": seconds,
        "output_tokens": output_tokens,
        "sentences_per_second": len(hypotheses) / seconds,
        "output_tokens_per_second": output_tokens / seconds,
        "search": translate.settings.search(),
    }


def score(options: argparse.Namespace, recipe: Recipe) -> dict[str, Any]:
    """Return all scores of a model in the format of the JSON output."""
    if options.output is not None and (options.output.exists() or not options.output.parent.is_dir()):
        raise UserError(f"--output={options.output}: give a new file in an existing folder.")
    if options.output is None:
        check_open("stdout", "give --output")
    named = LoadOptions.of(options)
    model, tokenizer = load_model_and_tokenizer(named)  # before the data, which may take minutes to load
    splits = load_pairs(recipe, [options.split, *(["train"] if options.lm_score else [])])
    if options.split not in splits:
        raise UserError(f"data.{options.split}: {recipe.name} has none; name one, or give another --split.")
    sources, references = (splits[options.split][side][:] for side in ("source", "target"))
    likelihoods = likelihood(model, tokenizer, sources, references, options.batch_tokens)
    translations, speed = translate_all(model, tokenizer, sources, recipe, options.batch_tokens)
    task, texts = make_task(recipe), (translations, references)
    return {
        "model": options.model,
        "digest": named.digest(),
        "recipe": recipe.name,
        **({"note": recipe.note} if recipe.note else {}),
        "data": to_dict(recipe)["data"] | {"fingerprint": fingerprint(splits[options.split])},
        "split": options.split,
        "sentences": len(sources),
        **task.all_scores(*texts),
        **task.statistics(*texts),
        **({"lm": lm_scores(splits["train"]["target"][:LM_TARGETS], *texts)} if options.lm_score else {}),
        **likelihoods,
        **speed,
        "batch_tokens": options.batch_tokens,
        "device": str(model.device),
        "dtype": str(model.dtype).removeprefix("torch.") if options.dtype == "auto" else options.dtype,
        "threads": torch.get_num_threads(),
        "commit": commit(),
        "versions": versions(),
        "hardware": hardware(model.device),
    }


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


def main(arguments: list[str] | None = None) -> None:
    options, overrides = parse_arguments(arguments)
    logging.disable_progress_bar()
    datasets.disable_progress_bars()
    with exit_on_user_error(ValueError, OSError):
        scores = score(options, load_recipe(options.recipe, overrides))
        report(scores)
        if options.output is not None:
            with write_errors(f"--output={options.output}", "the scores are printed above"):
                write_atomically(options.output, json.dumps(scores, indent=2, ensure_ascii=False))


if __name__ == "__main__":
    main()
