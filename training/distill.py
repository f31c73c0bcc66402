"""Distill a model: `python -m training.distill MODEL RECIPE.yaml --output_dir=DIR [--any.field=value]`.

The model translates the sources of the recipe's training pairs (Kim and Rush 2016, sequence-level knowledge
distillation). `data.distilled=DIR` then trains on these pairs. The folder has JSON Lines, a file a process, whose names
end in `.part` until they are complete; the same command resumes an interrupted one. `accelerate launch -m` shares the
work out over processes, and `--shard=i/n` over machines.
"""

import argparse
import itertools
import json
import logging
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
from accelerate import PartialState
from accelerate.utils import gather_object
from tqdm import tqdm
from transformers.utils.logging import disable_progress_bar

from training.data import load_pairs
from training.machine import commit, init_processes, versions
from training.recipe import Recipe, load_recipe
from vaswani_transformer.cpu.linear import chosen_layouts
from vaswani_transformer.parsing.constraint import tree_constraint
from vaswani_transformer.support.command_line import positive_argument
from vaswani_transformer.support.errors import UserError, exit_on_user_error
from vaswani_transformer.support.files import write_atomically, write_errors
from vaswani_transformer.tokenizer import text_encoder
from vaswani_transformer.translation.loading import LoadOptions, add_load_options, load_model_and_tokenizer
from vaswani_transformer.translation.translator import Translation, Translator

RECORD = "distillation.json"
logger = logging.getLogger(__name__)


def parse_arguments(arguments: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog="python -m training.distill", description=__doc__, allow_abbrev=False)
    parser.add_argument("model", metavar="MODEL", help="the teacher: a folder of a run or saved model, or a Hub name")
    parser.add_argument("recipe", metavar="RECIPE", help="the YAML file that names the data")
    parser.add_argument("--output_dir", type=Path, required=True, metavar="DIR", help="the folder to write or resume")
    parser.add_argument("--shard", default="1/1", metavar="i/n", help="write the i-th of n shares (1/1)")
    parser.add_argument("--beams", type=positive_argument, metavar="N", help="beams; 1 for greedy search")
    parser.add_argument("--length_penalty", type=float, metavar="ALPHA", help="alpha of lp(Y)")
    parser.add_argument("--min_length_difference", type=int, default=-20, metavar="N", help="translation minus source")
    parser.add_argument("--max_length_difference", type=int, default=20, metavar="N", help="the same at most (20)")
    size: dict[str, Any] = {"type": positive_argument, "default": 2048, "metavar": "N"}
    parser.add_argument("--batch_tokens", help="source tokens at once (2048)", **size)
    parser.add_argument("--window", dest="sort_lines", help="lines sorted by length at once (2048)", **size)
    add_load_options(parser)
    return parser.parse_known_args(arguments)


def load_teacher(options: argparse.Namespace, recipe: Recipe) -> Translator:
    """Return the teacher's translator, for a parser constrained to well-formed trees."""
    model, tokenizer = load_model_and_tokenizer(LoadOptions.of(options))
    settings: dict[str, Any] = {"batch_tokens": options.batch_tokens, "sort_lines": options.sort_lines}
    given = {"num_beams": options.beams, "length_penalty": options.length_penalty}
    settings |= {name: value for name, value in given.items() if value is not None}
    constraint = tree_constraint(model, tokenizer) if recipe.data.kind == "trees" else None
    longest = recipe.data.max_length
    return Translator(model, tokenizer, constraint=constraint, max_source_tokens=longest, **settings)


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


def read_back(path: Path) -> int:
    """Return the index of the next source of a file, after removing an incomplete last line."""
    if not path.exists():
        return 0
    content = path.read_bytes()
    complete = content[: content.rfind(b"\n") + 1]
    with path.open("r+b") as file:
        file.truncate(len(complete))
    lines = complete.splitlines()
    return json.loads(lines[-1])["number"] + 1 if lines else 0


def write_share(
    translator: Translator, sources: list[str], path: Path, options: argparse.Namespace, recipe: Recipe
) -> Counter[str]:
    """Write the pairs of a share of the sources, resuming an interrupted file, and count dropped pairs."""
    partial, dropped = path.with_name(f"{path.name}.part"), Counter[str]()
    if path.exists():
        return dropped
    first, encode = read_back(partial), text_encoder(translator.tokenizer)
    bar = tqdm(translator(sources, skip=first), total=len(sources), initial=first, disable=not sys.stderr.isatty())
    with write_errors(path, "make room, and the same command resumes it"), partial.open("a", 1, "utf-8") as file:
        for number, translation in enumerate(bar, start=first):
            text = translation.text.strip()
            tokens = len(encode(text_target=text, split_special_tokens=True)["input_ids"])
            if reason := drop_reason(translation, tokens, options, recipe.data.max_length):
                dropped[reason] += 1
                continue
            pair = {recipe.data.source: translation.source, recipe.data.target: text}
            file.write(f"{json.dumps({'translation': pair, 'number': number}, ensure_ascii=False)}\n")
    partial.rename(path)
    return dropped


def check_record(folder: Path, record: dict[str, Any]) -> None:
    """Write the settings into a new folder, or compare them with those of an existing one."""
    path, names = folder / RECORD, ("teacher", "data", "search", "settings")
    if path.exists():
        before, now = json.loads(path.read_text(encoding="utf-8")), json.loads(json.dumps(record))
        if changed := [name for name in names if before.get(name) != now[name]]:
            raise UserError(
                f"{folder}: holds another distillation, its {changed[0]} differs; give the same command to resume it, "
                "or another --output_dir."
            )
        return
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder}: holds files that are no distillation; give another --output_dir.")
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(record, indent=2, ensure_ascii=False))


def distill(options: argparse.Namespace, recipe: Recipe) -> dict[str, Any]:
    """Write this process's share of the pairs, and return the counts over all processes."""
    init_processes()
    state, folder = PartialState(), options.output_dir
    options.device = options.device or str(state.device)
    share, shares = (int(number) for number in options.shard.split("/"))
    share, shares = (share - 1) * state.num_processes + state.process_index, shares * state.num_processes
    path = folder / f"{share:05d}-of-{shares:05d}.jsonl"
    layouts = path.with_suffix(".layouts")  # of a teacher on a CPU, by which a resumed share has the same rounding
    if layouts.exists():
        chosen_layouts.update(json.loads(layouts.read_text(encoding="utf-8")))
    translator = load_teacher(options, recipe)
    with state.main_process_first():
        sources = load_pairs(recipe, ["train"])["train"]["source"][:]
    if state.is_main_process:
        limits = ("min_length_difference", "max_length_difference", "dtype")
        settings = {name: getattr(options, name) for name in limits}
        record = {
            "teacher": {"name": Path(options.model).name, "digest": LoadOptions.of(options).digest()},
            "data": {"source": recipe.data.source, "target": recipe.data.target, "sources": len(sources)},
            "search": translator.search,
            "settings": settings | {"max_length": recipe.data.max_length, "shares": shares},
            "versions": versions(),
            "commit": commit(),
        }
        check_record(folder, record)
    state.wait_for_everyone()
    write_atomically(layouts, json.dumps(chosen_layouts))
    dropped = write_share(translator, list(itertools.islice(sources, share, None, shares)), path, options, recipe)
    layouts.unlink()
    everyone = gather_object([dropped])
    kept = sum(len(file.read_bytes().splitlines()) for file in folder.glob("*.jsonl"))
    return {"output_dir": str(folder), "kept": kept, "dropped": dict(sum(everyone, Counter()))}


def main(arguments: list[str] | None = None) -> None:
    options, overrides = parse_arguments(arguments)
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    disable_progress_bar()
    datasets.disable_progress_bars()
    with exit_on_user_error(OSError, ValueError, what_now="; the same command resumes the distillation"):
        totals = distill(options, load_recipe(options.recipe, overrides))
        if PartialState().is_main_process:
            print(json.dumps(totals))


if __name__ == "__main__":
    main()
