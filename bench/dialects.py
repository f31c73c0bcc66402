"""A language in which two answers are equally right, which shows how ways of decoding differ.

A source is 3 to 9 of 20 symbols, or what LENGTHS and SYMBOLS say. Its target is reversed, without symbol 0 and with
symbol 1 doubled. A coin chooses one of two target vocabularies for the complete sentence. Positions that are predicted
independently mix the two.

`python -m bench.dialects iterative_vae --kl_scale 0.01 1 --seed 1 2` trains an IterativeVAE for each and prints the
shares of held-out sentences that are right after each layer, without and with noise, and of words. `python -m
bench.dialects flowseq` trains a FlowSeq, a third of the steps without the prior, and prints them at temperature 0, and
of the targets that importance weights rank first of four latents of a temperature.

B batch, S source, T target.
"""

import itertools
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench.measuring import Row, make_parser, report
from vaswani_transformer import (
    VaswaniFlowSeqConfig,
    VaswaniFlowSeqForConditionalGeneration,
    VaswaniIterativeVaeConfig,
    VaswaniIterativeVaeForConditionalGeneration,
)

Batch = dict[str, Any]  # tensors, for `model(**batch)`

SYMBOLS, FIRST = 20, 4  # after <s>, <pad>, </s> and <mask>
END, MASK = 2, 3
SIZES: dict[str, Any] = {
    "vocab_size": FIRST + 3 * SYMBOLS,
    "d_model": 64,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "num_heads": 4,
    "d_ff": 256,
    "dropout": 0.0,
    "label_smoothing": 0.0,
}
LENGTHS = (3, 9)
STEPS, BATCH, LEARNING_RATE, HELD_OUT = 1200, 64, 1e-3, 512


def target_in(dialect: int, source: list[int]) -> list[int]:
    """Return the only target of a source in a dialect, with its end."""
    words = [symbol for symbol in reversed(source) for _ in range((0, 2)[symbol] if symbol < 2 else 1)]
    return [FIRST + (1 + dialect) * SYMBOLS + word for word in words] + [END]


def draw_sources(coins: random.Random, count: int) -> list[list[int]]:
    return [[coins.randrange(SYMBOLS) for _ in range(coins.randint(*LENGTHS))] for _ in range(count)]


def pad(rows: list[list[int]], value: int) -> Tensor:
    width = max(len(row) for row in rows)
    return torch.tensor([row + [value] * (width - len(row)) for row in rows])


def encode(sources: list[list[int]]) -> Batch:
    """Return the tokens of the sources and their mask (B, S)."""
    tokens = pad([[FIRST + symbol for symbol in source] + [END] for source in sources], 1)
    return {"input_ids": tokens, "attention_mask": tokens.ne(1).long()}


def draw_batch(coins: random.Random) -> Batch:
    """Return random sources, and the target of each in a random dialect."""
    sources = draw_sources(coins, BATCH)
    labels = pad([target_in(coins.randrange(2), source) for source in sources], -100)
    return {**encode(sources), "labels": labels}


def train(model: Any, steps: int = STEPS, **schedules: Callable[[float], float]) -> Any:
    """Return the model after `steps` of Adam at LEARNING_RATE, falling to 0 over the last third.

    Each of `schedules` gives an attribute of the model by the progress from 0 to 1.
    """
    coins = random.Random(1)
    optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE, betas=(0.9, 0.98), eps=1e-9)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 100, 1, 3 * (steps - step) / steps)
    )
    model.train()
    for step in range(steps):
        for name, value in schedules.items():
            setattr(model, name, value(step / steps))
        model(**draw_batch(coins)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model.eval()


def answers_of(sequences: Tensor) -> list[list[int]]:
    """Return the targets, with their ends, of sequences (B, T + 1)."""
    rows = sequences[:, 1:].tolist()
    return [row[: row.index(END) + 1] if END in row else row for row in rows]


def share_of_answers(sources: list[list[int]], answers: list[list[int]]) -> float:
    """Return the share of answers that are the target in one of the two dialects."""
    pairs = zip(sources, answers, strict=True)
    return sum(answer in [target_in(dialect, source) for dialect in (0, 1)] for source, answer in pairs) / len(sources)


def share_of_words(sources: list[list[int]], answers: list[list[int]]) -> float:
    """Return the share of words that are right in either dialect; a wrong length makes all words of an answer wrong."""
    right = 0
    for source, answer in zip(sources, answers, strict=True):
        words = list(zip(target_in(0, source), target_in(1, source), strict=True))
        if len(answer) == len(words):
            right += sum(word in either for word, either in zip(answer, words, strict=True))
    return right / sum(len(target_in(0, source)) for source in sources)


def share_right(model: Any, **settings: Any) -> float:
    """Return the share of held-out sentences whose translation is the target in one of the two dialects."""
    sources = draw_sources(random.Random(2), HELD_OUT)
    return share_of_answers(sources, answers_of(model.generate(**encode(sources), **settings)))


def train_iterative_vae(kl_scale: float, steps: int = STEPS) -> VaswaniIterativeVaeForConditionalGeneration:
    """Return an IterativeVAE of the language, trained with divergences that reach their full weight after a third."""
    model = VaswaniIterativeVaeForConditionalGeneration(VaswaniIterativeVaeConfig(**SIZES))
    return train(model, steps, kl_scale=lambda progress: kl_scale * min(1.0, 3 * progress))


def train_flowseq(steps: int = STEPS, sizes: dict[str, Any] = SIZES) -> VaswaniFlowSeqForConditionalGeneration:
    """Return a FlowSeq of the language: a third of the steps without the prior, a third in which its weight rises."""

    class Phases(VaswaniFlowSeqForConditionalGeneration):
        """The model, whose flow starts when its prior first counts."""

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if name == "kl_scale" and value > 0 and not self.flow.started:
                self.start_flow(**draw_batch(random.Random(3)))

    model = Phases(VaswaniFlowSeqConfig(**sizes))
    return train(model, steps, kl_scale=lambda progress: min(1.0, max(0.0, 3 * progress - 1)))


def answers_by_layer(model: Any, sources: list[list[int]], **settings: Any) -> list[list[list[int]]]:
    """Return the answers after each layer of a model with a history."""
    generated = model.generate(**encode(sources), return_history=True, return_dict_in_generate=True, **settings)
    return [answers_of(words) for words in generated.history]


def rows_of_iterative_vae(options: Any) -> list[Row]:
    sources, rows = draw_sources(random.Random(2), options.held_out), []
    for kl_scale, seed in itertools.product(options.kl_scale, options.seed):
        torch.manual_seed(seed)
        model = train_iterative_vae(kl_scale, options.steps)
        plain, noisy = answers_by_layer(model, sources), answers_by_layer(model, sources, do_sample=True)
        for layer, (answers, with_noise) in enumerate(zip(plain, noisy, strict=True), start=1):
            shares = {"right": share_of_answers(sources, answers), "right words": share_of_words(sources, answers)}
            shares["right with noise"] = share_of_answers(sources, with_noise)
            rows.append({"kl_scale": kl_scale, "seed": seed, "layer": layer} | shares)
    return rows


def rows_of_flowseq(options: Any) -> list[Row]:
    sources, rows = draw_sources(random.Random(2), options.held_out), []
    for seed in options.seed:
        torch.manual_seed(seed)
        model: Any = train_flowseq(options.steps)
        for temperature in (0, 0.5, 1):
            settings = {"latent_temperature": temperature, "num_latent_samples": 4} if temperature else {}
            answers = answers_of(model.generate(**encode(sources), **settings))
            shares = {"right": share_of_answers(sources, answers), "right words": share_of_words(sources, answers)}
            rows.append({"seed": seed, "temperature": temperature} | shares)
    return rows


def main(arguments: list[str] | None = None) -> None:
    families = {"iterative_vae": rows_of_iterative_vae, "flowseq": rows_of_flowseq}
    parser = make_parser("dialects", __doc__, {"steps": 3, "held_out": 8})
    parser.add_argument("family", choices=families)
    parser.add_argument("--steps", type=int, default=STEPS, help="of training")
    parser.add_argument("--kl_scale", type=float, nargs="+", default=[1.0], help="of IterativeVAE, later in training")
    parser.add_argument("--seed", type=int, nargs="+", default=[1], help="of the weights, the dropout and the noise")
    parser.add_argument("--held_out", type=int, default=HELD_OUT, help="sentences to translate")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    report(families[options.family](options), options)


if __name__ == "__main__":
    main()
