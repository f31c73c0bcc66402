"""Score a model: `python -m training.score MODEL RECIPE.yaml [--split=validation] [--output=FILE] [--any.field=value]`.

It translates a split of the recipe's data by the recipe's search, prints a table and, on request, writes it as JSON.
Scores that are computed differently have different names, and each has its signature.
"""

import argparse
import dataclasses
import json
import math
import time
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from training.data.files import SPLITS
from training.data.pairs import is_streamed, load_pairs
from training.data.stream import PairStream
from training.data.tokenizing import set_up_tokenizer
from training.recipe.families import family_of
from training.recipe.fields import Recipe, load_recipe
from training.recipe.help import parse_with_recipe, recipe_parser
from training.report.card import describe_search
from training.report.results import commit, fingerprint, hardware, versions
from training.run.command import check_new_file, flush_stdout
from training.tasks import make_task
from training.tasks.language_model import lm_scores
from training.tasks.parsing import PARSING_STATISTICS
from training.tasks.text_statistics import STATISTICS, share
from vaswani_transformer.support.errors import UserError, exit_on_user_error
from vaswani_transformer.support.files import write_atomically, write_errors
from vaswani_transformer.support.modes import eval_mode, is_non_autoregressive
from vaswani_transformer.tokenizer import text_encoder
from vaswani_transformer.translation.engine import TransformersEngine, log_probabilities, pad_rows
from vaswani_transformer.translation.loading import LoadOptions, load_model_and_tokenizer
from vaswani_transformer.translation.options import add_batch_tokens, add_load_options
from vaswani_transformer.translation.translator import Translator, batches_by_length

LM_TARGETS = 1_000_000  # training targets that the language model counts, of a larger set the first ones


def parse_arguments(arguments: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    description, example = "Score a model on a split of a recipe's data.", "for example --data.path=FOLDER"
    parser = recipe_parser("score", description, example)
    parser.add_argument("model", metavar="MODEL", help="the folder of a run or any saved model, or a name on the Hub")
    parser.add_argument("recipe", metavar="RECIPE", help="the YAML file that names the data and the search")
    parser.add_argument("--split", choices=("validation", "test"), default="test", help="the split to score (test)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="a new file for the scores as JSON")
    parser.add_argument(
        "--lm_score", action="store_true", help="also score by a trigram model of the recipe's training targets"
    )
    add_batch_tokens(parser)
    add_load_options(parser)
    return parse_with_recipe(parser, arguments)


def load_split(recipe: Recipe, split: str) -> Dataset:
    """Return the pairs of one split, in the columns `source` and `target`; files of the others are not read."""
    without_others: dict[str, Any] = dict.fromkeys(set(SPLITS) - {split})
    return load_pairs(dataclasses.replace(recipe.data, **without_others))[split]


def load_training_targets(recipe: Recipe) -> list[str]:
    """Return the first `LM_TARGETS` training targets of a recipe."""
    if is_streamed(recipe.data, "train"):
        return [target for _, target in islice(PairStream(recipe.data, recipe.seed), LM_TARGETS)]
    return load_split(recipe, "train")["target"][:LM_TARGETS]


def likelihood(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sources: list[str], targets: list[str], tokens: int
) -> dict[str, Any]:
    """Return a model's likelihood of the targets' subword tokens, `</s>` included, in batches of `tokens` tokens.

    The keys are `loss` and `perplexity`. For a model that predicts all tokens at once the key is `nll_at_gold_length`:
    the mean over positions at the reference's length, each predicted without the others, which is not a perplexity.
    """
    encoded = text_encoder(tokenizer)(sources, text_target=targets, verbose=False)
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


class HistoryEngine(TransformersEngine):
    """`generate()` of a model that predicts all tokens at once, which counts the tokens that each iteration changes.

    An iteration is a pass of a CMLM or a layer of an IterativeVAE.

    Attributes:
        changed: tokens that iteration 2, 3, ... changed, over all texts so far.
        tokens: tokens of those texts.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs, return_dict_in_generate=True, return_history=True)
        self.changed: list[int] = []
        self.tokens = 0

    def generate(self, tokens: torch.Tensor, mask: torch.Tensor, **more: Any) -> Any:
        """Return the output for sources (B, S), and count."""
        output = super().generate(tokens, mask, **more)
        history = output.history[:, :, 1:]  # (R, B, T)
        is_real = torch.arange(history.shape[2], device=history.device) < output.lengths[:, None]  # (B, T)
        changed = ((history[1:] != history[:-1]) & is_real).sum((1, 2)).tolist()
        self.changed = [a + b for a, b in zip(self.changed or [0] * len(changed), changed, strict=True)]
        self.tokens += int(is_real.sum())
        return output

    def shares(self) -> dict[str, list[float]]:
        """Return the share of tokens that each iteration after the first changed; nothing after a single pass."""
        return {"changed_by_iteration": [share(count, self.tokens) for count in self.changed]} if self.changed else {}


def translate_all(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sources: list[str], recipe: Recipe, tokens: int
) -> tuple[list[str], dict[str, Any]]:
    """Return the hypotheses, their speed and search; a model of another kind uses its own generation settings."""
    settings: dict[str, Any] = {}
    if family_of(model.config) is recipe.family:
        settings["generation_config"] = recipe.generation_config(cast(Any, model.config), tokenizer)
    make_engine = HistoryEngine if is_non_autoregressive(model) else TransformersEngine
    engine = make_engine(model, tokenizer.pad_token_id, **settings)
    constraint = make_task(recipe).constraint(model, tokenizer)
    limit = engine.max_source_tokens()
    translate = Translator(engine, tokenizer, limit, tokens, too_long="keep", constraint=constraint)
    start = time.perf_counter()
    hypotheses = [translation.hypotheses[0] for translation in translate(sources)]
    seconds, output_tokens = time.perf_counter() - start, sum(hypothesis.tokens for hypothesis in hypotheses)
    return [hypothesis.text for hypothesis in hypotheses], {
        **(engine.shares() if isinstance(engine, HistoryEngine) else {}),
        "seconds": seconds,
        "output_tokens": output_tokens,
        "sentences_per_second": len(hypotheses) / seconds,
        "output_tokens_per_second": output_tokens / seconds,
        "search": engine.search,
    }


def score(options: argparse.Namespace, recipe: Recipe) -> dict[str, Any]:
    """Return all scores of a model, as the JSON output has them."""
    if options.output is not None:
        check_new_file(options.output)
    if options.lm_score and recipe.data.kind == "trees":
        raise UserError("--lm_score: a linear tree has brackets and labels instead of words; leave the option out.")
    if getattr(recipe.data, split := options.split) is None:
        raise UserError(f"data.{split}: {recipe.name} has no {split} set; name one, or give another --split.")
    named = LoadOptions.of(options)
    model, tokenizer = load_model_and_tokenizer(named)  # before the data, which may take minutes to read
    digest = named.digest()
    set_up_tokenizer(tokenizer, options.model, "pad", "eos")
    pairs = load_split(recipe, split)
    sources, references = pairs["source"][:], pairs["target"][:]
    training_targets = load_training_targets(recipe) if options.lm_score else None
    likelihoods = likelihood(model, tokenizer, sources, references, options.batch_tokens)
    translations, speed = translate_all(model, tokenizer, sources, recipe, options.batch_tokens)
    task = make_task(recipe)
    return {
        "model": options.model,
        "digest": digest,
        "recipe": recipe.name,
        **({"note": recipe.note} if recipe.note else {}),
        "data": dataclasses.asdict(recipe.data) | {"fingerprint": fingerprint(pairs)},
        "split": split,
        "sentences": len(sources),
        **task.all_scores(translations, references),
        **task.statistics(translations, references),
        **({} if training_targets is None else {"lm": lm_scores(training_targets, translations, references)}),
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
    for name, value in scores.items():
        if isinstance(value, dict) and "signature" in value:
            print(f"{name:<20} {value['score']:>8.2f}  {value['signature']}")
        elif text := (STATISTICS | PARSING_STATISTICS).get(name):
            print(f"{name:<20} {value:>8.3f}  {text}")
    if lm := scores.get("lm"):
        print(f"{'lm':<20} {lm['score']:>8.3f}  {lm['definition']}; of the references {lm['reference']:.3f}")
    tokens = f"of {scores['target_tokens']} sub-word tokens, </s> counted"
    if "perplexity" in scores:
        print(f"{'perplexity':<20} {scores['perplexity']:>8.2f}  {tokens}")
    else:
        nll = scores["nll_at_gold_length"]
        print(f"{'nll_at_gold_length':<20} {nll:>8.3f}  nats a position, each predicted by itself, {tokens}")
    if shares := scores.get("changed_by_iteration"):
        print(f"{'changed':<20} {' '.join(f'{share:.3f}' for share in shares)}  of the tokens, by iteration 2, 3, ...")
    print(f"search: {describe_search(scores['search'])}")
    if note := scores.get("note"):
        print(note)
    print(
        f"{scores['sentences']} sentences of {scores['split']} in {scores['seconds']:.1f} s: "
        f"{scores['sentences_per_second']:.1f} sentences and {scores['output_tokens_per_second']:.0f} output tokens a "
        f"second on {scores['device']}"
    )


def main(arguments: list[str] | None = None) -> None:
    options, overrides = parse_arguments(arguments)
    logging.disable_progress_bar()
    with exit_on_user_error(ValueError, OSError):
        scores = score(options, load_recipe(options.recipe, overrides, is_trained=False))
        try:
            if options.output is not None:
                with write_errors(f"--output={options.output}", "the scores are printed above"):
                    write_atomically(options.output, json.dumps(scores, indent=2, ensure_ascii=False))
        finally:  # also where the disk is full
            with flush_stdout("make room, or give --output=FILE"):
                report(scores)


if __name__ == "__main__":
    main()
