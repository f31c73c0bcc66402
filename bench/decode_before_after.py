"""Compare the decoding speed of this checkout with a different one: in turn, in one process, with the same tokens.

`git worktree add ../before COMMIT`, then `python -m bench.decode_before_after ../before --shape=small
--batches 1 8 32` decodes the same random sources by both and prints a row an arm and batch: the median over rounds of
the ratio of the other checkout's seconds to this one's, so that 1.2 is 1.2 times as fast as before. A round takes the
other checkout, this one twice and the other again, because a second call in succession finds its weights in the CPU's
caches. All arms but int8 must write the same tokens. `decode_against_marian` explains the options that both have.
"""

import argparse
import functools
import importlib
import statistics
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.utils import logging

from bench.decode_against_marian import decoding_parser, inputs_of, seconds, target_lengths
from bench.measuring import report
from bench.train_against_marian import make_model
from vaswani_transformer import prepare_for_inference

BEFORE = "vaswani_transformer_before"


def import_before(checkout: Path) -> tuple[Any, Any]:
    """Return the model's module of a different checkout and its `prepare_for_inference`; those of this one stay."""
    package = types.ModuleType(BEFORE)  # without its __init__, which would register its classes in place of ours
    package.__path__ = [str(checkout / "vaswani_transformer")]
    sys.modules[BEFORE] = package
    modules = [importlib.import_module(f"{BEFORE}.{name}") for name in ("model", "cpu.model")]
    return modules[0], modules[1].prepare_for_inference


def calls(
    options: argparse.Namespace, arm: str, lengths: Tensor, before: tuple[Any, Any]
) -> list[Callable[[], Tensor]]:
    """Return the search of the other checkout and of this one, over the same weights."""
    torch.manual_seed(0)
    ours: Any = make_model("ours", options.shape).eval()
    config = importlib.import_module(f"{BEFORE}.config").VaswaniTransformerConfig(**ours.config.to_diff_dict())
    other = before[0].VaswaniTransformerForConditionalGeneration(config).eval()
    other.load_state_dict(ours.state_dict())
    other.set_attn_implementation(ours.config._attn_implementation)
    models: list[Any] = [other, ours]
    if arm != "plain":
        prepares = (before[1], prepare_for_inference)
        models = [prepare(model, arm) for prepare, model in zip(prepares, models, strict=True)]
    inputs = inputs_of(config.vocab_size, options.beams, lengths)
    for model in models:
        model.generation_config = GenerationConfig(decoder_start_token_id=0, pad_token_id=1)
    return [functools.partial(model.generate, **inputs) for model in models]


def compare(arm: str, count: int, before: tuple[Any, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of both checkouts, round by round, and the median of their ratios."""
    lengths = target_lengths(count, options.lengths)
    longest = int(lengths.max())
    searches = calls(options, arm, lengths, before)
    tokens_before, tokens_after = (call() for call in searches)
    if arm != "int8" and not torch.equal(tokens_before, tokens_after):
        raise RuntimeError(f"{arm}, beam {options.beams}, batch {count}: the checkouts find different tokens.")
    rounds = []
    for _ in range(options.rounds):
        taken = [0.0, 0.0]
        for side in (0, 1, 1, 0):
            taken[side] += seconds(lambda side=side: searches[side]().shape[1] - 1, longest) / 2
        rounds.append(taken)
    ratios = sorted(before / after for before, after in rounds)
    milliseconds = [1000 * statistics.median(side) for side in zip(*rounds, strict=True)]
    return {
        **{"arm": arm, "beams": options.beams, "batch": count},
        "same tokens": torch.equal(tokens_before, tokens_after),
        **dict(zip(("ms before", "ms now"), milliseconds, strict=True)),
        "ratio": statistics.median(ratios),
        "quartiles": f"{ratios[len(ratios) // 4]:.3f} to {ratios[-1 - len(ratios) // 4]:.3f}",
    }


def main(arguments: list[str] | None = None) -> None:
    parser = decoding_parser("decode_before_after", __doc__, rounds=9)
    parser.add_argument("before", type=Path, help="another checkout")
    parser.add_argument(
        "--arms", nargs="+", choices=("plain", "float32", "bfloat16", "int8"), default=["float32", "int8"]
    )
    parser.add_argument("--beams", type=int, default=4)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    logging.set_verbosity_error()
    before = import_before(options.before)
    with torch.inference_mode():
        report([compare(arm, count, before, options) for arm in options.arms for count in options.batches], options)


if __name__ == "__main__":
    main()
