"""Distill a model: `python -m training.distill MODEL RECIPE.yaml --output_dir=DIR [--any.field=value]`.

The model translates the sources of the recipe's training pairs (Kim and Rush 2016, sequence-level knowledge
distillation). `data.distilled=DIR` then trains on these pairs. The folder has a file of JSON Lines and a record of each
process; the same command resumes an interrupted one. `accelerate launch -m` shares the work out over processes, and
`--shard=i/n` over machines.
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
from accelerate import PartialState
from accelerate.utils import gather_object
from tqdm import tqdm
from transformers.utils.logging import disable_progress_bar

from training.data import load_pairs
from training.machine import commit, init_processes, versions
from training.recipe import Recipe, Variants, load_recipe
from vaswani_transformer.parsing.constraint import tree_constraint
from vaswani_transformer.support.command import (
    CommandParser,
    UserError,
    exit_on_user_error,
    number_argument,
    positive_argument,
)
from vaswani_transformer.support.files import ResumableFile
from vaswani_transformer.support.loading import LoadOptions, add_load_options, load_model_and_tokenizer
from vaswani_transformer.tokenizer import text_encoder
from vaswani_transformer.translation.translator import Translation, Translator

RESULTS_DEPEND_ON = ("beams", "length_penalty", "min_length_difference", "max_length_difference", "dtype")


def shard_argument(text: str) -> tuple[int, int]:
    """Parse `text`, such as 2/8, as the number of a share, from 1, and the number of shares."""
    share, _, shares = text.partition("/")
    if not (share.isdecimal() and shares.isdecimal() and 1 <= int(share) <= int(shares)):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected i/n with i from 1 to n, such as 2/8")
    return int(share), int(shares)


def parse_arguments(arguments: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    parser = CommandParser(prog="python -m training.distill", description=__doc__, allow_abbrev=False)
    parser.add_argument("model", metavar="MODEL", help="the teacher: a folder of a run or saved model, or a Hub name")
    parser.add_argument("recipe", metavar="RECIPE", help="the YAML file that names the data")
    parser.add_argument("--output_dir", type=Path, required=True, metavar="DIR", help="the folder to write or resume")
    shard: dict[str, Any] = {"type": shard_argument, "default": (1, 1)}
    parser.add_argument("--shard", metavar="i/n", help="write the i-th of n shares (1/1)", **shard)
    parser.add_argument("--beams", type=positive_argument, metavar="N", help="beams; 1 for greedy search")
    parser.add_argument("--length_penalty", type=number_argument, metavar="ALPHA", help="alpha of the length penalty")
    difference = "tokens of a translation minus those of its source, at"
    parser.add_argument("--min_length_difference", type=int, default=-20, metavar="N", help=f"{difference} least (-20)")
    parser.add_argument("--max_length_difference", type=int, default=20, metavar="N", help=f"{difference} most (20)")
    size: dict[str, Any] = {"type": positive_argument, "default": 2048, "metavar": "N"}
    parser.add_argument("--batch_tokens", help="source tokens in a batch (2048)", **size)
    parser.add_argument("--window", help="lines to read and sort by length at once (2048)", **size)
    add_load_options(parser)
    return parser.parse_known_args(arguments)


def load_teacher(options: argparse.Namespace, recipe: Recipe, layouts: dict[str, str]) -> Translator:
    """Return the teacher's translator with recorded layouts, for a parser constrained to well-formed trees."""
    model, tokenizer = load_model_and_tokenizer(LoadOptions.of(options), layouts)
    search: dict[str, Any] = {}  # else the model's generation config
    if options.beams is not None:
        search["num_beams"] = options.beams
    if options.length_penalty is not None:
        search["length_penalty"] = options.length_penalty
    return Translator(
        model,
        tokenizer,
        batch_tokens=options.batch_tokens,
        window=options.window,
        max_source_tokens=recipe.data.max_length,
        constraint=tree_constraint(model, tokenizer) if recipe.data.kind == "trees" else None,
        **search,
    )


def drop_reason(translation: Translation, tokens: int, options: argparse.Namespace, longest: int) -> str:
    """Return the reason to drop a pair, or "" to keep it; `tokens` is the number of target tokens."""
    if translation.is_truncated:
        return "source_too_long"
    if not translation.text.strip():
        return "empty"
    if tokens > longest:
        return "too_long"
    difference = tokens - translation.source_tokens
    is_near = options.min_length_difference <= difference <= options.max_length_difference
    return "" if is_near else "length_difference"


def dropped_pairs(output: ResumableFile) -> Counter[str]:
    """Return the numbers of dropped pairs by reason in the record of a share; an empty share has none."""
    dropped = output.record.get("dropped", {})
    if not isinstance(dropped, dict) or not all(isinstance(count, int) for count in dropped.values()):
        raise output.conflict(f"has a damaged record with dropped {dropped!r}")
    return Counter(dropped)


def write_share(
    translator: Translator, sources: Iterator[str], output: ResumableFile, options: argparse.Namespace, recipe: Recipe
) -> None:
    """Write the pairs of the remaining sources, a window at a time, and count dropped pairs in the record."""
    encode = text_encoder(translator.tokenizer)
    dropped = dropped_pairs(output)
    first = output.done
    with tqdm(initial=output.done, unit="line", disable=None) as bar:  # None: shown in a terminal
        while window := list(itertools.islice(sources, options.window)):
            lines = []
            for translation in translator.translate_window(window, first, progress=bar.update):
                text = translation.text.strip()
                tokens = len(encode(text_target=text, split_special_tokens=True)["input_ids"])
                if reason := drop_reason(translation, tokens, options, recipe.data.max_length):
                    dropped[reason] += 1
                else:
                    pair = {recipe.data.source: translation.source, recipe.data.target: text}
                    lines.append(json.dumps({"translation": pair}, ensure_ascii=False))
            output.record["dropped"] = dropped
            output.write(window, lines)
            first += len(window)
    output.finish()


def share_of(options: argparse.Namespace) -> tuple[int, int]:
    """Return the share of this process, from 0, and the number of shares: those of each machine's processes."""
    state = PartialState()
    machine, machines = options.shard
    return (machine - 1) * state.num_processes + state.process_index, machines * state.num_processes


def check_shares(folder: Path, shares: int) -> None:
    """Check that a folder is new, or contains files of this number of shares."""
    if any(not path.name.endswith(f"-of-{shares:05d}.jsonl") for path in folder.glob("*.jsonl")):
        raise UserError(
            f"{folder}: contains a different number of shares; rerun the original command, or choose a new folder."
        )


def share_settings(options: argparse.Namespace, recipe: Recipe) -> dict[str, Any]:
    """Return the settings that the pairs of a share depend on; a later command must have the same."""
    settings = {name: getattr(options, name) for name in RESULTS_DEPEND_ON}
    settings["source"] = recipe.data.source
    settings["target"] = recipe.data.target
    settings["max_length"] = recipe.data.max_length
    settings["teacher"] = LoadOptions.of(options).digest()
    return settings


def distill(options: argparse.Namespace, recipe: Recipe) -> dict[str, Any]:
    """Write this process's share of the pairs, and return the counts over all processes."""
    init_processes()
    state = PartialState()
    folder = options.output_dir
    options.device = options.device or str(state.device)

    # The sources of this share.
    share, shares = share_of(options)
    check_shares(folder, shares)
    folder.mkdir(parents=True, exist_ok=True)
    with state.main_process_first():
        data = dataclasses.replace(recipe.data, variants=Variants())  # training copies the translations
        sources = load_pairs(dataclasses.replace(recipe, data=data), ["train"])["train"]["source"][share::shares]

    # Translate what an earlier command has not.
    path = folder / f"{share:05d}-of-{shares:05d}.jsonl"
    with contextlib.closing(ResumableFile(path, share_settings(options, recipe))) as output:
        remaining = iter(sources)
        output.skip(remaining)
        if not output.is_finished:
            layouts = output.record["layouts"]
            translator = load_teacher(options, recipe, layouts)
            layouts.update(getattr(translator.model, "layouts", {}))  # of a prepared model
            origin = {"commit": commit(), "versions": versions()}
            output.save_record(search=translator.settings.search(), layouts=layouts, **origin)
            write_share(translator, remaining, output, options, recipe)
        dropped = dropped_pairs(output)

    # Kept pairs are those of the folder, to which other machines may write too.
    dropped_by_process = gather_object([dropped])
    kept = sum(len(file.read_bytes().splitlines()) for file in folder.glob("*.jsonl"))
    return {"output_dir": str(folder), "kept": kept, "dropped": dict(sum(dropped_by_process, Counter()))}


def main(arguments: list[str] | None = None) -> None:
    options, overrides = parse_arguments(arguments)
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    disable_progress_bar()
    datasets.disable_progress_bars()
    with exit_on_user_error(OSError, ValueError, what_now="; the same command resumes the distillation"):
        totals = distill(options, load_recipe(options.recipe, overrides, vars(options)))
        if PartialState().is_main_process:
            print(json.dumps(totals))


if __name__ == "__main__":
    main()
