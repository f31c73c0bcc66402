"""Score a model: `python -m training.score MODEL RECIPE.yaml [--split=validation] [--output=FILE] [--any.field=value]`.

It translates a split of the recipe's data by the recipe's search, prints a table and, on request, writes it as JSON.
Scores that are computed otherwise are named otherwise, and each stands with the signature that it compares by.
"""

import argparse
import dataclasses
import json
import math
import sys
import time
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from training.command import OneLineParser, end_interrupted
from training.data import SPLITS, load_pairs
from training.metrics import bleu, chrf, tokenized_bleu
from training.recipe import Recipe, RecipeError, load_recipe
from training.recipe_help import recipe_help
from training.trainer import decoding_config
from vaswani_transformer import VaswaniTransformerForConditionalGeneration
from vaswani_transformer.errors import one_line
from vaswani_transformer.modes import eval_mode
from vaswani_transformer.tokenizer import text_encoder
from vaswani_transformer.translate.engine import log_probabilities, pad_rows
from vaswani_transformer.translate.loading import load
from vaswani_transformer.translate.options import DTYPE_HELP, DTYPES
from vaswani_transformer.translate.translator import batches_by_length, translate

CUT_AT_SPACES = ("13a", "intl", "none")  # the tokenisers of recipes whose language Moses cuts, too


def parse(arguments: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """The command's own arguments, and those of the recipe."""
    parser = OneLineParser(
        prog="python -m training.score",
        allow_abbrev=False,
        description="Score a model on a split of a recipe's data.",
        epilog=f"Any field of the recipe can be set as in training, for example --data.path=FOLDER:\n\n{recipe_help()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="the folder of a run or any saved model, or a name on the Hub")
    parser.add_argument("recipe", metavar="RECIPE", help="the YAML file that names the data and the search")
    parser.add_argument("--split", choices=("validation", "test"), default="test", help="(test)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="a new file for the scores as JSON")
    parser.add_argument("--batch_tokens", type=int, default=2048, metavar="N", help="source tokens at once (2048)")
    parser.add_argument("--device", help="the accelerator, where there is one, or else the CPU")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help=DTYPE_HELP)
    parser.add_argument("--revision", help="of a model on the Hub")
    parser.add_argument("--trust_remote_code", action="store_true", help="run the code that comes with the model")
    return parser.parse_known_args(arguments)


def load_split(recipe: Recipe, split: str) -> tuple[list[str], list[str]]:
    """The sources and targets of one split; the others are not read.

    Raises:
        RecipeError: the recipe has none of that name, or it cannot be used.
    """
    if getattr(recipe.data, split) is None:
        raise RecipeError(f"data.{split}: {recipe.name} has no {split} set; name one, or give another --split.")
    others: dict[str, Any] = dict.fromkeys(set(SPLITS) - {split})
    pairs = load_pairs(dataclasses.replace(recipe.data, **others))
    return pairs[split]["source"][:], pairs[split]["target"][:]


def refuse_misfits(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Refuse a tokenizer that is none for scoring.

    Raises:
        RecipeError: it has no token to pad or to end a text with.
    """
    for token, value in (("pad", tokenizer.pad_token_id), ("eos", tokenizer.eos_token_id)):
        if value is None:
            raise RecipeError(f"{name}: its tokenizer has no {token} token; set {token}_token and save it again.")


def likelihood(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sources: list[str], targets: list[str], tokens: int
) -> dict[str, Any]:
    """Loss and perplexity of a sub-word token of the targets, `</s>` counted, in batches of so many tokens."""
    encoded = cast(Any, text_encoder(tokenizer))(sources, text_target=targets, verbose=False)
    pairs = list(zip(encoded["input_ids"], encoded["labels"], strict=True))
    total, pad = 0.0, cast(int, tokenizer.pad_token_id)
    with eval_mode(model):
        for batch in batches_by_length({index: max(map(len, pair)) for index, pair in enumerate(pairs)}, tokens):
            rows, labels = zip(*(pairs[index] for index in batch), strict=True)
            source = pad_rows(list(rows), pad, model.device)  # (B, S)
            mask = pad_rows([[1] * len(row) for row in rows], 0, model.device)  # (B, S)
            target = pad_rows(list(labels), -100, model.device)  # (B, T)
            total -= log_probabilities(model, source, mask, target).double().sum().item()
    count = sum(len(labels) for _, labels in pairs)
    return {"loss": total / count, "perplexity": math.exp(min(total / count, 700)), "target_tokens": count}


def translate_all(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sources: list[str], recipe: Recipe, tokens: int
) -> tuple[list[str], dict[str, Any]]:
    """The translations by the recipe's search, and how long they took; a model of another kind searches its own way."""
    is_own = isinstance(model, VaswaniTransformerForConditionalGeneration)
    settings: dict[str, Any] = {"generation_config": decoding_config(model, recipe)} if is_own else {}
    start = time.perf_counter()
    found = [
        translation.hypotheses[0]
        for translation in translate(model, tokenizer, sources, batch_tokens=tokens, too_long="keep", **settings)
    ]
    seconds, output_tokens = time.perf_counter() - start, sum(hypothesis.tokens for hypothesis in found)
    return [hypothesis.text for hypothesis in found], {
        "seconds": seconds,
        "output_tokens": output_tokens,
        "sentences_per_second": len(found) / seconds,
        "output_tokens_per_second": output_tokens / seconds,
        "search": vars(recipe.decoding) if is_own else model.generation_config.to_diff_dict(),
    }


def quality(translations: list[str], references: list[str], recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Every score that is one for the recipe's texts, by a name of its own, each with its signature.

    sacrebleu: of texts as they are read, cut by sacreBLEU; not for files that are tokenised already.
    chrf: of texts as they are.
    tokenized_bleu: of the files' own tokens, or of those that Moses makes of both sides.
    compound_split_bleu: of the same with the parts of compounds apart, for German; the paper's En-De figures.
    """
    is_tokenized, target = recipe.score.tokenize == "none", recipe.data.target
    scores: dict[str, dict[str, Any]] = {}
    if not is_tokenized:
        scores["sacrebleu"] = bleu(translations, references, recipe.score.tokenize)
    scores["chrf"] = chrf(translations, references)
    if recipe.score.tokenize in CUT_AT_SPACES:
        language = None if is_tokenized else target
        scores["tokenized_bleu"] = tokenized_bleu(translations, references, language)
        if target == "de":
            scores["compound_split_bleu"] = tokenized_bleu(translations, references, language, compounds=True)
    return {
        name: {"score": score["chrf" if name == "chrf" else "bleu"], "signature": score["signature"]}
        for name, score in scores.items()
    }


def score(options: argparse.Namespace, recipe: Recipe) -> dict[str, Any]:
    """Everything that is found out about a model.

    Raises:
        RecipeError: the recipe, its data, the model or the output file cannot be used, or do not go together.
        UserError: the model cannot be loaded, or not as it is to run.
    """
    if options.output is not None and (options.output.exists() or not options.output.absolute().parent.is_dir()):
        what = "is there already" if options.output.exists() else "lies in no folder"
        raise RecipeError(f"--output={options.output}: {what}; give a new file in a folder that is there.")
    sources, references = load_split(recipe, options.split)
    model, tokenizer = load(options)
    refuse_misfits(tokenizer, options.model)
    if not tokenizer.is_fast:
        tokenizer.split_special_tokens = True  # as in training
    found = likelihood(model, tokenizer, sources, references, options.batch_tokens)
    translations, speed = translate_all(model, tokenizer, sources, recipe, options.batch_tokens)
    return {
        "model": options.model,
        "recipe": recipe.name,
        "data": dataclasses.asdict(recipe.data),
        "split": options.split,
        "sentences": len(sources),
        **quality(translations, references, recipe),
        **found,
        **speed,
        "batch_tokens": options.batch_tokens,
        "device": str(model.device),
        "dtype": str(model.dtype).removeprefix("torch.") if options.dtype == "auto" else options.dtype,
        "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }


def report(scores: dict[str, Any]) -> None:
    """Print the table."""
    for name, value in scores.items():
        if isinstance(value, dict) and "signature" in value:
            print(f"{name:<20} {value['score']:>8.2f}  {value['signature']}")
    print(
        f"{'perplexity':<20} {scores['perplexity']:>8.2f}  of {scores['target_tokens']} sub-word tokens, </s> counted"
    )
    print(
        f"{scores['sentences']} sentences of {scores['split']} in {scores['seconds']:.1f} s: "
        f"{scores['sentences_per_second']:.1f} sentences and {scores['output_tokens_per_second']:.0f} output tokens a "
        f"second on {scores['device']}"
    )


def write(path: Path, text: str) -> None:
    """Write the scores.

    Raises:
        RecipeError: they cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RecipeError(f"--output={path}: cannot be written ({error.strerror}); the scores stand above.") from error


def main(arguments: list[str] | None = None) -> None:
    """The command line; what cannot be scored ends it with one line and exit status 2."""
    options, overrides = parse(arguments)
    logging.disable_progress_bar()
    try:
        scores = score(options, load_recipe(options.recipe, overrides))
        report(scores)  # first, for a disk may be full
        if options.output is not None:
            write(options.output, json.dumps(scores, indent=2, ensure_ascii=False))
    except KeyboardInterrupt:
        end_interrupted()
    except (ValueError, OSError) as error:
        print(one_line(error), file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
