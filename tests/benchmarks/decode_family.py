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
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.utils import logging

from tests.benchmarks.part_times import PARTS, part_shares
from training.data.pairs import load_pairs
from training.recipe import DataRecipe
from training.report.results import commit, cpu_name, versions
from training.tasks.metrics import bleu, chrf
from training.tasks.text_statistics import text_statistics
from vaswani_transformer import prepare_for_inference
from vaswani_transformer.checked_loading import check_tokenizer_fits, load_model, load_tokenizer
from vaswani_transformer.command_line import ArgumentParser, positive_int
from vaswani_transformer.errors import UserError, exit_on_user_error
from vaswani_transformer.files import write_errors
from vaswani_transformer.tokenizer import text_encoder
from vaswani_transformer.translate.engine import is_parallel, pad_rows

BATCH = 32
COLUMNS = (
    *("model", "distilled", "passes", "BLEU", "chrF", "Distinct-1/2", "repeats", "length ratio"),
    *("ms a sentence, median", "p90", "speed-up over {}", "sentences a second, batch 32"),
)


@dataclass
class Arm:
    """One model under one search.

    model_name, name: of the model, and with its search.
    passes: of the decoder over a target; "m" for one a token.
    settings: arguments of `generate()`.
    texts: its translations of the complete test set.
    seconds: by number of threads, of each sentence at batch 1; of each batch of 32.
    """

    model_name: str
    name: str
    model: Any
    tokenizer: Any
    passes: str
    settings: dict[str, Any]
    is_distilled: bool
    texts: list[str] = field(default_factory=list)
    single: dict[int, list[float]] = field(default_factory=dict)
    batched: dict[int, list[float]] = field(default_factory=dict)

    def generate(self, inputs: dict[str, Tensor], **settings: Any) -> Any:
        return self.model.generate(**inputs, **self.settings, **settings)

    def decode(self, tokens: Tensor) -> list[str]:
        return self.tokenizer.batch_decode(tokens, skip_special_tokens=True)


def load_arms(options: argparse.Namespace) -> list[Arm]:
    """Return the arms of every model.

    Raises:
        UserError: a model cannot be loaded, or two have one name.
    """
    arms: list[Arm] = []
    for name, _, folder in (pair.partition("=") for pair in options.model):
        if not folder or any(arm.model_name == name for arm in arms):
            raise UserError(f"--model={name}: expected NAME=FOLDER with a new name. Name each model once.")
        model, tokenizer = load_model(folder), load_tokenizer(folder)
        check_tokenizer_fits(model, tokenizer, folder)
        if options.dtype != "plain":
            model = prepare_for_inference(model, options.dtype)
        for search, passes, settings in searches(model.eval(), options):
            distilled = name in options.distilled
            arms.append(Arm(name, f"{name}, {search}", model, tokenizer, passes, settings, distilled))
    if unknown := set(options.distilled) - {arm.model_name for arm in arms}:
        raise UserError(f"--distilled: no model is named {', '.join(sorted(unknown))}. Give names of --model.")
    return arms


def searches(model: Any, options: argparse.Namespace) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the name, the passes and the settings of each search of a model."""
    if is_parallel(model):
        for length_beam in options.lengths:
            for iterations in options.iterations if model.refines else [1]:
                settings = {"num_iterations": iterations, "length_beam_size": length_beam}
                yield f"l = {length_beam}", str(iterations), settings
        return
    names = ("bos_token_id", "pad_token_id", "eos_token_id", "decoder_start_token_id")
    tokens = {name: getattr(model.config, name) for name in names}
    for beams in options.beams:  # the paper's search (6.1)
        penalty = {"length_penalty": 0.6 if beams > 1 else 1.0, "length_penalty_type": "gnmt"}
        config = GenerationConfig(**tokens, num_beams=beams, max_source_relative_length=50, **penalty)
        yield f"beam {beams}", "m", {"generation_config": config}


def read_data(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Return the sources and targets of `--data`, a JSON Lines file or a folder with `test.jsonl.gz`.

    Raises:
        UserError: it cannot be read.
    """
    path = options.data / "test.jsonl.gz" if options.data.is_dir() else options.data
    recipe = DataRecipe(path=str(path.parent), test=path.name, source=options.source, target=options.target)
    pairs = load_pairs(dataclasses.replace(recipe, **dict.fromkeys(("train", "validation"))))["test"]
    return pairs["source"][:], pairs["target"][:]


def encode(arms: list[Arm], sources: list[str]) -> list[list[int]]:
    """Return the token ids of the sources, which every model must share.

    Raises:
        UserError: two models have different token ids.
    """
    encoded = None
    for arm in {arm.model_name: arm for arm in arms}.values():
        ids = text_encoder(arm.tokenizer)(sources)["input_ids"]
        if encoded is not None and ids != encoded:
            raise UserError(
                f"--model={arm.model_name}: its tokenizer gives other tokens than that of {arms[0].model_name}. Give "
                "models that share a vocabulary."
            )
        encoded = ids
    return encoded or []


def padded(rows: list[list[int]]) -> dict[str, Tensor]:
    """Return the inputs of a batch."""
    cpu = torch.device("cpu")
    return {"input_ids": pad_rows(rows, 1, cpu), "attention_mask": pad_rows([[1] * len(row) for row in rows], 0, cpu)}


def in_turn(
    arms: list[Arm], batches: list[list[list[int]]], clock: Callable[[], float]
) -> Iterator[tuple[Arm, int, float, Tensor]]:
    """Yield each arm, a batch number, and the seconds and tokens of the translation; the first arm alternates."""
    for number, rows in enumerate(batches):
        inputs, first = padded(rows), number % len(arms)
        for arm in arms[first:] + arms[:first]:
            start = clock()
            tokens = arm.generate(inputs)
            yield arm, number, clock() - start, tokens


def measure(arms: list[Arm], rows: list[list[int]], threads: int, options: argparse.Namespace) -> None:
    """Time every arm at batch 1 and 32 on `threads` threads, and keep its translations."""
    torch.set_num_threads(threads)
    clock = time.process_time if threads == 1 else time.perf_counter
    order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
    groups = [order[start : start + BATCH] for start in range(0, len(order), BATCH)]
    singles = [[rows[index]] for index in range(min(len(rows), options.warmup + options.sentences))]
    for arm, number, seconds, _ in in_turn(arms, singles, clock):
        if number >= options.warmup:
            arm.single.setdefault(threads, []).append(seconds)
    batches = [[rows[index] for index in group] for group in groups]
    for _ in in_turn(arms, batches[:1], clock):
        pass  # a warm-up
    for arm, number, seconds, tokens in in_turn(arms, batches, clock):
        arm.batched.setdefault(threads, []).append(seconds)
        arm.texts = arm.texts or [""] * len(rows)
        for index, text in zip(groups[number], arm.decode(tokens), strict=True):
            arm.texts[index] = text


def median_ratio(other_seconds: list[float], seconds: list[float]) -> float:
    """Return the median over sentences of how many times as long another arm takes."""
    return statistics.median(other / second for other, second in zip(other_seconds, seconds, strict=True))


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


def history(arms: list[Arm], sources: list[str], references: list[str], count: int) -> str:
    """Return `count` sentences, evenly spaced, as each model's most thorough search translates them, by iteration."""
    chosen = {arm.model_name: arm for arm in arms}.values()  # the last arm of a model has most passes and lengths
    rows, parts = encode(arms, sources), [f"## {count} sentences after each iteration"]
    for index in range(0, len(sources) // count * count, len(sources) // count):
        parts.append(f"Source: {sources[index]}\\\nReference: {references[index]}")
        lines = ["| model | passes | translation |", "| --- | --- | --- |"]
        for arm in chosen:
            inputs = padded([rows[index]])
            if is_parallel(arm.model):
                token_history = arm.generate(inputs, return_dict_in_generate=True, return_history=True).history[:, 0]
                steps = list(enumerate(arm.decode(token_history), start=1))
            else:
                steps = [(arm.passes, arm.decode(arm.generate(inputs))[0])]
            lines += [f"| {arm.name} | {step} | {text.replace('|', chr(92) + '|')} |" for step, text in steps]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def parts_table(arms: list[Arm], rows: list[list[int]], count: int) -> str:
    """Return the share of each part in the CPU time of `count` sentences by one thread, for all parallel arms."""
    torch.set_num_threads(1)
    inputs, names = [padded([row]) for row in rows[:count]], [*PARTS, "rest"]
    lines = [f"| model, passes | {' | '.join(names)} |", f"| {' | '.join(['---'] * (len(names) + 1))} |"]
    for arm in arms:
        if is_parallel(arm.model):
            shares = part_shares(arm.model, arm.generate, inputs, time.process_time)
            cells = [f"{shares[name]:.0%}" if name in shares else "" for name in names]
            lines.append(f"| {arm.name}, {arm.passes} | {' | '.join(cells)} |")
    return "\n".join(["## Share of each part in the time of a sentence", "", *lines]) + "\n"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(
        prog="python -m tests.benchmarks.decode_family",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
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
        parser.add_argument(f"--{name}", type=positive_int, nargs="+", default=default, help=f"{what} ({shown})")
    parser.add_argument("--sentences", type=positive_int, default=300, help="timed one by one (300)")
    parser.add_argument("--warmup", type=int, default=20, help="sentences before them that do not count (20)")
    parser.add_argument("--dtype", choices=("plain", "float32", "bfloat16", "int8"), default="float32")
    parser.add_argument("--history", type=positive_int, metavar="N", help="also N sentences after each iteration")
    parser.add_argument("--parts", action="store_true", help="also where the time goes, for parallel models")
    parser.add_argument("--output", metavar="NAME", help="writes NAME.md and NAME.json")
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
    if options.parts:
        text += "\n" + parts_table(arms, rows, options.warmup + options.sentences)
    print(text)
    if options.output is not None:
        with write_errors(f"--output={options.output}", "the table is printed above"):
            Path(f"{options.output}.md").write_text(text, encoding="utf-8")
            measured["options"] = {name: str(value) for name, value in vars(options).items()}
            Path(f"{options.output}.json").write_text(json.dumps(measured, indent=2) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with torch.inference_mode(), exit_on_user_error():
        run(options)


if __name__ == "__main__":
    main()
