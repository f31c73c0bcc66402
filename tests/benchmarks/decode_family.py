"""Quality and speed of saved models of every family on one test set, in turn, in one process, as one table.

`python -m tests.benchmarks.decode_family --model "AR=runs/teacher" --model "NAT=runs/nat" --data=FOLDER
--tokenize=none --output=table` takes each model that predicts from left to right at every beam of `--beams`, each other
one at every length beam of `--lengths`, and a CMLM also at every count of `--iterations`. It prints the table as
Markdown; `--output=NAME` writes `NAME.md` and `NAME.json`. The models have to share a vocabulary, up to `<mask>`.

Models are prepared for the CPU. A time is that of one `generate()`, from token ids to token ids. Every arm translates
each sentence, or batch, in turn, and each time another arm is first. The first `--warmup` sentences do not count. With
one thread, seconds are CPU time, which other work on the same core changes least; with more, clock time. A speed-up is
the median over sentences of the ratio of both arms' times. Quality is measured on the complete set, at predicted
lengths, in batches of 32.
"""

import argparse
import dataclasses
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from tests.benchmarks.family_arms import BATCH, Arm, encode, load_arms, padded
from tests.benchmarks.family_details import history, parts_table, refinement_table
from tests.measuring import add_tiny, clock, make_parser, median_ratio, rotated
from training.data.pairs import load_pairs
from training.recipe.fields import DataRecipe
from training.report.results import commit, cpu_name, versions
from training.tasks.metrics import bleu, chrf
from training.tasks.text_statistics import text_statistics
from vaswani_transformer.support.command_line import positive_argument
from vaswani_transformer.support.errors import UserError, exit_on_user_error
from vaswani_transformer.support.files import write_errors

COLUMNS = (
    *("model", "distilled", "passes", "BLEU", "chrF", "Distinct-1/2", "repeats", "length ratio"),
    *("ms a sentence, median", "p90", "speed-up over {}", "sentences a second, batch 32"),
)


def read_data(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Return the sources and targets of `--data`, a JSON Lines file or a folder with `test.jsonl.gz`.

    Raises:
        UserError: it cannot be read.
    """
    path = options.data / "test.jsonl.gz" if options.data.is_dir() else options.data
    recipe = DataRecipe(path=str(path.parent), test=path.name, source=options.source, target=options.target)
    pairs = load_pairs(dataclasses.replace(recipe, **dict.fromkeys(("train", "validation"))))["test"]
    return pairs["source"][:], pairs["target"][:]


def interleaved(
    arms: list[Arm], batches: list[list[list[int]]], now: Callable[[], float]
) -> Iterator[tuple[Arm, int, float, Tensor]]:
    """Yield each arm, a batch number, and the seconds and tokens of the translation; the first arm alternates."""
    for number, rows in enumerate(batches):
        inputs = padded(rows)
        for arm in rotated(arms, number):
            start = now()
            tokens = arm.generate(inputs)
            yield arm, number, now() - start, tokens


def measure(arms: list[Arm], rows: list[list[int]], threads: int, options: argparse.Namespace) -> None:
    """Time every arm at batch 1 and 32 on `threads` threads, and keep its translations."""
    torch.set_num_threads(threads)
    now = clock(threads)
    order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
    groups = [order[start : start + BATCH] for start in range(0, len(order), BATCH)]
    singles = [[rows[index]] for index in range(min(len(rows), options.warmup + options.sentences))]
    for arm, number, seconds, _ in interleaved(arms, singles, now):
        if number >= options.warmup:
            arm.single.setdefault(threads, []).append(seconds)
    batches = [[rows[index] for index in group] for group in groups]
    for _ in interleaved(arms, batches[:1], now):
        pass  # a warm-up
    for arm, number, seconds, tokens in interleaved(arms, batches, now):
        arm.batched.setdefault(threads, []).append(seconds)
        arm.texts = arm.texts or [""] * len(rows)
        for index, text in zip(groups[number], arm.decode(tokens), strict=True):
            arm.texts[index] = text


def speed(arm: Arm, threads: int, baselines: dict[str, Arm], sentences: int) -> dict[str, Any]:
    """Return the times of one arm with this number of threads."""
    seconds = sorted(arm.single[threads])
    return {
        "milliseconds_median": 1000 * statistics.median(seconds),
        "milliseconds_p90": 1000 * seconds[min(len(seconds) - 1, int(0.9 * len(seconds)))],
        "speed_up": {
            name: median_ratio(baseline.single[threads], arm.single[threads]) for name, baseline in baselines.items()
        },
        "sentences_per_second_batch_32": sentences / sum(arm.batched[threads]),
    }


def quality(arm: Arm, references: list[str], tokenize: str) -> dict[str, Any]:
    """Return the scores and statistics of one arm's translations."""
    scores, characters = bleu(arm.texts, references, tokenize), chrf(arm.texts, references)
    return {
        "bleu": scores["bleu"],
        "bleu_signature": scores["signature"],
        "chrf": characters["chrf"],
        "chrf_signature": characters["signature"],
        **text_statistics(arm.texts, references),
    }


def results(arms: list[Arm], references: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """Return everything that was measured."""
    first = next((arm.model_name for arm in arms if arm.passes == "m"), None)
    chosen = {arm.settings["generation_config"].num_beams: arm for arm in arms if arm.model_name == first}
    baselines = {f"{first}, beam {beams}": chosen[beams] for beams in sorted(chosen, reverse=True)}
    rows = []
    for arm in arms:
        measured = {str(threads): speed(arm, threads, baselines, len(references)) for threads in options.threads}
        facts = {"model": arm.name, "distilled": arm.is_distilled, "passes": arm.passes}
        rows.append(facts | quality(arm, references, options.tokenize) | {"threads": measured})
    return {
        "sentences": len(references),
        "timed_sentences": min(len(references) - options.warmup, options.sentences),
        "dtype": options.dtype,
        "cpu": cpu_name(),
        "commit": commit(),
        "versions": versions(),
        "baselines": list(baselines),
        "arms": rows,
    }


def markdown_table(measured: dict[str, Any], threads: int) -> str:
    """Return the table of one number of threads."""
    columns = [column.format(" / ".join(measured["baselines"]) or "none") for column in COLUMNS]
    lines = [f"| {' | '.join(columns)} |", f"| {' | '.join(['---'] * len(columns))} |"]
    for arm in measured["arms"]:
        timed = arm["threads"][str(threads)]
        cells = [
            arm["model"],
            "yes" if arm["distilled"] else "no",
            arm["passes"],
            f"{arm['bleu']:.2f}",
            f"{arm['chrf']:.2f}",
            f"{arm['distinct_1']:.3f} / {arm['distinct_2']:.3f}",
            f"{arm['repeats']:.2%}",
            f"{arm['length_ratio']:.3f}",
            f"{timed['milliseconds_median']:.1f}",
            f"{timed['milliseconds_p90']:.1f}",
            " / ".join(f"{ratio:.2f}" for ratio in timed["speed_up"].values()) or "-",
            f"{timed['sentences_per_second_batch_32']:.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def markdown(measured: dict[str, Any], options: argparse.Namespace) -> str:
    """Return the tables, and what they were measured on."""
    first, revision = measured["arms"][0], (measured["commit"] or {}).get("hash", "unknown")
    parts = [
        f"{measured['sentences']} sentences, {measured['timed_sentences']} of them timed one by one; "
        f"{measured['cpu']}, "
        f"{measured['dtype']}, torch {measured['versions']['torch']}, commit {revision}. The references repeat "
        f"{first['reference_repeats']:.2%} of their words. BLEU `{first['bleu_signature']}`, chrF "
        f"`{first['chrf_signature']}`."
    ]
    for threads in options.threads:
        parts += [f"Threads: {threads}", markdown_table(measured, threads)]
    return "\n\n".join(parts) + "\n"


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = make_parser("tests.benchmarks.decode_family", __doc__)
    parser.add_argument("--model", action="append", required=True, metavar="NAME=FOLDER", help="once for each model")
    parser.add_argument("--distilled", nargs="+", default=[], metavar="NAME", help="models trained on distilled data")
    parser.add_argument("--data", type=Path, required=True, help="JSON Lines, or a folder with test.jsonl.gz")
    parser.add_argument("--source", default="en", help="the source language (en)")
    parser.add_argument("--target", default="de", help="the target language (de)")
    parser.add_argument("--tokenize", default="13a", help="sacreBLEU's tokenizer; none for tokenized data (13a)")
    for name, default, what in (
        ("beams", [1, 4], "of models that predict from left to right"),
        ("lengths", [1, 5], "length beams of the others"),
        ("iterations", [1, 4, 10], "of a CMLM"),
        ("threads", [1, 2], "numbers of threads"),
    ):
        shown = " ".join(map(str, default))
        parser.add_argument(f"--{name}", type=positive_argument, nargs="+", default=default, help=f"{what} ({shown})")
    parser.add_argument("--sentences", type=positive_argument, default=300, help="timed one by one (300)")
    parser.add_argument("--warmup", type=int, default=20, help="sentences before them that do not count (20)")
    parser.add_argument("--dtype", choices=("plain", "float32", "bfloat16", "int8"), default="float32")
    parser.add_argument("--history", type=positive_argument, metavar="N", help="also N sentences after each iteration")
    parser.add_argument("--refinement", action="store_true", help="also the scores after each iteration or layer")
    parser.add_argument("--parts", action="store_true", help="also where the time goes, for non-autoregressive models")
    parser.add_argument("--output", metavar="NAME", help="writes NAME.md and NAME.json")
    add_tiny(parser, sentences=4, warmup=2, threads=[1])
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> None:
    """Run all measurements, print the table, and write the files."""
    sources, references = read_data(options)
    if len(sources) <= options.warmup or (options.history or 0) > len(sources):
        raise UserError(f"--data: {len(sources)} sentences; give more than --warmup and at least --history.")
    arms = load_arms(options)
    rows = encode(arms, sources)
    for threads in options.threads:
        measure(arms, rows, threads, options)
    measured = results(arms, references, options)
    text = markdown(measured, options)
    if options.history is not None:
        text += "\n" + history(arms, sources, references, options.history)
    if options.refinement:
        text += "\n" + refinement_table(arms, sources, references, options)
    if options.parts:
        text += "\n" + parts_table(arms, rows, options.warmup + options.sentences)
    print(text)
    if options.output is not None:
        with write_errors(f"--output={options.output}", "the table is printed above"):
            Path(f"{options.output}.md").write_text(text, encoding="utf-8")
            measured["options"] = {name: str(value) for name, value in vars(options).items()}
            Path(f"{options.output}.json").write_text(json.dumps(measured, indent=2) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with torch.inference_mode(), exit_on_user_error():
        run(options)


if __name__ == "__main__":
    main()
