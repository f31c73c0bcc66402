"""Compare the decoding speed of this checkout with that of an earlier one, alternately in one process.

Make an earlier checkout with `git worktree add ../before COMMIT`. Then `python -m bench.decode_before_after ../before
--shape=small --batches 1 8 32` decodes the same random sources with both. It prints a row for each arm and batch size,
with the median over rounds of the seconds before divided by the seconds now: 1.2 means 1.2 times as fast as before. A
round calls the earlier checkout, this one twice and the earlier one again, because a second call in succession finds
its weights in the CPU's caches. Both must write the same tokens, except in int8. `decode_against_marian` explains the
options that it shares.
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
    """Return the model's module of the earlier checkout and its `prepare_for_inference`; this checkout's stay."""
    package = types.ModuleType(BEFORE)  # without its __init__, which would register its classes in place of ours
    package.__path__ = [str(checkout / "vaswani_transformer")]
    sys.modules[BEFORE] = package
    model_module = importlib.import_module(f"{BEFORE}.model")
    return model_module, importlib.import_module(f"{BEFORE}.cpu.model").prepare_for_inference


def calls(
    options: argparse.Namespace, arm: str, lengths: Tensor, before: tuple[Any, Any]
) -> list[Callable[[], Tensor]]:
    """Return the search of the earlier checkout and of this one, over the same weights."""
    model_module, prepare_before = before
    torch.manual_seed(0)
    model: Any = make_model("ours", options.shape).eval()
    config = importlib.import_module(f"{BEFORE}.config").VaswaniTransformerConfig(**model.config.to_diff_dict())
    earlier = model_module.VaswaniTransformerForConditionalGeneration(config).eval()
    earlier.load_state_dict(model.state_dict())
    earlier.set_attn_implementation(model.config._attn_implementation)
    if arm != "plain":
        earlier = prepare_before(earlier, arm)
        model = prepare_for_inference(model, arm)
    models: list[Any] = [earlier, model]

    inputs = inputs_of(config.vocab_size, options.beams, lengths)
    for model in models:
        model.generation_config = GenerationConfig(decoder_start_token_id=0, pad_token_id=1)
    return [functools.partial(model.generate, **inputs) for model in models]


def compare(arm: str, count: int, before: tuple[Any, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Return the median milliseconds of both checkouts, and the median and the quartiles of their ratios."""
    lengths = target_lengths(count, options.lengths)
    longest = int(lengths.max())
    searches = calls(options, arm, lengths, before)
    tokens_before, tokens_now = (search() for search in searches)
    is_same = torch.equal(tokens_before, tokens_now)
    if arm != "int8" and not is_same:
        raise RuntimeError(f"{arm}, beam {options.beams}, batch {count}: the checkouts write different tokens.")

    # The means of the two calls of each checkout in a round.
    rounds = []
    for _ in range(options.rounds):
        taken = [0.0, 0.0]
        for index in (0, 1, 1, 0):
            taken[index] += seconds(lambda index=index: searches[index]().shape[1] - 1, longest) / 2
        rounds.append(taken)

    seconds_before, seconds_now = zip(*rounds, strict=True)
    ratios = sorted(earlier / now for earlier, now in rounds)
    return {
        "arm": arm,
        "beams": options.beams,
        "batch": count,
        "same tokens": is_same,
        "ms before": 1000 * statistics.median(seconds_before),
        "ms now": 1000 * statistics.median(seconds_now),
        "ratio": statistics.median(ratios),
        "quartiles": f"{ratios[len(ratios) // 4]:.3f} to {ratios[-1 - len(ratios) // 4]:.3f}",
    }


def main(arguments: list[str] | None = None) -> None:
    parser = decoding_parser("decode_before_after", __doc__, rounds=9)
    parser.add_argument("before", type=Path, help="folder of the earlier checkout")
    arms = ("plain", "float32", "bfloat16", "int8")
    help_text = "plain, or prepared in these dtypes (float32 int8)"
    parser.add_argument("--arms", nargs="+", choices=arms, default=["float32", "int8"], help=help_text)
    parser.add_argument("--beams", type=int, default=4, help="beams of the search (4)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    logging.set_verbosity_error()
    before = import_before(options.before)
    with torch.inference_mode():
        report([compare(arm, count, before, options) for arm in options.arms for count in options.batches], options)


if __name__ == "__main__":
    main()
