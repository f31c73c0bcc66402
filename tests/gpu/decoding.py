"""Speed of decoding: this package with and without CUDA graphs, Marian, CTranslate2, and models that decode at once."""

import functools
import importlib.util
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import GenerationConfig

from tests import measuring
from tests.gpu.models import PARALLEL, STATIC, compile_steps, make_marian, make_model, make_nar
from tests.gpu.runner import Part, Row, Setting, SkipPart
from tests.measuring import TARGET_LENGTH, endless_ctranslate2, endless_search, random_sources

DECODING = "Decoding"


def seconds_of(setting: Setting, call: Callable[[], Any], rounds: int) -> float:
    """Return the median seconds of a call after one to warm up."""
    taken = [measuring.seconds_of(call, time.perf_counter, setting.synchronize) for _ in range(rounds + 1)]
    return statistics.median(taken[1:])


def generating(setting: Setting, arm: str, dtype: torch.dtype) -> Callable[[int, int], Callable[[], int]]:
    """Return a function of beams and batch size that returns a search, which returns the tokens per source."""
    make = make_marian if arm == "marian" else make_model
    model: Any = make("base", setting).eval()
    vocab_size = model.config.vocab_size
    if arm != "marian":
        model.set_attn_implementation("sdpa")
    model = model.to(setting.device, dtype)
    model.generation_config = GenerationConfig(decoder_start_token_id=0, pad_token_id=1)
    cached = STATIC if arm == "ours, CUDA graphs" else {}
    if cached:
        compile_steps(model, setting)

    def prepared(num_beams: int, count: int) -> Callable[[], int]:
        batch = {name: tensor.to(setting.device) for name, tensor in random_sources(count, vocab_size).items()}
        config = endless_search(num_beams, vocab_size)
        return lambda: model.generate(**batch, generation_config=config, **cached).shape[1] - 1

    return prepared


def translating(setting: Setting, dtype: torch.dtype) -> Callable[[int, int], Callable[[], int]]:
    """Return the same for CTranslate2.

    Raises:
        SkipPart: CTranslate2 is not installed, has no CUDA, or lacks the libraries of its version of CUDA.
    """
    if importlib.util.find_spec("ctranslate2") is None:
        raise SkipPart("ctranslate2 is not installed")
    import ctranslate2

    from vaswani_transformer.convert import to_ctranslate2

    model, device = make_model("base", setting).eval(), setting.device.type
    folder, kind = str(setting.folder / "ctranslate2"), "float32" if dtype == torch.float32 else "bfloat16"
    to_ctranslate2(model, None, folder, force=True)
    try:
        if device not in ("cpu", "cuda") or (setting.is_cuda and not ctranslate2.get_cuda_device_count()):
            raise SkipPart(f"this ctranslate2 has no {device}")
        if kind not in ctranslate2.get_supported_compute_types(device):
            raise SkipPart(f"ctranslate2 has no {kind} on this {device}")
        translator = ctranslate2.Translator(folder, device=device, compute_type=kind)
        translator.translate_batch([["5"]], max_decoding_length=2)  # it loads CUDA's libraries now
    except RuntimeError as error:
        if not setting.is_cuda:
            raise
        raise SkipPart(f"ctranslate2: {error}") from error

    def prepared(num_beams: int, count: int) -> Callable[[], int]:
        batch = random_sources(count, model.config.vocab_size)
        return endless_ctranslate2(translator, batch, num_beams, TARGET_LENGTH)

    return prepared


@torch.no_grad()
def decoding_part(setting: Setting, arm: str, dtype: torch.dtype) -> Iterator[Row]:
    """Measure output tokens a second of an arm."""
    prepared = translating(setting, dtype) if arm == "ctranslate2" else generating(setting, arm, dtype)
    for num_beams, count in itertools.product((4, 1), (1, 2) if setting.is_tiny else (1, 32, 256)):
        call, written = prepared(num_beams, count), []
        seconds = seconds_of(
            setting, lambda call=call, written=written: written.append(call()), 1 if setting.is_tiny else 3
        )
        if set(written) != {TARGET_LENGTH}:
            raise RuntimeError(f"{written} tokens were written, not {TARGET_LENGTH}; the figures would not compare.")
        yield {
            "search": f"beam {num_beams}" if num_beams > 1 else "greedy",
            "batch": count,
            "precision": "fp32" if dtype == torch.float32 else "bf16",
            "tokens/s": count * TARGET_LENGTH / seconds,
            "ms a token": 1000 * seconds / TARGET_LENGTH,
        }


@torch.no_grad()
def parallel_part(setting: Setting) -> Iterator[Row]:
    """Measure the sentences a second of the models that decode in parallel."""
    for name, dtype in itertools.product(PARALLEL, (torch.float32, torch.bfloat16)):
        model = make_nar(name, setting).eval().to(setting.device, dtype)
        precision = "fp32" if dtype == torch.float32 else "bf16"
        passes = {"num_iterations": 4} if name == "CMLM" else {}
        for count in (1, 2) if setting.is_tiny else (1, 32, 256):
            batch = random_sources(count, model.config.vocab_size)
            batch = {key: tensor.to(setting.device) for key, tensor in batch.items()}
            seconds = seconds_of(
                setting,
                lambda batch=batch, model=model, passes=passes: model.generate(**batch, **passes),
                1 if setting.is_tiny else 3,
            )
            yield {"model": name, "batch": count, "precision": precision, "sentences/s": count / seconds}


def parts() -> list[Part]:
    """Return the parts in the order in which they run."""
    made, arms = [], ("ours", "marian", "ctranslate2", "ours, CUDA graphs")
    for arm, dtype in itertools.product(arms, (torch.bfloat16, torch.float32)):
        run, compiles = functools.partial(decoding_part, arm=arm, dtype=dtype), "graphs" in arm
        name = f"speed: decode, {arm}, {'fp32' if dtype == torch.float32 else 'bf16'}"
        made.append(Part(name, DECODING, run, 150 if compiles else 90, compiles=compiles))
    return [*made, Part("speed: decode in parallel", DECODING, parallel_part, 90)]
