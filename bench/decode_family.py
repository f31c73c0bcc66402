"""Quality and speed of saved models of every family on one test set, in turn, in one process, as one table.

`python -m bench.decode_family --model "AR=runs/teacher" --model "NAT=runs/nat" --data=FOLDER --tokenize=none` takes
each autoregressive model at every beam of `--beams`, each other one that predicts a length at every length beam of
`--lengths`, and a CMLM also at every count of `--iterations`. The models have to share a vocabulary, up to `<mask>`.

Models are prepared for the CPU. A time is that of one `generate()`, from token ids to token ids. Every arm translates
each sentence, or batch, in turn, and each time another arm is first. The first `--warmup` sentences do not count. With
one thread, seconds are CPU time, which other work on the same core changes least; with more, clock time. A speed-up is
the median over sentences of the ratio of both arms' times. Quality is measured on the complete set, at predicted
lengths, in batches of 32.
"""

import argparse
import gzip
import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from sacrebleu.significance import PairedTest
from torch import Tensor
from transformers import GenerationConfig
from transformers.utils import logging

from bench.measuring import Row, clock, make_parser, median_ratio, report, rotated, sources_of, table
from training.metrics import bleu, bleu_metric, chrf, text_statistics
from vaswani_transformer import prepare_for_inference
from vaswani_transformer.support.errors import UserError, exit_on_user_error
from vaswani_transformer.support.loading import load_model, load_tokenizer
from vaswani_transformer.support.modes import is_non_autoregressive
from vaswani_transformer.tokenizer import check_vocabulary, text_encoder

BATCH = 32


@dataclass
class Arm:
    """One model under one search.

    Attributes:
        model_name, name: of the model, and with its search.
        passes: of the decoder over a target; "m" for one a token.
        settings: arguments of `generate()`.
        texts: its translations of the complete test set.
        single, batched: by number of threads, the seconds of each sentence at batch 1, and of each batch of 32.
    """

    model_name: str
    name: str
    model: Any
    tokenizer: Any
    passes: str
    settings: dict[str, Any]
    is_distilled: bool
    texts: list[str] = field(default_factory=list)
    single: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    batched: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))

    def generate(self, inputs: dict[str, Tensor], **settings: Any) -> Any:
        return self.model.generate(**inputs, **self.settings, **settings)

    def decode(self, tokens: Tensor) -> list[str]:
        return self.tokenizer.batch_decode(tokens, skip_special_tokens=True)


def load_arms(options: argparse.Namespace) -> list[Arm]:
    """Return the arms of every model."""
    arms: list[Arm] = []
    for name, _, folder in (pair.partition("=") for pair in options.model):
        model = load_model(folder)
        tokenizer = load_tokenizer(folder)
        check_vocabulary(model, tokenizer)
        if options.dtype != "plain":
            model = prepare_for_inference(model, options.dtype)
        for search, passes, settings in searches(model.eval(), options):
            arms.append(Arm(name, f"{name}, {search}", model, tokenizer, passes, settings, name in options.distilled))
    return arms


def searches(model: Any, options: argparse.Namespace) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the name, the passes and the settings of each search of a model."""
    if is_non_autoregressive(model):
        for length_beam in options.lengths if model.num_length_classes > 1 else [1]:
            for iterations in options.iterations if "num_iterations" in model.family_settings else [1]:
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
    """Return the sources and targets of `--data`, a JSON Lines file or a folder with `test.jsonl.gz`."""
    path = options.data / "test.jsonl.gz" if options.data.is_dir() else options.data
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file if line.strip()]
    pairs = [row.get("translation", row) for row in rows]
    return [pair[options.source].strip() for pair in pairs], [pair[options.target].strip() for pair in pairs]


def encode(arms: list[Arm], sources: list[str]) -> list[list[int]]:
    """Return the token ids of the sources, which every model must share."""
    encoded = None
    for arm in {arm.model_name: arm for arm in arms}.values():
        ids = text_encoder(arm.tokenizer)(sources)["input_ids"]
        if encoded is not None and ids != encoded:
            raise UserError(
                f"--model={arm.model_name}: its tokenizer returns different tokens from that of {arms[0].model_name}. "
                "Choose models that share a vocabulary."
            )
        encoded = ids
    return encoded or []


def interleaved(
    arms: list[Arm], batches: list[list[list[int]]], now: Callable[[], float]
) -> Iterator[tuple[Arm, int, float, Tensor]]:
    """Yield each arm, a batch number, and the seconds and tokens of the translation; the first arm alternates."""
    for number, rows in enumerate(batches):
        inputs = sources_of(rows)
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
            arm.single[threads].append(seconds)
    batches = [[rows[index] for index in group] for group in groups]
    for _ in interleaved(arms, batches[:1], now):
        pass  # a warm-up
    for arm, number, seconds, tokens in interleaved(arms, batches, now):
        arm.batched[threads].append(seconds)
        arm.texts = arm.texts or [""] * len(rows)
        for index, text in zip(groups[number], arm.decode(tokens), strict=True):
            arm.texts[index] = text


def bootstrap_intervals(arms: list[Arm], references: list[str], tokenize: str) -> list[str]:
    """Return the 95% interval of each arm's BLEU over 1,000 bootstrap samples of the sentences."""
    metrics: dict[str, Any] = {"BLEU": bleu_metric(tokenize)}
    scores: Any = PairedTest([(arm.name, arm.texts) for arm in arms], metrics, [references], test_type="bs")()[1]
    return [f"{score.mean - score.ci:.2f} to {score.mean + score.ci:.2f}" for score in scores["BLEU"]]


def without_repeats(text: str) -> str:
    """Return a text in which equal neighbors are one word."""
    return " ".join(word for word, _ in groupby(text.split()))


def results(arms: list[Arm], references: list[str], options: argparse.Namespace) -> list[Row]:
    """Return a row for each arm and number of threads."""
    intervals = bootstrap_intervals(arms, references, options.tokenize)
    first = next((arm.model_name for arm in arms if arm.passes == "m"), None)
    baselines = [arm for arm in arms if arm.model_name == first and arm.passes == "m"]
    rows = []
    for arm, interval in zip(arms, intervals, strict=True):
        collapsed = bleu([without_repeats(text) for text in arm.texts], references, options.tokenize)
        scores = bleu(arm.texts, references, options.tokenize)
        statistic = text_statistics(arm.texts, references)
        for threads in options.threads:
            seconds = sorted(arm.single[threads])
            rows.append(
                {
                    **{"model": arm.name, "distilled": arm.is_distilled, "passes": arm.passes, "threads": threads},
                    **{"BLEU": f"{scores['score']:.2f}", "BP": f"{scores['brevity_penalty']:.3f}"},
                    **{"95% interval": interval, "BLEU without repeats": f"{collapsed['score']:.2f}"},
                    "chrF": f"{chrf(arm.texts, references)['score']:.2f}",
                    "Distinct-1/2": f"{statistic['distinct_1']:.3f} / {statistic['distinct_2']:.3f}",
                    **{"repeats": f"{statistic['repeats']:.2%}", "length ratio": f"{statistic['length_ratio']:.3f}"},
                    "ms a sentence, median": 1000 * statistics.median(seconds),
                    "p90": 1000 * seconds[min(len(seconds) - 1, int(0.9 * len(seconds)))],
                    **{
                        f"speed-up over {base.name}": median_ratio(base.single[threads], arm.single[threads])
                        for base in baselines
                    },
                    "sentences a second, batch 32": len(references) / sum(arm.batched[threads]),
                    "signature": scores["signature"],
                }
            )
    return rows


def history(arms: list[Arm], sources: list[str], references: list[str], count: int) -> list[Row]:
    """Return `count` sentences, evenly spaced, as each model's most thorough search translates them, by iteration."""
    chosen = {arm.model_name: arm for arm in arms}.values()  # the last arm of a model has most passes and lengths
    encoded = encode(arms, sources)
    rows = []
    for index in range(0, len(sources) // count * count, len(sources) // count):
        rows += [{"model": name, "text": texts[index]} for name, texts in (("source", sources), ("target", references))]
        for arm in chosen:
            inputs = sources_of([encoded[index]])
            if is_non_autoregressive(arm.model):
                tokens = arm.generate(inputs, return_dict_in_generate=True, return_history=True).history[:, 0]
                steps = list(enumerate(arm.decode(tokens), start=1))
            else:
                steps = [(arm.passes, arm.decode(arm.generate(inputs))[0])]
            rows += [{"model": arm.name, "text": text, "pass": step} for step, text in steps]
    return rows


def refinement(arms: list[Arm], sources: list[str], references: list[str], tokenize: str) -> list[Row]:
    """Return the scores of what each model's most thorough search has after each iteration, or each layer."""
    table_rows = []
    for arm in {arm.model_name: arm for arm in arms if is_non_autoregressive(arm.model)}.values():
        rows = encode([arm], sources)
        texts: list[list[str]] = []  # by iteration
        changed = Counter[int]()
        tokens = 0
        for start in range(0, len(rows), BATCH):
            inputs = sources_of(rows[start : start + BATCH])
            output = arm.generate(inputs, return_dict_in_generate=True, return_history=True)
            steps = output.history[:, :, 1:]  # (R, B, T)
            is_real = torch.arange(steps.shape[2]) < output.lengths[:, None]  # (B, T)
            texts = [old + arm.decode(step) for old, step in zip(texts or [[]] * len(steps), steps, strict=True)]
            changed.update({i + 1: int(((steps[i] != steps[i - 1]) & is_real).sum()) for i in range(1, len(steps))})
            tokens += int(is_real.sum())
        for number, outputs in enumerate(texts, start=1):
            score = bleu(outputs, references, tokenize)
            scores = {
                **{"BLEU": f"{score['score']:.2f}", "BP": f"{score['brevity_penalty']:.3f}"},
                "repeats": f"{text_statistics(outputs, references)['repeats']:.2%}",
            }
            share = f"{changed[number] / tokens:.1%}" if number > 1 else None
            table_rows.append({"model": arm.name, "iteration or layer": number} | scores | {"tokens changed": share})
    return table_rows


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = make_parser("decode_family", __doc__, {"sentences": 4, "warmup": 2, "threads": [1]})
    parser.add_argument("--model", action="append", required=True, metavar="NAME=FOLDER", help="once for each model")
    parser.add_argument("--distilled", nargs="+", default=[], metavar="NAME", help="models trained on distilled data")
    parser.add_argument("--data", type=Path, required=True, help="JSON Lines, or a folder with test.jsonl.gz")
    parser.add_argument("--source", default="en", help="the source language (en)")
    parser.add_argument("--target", default="de", help="the target language (de)")
    parser.add_argument("--tokenize", default="13a", help="sacreBLEU's tokenizer; none for tokenized data (13a)")
    for name, default, what in (
        ("beams", [1, 4], "of autoregressive models"),
        ("lengths", [1, 5], "length beams of the others"),
        ("iterations", [1, 4, 10], "of a CMLM"),
        ("threads", [1, 2], "numbers of threads"),
    ):
        shown = " ".join(map(str, default))
        parser.add_argument(f"--{name}", type=int, nargs="+", default=default, help=f"{what} ({shown})")
    parser.add_argument("--sentences", type=int, default=300, help="timed one by one (300)")
    parser.add_argument("--warmup", type=int, default=20, help="sentences before them that do not count (20)")
    parser.add_argument("--dtype", choices=("plain", "float32", "bfloat16", "int8"), default="float32")
    parser.add_argument("--history", type=int, metavar="N", help="also N sentences after each iteration")
    parser.add_argument("--refinement", action="store_true", help="also the scores after each iteration or layer")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with torch.inference_mode(), exit_on_user_error(ValueError):
        sources, references = read_data(options)
        arms = load_arms(options)
        rows = encode(arms, sources)
        for threads in options.threads:
            measure(arms, rows, threads, options)
        report(results(arms, references, options), options)
        if options.history is not None:
            print(
                "\nAfter each iteration or layer:\n",
                table(history(arms, sources, references, options.history)),
                sep="\n",
            )
        if options.refinement:
            print("\nRefinement:\n", table(refinement(arms, sources, references, options.tokenize)), sep="\n")


if __name__ == "__main__":
    main()
