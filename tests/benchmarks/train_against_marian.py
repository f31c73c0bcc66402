"""Compare the training speed of this model and of MarianMTModel of the same shape, in turn, in one process, on Linux.

`python -m tests.benchmarks.train_against_marian --shape=small --rounds=3 --steps=8` trains the arms in turn on the same
sentences, synthetic token ids with a log-normal mix of lengths of mean 25, each through Seq2SeqTrainer, and prints one
JSON object: real target tokens a second (the median over rounds), the padding share, the share of
the matrix products' peak speed that real tokens reach, the peak memory of a separate process above weights, gradients
and optimizer, and the ratios.

The arms: ours with the paper's Adam, batches by token budget and the model's own label smoothing; Marian with random
batches of a fixed number of sentences, as many as hold the same real tokens on average, and the Trainer's label
smoother; Marian with `group_by_length` too. Each arm's sampler makes the batches of an epoch. A round takes batches
evenly spaced by size, so that few steps represent all: `group_by_length` begins with the longest.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from typing import Any, cast

import datasets
import torch
from torch.utils.data import DataLoader
from transformers import DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments
from transformers.trainer_pt_utils import LabelSmoother
from transformers.utils import logging

from tests.measuring import (
    StepClock,
    in_turns,
    make_pairs,
    make_parser,
    marian_like,
    median_ratio,
    report,
    resident_mib,
    seconds_of,
)
from training.recipe.fields import DataRecipe, Recipe, TrainingRecipe
from training.recipe.flops import pair_lengths, training_flops
from training.run.checks import attention
from training.trainer.trainer import RecipeTrainer
from vaswani_transformer import (
    VaswaniTransformerConfig,
    VaswaniTransformerForConditionalGeneration,
    VaswaniTransformerTokenizer,
)
from vaswani_transformer.loss import projected_cross_entropy

SIZES = ("vocab_size", "d_model", "num_heads", "d_ff", "encoder_layers", "decoder_layers")
SHAPES: dict[str, dict[str, Any]] = {  # what differs from the paper's base model
    "base": {},
    "small": dict(zip(SIZES, (10_000, 256, 4, 1024, 3, 3), strict=True)),
    "tiny": dict(zip(SIZES, (500, 32, 2, 64, 1, 1), strict=True)),
}
ARMS = ("ours", "marian_random", "marian_grouped")
SENTENCES = 20_000  # pairs of an epoch


def sentences(count: int, vocab_size: int) -> datasets.Dataset:
    """Return pairs as lists of token ids, and the length of each source."""
    pairs = make_pairs(count, vocab_size)
    lists = [{name: tokens.tolist() for name, tokens in pair.items()} for pair in pairs]
    return datasets.Dataset.from_list([pair | {"length": len(pair["input_ids"])} for pair in lists])


def sampled(loader: DataLoader, lengths: list[int], count: int, phase: float) -> DataLoader:
    """Return `count` batches of one epoch, evenly spaced in the order of their size, shuffled, after two to warm up.

    The longest of all would take more memory in the base shape than a small machine has.
    """
    batches = list(cast(Iterable[list[int]], loader.batch_sampler))
    batches.sort(key=lambda batch: len(batch) * max(lengths[row] for row in batch))
    chosen = [batches[int((index + phase) * len(batches) / count)] for index in range(count)]
    warm_up = [chosen[-1], chosen[len(chosen) // 2]]
    random.Random(0).shuffle(chosen)
    return DataLoader(loader.dataset, batch_sampler=warm_up + chosen, collate_fn=loader.collate_fn)


def counting(collate: Any, seen: list[dict[str, int]], config: VaswaniTransformerConfig) -> Any:
    """Return a collator that records what each batch holds, and the operations of our model on it."""

    def collated(features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = collate([{name: feature[name] for name in ("input_ids", "labels")} for feature in features])
        sources, targets = pair_lengths(batch)
        seen.append(
            {
                "tokens": int(sources.sum() + targets.sum()),
                "targets": int(targets.sum()),
                "cells": batch["labels"].numel() + batch["input_ids"].numel(),
                "flops": training_flops(config, sources, targets),
            }
        )
        return batch

    return collated


def make_model(arm: str, shape: str) -> torch.nn.Module:
    """Return our model of a shape, or MarianMTModel, with random weights."""
    config = VaswaniTransformerConfig(**SHAPES[shape])
    if arm != "ours":
        return marian_like(config)
    model = VaswaniTransformerForConditionalGeneration(config)
    model.set_attn_implementation(attention(Recipe()))
    return model


def make_trainer(
    arm: str, model: Any, data: datasets.Dataset, tokenizer: Any, options: argparse.Namespace
) -> Seq2SeqTrainer:
    """Return a trainer of an arm for `steps` steps after two to warm up."""
    arguments: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(),
        "max_steps": options.steps + 2,
        "report_to": "none",
        "save_strategy": "no",
        "max_grad_norm": 0,
        "disable_tqdm": True,
        "logging_steps": 10**6,
        "bf16": options.precision == "bf16",
        "use_cpu": not torch.accelerator.is_available(),
        "remove_unused_columns": False,
    }
    recipe = Recipe(
        data=DataRecipe(kind="grammar"),
        training=TrainingRecipe(
            steps=options.steps + 2,
            source_tokens=options.tokens,
            target_tokens=options.tokens,
            device_tokens=options.tokens,
            precision=options.precision,
        ),
    )
    ours = RecipeTrainer(model, Seq2SeqTrainingArguments(**arguments), recipe, tokenizer, data, data)
    if arm == "ours":
        return ours
    arguments |= {"label_smoothing_factor": 0.1, "learning_rate": 3e-4, "optim": "adamw_torch_fused"}
    arguments |= {"per_device_train_batch_size": round(len(data) / len(ours.get_train_dataloader()))}
    if arm == "marian_grouped":
        arguments |= {"train_sampling_strategy": "group_by_length", "length_column_name": "length"}
    return Seq2SeqTrainer(
        model,
        Seq2SeqTrainingArguments(**arguments),
        data_collator=DataCollatorForSeq2Seq(tokenizer, model),
        train_dataset=data,
        processing_class=tokenizer,
    )


def one_round(
    arm: str, model: Any, data: datasets.Dataset, tokenizer: Any, options: argparse.Namespace, phase: float
) -> dict[str, float]:
    """Return speed and padding of one arm over `steps` batches."""
    trainer, clock, seen = make_trainer(arm, model, data, tokenizer, options), StepClock(warm_up=2), []
    loader = trainer.get_train_dataloader()
    trainer.get_train_dataloader = lambda: sampled(loader, data["length"][:], options.steps, phase)
    trainer.data_collator = counting(trainer.data_collator, seen, VaswaniTransformerConfig(**SHAPES[options.shape]))
    loader.collate_fn = trainer.data_collator
    trainer.add_callback(clock)
    trainer.train()
    timed = {name: sum(batch[name] for batch in seen[2:]) for name in seen[0]}
    return {
        "tokens_per_second": timed["targets"] / clock.seconds,
        "padding": 1 - timed["tokens"] / timed["cells"],
        "tokens_per_step": timed["targets"] / options.steps,
        "gemm_share": timed["flops"] / clock.seconds / gemm_peak(options.precision),
    }


def gemm_peak(precision: str) -> float:
    """Return the FLOP a second of a large matrix product, the fastest of several."""
    size = 2048
    device = torch.accelerator.current_accelerator() or "cpu"
    factor = torch.randn(size, size, device=device, dtype=torch.bfloat16 if precision == "bf16" else torch.float32)
    times = [seconds_of(lambda: (factor @ factor)[0, 0].item(), time.perf_counter) for _ in range(6)]
    return 2 * size**3 / min(times)


def memory(arm: str, options: argparse.Namespace) -> dict[str, float]:
    """Return the MiB that an arm needs at its peak above weights, gradients and optimizer, in a separate process.

    One number is that of complete steps, one that of only logits and loss, forward and backward, for the target tokens
    of a step.
    """
    command = [sys.executable, "-m", "tests.benchmarks.train_against_marian", f"--memory_of={arm}"]
    command += [f"--{name}={getattr(options, name)}" for name in ("shape", "tokens", "precision", "threads")]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def measure_memory(arm: str, options: argparse.Namespace) -> dict[str, float]:
    model: Any = make_model(arm, options.shape)
    data, tokenizer = sentences(2000, model.config.vocab_size), make_tokenizer()
    of_loss = loss_memory(arm, model, options)
    weights = sum(weight.numel() * weight.element_size() for weight in model.parameters()) / 2**20
    model.zero_grad()
    before = resident_mib()["now_MiB"]
    options.steps = 4
    make_trainer(arm, model, data, tokenizer, options).train()
    return {"peak_mib": resident_mib()["peak_MiB"] - before - 3 * weights, "loss_peak_mib": of_loss}


def loss_memory(arm: str, model: Any, options: argparse.Namespace) -> float:
    hidden = torch.randn(1, options.tokens, model.config.d_model, requires_grad=True)
    labels = torch.randint(4, model.config.vocab_size, (1, options.tokens))
    gradients = hidden.numel() + model.lm_head.weight.numel()
    before = resident_mib()["now_MiB"]
    with torch.autocast("cpu", torch.bfloat16, enabled=options.precision == "bf16"):
        if arm == "ours":
            loss = projected_cross_entropy(hidden, model.lm_head.weight, labels, smoothing=0.1)
        else:
            loss = LabelSmoother(0.1)({"logits": model.lm_head(hidden) + model.final_logits_bias}, labels)
    loss.backward()
    return resident_mib()["peak_MiB"] - before - 4 * gradients / 2**20


def make_tokenizer() -> VaswaniTransformerTokenizer:
    """Return a tokenizer for padding only."""
    return VaswaniTransformerTokenizer.train_from_iterator(["a"], 300)


def train_in_turn(options: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Return the figures of each arm's rounds."""
    models: dict[str, Any] = {arm: make_model(arm, options.shape) for arm in options.arms}
    vocab_size = next(iter(models.values())).config.vocab_size
    data, tokenizer = sentences(SENTENCES, vocab_size), make_tokenizer()
    phases = {arm: iter((turn + 0.5) / options.rounds for turn in range(options.rounds)) for arm in options.arms}

    def round_of(arm: str) -> Callable[[], dict[str, float]]:
        return lambda: one_round(arm, models[arm], data, tokenizer, options, next(phases[arm]))

    return in_turns({arm: round_of(arm) for arm in options.arms}, options.rounds)


def main() -> None:
    parser = make_parser("tests.benchmarks.train_against_marian", __doc__, rounds=3, threads=1)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--tokens", type=int, default=2048, help="real tokens a side in a step")
    parser.add_argument("--steps", type=int, default=8, help="timed steps a round")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--memory_of", choices=ARMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logging.set_verbosity_error()
    datasets.disable_progress_bars()
    if options.memory_of:
        print(json.dumps(measure_memory(options.memory_of, options)))
        return
    rounds = train_in_turn(options)
    summary = {
        arm: {name: statistics.median(one[name] for one in rounds[arm]) for name in rounds[arm][0]}
        | memory(arm, options)
        for arm in options.arms
    }
    speeds = {arm: [one["tokens_per_second"] for one in rounds[arm]] for arm in options.arms}
    others = [arm for arm in options.arms if arm != "ours" and "ours" in options.arms]
    ratios = {f"ours_to_{arm}": median_ratio(speeds["ours"], speeds[arm]) for arm in others}
    report({"options": vars(options), "torch": torch.__version__, "arms": summary, "ratios": ratios})


if __name__ == "__main__":
    main()
