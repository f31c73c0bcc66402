"""The timings of `bench.gpu`: training, the loss and decoding on a device."""

import functools
import gc
import itertools
import re
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from transformers import GenerationConfig
from transformers.trainer_pt_utils import LabelSmoother

from bench import measuring
from bench.gpu_models import (
    PARALLEL,
    STATIC,
    Batch,
    Setting,
    SkipPart,
    autocast,
    batch_for,
    compile_steps,
    config_of,
    make_marian,
    make_model,
    sampled,
    set_attention,
    to,
)  # fmt: skip
from bench.measuring import TARGET_LENGTH, Pairs, Row, collate, lengths_of, make_pairs, random_sources
from vaswani_transformer import loss as loss_module
from vaswani_transformer import paper_adam
from vaswani_transformer.convert import to_ctranslate2
from vaswani_transformer.loss import projected_cross_entropy

PEAKS = {"H100": 989, "H200": 989, "A100": 312, "L4": 121, "L40": 181, "L40S": 362, "4090": 165}  # dense bf16 TFLOP/s
WARM_UP = 3
GIB = 2**30


def paper_tokens(setting: Setting) -> int:
    """Return the number of tokens on each side of a step (5.1)."""
    return 400 if setting.is_tiny else 25_000


def seconds_of(setting: Setting, call: Any) -> float:
    """Return the median seconds of a call after one to warm up."""
    rounds = 1 if setting.is_tiny else 3
    taken = [measuring.seconds_of(call, time.perf_counter, setting.synchronize) for _ in range(rounds + 1)]
    return statistics.median(taken[1:])


def peak_teraflops(setting: Setting) -> int | None:
    """Return the peak of this GPU by `PEAKS`; None of one that is not in it."""
    name = torch.cuda.get_device_name() if setting.is_cuda else ""
    return next((PEAKS[word] for word in re.split(r"[\s-]+", name) if word in PEAKS), None)


def training_flops(config: Any, pairs: Pairs) -> int:
    """Return the operations of a training step's matrix products.

    A multiplication and its addition are two, and the backward pass has twice as many as the forward pass.
    """
    sources, targets = (torch.tensor(lengths) for lengths in lengths_of(pairs))
    d = config.d_model
    attention = 2 * config.num_heads * config.head_dim + 2 * config.num_heads * config.value_head_dim
    encoder = config.encoder_layers * sources * (d * attention + 2 * d * config.d_ff)
    decoder = config.decoder_layers * targets * (1.5 * d * attention + 2 * d * config.d_ff)  # half of cross-attention
    cross = config.decoder_layers * sources * d * attention / 2
    heads = config.num_heads * (config.head_dim + config.value_head_dim)
    scores = config.encoder_layers * sources**2 + config.decoder_layers * targets * (targets + sources)
    return int(6 * (encoder + decoder + cross + heads * scores + targets * d * config.vocab_size).sum())


def step_of(setting: Setting, arm: str, shape: str, compiles: bool = False, attention: str = "sdpa") -> Any:
    """Return a function that trains on micro-batches, as the Trainer does in bf16 on a device, and the config."""
    model = make_model(shape, setting) if arm == "ours" else make_marian(shape, setting)
    set_attention(model, attention if arm == "ours" else "sdpa", setting)
    model = model.to(setting.device).train()
    called = torch.compile(model, backend=setting.compiler) if compiles else model
    optimizer = paper_adam(model.parameters()) if arm == "ours" else torch.optim.AdamW(model.parameters(), fused=True)
    dtype = torch.float32 if setting.device.type == "cpu" else torch.bfloat16
    smoother = LabelSmoother(0.1)

    def step(micro_batches: list[Batch]) -> None:
        for host_batch in micro_batches:
            batch = to(setting.device, host_batch)
            with autocast(setting, dtype):
                output = called(**batch)
                loss = output.loss if arm == "ours" else smoother({"logits": output.logits}, batch["labels"])
            (loss / len(micro_batches)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step, config_of(shape, setting)


def micro_batches_of(setting: Setting, arm: str, pairs: Pairs, accumulation: int, steps: int) -> list[list[int]]:
    """Return the numbers of the pairs in each micro-batch of some paper steps."""
    batches: Any = sampled(pairs, paper_tokens(setting), accumulation)
    if "random" in arm:
        size = max(1, paper_tokens(setting) // (measuring.MEAN_LENGTH * accumulation))
        order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(0))
        batches = [rows.tolist() for rows in order.split(size)]
    return list(itertools.islice(batches, steps * accumulation))


def train_arm(setting: Setting, arm: str, shape: str, accumulation: int, compiles: bool, attention: str) -> Row:
    """Return the metrics of some paper steps of an arm, taken twice: new shapes may make libraries prepare kernels."""
    # The micro-batches of all steps.
    step, config = step_of(setting, arm, shape, compiles, attention)
    warm_up = 8 if compiles else WARM_UP
    count = 10
    if setting.is_tiny:
        warm_up = 1
        count = 1
    pairs = make_pairs(200 if setting.is_tiny else 40_000, config.vocab_size)
    rows_of_batches = micro_batches_of(setting, arm, pairs, accumulation, warm_up + count)
    batches = [collate([pairs[row] for row in rows]) for rows in rows_of_batches]
    steps = [batches[first : first + accumulation] for first in range(0, len(batches), accumulation)]

    # The warm-up, then the timed steps.
    if setting.is_cuda:
        torch.cuda.reset_peak_memory_stats()
    for micro_batches in steps[:warm_up]:
        step(micro_batches)

    def run() -> None:
        for micro_batches in steps[warm_up:]:
            step(micro_batches)

    new, seconds = (measuring.seconds_of(run, time.perf_counter, setting.synchronize) for _ in range(2))

    # What the timed steps learned.
    learned = [pairs[row] for rows in rows_of_batches[warm_up * accumulation :] for row in rows]
    sources, targets = map(sum, lengths_of(learned))
    timed = batches[warm_up * accumulation :]
    positions = sum(batch["input_ids"].numel() + batch["labels"].numel() for batch in timed)
    teraflops = training_flops(config, learned) / seconds / 1e12
    peak = peak_teraflops(setting)
    return {
        "precision": "fp32" if setting.device.type == "cpu" else "bf16",
        "micro-batches": accumulation,
        "ms a step": 1000 * seconds / count,
        "ms a step of new shapes": 1000 * new / count,
        "target tokens/s": targets / seconds,
        "TFLOP/s": teraflops,
        "MFU": None if peak is None else f"{teraflops / peak:.1%}",
        "peak GiB": torch.cuda.max_memory_allocated() / GIB if setting.is_cuda else None,
        "padding": f"{1 - (sources + targets) / positions:.1%}",
    }


def train_part(
    setting: Setting, arm: str, shape: str, compiles: bool = False, attention: str = "sdpa"
) -> Iterator[Row]:
    """Measure an arm, with the fewest micro-batches that fit into memory."""
    for accumulation in (1, 2, 4, 8, 16):
        try:
            yield train_arm(setting, arm, shape, accumulation, compiles, attention)
            return
        except torch.OutOfMemoryError:
            pass  # the traceback keeps the tensors until the handler ends
        gc.collect()
        torch.cuda.empty_cache()
    raise SkipPart("out of memory even with 16 micro-batches a step")


def waits_part(setting: Setting) -> Iterator[Row]:
    """Count how often the host waits for the device at each line of a training step, as torch warns on CUDA."""
    if not setting.is_cuda:
        raise SkipPart("torch reports waits on CUDA only; tests/test_synchronizations.py counts them without a GPU")
    for name in ("base", *PARALLEL):
        model = make_model(name, setting).to(setting.device).train()
        batch = to(setting.device, batch_for(name, make_pairs(8, model.config.vocab_size)))
        model(**batch).loss.backward()
        setting.synchronize()
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model(**batch).loss.backward()
        torch.cuda.set_sync_debug_mode("default")
        waits = Counter[str]()
        for warning in caught:
            if "synchroniz" in str(warning.message):
                file = "/".join(warning.filename.split("/")[-2:])
                waits[f"{file}:{warning.lineno}"] += 1
        for line, count in waits.items():
            yield {"step of": name, "line": line, "waits": count}


def chunks_part(setting: Setting) -> Iterator[Row]:
    """Measure the loss with several sizes of its chunks."""
    tokens, vocab_size, d_model = (400, 99, 32) if setting.is_tiny else (25_000, 37_000, 512)
    dtype = torch.float32 if setting.device.type == "cpu" else torch.bfloat16
    hidden = torch.randn(tokens, d_model, device=setting.device, dtype=dtype, requires_grad=True)
    weight = (torch.randn(vocab_size, d_model, device=setting.device) * d_model**-0.5).requires_grad_()
    labels = torch.randint(vocab_size, (tokens,), device=setting.device)
    labels[::20] = -100
    for chunk in (512, 1024, 2048, 4096, 8192):
        if setting.is_cuda:
            torch.cuda.reset_peak_memory_stats()
        with mock.patch.object(loss_module, "ACCELERATOR_CHUNK", chunk):
            call = lambda: projected_cross_entropy(hidden, weight, labels, 0.1).backward()  # noqa: E731
            seconds = seconds_of(setting, call)
        peak = torch.cuda.max_memory_allocated() / GIB if setting.is_cuda else None
        yield {"chunk": chunk, "ms": 1000 * seconds, "peak GiB": peak}


def translator_of(setting: Setting, dtype: torch.dtype) -> Any:
    """Return CTranslate2's translator of the base model.

    Raises:
        SkipPart: CTranslate2 is not installed, or does not support the device.
    """
    try:
        import ctranslate2
    except ImportError as error:
        raise SkipPart(str(error)) from error

    device = setting.device.type
    folder = str(setting.folder / "ctranslate2")
    compute_type = "float32" if dtype == torch.float32 else "bfloat16"
    to_ctranslate2(make_model("base", setting).eval(), None, folder, force=True)
    try:
        if compute_type not in ctranslate2.get_supported_compute_types(device):
            raise SkipPart(f"ctranslate2 does not support {compute_type} on this {device}")
        translator = ctranslate2.Translator(folder, device=device, compute_type=compute_type)
        translator.translate_batch([["5"]], max_decoding_length=2)  # it loads CUDA's libraries now
    except (RuntimeError, ValueError) as error:
        raise SkipPart(f"ctranslate2: {error}") from error
    return translator


@torch.no_grad()
def decoding_part(setting: Setting, arm: str, dtype: torch.dtype) -> Iterator[Row]:
    """Measure the output tokens a second of an arm."""
    model: Any = (make_marian if arm == "marian" else make_model)("base", setting).eval()
    vocab_size = model.config.vocab_size
    cached = STATIC if "graphs" in arm else {}
    translator = translator_of(setting, dtype) if arm == "ctranslate2" else None
    set_attention(model, "sdpa", setting)
    model = model.to(setting.device, dtype)
    model.generation_config = GenerationConfig(decoder_start_token_id=0, pad_token_id=1)
    if cached:
        compile_steps(model, setting)

    counts = (1, 2) if setting.is_tiny else (1, 32, 256)
    for num_beams, count in itertools.product((4, 1), counts):
        sources = random_sources(count, vocab_size)
        config = measuring.endless_search(num_beams, vocab_size)
        inputs = to(setting.device, sources)
        written: set[int] = set()
        if translator is not None:
            search = measuring.endless_ctranslate2(translator, sources, num_beams, TARGET_LENGTH)
        else:
            search = functools.partial(model.generate, **inputs, generation_config=config, **cached)

        def call(search: Any = search, written: set[int] = written) -> None:
            output = search()
            written.add(output if isinstance(output, int) else output.shape[1] - 1)

        seconds = seconds_of(setting, call)
        if written != {TARGET_LENGTH}:
            raise RuntimeError(f"targets have {written} tokens, not {TARGET_LENGTH}; the figures are not comparable")
        name = f"beam {num_beams}" if num_beams > 1 else "greedy"
        yield {"search": name, "batch": count, "tokens/s": count * TARGET_LENGTH / seconds}


@torch.no_grad()
def parallel_decoding_part(setting: Setting, dtype: torch.dtype) -> Iterator[Row]:
    """Measure the sentences a second of the non-autoregressive models."""
    for name in PARALLEL:
        model = make_model(name, setting).eval().to(setting.device, dtype)
        passes = {"num_iterations": 4} if name == "CMLM" else {}
        for count in (1, 2) if setting.is_tiny else (1, 32, 256):
            batch = to(setting.device, random_sources(count, model.config.vocab_size))
            seconds = seconds_of(setting, functools.partial(model.generate, **batch, **passes))
            yield {"model": name, "batch": count, "sentences/s": count / seconds}
