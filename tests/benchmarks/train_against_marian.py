"""Training speed of this model and of Transformers' MarianMTModel of the same shape, in turn, in one process, on Linux.

`python -m tests.benchmarks.train_against_marian --shape=small --rounds=3 --steps=8` trains the arms in turn on the same
sentences, synthetic token ids with a log-normal mix of lengths of mean 25, each through Seq2SeqTrainer, and prints one
JSON object: real target tokens a second (the median over rounds), the share of cells that are padding, the peak memory
of a process of its own above model and optimiser, and the ratios.

The arms: ours with the paper's Adam, batches by token budget and the model's own label smoothing; Marian with random
batches of a fixed number of sentences, as many as hold the same real tokens on average, and the Trainer's label
smoother; Marian with `group_by_length` beside it.
"""

import argparse
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any, cast

import datasets
import torch
from transformers import (
    DataCollatorForSeq2Seq,
    MarianConfig,
    MarianMTModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
)
from transformers.utils import logging

from training.recipe import DataRecipe, Recipe, TrainingRecipe
from training.trainer import TranslationTrainer
from vaswani_transformer import (
    VaswaniTransformerConfig,
    VaswaniTransformerForConditionalGeneration,
    VaswaniTransformerTokenizer,
)

SHAPES = {
    "base": {"layers": 6, "d_model": 512, "d_ff": 2048, "heads": 8, "vocab_size": 37_000},
    "small": {"layers": 3, "d_model": 256, "d_ff": 1024, "heads": 4, "vocab_size": 10_000},
    "tiny": {"layers": 1, "d_model": 32, "d_ff": 64, "heads": 2, "vocab_size": 500},
}
ARMS = ("ours", "marian_random", "marian_grouped")
MEAN_LENGTH = 25


def sentences(count: int, vocab_size: int) -> datasets.Dataset:
    """Pairs of random token ids; lengths are log-normal with mean 25, targets within a fifth of their sources."""
    generator = random.Random(0)
    sigma = 0.6
    rows = []
    for _ in range(count):
        length = max(3, round(generator.lognormvariate(math.log(MEAN_LENGTH) - sigma**2 / 2, sigma)))
        other = max(3, round(length * generator.uniform(0.85, 1.15)))
        rows.append(
            {
                "input_ids": [generator.randrange(4, vocab_size) for _ in range(length - 1)] + [2],
                "labels": [generator.randrange(4, vocab_size) for _ in range(other - 1)] + [2],
                "length": length,
            }
        )
    return datasets.Dataset.from_list(rows)


class Clock(TrainerCallback):
    """Seconds and real target tokens of every step but the first two, which warm up."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.steps = 0
        self.start: float | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            self.start = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.start is not None:
            self.seconds, self.steps = time.perf_counter() - self.start, state.global_step - 2


def counting(collate: Any, seen: list[tuple[int, int, int]]) -> Any:
    """A collator that notes each batch's real target tokens, all real tokens and all cells."""

    def collated(features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = collate([{name: feature[name] for name in ("input_ids", "labels")} for feature in features])
        targets = int(batch["labels"].ne(-100).sum())
        seen.append(
            (
                targets,
                targets + int(batch["attention_mask"].sum()),
                batch["labels"].numel() + batch["input_ids"].numel(),
            )
        )
        return batch

    return collated


def make_model(arm: str, shape: dict[str, int]) -> torch.nn.Module:
    common = {"vocab_size": shape["vocab_size"], "d_model": shape["d_model"], "dropout": 0.1}
    common |= {"encoder_layers": shape["layers"], "decoder_layers": shape["layers"]}
    if arm == "ours":
        config = VaswaniTransformerConfig(num_heads=shape["heads"], d_ff=shape["d_ff"], **cast(Any, common))
        return VaswaniTransformerForConditionalGeneration(config)
    sides = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in (("attention_heads", shape["heads"]), ("ffn_dim", shape["d_ff"]))
    }
    ids = {
        "pad_token_id": 1,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "decoder_start_token_id": 0,
        "forced_eos_token_id": 2,
    }
    extra = {"activation_function": "relu", "scale_embedding": True, "max_position_embeddings": 512}
    return MarianMTModel(MarianConfig(**cast(Any, common | sides | ids | extra)))


def make_trainer(
    arm: str, model: torch.nn.Module, data: datasets.Dataset, tokenizer: Any, options: argparse.Namespace
) -> tuple[Any, Clock, list]:
    """The arm's trainer, its clock, and the list that its batches are noted in."""
    seen: list[tuple[int, int, int]] = []
    clock = Clock()
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
        "per_device_train_batch_size": max(1, options.tokens // MEAN_LENGTH),
    }
    if arm == "ours":
        recipe = Recipe(
            data=DataRecipe(kind="grammar"),
            training=TrainingRecipe(
                steps=options.steps + 2,
                source_tokens=options.tokens,
                target_tokens=options.tokens,
                device_tokens=options.tokens,
            ),
        )
        trainer = TranslationTrainer(
            cast(Any, model), Seq2SeqTrainingArguments(**arguments), recipe, tokenizer, data, data
        )
    else:
        arguments |= {"label_smoothing_factor": 0.1, "learning_rate": 3e-4, "optim": "adamw_torch_fused"}
        if arm == "marian_grouped":
            arguments |= {"train_sampling_strategy": "group_by_length", "length_column_name": "length"}
        trainer = Seq2SeqTrainer(
            cast(Any, model),
            Seq2SeqTrainingArguments(**arguments),
            data_collator=DataCollatorForSeq2Seq(tokenizer, model),
            train_dataset=cast(Any, data),
            processing_class=tokenizer,
        )
    trainer.data_collator = counting(trainer.data_collator, seen)
    trainer.add_callback(clock)
    return trainer, clock, seen


def one_round(
    arm: str, model: torch.nn.Module, data: datasets.Dataset, tokenizer: Any, options: argparse.Namespace
) -> dict[str, float]:
    trainer, clock, seen = make_trainer(arm, model, data, tokenizer, options)
    trainer.train()
    timed = seen[2 : 2 + clock.steps]
    targets, tokens, cells = (sum(column) for column in zip(*timed, strict=True))
    return {
        "tokens_per_second": targets / clock.seconds,
        "padding": 1 - tokens / cells,
        "tokens_per_step": targets / len(timed),
    }


def memory(arm: str, options: argparse.Namespace) -> float:
    """MiB that the training of one arm takes at its peak above its model, gradients and optimiser, in a new process."""
    command = [sys.executable, "-m", "tests.benchmarks.train_against_marian", f"--memory_of={arm}"]
    command += [f"--{name}={getattr(options, name)}" for name in ("shape", "tokens", "precision", "threads")]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def resident(field: str) -> float:
    """MiB of this process now ("VmRSS") or at its peak ("VmHWM", which unlike getrusage forgets the parent's)."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(f"{field}:")) / 1024


def measure_memory(arm: str, options: argparse.Namespace) -> float:
    shape = SHAPES[options.shape]
    model, data, tokenizer = make_model(arm, shape), sentences(2000, shape["vocab_size"]), make_tokenizer()
    weights = sum(weight.numel() * weight.element_size() for weight in model.parameters()) / 2**20
    before = resident("VmRSS")
    options.steps = 4
    make_trainer(arm, model, data, tokenizer, options)[0].train()
    return resident("VmHWM") - before - 3 * weights


def make_tokenizer() -> VaswaniTransformerTokenizer:
    """One that pads; it never sees a text."""
    return VaswaniTransformerTokenizer.train_from_iterator(["a"], 300)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--tokens", type=int, default=2048, help="real tokens a side in a step")
    parser.add_argument("--steps", type=int, default=8, help="timed steps a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--memory_of", choices=ARMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logging.set_verbosity_error()
    datasets.disable_progress_bars()
    if options.memory_of:
        print(measure_memory(options.memory_of, options))
        return
    shape = SHAPES[options.shape]
    data, tokenizer = sentences(6000, shape["vocab_size"]), make_tokenizer()
    models = {arm: make_model(arm, shape) for arm in ARMS}
    rounds: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    for _ in range(options.rounds):
        for arm in ARMS:
            rounds[arm].append(one_round(arm, models[arm], data, tokenizer, options))
    found = {
        arm: {name: statistics.median(one[name] for one in rounds[arm]) for name in rounds[arm][0]}
        | {"peak_mib": memory(arm, options)}
        for arm in ARMS
    }
    ratios = {
        f"ours_to_{arm}": statistics.median(
            ours["tokens_per_second"] / theirs["tokens_per_second"]
            for ours, theirs in zip(rounds["ours"], rounds[arm], strict=True)
        )
        for arm in ARMS[1:]
    }
    print(json.dumps({"options": vars(options), "torch": torch.__version__, "arms": found, "ratios": ratios}, indent=2))


if __name__ == "__main__":
    main()
