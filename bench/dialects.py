"""A language in which two answers are equally right, which shows how ways of decoding differ.

A source is 3 to 9 of 20 symbols, or as many as a `Language` says. Its target is reversed, without symbol 0 and with
symbol 1 doubled. A coin chooses one of two target vocabularies, the dialects, for the complete sentence. A model that
predicts positions independently mixes the two.

`python -m bench.dialects FAMILY --seed 1 2` trains a model of the family for each seed. For each search it prints the
share of held-out sentences that are right, and the share of words. An IterativeVAE is measured after each layer (with
discrete latents, `discrete`, also with noise). A FlowSeq is measured at temperature 0, and at higher temperatures with
four latents, which it ranks by importance weights.

B batch, S source, T target.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench.measuring import Row, make_parser, pad, report, sources_of
from vaswani_transformer.registration import FAMILIES
from vaswani_transformer.settings import DECODING_STRATEGIES

Batch = dict[str, Any]  # tensors, for `model(**batch)`

FIRST = 4  # the first symbol, after <s>, <pad>, </s> and <mask>
END = 2
MASK = 3
VARIANTS = {"glat": "nat", "ctc-glat": "ctc", "discrete": "iterative_vae"}  # the family of each variant
FIELDS: dict[str, dict[str, Any]] = {  # of the configuration, in addition to the sizes
    "cmlm": {"mask_token_id": MASK, "max_target_length": 30},
    "discrete": {"latent": "discrete"},
}
SEARCHES: dict[str, list[dict[str, Any]]] = {  # arguments of `generate()`
    "autoregressive": [{"max_new_tokens": 20}],
    "nat": [{}],
    "glat": [{}],
    "ctc": [{}],
    "ctc-glat": [{}],
    "dag": [{"decoding_strategy": strategy} for strategy in DECODING_STRATEGIES],
    "cmlm": [{"num_iterations": iterations} for iterations in (1, 4, 10)],
    "iterative_vae": [{}],
    "discrete": [{"do_sample": False}, {"do_sample": True}],
    "flowseq": [
        {"latent_temperature": 0.0},
        {"latent_temperature": 0.5, "num_latent_samples": 4},
        {"latent_temperature": 1.0, "num_latent_samples": 4},
    ],
}
GLANCING: dict[str, Callable[[float], float]] = {"glancing_ratio": lambda progress: 0.5 - 0.2 * progress}
SCHEDULES: dict[str, dict[str, Callable[[float], float]]] = {  # attributes of the model by the progress from 0 to 1
    "glat": GLANCING,
    "ctc-glat": GLANCING,
    "dag": GLANCING,
    "discrete": {"kl_scale": lambda progress: min(1.0, 3 * progress)},
    "flowseq": {"kl_scale": lambda progress: min(1.0, max(0.0, 3 * progress - 1))},  # a third without the prior
}


def encode(sources: list[list[int]]) -> Batch:
    """Return the tokens of the sources and their mask (B, S)."""
    return sources_of([FIRST + symbol for symbol in source] + [END] for source in sources)


def answers_of(sequences: Tensor) -> list[list[int]]:
    """Return the targets, with their ends, of sequences (B, T + 1)."""
    rows = sequences[:, 1:].tolist()
    return [row[: row.index(END) + 1] if END in row else row for row in rows]


def answers_by_layer(model: Any, sources: list[list[int]], **settings: Any) -> list[list[list[int]]]:
    """Return the answers after each layer of a model with a history."""
    generated = model.generate(**encode(sources), return_history=True, return_dict_in_generate=True, **settings)
    return [answers_of(words) for words in generated.history]


@dataclass(frozen=True)
class Language:
    """The language, and the training of a model of it."""

    symbols: int = 20
    lengths: tuple[int, int] = (3, 9)
    d_model: int = 64
    encoder_layers: int = 3
    decoder_layers: int = 3
    steps: int = 1200
    warm_up: float = 1 / 12
    batch_size: int = 64
    learning_rate: float = 1e-3
    held_out: int = 512

    @property
    def sizes(self) -> dict[str, Any]:
        """The sizes of a model of the language, and no noise."""
        return {
            "vocab_size": FIRST + 3 * self.symbols,
            "d_model": self.d_model,
            "encoder_layers": self.encoder_layers,
            "decoder_layers": self.decoder_layers,
            "num_heads": 4,
            "d_ff": 256,
            "dropout": 0.0,
            "label_smoothing": 0.0,
        }

    def target_in(self, dialect: int, source: list[int]) -> list[int]:
        """Return the only target of a source in a dialect, with its end."""
        copies = {0: 0, 1: 2}  # of a symbol in the target; one of each other symbol
        first_word = FIRST + (1 + dialect) * self.symbols
        target = []
        for symbol in reversed(source):
            target += [first_word + symbol] * copies.get(symbol, 1)
        return [*target, END]

    def draw_sources(self, coins: random.Random, count: int) -> list[list[int]]:
        sources = []
        for _ in range(count):
            length = coins.randint(*self.lengths)
            sources.append([coins.randrange(self.symbols) for _ in range(length)])
        return sources

    def held_out_sources(self) -> list[list[int]]:
        return self.draw_sources(random.Random(2), self.held_out)

    def draw_batch(self, coins: random.Random, count: int | None = None) -> Batch:
        """Return random sources, and the target of each in a random dialect."""
        sources = self.draw_sources(coins, self.batch_size if count is None else count)
        batch = encode(sources)
        batch["labels"] = pad((self.target_in(coins.randrange(2), source) for source in sources), -100)
        return batch

    def train(self, model: Any, **schedules: Callable[[float], float]) -> Any:
        """Return the model after `steps` of Adam.

        The learning rate rises over the share `warm_up` of the steps, and falls to 0 over the last third. Each of
        `schedules` sets an attribute of the model by the progress from 0 to 1.
        """
        coins = random.Random(1)
        steps = self.steps
        warm_up = self.warm_up * steps
        optimizer = torch.optim.Adam(model.parameters(), self.learning_rate, betas=(0.9, 0.98), eps=1e-9, fused=True)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / warm_up, 1, 3 * (steps - step) / steps)
        )
        is_flow = hasattr(model, "flow")
        model.train()
        for step in range(steps):
            for attribute, value_at in schedules.items():
                setattr(model, attribute, value_at(step / steps))
            if is_flow and model.kl_scale > 0 and not model.flow.started:  # from now on the loss contains the prior
                model.start_flow(**self.draw_batch(random.Random(3)))

            model(**self.draw_batch(coins)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        return model.eval()

    def train_family(self, family: str, **fields: Any) -> Any:
        """Return a trained model of a family, whose configuration has `fields` too."""
        model_class = FAMILIES[VARIANTS.get(family, family)].model_class
        model = model_class(model_class.config_class(**self.sizes, **FIELDS.get(family, {}), **fields))
        return self.train(model, **SCHEDULES.get(family, {}))

    def share_of_answers(self, sources: list[list[int]], answers: list[list[int]]) -> float:
        """Return the share of answers that are the target in one of the two dialects."""
        right = 0
        for source, answer in zip(sources, answers, strict=True):
            right += answer in (self.target_in(0, source), self.target_in(1, source))
        return right / len(sources)

    def share_of_words(self, sources: list[list[int]], answers: list[list[int]]) -> float:
        """Return the share of words that are right in either dialect; with a wrong length all words are wrong."""
        right = 0
        total = 0
        for source, answer in zip(sources, answers, strict=True):
            words = list(zip(self.target_in(0, source), self.target_in(1, source), strict=True))
            total += len(words)
            if len(answer) == len(words):
                right += sum(word in either for word, either in zip(answer, words, strict=True))
        return right / total

    def share_right(self, model: Any, **settings: Any) -> float:
        """Return the share of held-out sentences whose translation is the target in one of the two dialects."""
        sources = self.held_out_sources()
        return self.share_of_answers(sources, answers_of(model.generate(**encode(sources), **settings)))


def rows_of(family: str, language: Language, seed: int) -> Iterator[Row]:
    """Train a model of a family, and yield the row of each of its searches, or of each layer."""
    sources = language.held_out_sources()
    torch.manual_seed(seed)
    model = language.train_family(family)
    for search in SEARCHES[family]:
        if family in ("iterative_vae", "discrete"):
            by_layer = answers_by_layer(model, sources, **search)
        else:
            by_layer = [answers_of(model.generate(**encode(sources), **search))]
        for layer, answers in enumerate(by_layer, start=1):
            row: Row = {"seed": seed, **search}
            if len(by_layer) > 1:
                row["layer"] = layer
            row["right"] = language.share_of_answers(sources, answers)
            row["right words"] = language.share_of_words(sources, answers)
            yield row


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser("dialects", __doc__, {"steps": 3, "held_out": 8})
    parser.add_argument("family", choices=SEARCHES)
    parser.add_argument("--steps", type=int, default=Language.steps, help=f"training steps ({Language.steps})")
    parser.add_argument("--seed", type=int, nargs="+", default=[1], help="seeds of the weights and of the noise (1)")
    held_out = f"sentences to translate ({Language.held_out})"
    parser.add_argument("--held_out", type=int, default=Language.held_out, help=held_out)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    language = Language(steps=options.steps, held_out=options.held_out)
    rows = [row for seed in options.seed for row in rows_of(options.family, language, seed)]
    report(rows, options)


if __name__ == "__main__":
    main()
