"""Distill a model: `python -m training.distill MODEL RECIPE.yaml --output_dir=DIR [--any.field=value]`.

The model translates the sources of the recipe's training pairs. A recipe with `data.distilled=DIR` trains on these
translations instead of the real targets (Kim and Rush 2016, sequence-level knowledge distillation). The same command
resumes an interrupted one. `accelerate launch -m` shares the work out over processes, and `--shard=i/n` over machines.
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import logging
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from tqdm import tqdm

from training.data.distilled import RECORD, Distillation, digest_sources
from training.data.pairs import sources_in_order
from training.data.tokenizing import set_up_tokenizer, target_ids
from training.recipe.fields import DataRecipe, load_recipe
from training.recipe.help import parse_with_recipe, recipe_parser
from training.report.results import commit, versions
from training.run.command import check_writable, flush_stdout, start_log
from training.run.distributed import exit_together, init_distributed, raise_together
from training.run.folder import diff_trees
from vaswani_transformer.parsing.constraint import tree_constraint
from vaswani_transformer.support.command_line import positive_argument
from vaswani_transformer.support.errors import UserError
from vaswani_transformer.support.files import holds_files, lock, open_lock, write_atomically, write_errors
from vaswani_transformer.support.modes import is_non_autoregressive
from vaswani_transformer.translation.engine import TransformersEngine
from vaswani_transformer.translation.loading import LoadOptions, load_model_and_tokenizer
from vaswani_transformer.translation.options import add_batch_tokens, add_beam_options, add_load_options, add_sort_lines
from vaswani_transformer.translation.translator import Translation, Translator

logger = logging.getLogger(__name__)
LOG_SECONDS = 10.0  # at least, between lines of progress


def shard_of(text: str) -> tuple[int, int]:
    """Return `i/n` as two numbers, i from 1 to n."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected i/n with i from 1 to n, such as 2/3")
    return int(match[1]), int(match[2])


def add_search_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that the pairs depend on: of the search, and of the pairs that are kept."""
    search = parser.add_argument_group("search", "the model's generation config is the default")
    add_beam_options(search)
    kept = parser.add_argument_group("kept pairs", "lengths in the teacher's tokens, </s> included")
    kept.add_argument(
        "--max_length",
        type=positive_argument,
        metavar="N",
        help="most tokens of a source and of a translation (the recipe's data.max_length)",
    )
    for name, default, bound in (("min", -20, "least"), ("max", 20, "most")):
        kept.add_argument(
            f"--{name}_length_difference",
            type=int,
            default=default,
            metavar="N",
            help=f"translation minus source at {bound}, as in NAT's configuration ({default})",
        )


def parse_arguments(arguments: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    description = "Write a model's translations of a recipe's training sources, on which another model trains."
    parser = recipe_parser("distill", description, "for example --data.path=FOLDER")
    parser.add_argument("model", metavar="MODEL", help="the teacher: a folder of a run or saved model, or a Hub name")
    parser.add_argument("recipe", metavar="RECIPE", help="the YAML file that names the data")
    parser.add_argument(
        *("--output_dir", "--output"), type=Path, required=True, metavar="DIR", help="the folder to write or resume"
    )
    parser.add_argument(
        "--shard", type=shard_of, default=(1, 1), metavar="i/n", help="write the i-th of n shares (1/1)"
    )
    add_search_options(parser)
    machine = parser.add_argument_group("machine")
    add_batch_tokens(machine)
    add_sort_lines(machine, "sources sorted by length, and of a part (2048)")
    add_load_options(machine)
    return parse_with_recipe(parser, arguments)


def check_options(options: argparse.Namespace, recipe: DataRecipe) -> DataRecipe:
    """Return the data of the recipe with the options' length limit."""
    low, high = options.min_length_difference, options.max_length_difference
    if low > high:
        raise UserError(f"--min_length_difference={low}: more than --max_length_difference={high}; exchange them.")
    if recipe.distilled is not None:
        raise UserError("data.distilled: a teacher translates the real sources; leave it out.")
    return recipe if options.max_length is None else dataclasses.replace(recipe, max_length=options.max_length)


def load_teacher(options: argparse.Namespace, recipe: DataRecipe) -> tuple[Translator, dict[str, Any]]:
    """Return the teacher's translator, a parser's with well-formed trees only, and the settings of its search."""
    model, tokenizer = load_model_and_tokenizer(LoadOptions.of(options))
    set_up_tokenizer(tokenizer, options.model, "pad")
    given = {"num_beams": options.beams, "length_penalty": options.length_penalty}
    settings = {name: value for name, value in given.items() if value is not None}
    if settings and is_non_autoregressive(model):
        raise UserError(
            f"--beams, --length_penalty: {options.model} predicts all words at once and has no beams; leave them out."
        )
    engine = TransformersEngine(model, tokenizer.pad_token_id, **settings)
    limit = min(recipe.max_length, engine.max_source_tokens(recipe.max_length))
    constraint = tree_constraint(model, tokenizer) if recipe.kind == "trees" else None
    batches = (options.batch_tokens, options.sort_lines)
    return Translator(engine, tokenizer, limit, *batches, constraint=constraint), engine.search


def make_record(options: argparse.Namespace, recipe: DataRecipe, search: dict[str, Any]) -> dict[str, Any]:
    """Return the content of `distillation.json`, for which all sources are read once."""
    is_folder = Path(options.model).is_dir()
    digest = LoadOptions.of(options).digest()
    digests = digest_sources(sources_in_order(recipe))
    if not digests["sources"]:
        raise UserError(f"data.train: {recipe.train} has no pairs; name another file or split.")
    names = ("min_length_difference", "max_length_difference", "batch_tokens", "dtype")
    settings = {"max_length": recipe.max_length, "window": options.sort_lines}
    return {
        "teacher": {"name": Path(options.model).resolve().name if is_folder else options.model, "digest": digest},
        "data": {"source": recipe.source, "target": recipe.target} | digests,
        "search": search,
        "settings": settings | {name: getattr(options, name) for name in names},
        "versions": versions(),
        "commit": commit(),
    }


def check_folder(folder: Path) -> None:
    check_writable(folder)
    if not (folder / RECORD).exists() and holds_files(folder):
        raise UserError(f"{folder}: holds files that are no distillation; give another --output_dir.")


def open_distillation(folder: Path, record: dict[str, Any]) -> Distillation:
    """Return the distillation in a folder, which gets the record if it is new."""
    distillation = Distillation(folder, record)
    if not (folder / RECORD).exists():
        with write_errors(folder, "give another --output_dir"):
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / RECORD, json.dumps(record, indent=2, ensure_ascii=False))
        return distillation
    before = Distillation.load(folder)
    if names := diff_trees(before.inputs, json.loads(json.dumps(distillation.inputs))):
        raise UserError(
            f"{folder}: holds another distillation, {names[0]} differs; give the same command to resume it, or another "
            "--output_dir."
        )
    return before


@contextlib.contextmanager
def shard_lock(folder: Path, shard: tuple[int, int]) -> Generator[None]:
    """Lock a shard of a folder against other commands, in the main process."""
    if not PartialState().is_main_process:
        yield
        return
    name = "shard-{}-of-{}".format(*shard)
    with open_lock(folder / f".{name}.lock") as file:
        lock(file, f"{folder}: another command is writing {name}; end it, or give another --shard or --output_dir.")
        yield


def select_pair(translation: Translation, tokens: int, settings: dict[str, Any]) -> str:
    """Return why a pair is dropped, or "" for a pair that is kept.

    `tokens` are those that a student learns; the teacher may have written its text in others.
    """
    difference = tokens - translation.source_tokens
    if translation.is_truncated:
        return "source_too_long"
    if not translation.text.strip():
        return "empty"
    if tokens > settings["max_length"]:
        return "too_long"
    in_range = settings["min_length_difference"] <= difference <= settings["max_length_difference"]
    return "" if in_range else "length_difference"


def translate_part(
    translator: Translator, distillation: Distillation, sources: list[str], progress: Callable[[int], object]
) -> tuple[list[dict[str, str]], Counter[str]]:
    data, settings = distillation.record["data"], distillation.record["settings"]
    pairs, dropped = [], Counter[str]()
    translations = list(translator(sources, progress=progress))
    texts = [translation.text.strip() for translation in translations]
    targets = target_ids(translator.tokenizer, texts)
    for source, translation, text, target in zip(sources, translations, texts, targets, strict=True):
        if reason := select_pair(translation, len(target), settings):
            dropped[reason] += 1
        else:
            pairs.append({data["source"]: source, data["target"]: text})
    return pairs, dropped


class Progress:
    """The translated sentences of a shard, with the time left: a bar in a terminal, lines of the log elsewhere."""

    def __init__(self, distillation: Distillation, numbers: list[int]) -> None:
        self.distillation, self.missing = distillation, numbers
        self.total = sum(map(distillation.sources_of, numbers))
        self.start = self.last = time.perf_counter()
        self.before = self.count()
        is_shown = sys.stderr.isatty() and PartialState().is_main_process
        self.bar = tqdm(total=self.total, initial=self.before, unit="sentence", disable=not is_shown)
        if self.before:
            logger.info("Resuming after %s of %s sentences.", f"{self.before:,d}", f"{self.total:,d}")

    def count(self) -> int:
        """Return the sentences in complete parts, of all processes."""
        self.missing = [number for number in self.missing if self.distillation.counts(number) is None]
        return self.total - sum(map(self.distillation.sources_of, self.missing))

    def part_done(self, is_last: bool) -> None:
        """Show the parts of all processes, every few seconds and after the last part of this one."""
        now = time.perf_counter()
        if not PartialState().is_main_process or (now - self.last < LOG_SECONDS and not is_last):
            return
        done, self.last = self.count(), now
        self.bar.n = done
        self.bar.refresh()
        if not self.bar.disable or done == self.before:
            return
        rate = (done - self.before) / (now - self.start)
        speed = f"{rate:.1f} a second, {(self.total - done) / rate / 60:.1f} minutes left"
        logger.info("%s of %s sentences, %s.", f"{done:,d}", f"{self.total:,d}", speed)


def write_parts(
    translator: Translator, recipe: DataRecipe, distillation: Distillation, numbers: list[int], progress: Progress
) -> None:
    sources, first = sources_in_order(recipe), 0  # the number of the next source
    for number in numbers:
        start = number * distillation.sort_lines
        part = list(itertools.islice(sources, start - first, start - first + distillation.sort_lines))
        first = start + len(part)
        pairs, dropped = translate_part(translator, distillation, part, progress.bar.update)
        with write_errors(distillation.folder, "make room, and the same command resumes it"):
            distillation.write_part(number, pairs, dropped)
        progress.part_done(number == numbers[-1])


def distill(options: argparse.Namespace, recipe: DataRecipe) -> dict[str, Any]:
    """Write the parts of a shard that are missing, and return the counts of the folder."""
    init_distributed()
    state, folder = PartialState(), options.output_dir
    options.device = options.device or str(state.device)
    raise_together(lambda: check_folder(folder))
    translator, search = raise_together(lambda: load_teacher(options, recipe))
    if state.is_main_process:
        logger.info("Reading the sources.")
    raise_together(
        lambda: open_distillation(folder, make_record(options, recipe, search)) if state.is_main_process else None
    )
    distillation = raise_together(lambda: Distillation.load(folder))
    with contextlib.ExitStack() as stack:
        raise_together(lambda: stack.enter_context(shard_lock(folder, options.shard)))
        numbers = list(range(options.shard[0] - 1, distillation.num_parts, options.shard[1]))
        progress = raise_together(lambda: Progress(distillation, numbers))
        (missing,) = broadcast_object_list([progress.missing])
        rank_parts = missing[state.process_index :: state.num_processes]
        with contextlib.closing(progress.bar):
            write_parts(translator, recipe, distillation, rank_parts, progress)
        state.wait_for_everyone()
    return {"output_dir": str(folder), **distillation.totals, "missing_parts": len([*distillation.missing_parts()])}


def main(arguments: list[str] | None = None) -> None:
    options, overrides = parse_arguments(arguments)
    start_log()
    with exit_together("; the same command resumes the distillation", OSError, ValueError):
        totals = distill(options, check_options(options, load_recipe(options.recipe, overrides, is_trained=False).data))
        if PartialState().is_main_process:
            with flush_stdout(f"the pairs are in {options.output_dir}"):
                print(json.dumps(totals))
    PartialState().destroy_process_group()


if __name__ == "__main__":
    main()
