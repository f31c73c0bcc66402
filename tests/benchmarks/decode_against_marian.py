"""Decoding speed of this model and of Transformers' MarianMTModel of the same shape, in turn, in one process.

`python -m tests.benchmarks.decode_against_marian --shape=base --beams 4 --batches 1 8 32` decodes the same random
sources of about 25 tokens with plain `generate()` and prints one JSON object: output tokens a second (the median over
rounds) and the ratios to Marian's, round by round. Both sides write 27 tokens: their end token is outside of the
vocabulary and never wins, so that neither runs a logits processor. With `--lengths=mixed` each source has a log-normal
number of tokens to write, mean 25, at which a stopping criterion ends it on both sides.

The arms: ours as it is trained; ours prepared for the CPU in "float32", "bfloat16" or "int8"; the same weights in
CTranslate2 ("ct2_float32", "ct2_int8"), which can only write equal lengths; Marian, which every run has, since the
ratios are to it. On one thread the seconds are those of the CPU, which other work on the same core changes least.
"""

import argparse
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList
from transformers.utils import logging

from tests.benchmarks.train_against_marian import SHAPES, make_model
from vaswani_transformer import prepare_for_inference
from vaswani_transformer.convert import to_ctranslate2
from vaswani_transformer.translation.ctranslate2_engine import import_ctranslate2

SOURCE_LENGTH, TARGET_LENGTH = 25, 27
ENGINE = "ct2_"  # CTranslate2, before how it computes
ARMS = ("ours", "float32", "bfloat16", "int8", "ct2_float32", "ct2_int8", "marian")


def sources(count: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return random sources of 22 to 28 tokens, padded (B, S), and their mask."""
    generator = random.Random(count)
    lengths = [generator.randint(SOURCE_LENGTH - 3, SOURCE_LENGTH + 3) for _ in range(count)]
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    tokens = torch.randint(4, vocab_size, mask.shape, generator=torch.Generator().manual_seed(count))
    return tokens.masked_fill(~mask, 1), mask.long()


class OwnLengths(StoppingCriteria):
    """Ends each target at its own length."""

    def __init__(self, lengths: Tensor) -> None:
        self.lengths = lengths

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        lengths = self.lengths.repeat_interleave(input_ids.shape[0] // len(self.lengths))
        return lengths <= input_ids.shape[1] - 1


def target_lengths(count: int, mix: str) -> Tensor:
    """Return the number of tokens of each of `count` targets."""
    if mix == "equal":
        return torch.full((count,), TARGET_LENGTH)
    generator, sigma = random.Random(count), 0.6
    drawn = (generator.lognormvariate(math.log(25) - sigma**2 / 2, sigma) for _ in range(count))
    return torch.tensor([min(max(3, round(length)), 100) for length in drawn])


def search(beams: int, vocab_size: int, longest: int) -> GenerationConfig:
    """Return the settings of beam search, or greedy search, up to `longest` new tokens."""
    return GenerationConfig(
        max_new_tokens=longest,
        num_beams=beams,
        decoder_start_token_id=0,
        pad_token_id=1,
        eos_token_id=vocab_size,
        do_sample=False,
    )


def engine_of(name: str, model: Any, beams: int, lengths: Tensor) -> Callable[[], int]:
    """Return the function of `arm_of` for CTranslate2, with the model's weights."""
    with tempfile.TemporaryDirectory() as folder:
        to_ctranslate2(model, None, folder, force=True)
        translator = import_ctranslate2().Translator(
            folder, compute_type=name.removeprefix(ENGINE), intra_threads=torch.get_num_threads(), inter_threads=1
        )
    ids, mask = sources(len(lengths), model.config.vocab_size)
    texts = [[str(token) for token in row[is_token.bool()].tolist()] for row, is_token in zip(ids, mask, strict=True)]
    longest = int(lengths.max())
    options = {"beam_size": beams, "max_decoding_length": longest, "min_decoding_length": longest}
    return lambda: min(len(result.hypotheses[0]) for result in translator.translate_batch(texts, **options))


def arm_of(name: str, shape: dict[str, int], beams: int, lengths: Tensor) -> Callable[[], int]:
    """Return a function that decodes a target of each length, and returns the length of the longest."""
    torch.manual_seed(0)
    model: Any = make_model("marian" if name == "marian" else "ours", shape).eval()
    if name.startswith(ENGINE):
        return engine_of(name, model, beams, lengths)
    if name not in ("ours", "marian"):
        model = prepare_for_inference(model, name)
    ids, mask = sources(len(lengths), shape["vocab_size"])
    longest = int(lengths.max())
    config = search(beams, shape["vocab_size"], longest)
    criteria = StoppingCriteriaList([OwnLengths(lengths)] if longest > int(lengths.min()) else [])
    model.generation_config = GenerationConfig(decoder_start_token_id=0, pad_token_id=1)
    inputs = {"input_ids": ids, "attention_mask": mask, "generation_config": config, "stopping_criteria": criteria}
    return lambda: model.generate(**inputs).shape[1] - 1


def seconds(call: Callable[[], int], longest: int) -> float:
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    written = call()
    taken = clock() - start
    if written != longest:
        raise RuntimeError(f"{written} tokens were written, not {longest}; the figures would not compare.")
    return taken


def arms_to_run(arms: list[str], lengths: str) -> list[str]:
    """Return each arm once, without those of CTranslate2 where they cannot run, and always with Marian."""
    reason = None
    if lengths != "equal":
        reason = f"CTranslate2 has no lengths of each target's own, as --lengths={lengths} wants them"
    else:
        try:
            import_ctranslate2()
        except ImportError as error:
            reason = str(error)
    left_out = [arm for arm in arms if arm.startswith(ENGINE) and reason]
    if left_out:
        print(f"Without {', '.join(left_out)}: {reason}", file=sys.stderr)
    return [arm for arm in dict.fromkeys([*arms, "marian"]) if arm not in left_out]


def compare(shape: dict[str, int], beams: int, count: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return the output tokens a second of each arm, and the medians of the ratios to Marian's, round by round."""
    lengths = target_lengths(count, options.lengths)
    calls = {arm: arm_of(arm, shape, beams, lengths) for arm in options.arms}
    for call in calls.values():
        call()
    longest, tokens = int(lengths.max()), int(lengths.sum())
    rounds = [{arm: seconds(call, longest) for arm, call in calls.items()} for _ in range(options.rounds)]
    speeds = {arm: tokens / statistics.median(times[arm] for times in rounds) for arm in calls}
    ratios = {
        arm: statistics.median(times["marian"] / times[arm] for times in rounds) for arm in calls if arm != "marian"
    }
    return {"batch": count, "beams": beams, "tokens_per_second": speeds, "ratios_to_marian": ratios}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--beams", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--lengths", choices=("equal", "mixed"), default="equal")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    options = parser.parse_args(arguments)
    options.arms = arms_to_run(options.arms, options.lengths)
    torch.set_num_threads(options.threads)
    logging.set_verbosity_error()
    shape = SHAPES[options.shape]
    with torch.inference_mode():
        measured = [compare(shape, beams, count, options) for beams in options.beams for count in options.batches]
    print(json.dumps({"options": vars(options), "torch": torch.__version__, "measured": measured}, indent=2))


if __name__ == "__main__":
    main()
