"""Decoding speed of this model and of a MarianMTModel of the same size, timed alternately in one process.

`python -m bench.decode_against_marian --shape=base --beams 4 --batches 1 8 32` decodes the same random sources of about
25 tokens with plain `generate()`. It prints a row for each arm: output tokens a second (the median over rounds) and the
median over rounds of the ratio to Marian. All arms write 27 tokens: their end token is outside of the vocabulary and
never wins, so that no arm runs a logits processor. With `--lengths=mixed` each target has a log-normal length, mean 25,
at which a stopping criterion ends it in every arm.

The arms are our model as it was trained ("ours"), our model prepared for the CPU in "float32", "bfloat16" or "int8",
the same weights in CTranslate2 ("ct2_float32", "ct2_int8"), which can only write equal lengths, and "marian". Marian
always runs, since the ratios are to it. On one thread, seconds are CPU time, which other work on the same core changes
least.
"""

import argparse
import functools
import math
import random
import statistics
import sys
import tempfile
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList
from transformers.utils import logging

from bench import measuring
from bench.measuring import SHAPES
from bench.train_against_marian import make_model
from vaswani_transformer import prepare_for_inference
from vaswani_transformer.convert import to_ctranslate2

ENGINE = "ct2_"  # begins the arms of CTranslate2, whose compute type follows
ARMS = ("ours", "float32", "bfloat16", "int8", "ct2_float32", "ct2_int8", "marian")


class OwnLengths(StoppingCriteria):
    """Ends each target at its own length."""

    def __init__(self, lengths: Tensor) -> None:
        self.lengths = lengths

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        lengths = self.lengths.repeat_interleave(input_ids.shape[0] // len(self.lengths))
        return lengths <= input_ids.shape[1] - 1


def target_lengths(count: int, mix: str) -> Tensor:
    """Return the number of tokens of each of `count` targets, equal or mixed."""
    if mix == "equal":
        return torch.full((count,), measuring.TARGET_LENGTH)
    generator = random.Random(count)
    sigma = 0.6
    lengths = []
    for _ in range(count):
        length = generator.lognormvariate(math.log(25) - sigma**2 / 2, sigma)
        lengths.append(min(max(3, round(length)), 100))
    return torch.tensor(lengths)


def inputs_of(vocab_size: int, beams: int, lengths: Tensor) -> dict[str, Any]:
    """Return the arguments of `generate()` that write a target of each length."""
    longest = int(lengths.max())
    criteria = StoppingCriteriaList([OwnLengths(lengths)] if longest > int(lengths.min()) else [])
    return {
        **measuring.random_sources(len(lengths), vocab_size),
        "generation_config": measuring.endless_search(beams, vocab_size, longest),
        "stopping_criteria": criteria,
    }


def arm_of(name: str, shape: str, beams: int, lengths: Tensor) -> Callable[[], int]:
    """Return a function that decodes a target of each length, and returns how many tokens the longest has."""
    torch.manual_seed(0)
    model: Any = make_model("marian" if name == "marian" else "ours", shape).eval()
    if name.startswith(ENGINE):
        with tempfile.TemporaryDirectory() as folder:
            to_ctranslate2(model, None, folder, force=True)
            translator = import_module("ctranslate2").Translator(
                folder, compute_type=name.removeprefix(ENGINE), intra_threads=torch.get_num_threads(), inter_threads=1
            )
        sources = measuring.random_sources(len(lengths), model.config.vocab_size)
        return measuring.endless_ctranslate2(translator, sources, beams, int(lengths.max()))
    if name not in ("ours", "marian"):
        model = prepare_for_inference(model, name)
    model.generation_config = GenerationConfig(decoder_start_token_id=0, pad_token_id=1)
    inputs = inputs_of(model.config.vocab_size, beams, lengths)
    return lambda: model.generate(**inputs).shape[1] - 1


def seconds(call: Callable[[], int], longest: int) -> float:
    """Return the seconds of a search, which must write `longest` tokens."""
    written: list[int] = []
    taken = measuring.seconds_of(lambda: written.append(call()), measuring.clock())
    if written != [longest]:
        raise RuntimeError(
            f"the search wrote a target of {written[0]} tokens, not {longest}; its time is not comparable"
        )
    return taken


def arms_to_run(arms: list[str], lengths: str) -> list[str]:
    """Return each arm once, and always Marian; arms of CTranslate2 only where they can run."""
    reason = None
    if lengths != "equal":
        reason = f"CTranslate2 does not support a different length for each target (--lengths={lengths})"
    else:
        try:
            import_module("ctranslate2")
        except ImportError as error:
            reason = str(error)
    skipped = [arm for arm in arms if arm.startswith(ENGINE)] if reason else []
    if skipped:
        print(f"Skipping {', '.join(skipped)}: {reason}", file=sys.stderr)
    return [arm for arm in dict.fromkeys([*arms, "marian"]) if arm not in skipped]


def compare(beams: int, count: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the output tokens a second of each arm, and the median over rounds of the ratio to Marian."""
    lengths = target_lengths(count, options.lengths)
    longest = int(lengths.max())
    tokens = int(lengths.sum())
    calls = {arm: arm_of(arm, options.shape, beams, lengths) for arm in options.arms}
    for call in calls.values():
        call()  # the first calls are slow
    timed = {arm: functools.partial(seconds, call, longest) for arm, call in calls.items()}
    times = measuring.in_turns(timed, options.rounds)
    rows = []
    for arm in calls:
        rows.append(
            {
                "arm": arm,
                "batch": count,
                "beams": beams,
                "tokens/s": tokens / statistics.median(times[arm]),
                "ratio to Marian": measuring.median_ratio(times["marian"], times[arm]),
            }
        )
    return rows


def decoding_parser(module: str, description: str | None, rounds: int) -> argparse.ArgumentParser:
    """Return the parser of a command that decodes, without its arms and beams."""
    tiny = {"shape": "tiny", "batches": [2], "rounds": 1}
    parser = measuring.make_parser(module, description, tiny, rounds=rounds, threads=1)
    parser.add_argument("--shape", choices=SHAPES, default="small", help="the model's size (small)")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32], help="batch sizes (1 8 32)")
    parser.add_argument("--lengths", choices=("equal", "mixed"), default="equal", help="of the targets (equal)")
    return parser


def main(arguments: list[str] | None = None) -> None:
    parser = decoding_parser("decode_against_marian", __doc__, rounds=5)
    parser.add_argument("--beams", type=int, nargs="+", default=[1, 4], help="beams of the searches (1 4)")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS, help="arms to compare with Marian (all)")
    options = parser.parse_args(arguments)
    options.arms = arms_to_run(options.arms, options.lengths)
    torch.set_num_threads(options.threads)
    logging.set_verbosity_error()
    with torch.inference_mode():
        rows = [row for beams in options.beams for count in options.batches for row in compare(beams, count, options)]
    measuring.report(rows, options)


if __name__ == "__main__":
    main()
