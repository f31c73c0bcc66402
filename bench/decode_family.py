"""Quality and speed of saved models of every family on one test set, timed alternately in one process, as one table.

`python -m bench.decode_family --model "AR=runs/teacher" --model "NAT=runs/nat" --data=FOLDER --tokenize=none` measures
arms, each a model with a search. An autoregressive model searches with every beam of `--beams`, a model that predicts
lengths with every length beam of `--lengths`, a CMLM also with every number of `--iterations`, CTC with every beam of
`--ctc_beams`, and DAG with every strategy. The models have to share a vocabulary, up to `<mask>`. With
`--rerank=FOLDER` each search of a non-autoregressive model that finds several translations is also measured with this
teacher's choice among them; its time includes the tokenization of the candidates.

Models of `--untimed`, such as those of further seeds, are only scored. `--counts=FOLDER` writes a file for each model
with the counts of each sentence, from which `bench.family_table` computes all scores. They include the likelihood under
a language model of the targets in `--lm`, the folder of a distillation.

The search of CTC adds a `length_bonus` for each token. Of several `--length_bonuses` a CTC model gets the one with the
highest BLEU on validation.jsonl.gz, the mean over its seeds (names that end in `-SEED`).

Models are prepared for the CPU. A time is that of one `generate()`, from token ids to token ids. All arms translate a
sentence, or a batch, before the next one, and each time a different arm begins. The first `--warmup` sentences do not
count. With one thread, seconds are CPU time, which other work on the same core changes least; with more, clock time.
A speed-up is the median over sentences of the ratio of both arms' times. Quality is measured on the complete set, at
predicted lengths, in batches of 32.
"""

import argparse
import gzip
import json
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.utils import logging

from bench.family_table import model_of
from bench.measuring import Row, clock, make_parser, median_ratio, peak_mib, report, report_more, rotated, sources_of
from bench.sentence_counts import translation_counts, write_counts
from training.tasks import TrigramModel, bleu, bleu_metric, chrf, p_value, paired_test, text_statistics
from vaswani_transformer import prepare_for_inference, score_targets
from vaswani_transformer.settings import DECODING_STRATEGIES
from vaswani_transformer.support.command import UserError, exit_on_user_error
from vaswani_transformer.support.loading import is_non_autoregressive, load_model, load_tokenizer
from vaswani_transformer.tokenizer import check_vocabulary, source_encoder, text_encoder
from vaswani_transformer.translation.reranking import teacher_scores
from vaswani_transformer.translation.targets import TargetScorer
from vaswani_transformer.translation.translator import Translator, width_setting

BATCH = 32


@dataclass
class Arm:
    """One model under one search.

    Attributes:
        model_name: the model's name.
        name: the name of the model and its search.
        passes: passes of the decoder over a target; "m" for one pass per token.
        settings: arguments of `generate()`.
        is_distilled: whether the model was trained on distilled data.
        teacher: scorer of the model that chooses among the candidates of the search (`--rerank`).
        texts: its translations of the complete test set.
        single: the seconds of each sentence at batch 1, by number of threads.
        batched: the seconds of each batch of 32, by number of threads.
    """

    model_name: str
    name: str
    model: Any
    tokenizer: Any
    passes: str
    settings: dict[str, Any]
    is_distilled: bool
    teacher: TargetScorer | None = None
    texts: list[str] = field(default_factory=list)
    single: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    batched: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))

    def generate(self, inputs: dict[str, Tensor], **settings: Any) -> Any:
        output = self.model.generate(**inputs, **self.settings, **settings)
        return output if self.teacher is None else self.teachers_choice(inputs["input_ids"], output)

    def teachers_choice(self, sources: Tensor, candidates: Tensor) -> Tensor:
        """Return the candidate of each source (B, S) that the teacher finds best among `candidates` (n B, T)."""
        texts = self.decode(candidates)
        count = len(candidates) // len(sources)
        grouped = [texts[start : start + count] for start in range(0, len(texts), count)]
        scores = torch.tensor(teacher_scores(cast(TargetScorer, self.teacher), self.decode(sources), grouped))  # (B, n)
        return candidates[scores.argmax(1) + count * torch.arange(len(sources))]

    def decode(self, tokens: Tensor) -> list[str]:
        return self.tokenizer.batch_decode(tokens, skip_special_tokens=True)


def load_arms(options: argparse.Namespace) -> list[Arm]:
    """Return the arms of every model."""
    arms: list[Arm] = []
    teacher = None
    if options.rerank is not None:
        model, tokenizer = load_prepared(options.rerank, options.dtype)
        teacher = TargetScorer(model, tokenizer)
    for name, _, folder in (pair.partition("=") for pair in options.model):
        model, tokenizer = load_prepared(folder, options.dtype)
        is_distilled = name in options.distilled
        for search, passes, settings in searches(model, options):
            arm = Arm(name, f"{name}, {search}", model, tokenizer, passes, settings, is_distilled)
            arms.append(arm)
            if teacher is not None and is_non_autoregressive(model):
                arms += reranked(arm, teacher)
    if teacher is not None and all(arm.teacher is None for arm in arms):
        raise UserError(
            f"--rerank={options.rerank}: no search finds more than one translation; expected one with several lengths "
            "or beams. Choose larger --lengths or --ctc_beams."
        )
    return arms


def is_timed(arm: Arm, options: argparse.Namespace) -> bool:
    return arm.model_name not in options.untimed


def load_prepared(folder: str, dtype: str) -> tuple[Any, Any]:
    """Return the model of a folder, prepared for the CPU unless `dtype` is plain, and its tokenizer."""
    model = load_model(folder)
    tokenizer = load_tokenizer(folder)
    check_vocabulary(model, tokenizer)
    return (model if dtype == "plain" else prepare_for_inference(model, dtype)).eval(), tokenizer


def reranked(arm: Arm, teacher: TargetScorer) -> list[Arm]:
    """Return the arm in which a teacher chooses among all candidates of the search, or none if there is only one."""
    candidates = int(Translator(arm.model, arm.tokenizer, **arm.settings).most_hypotheses)
    if candidates == 1:
        return []
    settings = {**arm.settings, "num_return_sequences": candidates}
    name = f"{arm.name}; reranked"
    return [Arm(arm.model_name, name, arm.model, arm.tokenizer, arm.passes, settings, arm.is_distilled, teacher)]


def searches(model: Any, options: argparse.Namespace) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the name, the passes and the settings of each search of a model."""
    if "decoding_strategy" in getattr(model, "family_settings", ()):
        for strategy in DECODING_STRATEGIES:
            yield strategy, "1", {"decoding_strategy": strategy}
        return
    if is_non_autoregressive(model) and width_setting(model) == "num_beams":
        for beams in options.ctc_beams:
            settings: dict[str, Any] = {"num_beams": beams, "length_bonus": 0.0}
            yield "best path" if beams == 1 else f"beam {beams}", "1", settings
        return
    if is_non_autoregressive(model):
        iteration_counts = options.iterations if "num_iterations" in model.family_settings else [1]
        for length_beam in options.lengths:
            for iterations in iteration_counts:
                settings = {"num_iterations": iterations, "length_beam_size": length_beam}
                name = counted(length_beam, "length")
                if len(iteration_counts) > 1:
                    name += f"; {counted(iterations, 'iteration')}"
                yield name, str(iterations), settings
        return

    # The paper's search (6.1), whatever search was saved with the model.
    for beams in options.beams:
        config = GenerationConfig(
            bos_token_id=model.config.bos_token_id,
            pad_token_id=model.config.pad_token_id,
            eos_token_id=model.config.eos_token_id,
            decoder_start_token_id=model.config.decoder_start_token_id,
            num_beams=beams,
            length_penalty=0.6 if beams > 1 else 1.0,
            length_penalty_type="gnmt",
            max_source_relative_length=50,
        )
        yield f"beam {beams}", "m", {"generation_config": config}


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def read_data(options: argparse.Namespace, split: str = "test") -> tuple[list[str], list[str]]:
    """Return the sources and targets of `--data`, a JSON Lines file or a folder with a file of each split."""
    path = options.data / f"{split}.jsonl.gz" if options.data.is_dir() else options.data
    open_text = gzip.open if path.suffix == ".gz" else open
    with open_text(path, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file if line.strip()]
    pairs = [row.get("translation", row) for row in rows]
    sources = [pair[options.source].strip() for pair in pairs]
    references = [pair[options.target].strip() for pair in pairs]
    return sources, references


def last_arms(arms: list[Arm]) -> list[Arm]:
    """Return the last arm of each model, whose own search has the most passes and lengths."""
    return list({arm.model_name: arm for arm in arms if arm.teacher is None}.values())


def encode(arms: list[Arm], sources: list[str]) -> list[list[int]]:
    """Return the token ids of the sources, which every model must share."""
    encoded = None
    for arm in last_arms(arms):
        ids = source_encoder(arm.tokenizer)(sources)["input_ids"]
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


def groups_by_length(rows: list[list[int]]) -> list[list[int]]:
    """Return the indices of sources in batches of 32 of similar lengths."""
    order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
    return [order[start : start + BATCH] for start in range(0, len(order), BATCH)]


def measure(arms: list[Arm], rows: list[list[int]], threads: int, options: argparse.Namespace) -> None:
    """Time every arm at batch 1 and 32 on `threads` threads, and keep its translations."""
    torch.set_num_threads(threads)
    now = clock(threads)

    # One by one.
    singles = [[row] for row in rows[: options.warmup + options.sentences]]
    for arm, number, seconds, _ in interleaved(arms, singles, now):
        if number >= options.warmup:
            arm.single[threads].append(seconds)

    # In batches of similar lengths, the first of which is also the warm-up.
    groups = groups_by_length(rows)
    batches = [[rows[index] for index in group] for group in groups]
    for _ in interleaved(arms, batches[:1], now):
        pass
    for arm, number, seconds, tokens in interleaved(arms, batches, now):
        arm.batched[threads].append(seconds)
        arm.texts = arm.texts or [""] * len(rows)
        for index, text in zip(groups[number], arm.decode(tokens), strict=True):
            arm.texts[index] = text


def choose_length_bonus(arms: list[Arm], options: argparse.Namespace) -> None:
    """Set the `length_bonus` of the searches of CTC to the best one of `--length_bonuses` on validation data.

    Each model has its own, which is the same for all its seeds.
    """
    searching = [arm for arm in arms if arm.settings.get("num_beams", 1) > 1]
    if not searching:
        return
    first, *others = options.length_bonuses
    for arm in searching:
        arm.settings["length_bonus"] = first
    if not others:
        return
    if not options.data.is_dir():
        raise UserError(
            f"--data={options.data}: the length bonus of CTC is chosen on validation data; got a file, expected a "
            "folder with validation.jsonl.gz too. Or set --length_bonuses to one number."
        )
    sources, references = read_data(options, "validation")
    rows = encode(arms, sources)
    for model in dict.fromkeys(model_of(arm.model_name) for arm in searching):
        own = [arm for arm in searching if model_of(arm.model_name) == model]
        scores = {}
        for bonus in options.length_bonuses:
            texts = [translations(arm, rows, length_bonus=bonus) for arm in own if arm.teacher is None]
            scores[bonus] = statistics.mean(bleu(text, references, options.tokenize)["score"] for text in texts)
            line = f"{model}, length_bonus {bonus:g}: {scores[bonus]:.2f} BLEU on validation"
            print(line, file=sys.stderr, flush=True)
        best = max(scores, key=scores.__getitem__)
        for arm in own:
            arm.settings["length_bonus"] = best


def translations(arm: Arm, rows: list[list[int]], **settings: Any) -> list[str]:
    """Return an arm's translations of sources, with further arguments of `generate()`, in batches of 32."""
    texts = [""] * len(rows)
    for group in groups_by_length(rows):
        settings_of_batch = {**arm.settings, **settings}
        tokens = replace(arm, settings=settings_of_batch).generate(sources_of([rows[index] for index in group]))
        for index, text in zip(group, arm.decode(tokens), strict=True):
            texts[index] = text
    return texts


def write_all_counts(arms: list[Arm], sources: list[str], references: list[str], options: argparse.Namespace) -> None:
    """Write the counts of each model's searches, and the likelihood of the references, into the folder `--counts`."""
    language_model = None
    if options.lm is not None:
        files = sorted(options.lm.glob("*.jsonl"))
        lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
        language_model = TrigramModel(json.loads(line)["translation"][options.target] for line in lines)
    options.counts.mkdir(parents=True, exist_ok=True)
    for name, arms_of_model in groupby(arms, key=lambda arm: arm.model_name):
        searches_of_model = list(arms_of_model)
        own = likelihoods(searches_of_model[0], sources, references)
        counts = {}
        for arm in searches_of_model:
            rows = translation_counts(arm.texts, references, sources, options.tokenize, language_model)
            rows[:, -own.shape[1] :] = own
            counts[arm.name.removeprefix(f"{name}, ")] = rows
        write_counts(options.counts / f"{name}.csv.gz", counts)


def likelihoods(arm: Arm, sources: list[str], references: list[str]) -> np.ndarray:
    """Return the columns `nll`, `length_nll` and `tokens` (N, 3) of the references under an arm's model."""
    rows = []
    for score in score_targets(arm.model, arm.tokenizer, sources, references):
        total, of_length = score.log_probability, score.length_log_probability
        rows.append((-total, np.nan if of_length is None else -of_length, len(score.tokens)))
    return np.array(rows)


def bootstrap_intervals(arms: list[Arm], references: list[str], tokenize: str) -> list[str]:
    """Return the 95% interval of each arm's BLEU over 1,000 bootstrap samples of the sentences."""
    metrics: dict[str, Any] = {"BLEU": bleu_metric(tokenize)}
    scores = paired_test([(arm.name, arm.texts) for arm in arms], metrics, references)[1]
    return [f"{score.mean - score.ci:.2f} to {score.mean + score.ci:.2f}" for score in scores["BLEU"]]


def significance(arms: list[Arm], references: list[str], tokenize: str) -> list[Row]:
    """Return for each arm the p values of its differences in BLEU to the others, by sacreBLEU's paired bootstrap."""
    metrics: dict[str, Any] = {"BLEU": bleu_metric(tokenize)}
    rows = []
    for arm in arms:
        others = [other for other in arms if other is not arm]
        results = paired_test([(other.name, other.texts) for other in (arm, *others)], metrics, references)[1]["BLEU"]
        row: Row = {"model": arm.name, **dict.fromkeys(other.name for other in arms)}
        for other, result in zip(others, results[1:], strict=True):
            row[other.name] = p_value(results[0], result)
        rows.append(row)
    return rows


def without_repeats(text: str) -> str:
    """Return a text in which equal neighbors are one word."""
    return " ".join(word for word, _ in groupby(text.split()))


def quality(arm: Arm, references: list[str], interval: str, tokenize: str) -> Row:
    """Return the scores of an arm's translations, and statistics of them."""
    scores = bleu(arm.texts, references, tokenize)
    collapsed = bleu([without_repeats(text) for text in arm.texts], references, tokenize)
    statistic = text_statistics(arm.texts, references)
    return {
        "BLEU": f"{scores['score']:.2f}",
        "BP": f"{scores['brevity_penalty']:.3f}",
        "95% interval": interval,
        "BLEU without repeats": f"{collapsed['score']:.2f}",
        "chrF": f"{chrf(arm.texts, references)['score']:.2f}",
        "Distinct-1/2": f"{statistic['distinct_1']:.3f} / {statistic['distinct_2']:.3f}",
        "repeats": f"{statistic['repeats']:.2%}",
        "length ratio": f"{statistic['length_ratio']:.3f}",
        "signature": scores["signature"],
    }


def speed(arm: Arm, baselines: list[Arm], threads: int, sentences: int) -> Row:
    """Return an arm's times on a number of threads; `sentences` are in the complete test set."""
    seconds = sorted(arm.single[threads])
    row: Row = {
        "ms a sentence, median": 1000 * statistics.median(seconds),
        "p90": 1000 * seconds[min(len(seconds) - 1, int(0.9 * len(seconds)))],
    }
    for base in baselines:
        row[f"speed-up over {base.name}"] = median_ratio(base.single[threads], arm.single[threads])
    row["sentences a second, batch 32"] = sentences / sum(arm.batched[threads])
    return row


def memory(arm: Arm, rows: list[list[int]]) -> Row:
    """Return the MiB of a model's weights, and how many more the batch with the longest sources needs at its peak."""
    sources = sources_of([rows[index] for index in groups_by_length(rows)[-1]])
    peak = peak_mib(lambda: arm.generate(sources))
    return {"MiB of weights": arm.model.get_memory_footprint() / 2**20, "MiB more, batch 32": peak}


def results(arms: list[Arm], sources: list[list[int]], references: list[str], options: argparse.Namespace) -> list[Row]:
    """Return a row for each arm and number of threads; speed-ups are over the first autoregressive model."""
    autoregressive = [arm for arm in arms if arm.passes == "m"]
    baselines = [arm for arm in autoregressive if arm.model_name == autoregressive[0].model_name]
    intervals = bootstrap_intervals(arms, references, options.tokenize)
    rows = []
    for arm, interval in zip(arms, intervals, strict=True):
        scores = quality(arm, references, interval, options.tokenize)
        signature = scores.pop("signature")  # long, so it is the last column
        for threads in options.threads:
            row: Row = {"model": arm.name, "distilled": arm.is_distilled, "passes": arm.passes, "threads": threads}
            if "length_bonus" in arm.settings:
                row["length bonus"] = arm.settings["length_bonus"]
            row.update(scores)
            row.update(speed(arm, baselines, threads, len(references)))
            row.update(memory(arm, sources))
            row["signature"] = signature
            rows.append(row)
    return rows


def history(arms: list[Arm], sources: list[str], references: list[str], count: int) -> list[Row]:
    """Return `count` sentences, evenly spaced, as each model's most thorough search translates them, by iteration."""
    encoded = encode(arms, sources)
    step = len(sources) // count
    rows = []
    for index in range(0, step * count, step):
        rows.append({"model": "source", "text": sources[index]})
        rows.append({"model": "target", "text": references[index]})
        for arm in last_arms(arms):
            for step, text in passes_of(arm, sources_of([encoded[index]])):
                rows.append({"model": arm.name, "text": text, "pass": step})
    return rows


def passes_of(arm: Arm, inputs: dict[str, Tensor]) -> list[tuple[int | str, str]]:
    """Return the translation of one source after each iteration or layer, in bold the words that later layers know."""
    if not is_non_autoregressive(arm.model):
        return [(arm.passes, arm.decode(arm.generate(inputs))[0])]
    output = arm.generate(inputs, return_dict_in_generate=True, return_history=True)
    iterations = output.history[:, 0]  # (R, 1 + T)
    texts = arm.decode(iterations)
    if output.committed is not None:
        for layer in range(len(texts) - 1):
            texts[layer] = mark_committed(arm, iterations[layer, 1:], output.committed[layer, 0])
    return list(enumerate(texts, start=1))


def mark_committed(arm: Arm, tokens: Tensor, is_committed: Tensor) -> str:
    """Return the text of `tokens` (T,), with the words in bold whose tokens are all committed."""
    words = arm.decode(tokens[None])[0].split()
    is_bold = [True] * len(words)
    before = ""
    for index in range(len(tokens)):
        text = arm.decode(tokens[None, : index + 1])[0]
        number = len(text.split())  # of the word that this token belongs to
        if number and text != before and not is_committed[index]:  # a special token adds no text
            is_bold[number - 1] = False
        before = text
    return " ".join(f"**{word}**" if bold else word for word, bold in zip(words, is_bold, strict=True))


def refinement(arms: list[Arm], sources: list[str], references: list[str], tokenize: str) -> list[Row]:
    """Return the scores of what each model's most thorough search has after each iteration, or each layer."""
    table_rows = []
    for arm in last_arms(arms):
        if not is_non_autoregressive(arm.model):
            continue

        # What each iteration writes, and how many tokens it changes.
        texts: dict[int, list[str]] = defaultdict(list)
        changed = Counter[int]()
        tokens = 0
        rows = encode([arm], sources)
        for start in range(0, len(rows), BATCH):
            inputs = sources_of(rows[start : start + BATCH])
            output = arm.generate(inputs, return_dict_in_generate=True, return_history=True)
            iterations = output.history[:, :, 1:]  # (R, B, T)
            is_real = torch.arange(iterations.shape[2]) < output.lengths[:, None]  # (B, T)
            tokens += int(is_real.sum())
            for number, written in enumerate(iterations, start=1):
                texts[number] += arm.decode(written)
            for number, (before, after) in enumerate(pairwise(iterations), start=2):
                changed[number] += int(((before != after) & is_real).sum())

        for number, outputs in texts.items():
            score = bleu(outputs, references, tokenize)
            table_rows.append(
                {
                    "model": arm.name,
                    "iteration or layer": number,
                    "BLEU": f"{score['score']:.2f}",
                    "BP": f"{score['brevity_penalty']:.3f}",
                    "repeats": f"{text_statistics(outputs, references)['repeats']:.2%}",
                    "tokens changed": f"{changed[number] / tokens:.1%}" if number > 1 else None,
                }
            )
    return table_rows


def at_reference_lengths(arms: list[Arm], sources: list[str], references: list[str], tokenize: str) -> list[Row]:
    """Return the scores of models that predict lengths, if they get those of the references instead."""
    rows = []
    for arm in last_arms(arms):
        if not is_non_autoregressive(arm.model) or arm.model.num_length_classes == 1:
            continue
        encoded = encode([arm], sources)
        targets = text_encoder(arm.tokenizer)(text_target=references)["input_ids"]
        texts: list[str] = []
        for start in range(0, len(encoded), BATCH):
            lengths = torch.tensor([[len(target)] for target in targets[start : start + BATCH]])  # (B, 1)
            chosen = lengths, torch.ones_like(lengths, dtype=torch.bool)
            # `generate()` has no argument for lengths.
            with patch.object(arm.model, "choose_lengths", return_value=chosen):
                texts += arm.decode(arm.generate(sources_of(encoded[start : start + BATCH])))
        score = bleu(texts, references, tokenize)
        repeats = text_statistics(texts, references)["repeats"]
        rows.append({"model": arm.model_name, "BLEU": f"{score['score']:.2f}", "repeats": f"{repeats:.2%}"})
    return rows


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = make_parser("decode_family", __doc__, {"sentences": 4, "warmup": 2, "threads": [1]})
    parser.add_argument("--model", action="append", required=True, metavar="NAME=FOLDER", help="repeat for each model")
    parser.add_argument("--distilled", nargs="+", default=[], metavar="NAME", help="models trained on distilled data")
    parser.add_argument("--data", type=Path, required=True, help="JSON Lines file, or folder with test.jsonl.gz")
    parser.add_argument("--source", default="en", help="the source language (en)")
    parser.add_argument("--target", default="de", help="the target language (de)")
    parser.add_argument("--tokenize", default="13a", help="sacreBLEU's tokenizer; none for tokenized data (13a)")
    for name, default, meaning in (
        ("beams", [1, 4], "beams of autoregressive models"),
        ("lengths", [1, 5], "length beams of models that predict lengths"),
        ("iterations", [1, 4, 10], "iterations of a CMLM"),
        ("ctc_beams", [1, 8], "beams of CTC; 1 for the best path"),
        ("threads", [1, 2], "numbers of threads"),
    ):
        shown = " ".join(map(str, default))
        parser.add_argument(f"--{name}", type=int, nargs="+", default=default, help=f"{meaning} ({shown})")
    bonuses = [0.0, 0.25, 0.5, 0.75, 1.0]
    bonus_help = f"CTC's length bonus; of several the best on validation data ({' '.join(map(str, bonuses))})"
    parser.add_argument("--length_bonuses", type=float, nargs="+", default=bonuses, metavar="B", help=bonus_help)
    untimed = "models that are only scored, such as those of further seeds"
    parser.add_argument("--untimed", nargs="+", default=[], metavar="NAME", help=untimed)
    parser.add_argument(
        "--counts", type=Path, metavar="FOLDER", help="write the counts of each sentence to this folder"
    )
    parser.add_argument(
        "--lm", type=Path, metavar="FOLDER", help="distilled targets for the language model of --counts"
    )
    parser.add_argument("--rerank", metavar="FOLDER", help="also measure the choice of this teacher among translations")
    parser.add_argument("--sentences", type=int, default=300, help="sentences timed one by one (300)")
    parser.add_argument("--warmup", type=int, default=20, help="untimed sentences before them (20)")
    dtypes = ("plain", "float32", "bfloat16", "int8")
    parser.add_argument("--dtype", choices=dtypes, default="float32", help="of the prepared models (float32)")
    parser.add_argument("--history", type=int, metavar="N", help="also print N sentences after each iteration")
    parser.add_argument("--significance", action="store_true", help="also print p values of all differences in BLEU")
    parser.add_argument("--refinement", action="store_true", help="also print the scores after each iteration or layer")
    parser.add_argument("--reference_lengths", action="store_true", help="also print the scores at these lengths")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with torch.inference_mode(), exit_on_user_error(ValueError):
        if {pair.partition("=")[0] for pair in options.model} <= set(options.untimed):
            raise UserError("--untimed: names every model; expected one that is timed. Leave one out.")
        sources, references = read_data(options)
        arms = load_arms(options)
        rows = encode(arms, sources)
        choose_length_bonus(arms, options)
        every_arm, arms = arms, [arm for arm in arms if is_timed(arm, options)]
        for threads in options.threads:
            measure(arms, rows, threads, options)
        for arm in every_arm:
            arm.texts = arm.texts or translations(arm, rows)
        if options.counts is not None:
            write_all_counts(every_arm, sources, references, options)
        report(results(arms, rows, references, options), options)
        if options.significance:
            report_more("significance", significance(arms, references, options.tokenize), options)
        if options.reference_lengths:
            scores = at_reference_lengths(arms, sources, references, options.tokenize)
            report_more("reference lengths", scores, options)
        if options.history is not None:
            report_more("history", history(arms, sources, references, options.history), options)
        if options.refinement:
            report_more("refinement", refinement(arms, sources, references, options.tokenize), options)


if __name__ == "__main__":
    main()
