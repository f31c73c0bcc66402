"""Training speed of this model and of a MarianMTModel of the same size, timed alternately in one process.

`python -m bench.train_against_marian --shape=small --rounds=3 --steps=8` trains each arm on the same sentences, random
token ids of log-normal lengths with mean 25. It prints a row for each arm: target tokens a second without padding (the
median over rounds), the share of padding, the MiB that logits and loss take above weights and gradients, and the ratio
of our speed to the arm's.

The arm "ours" has the paper's Adam, batches by token budget and the model's own label smoothing. The others are Marian
with AdamW and the Trainer's label smoother: "marian" on our batches, "marian_random" on batches of a fixed number of
random sentences with the same mean number of tokens, and "marian_grouped" on such batches of similar lengths, which the
Trainer's `group_by_length` makes. A round takes batches of an epoch that are evenly spaced by size, so that few steps
represent all.
"""

import argparse
import random
import statistics
import tempfile
import time
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler
from transformers import (
    DataCollatorForSeq2Seq,
    PrinterCallback,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
)
from transformers.trainer_pt_utils import LabelSmoother, LengthGroupedSampler
from transformers.utils import logging

from bench.measuring import (
    SHAPES,
    Pairs,
    Row,
    lengths_of,
    make_pairs,
    make_parser,
    marian_like,
    peak_mib,
    report,
    rotated,
)
from vaswani_transformer import (
    TokenBudgetBatchSampler,
    VaswaniTransformerConfig,
    VaswaniTransformerForConditionalGeneration,
    VaswaniTransformerTokenizer,
    paper_adam,
    paper_schedule,
)
from vaswani_transformer.loss import projected_cross_entropy

ARMS = ("ours", "marian", "marian_random", "marian_grouped")
WARM_UP = 2  # steps of a round that are not timed


class StepClock(TrainerCallback):
    """Measures the seconds of the steps after the first WARM_UP ones."""

    seconds = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == WARM_UP:
            self.start = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == state.max_steps:
            self.seconds = time.perf_counter() - self.start


def make_model(arm: str, shape: str) -> Any:
    """Return our model of a shape, or MarianMTModel, with random weights."""
    config = VaswaniTransformerConfig(**SHAPES[shape])
    if arm != "ours":
        return marian_like(config)
    model = VaswaniTransformerForConditionalGeneration(config)
    model.set_attn_implementation("sdpa" if torch.accelerator.is_available() else "eager")
    return model


def size_of(pairs: Pairs) -> int:
    """Return the positions of a batch, padding included."""
    return len(pairs) * sum(map(max, lengths_of(pairs)))


def batches_of(arm: str, pairs: Pairs, tokens: int) -> list[list[int]]:
    """Return the batches of an epoch, the smallest first; `tokens` is the budget of each side."""
    sources, targets = lengths_of(pairs)
    batches = list(TokenBudgetBatchSampler(sources, targets, tokens, tokens))
    size = round(len(pairs) / len(batches))
    if arm == "marian_random":
        batches = list(BatchSampler(RandomSampler(pairs), size, drop_last=True))
    elif arm == "marian_grouped":
        batches = list(BatchSampler(LengthGroupedSampler(size, lengths=sources), size, drop_last=True))
    return sorted(batches, key=lambda batch: size_of([pairs[row] for row in batch]))


def train(arm: str, model: Any, pairs: Pairs, batches: list[list[int]], options: argparse.Namespace) -> float:
    """Return the seconds of the steps on the batches after the first WARM_UP ones."""
    tokenizer = VaswaniTransformerTokenizer.train_from_iterator(["a"], 300)  # the collator pads with it
    collator = DataCollatorForSeq2Seq(tokenizer, model)
    clock = StepClock()
    optimizers: Any = (None, None)  # the Trainer's own
    if arm == "ours":
        adam = paper_adam(model.parameters())
        optimizers = (adam, paper_schedule(adam, model.config.d_model))
    with tempfile.TemporaryDirectory() as folder:
        arguments = Seq2SeqTrainingArguments(
            folder,
            max_steps=len(batches),
            max_grad_norm=0,
            learning_rate=3e-4,
            label_smoothing_factor=0.0 if arm == "ours" else 0.1,
            bf16=options.precision == "bf16",
            use_cpu=not torch.accelerator.is_available(),
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        dataset: Any = pairs
        trainer = Seq2SeqTrainer(model, arguments, collator, dataset, callbacks=[clock], optimizers=optimizers)
        trainer.remove_callback(PrinterCallback)

        # The batches in place of the Trainer's own.
        loader = DataLoader(dataset, batch_sampler=batches, collate_fn=collator)
        trainer.get_train_dataloader = lambda: loader
        trainer.train()
    return clock.seconds


def one_round(
    arm: str, model: Any, pairs: Pairs, batches: list[list[int]], phase: float, options: argparse.Namespace
) -> dict[str, float]:
    """Return speed and padding of one arm over `steps` batches; each round's `phase` from 0 to 1 chooses others."""
    chosen = [batches[int((step + phase) * len(batches) / options.steps)] for step in range(options.steps)]
    warm_up = [chosen[-1], chosen[len(chosen) // 2]]  # the largest, for memory, and a medium one
    random.Random(0).shuffle(chosen)
    seconds = train(arm, model, pairs, warm_up + chosen, options)

    timed = [[pairs[row] for row in batch] for batch in chosen]
    sources, targets = lengths_of([pair for batch in timed for pair in batch])
    positions = sum(size_of(batch) for batch in timed)
    return {
        "target tokens/s": sum(targets) / seconds,
        "padding": 1 - sum(sources + targets) / positions,
    }


def loss_memory(arm: str, model: Any, options: argparse.Namespace) -> float | None:
    """Return the MiB that logits and loss of a step take, forward and backward, above weights and gradients."""
    hidden = torch.randn(1, options.tokens, model.config.d_model, requires_grad=True)
    labels = torch.randint(4, model.config.vocab_size, (1, options.tokens))
    model.zero_grad()

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=options.precision == "bf16"):
            if arm == "ours":
                loss = projected_cross_entropy(hidden, model.lm_head.weight, labels, smoothing=0.1)
            else:
                loss = LabelSmoother(0.1)({"logits": model.lm_head(hidden) + model.final_logits_bias}, labels)
        loss.backward()

    peak = peak_mib(step)
    gradients = hidden.numel() + model.lm_head.weight.numel()
    return None if peak is None else peak - 4 * gradients / 2**20


def measure(options: argparse.Namespace) -> list[Row]:
    """Return the row of each arm."""
    # Every arm has the same pairs.
    invented = make_pairs(options.pairs, VaswaniTransformerConfig(**SHAPES[options.shape]).vocab_size)
    pairs: Any = [{name: tokens.tolist() for name, tokens in pair.items()} for pair in invented]
    models = {arm: make_model(arm, options.shape) for arm in options.arms}
    batches = {arm: batches_of(arm, pairs, options.tokens) for arm in options.arms}
    memory = {arm: loss_memory(arm, models[arm], options) for arm in options.arms}

    # Rounds, in which the arms take turns.
    rounds: dict[str, list[dict[str, float]]] = {arm: [] for arm in options.arms}
    for turn in range(options.rounds):
        phase = (turn + 0.5) / options.rounds
        for arm in rotated(list(options.arms), turn):
            rounds[arm].append(one_round(arm, models[arm], pairs, batches[arm], phase, options))

    rows: list[Row] = []
    for arm, figures in rounds.items():
        row: Row = {"arm": arm}
        for name in figures[0]:
            row[name] = statistics.median(figure[name] for figure in figures)
        row["loss MiB"] = memory[arm]
        rows.append(row)
    ours = next((row["target tokens/s"] for row in rows if row["arm"] == "ours"), None)
    for row in rows:
        row["ours to it"] = None if ours is None else ours / row["target tokens/s"]
    return rows


def main(arguments: list[str] | None = None) -> None:
    tiny = {"shape": "tiny", "pairs": 200, "tokens": 128, "steps": 2, "rounds": 1}
    parser = make_parser("train_against_marian", __doc__, tiny, rounds=3, threads=1)
    parser.add_argument("--shape", choices=SHAPES, default="small", help="the model's size (small)")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="of training (fp32)")
    parser.add_argument("--pairs", type=int, default=20_000, help="pairs of an epoch (20000)")
    parser.add_argument("--tokens", type=int, default=2048, help="most tokens on each side of a step (2048)")
    parser.add_argument("--steps", type=int, default=8, help="timed steps a round (8)")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS, help="what to measure (all)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    logging.set_verbosity_error()
    report(measure(options), options)


if __name__ == "__main__":
    main()
