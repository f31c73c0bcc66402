"""Speed on a device: a paper step and its operations, the loss, and decoding, against Marian and CTranslate2."""

import functools
import importlib.util
import itertools
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import GenerationConfig

from tests.gpu.models import (
    MEAN_LENGTH,
    TINY,
    Pairs,
    collate,
    collate_for_marian,
    make_marian,
    make_model,
    make_pairs,
    sources,
)
from tests.gpu.runner import Part, Row, Setting, SkipPart
from tests.gpu.synchronizations import SynchronizationCounter, move, pretended_device
from tests.gpu.training_run import Clock, TokenBudgetTrainer, arguments, sampler_of
from training.monitor.flops import peak_teraflops, training_flops  # the only import from the training package
from vaswani_transformer import (
    VaswaniCmlmForConditionalGeneration,
    VaswaniIterativeVaeForConditionalGeneration,
    VaswaniNatForConditionalGeneration,
)
from vaswani_transformer import loss as loss_module
from vaswani_transformer.schedule import paper_adam

TRAINING, TIME, DECODING, LOSS = "Training", "Where the time of a step goes", "Decoding", "Loss"
WARM_UP = 3  # steps
COMPILER_WARM_UP = 8  # steps with enough different lengths for the compiler to make a graph for all
TARGET_LENGTH = 27  # tokens that every search writes
GIB = 2**30


def paper_tokens(setting: Setting) -> int:
    """Return the number of tokens on each side of a step (5.1)."""
    return 400 if setting.is_tiny else 25_000


def timed_steps(setting: Setting) -> int:
    return 2 if setting.is_tiny else 10


def reset_peak(setting: Setting) -> None:
    if setting.is_cuda:
        torch.cuda.reset_peak_memory_stats()


def peak_gib(setting: Setting) -> float | None:
    return torch.cuda.max_memory_allocated() / GIB if setting.is_cuda else None


class SomeBatches:
    """The first batches of a sampler, kept in a list, so that all arms train on the same pairs."""

    def __init__(self, sampler: Any, count: int) -> None:
        self.batches = list(itertools.islice(iter(sampler), count))

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def random_batches(pairs: Pairs, tokens: int, accumulation: int) -> list[list[int]]:
    """Return batches of a fixed number of pairs in random order, `accumulation` of which hold `tokens` a side."""
    order, size = list(range(len(pairs))), max(1, tokens // (MEAN_LENGTH * accumulation))
    random.Random(0).shuffle(order)
    return [order[start : start + size] for start in range(0, len(order) - size + 1, size)]


def flops_of(config: Any, pairs: Pairs) -> int:
    """Return the number of operations in the matrix products of a training step on the pairs."""
    lengths = [torch.tensor([len(pair[name]) for pair in pairs]) for name in ("input_ids", "labels")]
    return training_flops(config, *lengths)


def measured(
    setting: Setting, config: Any, pairs: Pairs, timed: list[list[int]], seconds: float, accumulation: int
) -> Row:
    """Return the metrics of steps on the micro-batches `timed`, which took `seconds` together."""
    learned = [pairs[index] for batch in timed for index in batch]
    targets = sum(len(pair["labels"]) for pair in learned)
    positions = sum(
        collate([pairs[index] for index in batch])[name].numel() for batch in timed for name in ("input_ids", "labels")
    )
    real = targets + sum(len(pair["input_ids"]) for pair in learned)
    teraflops = flops_of(config, learned) / seconds / 1e12
    peak = peak_teraflops(torch.cuda.get_device_name(), "bf16") if setting.is_cuda else None
    return {
        "ms a step": 1000 * seconds / timed_steps(setting),
        "target tokens/s": targets / seconds,
        "TFLOP/s": teraflops,
        "MFU": None if peak is None else f"{teraflops / peak:.1%}",
        "peak GiB": peak_gib(setting),
        "micro-batches": accumulation,
        "padding": f"{1 - real / positions:.1%}",
    }


def train(setting: Setting, arm: str, shape: str, attention: str, compiles: bool, accumulation: int) -> Row:
    """Return the metrics of some paper steps of an arm in the Trainer."""
    ours = make_model(shape, setting, attn_implementation="eager")
    warm_up = COMPILER_WARM_UP if compiles and not setting.is_tiny else WARM_UP
    config, tokens, count = ours.config, paper_tokens(setting), warm_up + timed_steps(setting)
    pairs = make_pairs(200 if setting.is_tiny else 40_000, config.vocab_size)
    sampler: Any = sampler_of(pairs, tokens, accumulation)
    if arm == "marian, random batches":
        sampler = random_batches(pairs, tokens, accumulation)
    batches = SomeBatches(sampler, count * accumulation)
    is_bf16 = setting.device.type != "cpu"
    settings: dict[str, Any] = {"bf16": is_bf16, "logging_steps": 1000, "gradient_accumulation_steps": accumulation}
    settings |= {"use_cpu": setting.device.type == "cpu", "torch_compile": compiles}
    if compiles:
        settings["torch_compile_backend"] = setting.compiler
    if arm == "ours":
        model: Any = ours
        model.set_attn_implementation(attention)
    else:
        model, settings["label_smoothing_factor"] = make_marian(shape, setting), 0.1
    collator = collate if arm == "ours" else collate_for_marian
    args = arguments(setting.folder, count, **settings)
    trainer = TokenBudgetTrainer(model, args, pairs, batches, collate=collator)
    clock = Clock(setting, warm_up)
    trainer.add_callback(clock)
    reset_peak(setting)
    trainer.train()
    timed = batches.batches[warm_up * accumulation :]
    named = {"model": shape, "precision": "bf16" if is_bf16 else "fp32"}
    return named | measured(setting, config, pairs, timed, clock.seconds, accumulation)


def training_part(
    setting: Setting, arm: str, shape: str, attention: str = "sdpa", compiles: bool = False
) -> Iterator[Row]:
    """Measure an arm, in as few micro-batches as memory holds."""
    for accumulation in (1, 2, 4, 8, 16):
        try:
            yield train(setting, arm, shape, attention, compiles, accumulation)
            return
        except torch.OutOfMemoryError:
            pass  # the traceback holds the tensors until the handler ends
        except (ImportError, ValueError) as error:
            raise SkipPart(f"{attention}: {' '.join(str(error).split())}") from error
        torch.cuda.empty_cache()
    raise SkipPart("out of memory even with 16 micro-batches a step")


def step_of(setting: Setting, model: Any) -> tuple[Callable[[], None], Any]:
    """Return a training step over one paper batch, and the batch."""
    pairs = make_pairs(200 if setting.is_tiny else 5000, model.config.vocab_size)
    rows = next(iter(sampler_of(pairs, paper_tokens(setting))))
    batch = {name: tensor.to(setting.device) for name, tensor in collate([pairs[row] for row in rows]).items()}
    optimizer = paper_adam(model.parameters())

    def step() -> None:
        with torch.autocast(setting.device.type, torch.bfloat16, enabled=setting.device.type != "cpu"):
            loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step, batch


def profile_part(setting: Setting) -> Iterator[Row]:
    """Yield the operations that take most of a step's time."""
    model = make_model("base", setting, attn_implementation="sdpa").to(setting.device).train()
    step, _ = step_of(setting, model)
    for _ in range(WARM_UP):
        step()
    setting.synchronize()
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if setting.is_cuda else [])
    with profile(activities=activities) as profiler:
        for _ in range(timed_steps(setting)):
            step()
        setting.synchronize()
    name = "self_device_time_total" if setting.is_cuda else "self_cpu_time_total"
    events = sorted(profiler.key_averages(), key=lambda event: getattr(event, name), reverse=True)
    total = sum(getattr(event, name) for event in events) or 1
    for event in events[:15]:
        spent = getattr(event, name)
        yield {
            "operation": event.key[:80],
            "ms a step": spent / 1000 / timed_steps(setting),
            "share": f"{spent / total:.1%}",
            "calls a step": round(event.count / timed_steps(setting)),
        }


def synchronization_part(setting: Setting) -> Iterator[Row]:
    """Count how often a training step waits for the device, by torch's check on CUDA or on a pretended device."""
    if not setting.is_cuda:
        with pretended_device() as device:
            model = move(make_model("base", setting, attn_implementation="sdpa")).train()
            batch = {name: tensor.to(device) for name, tensor in collate(make_pairs(4, 99)).items()}
            with SynchronizationCounter() as counter:
                model(**batch).loss.backward()
        yield from ({"operation": f"wait: {line}", "calls a step": count} for line, count in counter.places.items())
        return
    step, _ = step_of(setting, make_model("base", setting, attn_implementation="sdpa").to(setting.device).train())
    step()
    setting.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    lines = [f"{one.filename}:{one.lineno}" for one in caught if "synchroniz" in str(one.message)]
    for line in dict.fromkeys(lines):
        yield {"operation": f"wait: {'/'.join(line.split('/')[-2:])}", "calls a step": lines.count(line)}


def seconds_of(setting: Setting, call: Callable[[], Any], rounds: int) -> float:
    """Return the median seconds of a call after one to warm up."""
    taken = []
    for _ in range(rounds + 1):
        setting.synchronize()
        start = time.perf_counter()
        call()
        setting.synchronize()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def loss_part(setting: Setting) -> Iterator[Row]:
    """Measure the loss for several sizes of its chunks, and with padding masked instead of dropped."""
    tokens, vocab_size, d_model = (400, 99, 32) if setting.is_tiny else (25_000, 37_000, 512)
    dtype = torch.float32 if setting.device.type == "cpu" else torch.bfloat16
    hidden = torch.randn(tokens, d_model, device=setting.device, dtype=dtype, requires_grad=True)
    weight = (torch.randn(vocab_size, d_model, device=setting.device) * d_model**-0.5).requires_grad_()
    labels = torch.randint(vocab_size, (tokens,), device=setting.device)
    labels[::20] = -100
    is_target = labels.ne(-100)

    def select() -> None:
        loss_module.projected_cross_entropy(hidden, weight, labels, 0.1).backward()

    def mask() -> None:
        arguments = (hidden, weight, labels.masked_fill(~is_target, 0), is_target, 0.1)
        loss_module.FusedLinearCrossEntropy.apply(*arguments).backward()

    usual = loss_module.ACCELERATOR_CHUNK
    cases = [(chunk, "taken out", select) for chunk in (512, 1024, 2048, 4096, 8192)] + [(usual, "masked", mask)]
    try:
        for chunk, padding, call in cases:
            loss_module.ACCELERATOR_CHUNK = chunk
            reset_peak(setting)
            seconds = seconds_of(setting, call, timed_steps(setting))
            yield {"chunk": chunk, "padding": padding, "ms": 1000 * seconds, "peak GiB": peak_gib(setting)}
    finally:
        loss_module.ACCELERATOR_CHUNK = usual


def search_config(num_beams: int, vocab_size: int) -> GenerationConfig:
    """Return a search that writes `TARGET_LENGTH` tokens, because its end token is outside of the vocabulary."""
    return GenerationConfig(
        max_new_tokens=TARGET_LENGTH,
        num_beams=num_beams,
        decoder_start_token_id=0,
        pad_token_id=1,
        eos_token_id=vocab_size,
        do_sample=False,
    )


def generating(setting: Setting, arm: str, dtype: torch.dtype) -> Callable[[int, int], Callable[[], int]]:
    """Return a function of beams and batch size that returns a search, which returns the tokens per source."""
    make = make_marian if arm == "marian" else make_model
    model: Any = make("base", setting).eval()
    vocab_size = model.config.vocab_size
    if arm != "marian":
        model.set_attn_implementation("sdpa")
    model = model.to(setting.device, dtype)
    model.generation_config = GenerationConfig(decoder_start_token_id=0, pad_token_id=1)
    cached = {}
    if arm == "ours, CUDA graphs":
        cached = {"cache_implementation": "static"}
        mode = {"mode": "reduce-overhead"} if setting.is_cuda else {}
        model.forward = torch.compile(model.forward, fullgraph=True, dynamic=False, backend=setting.compiler, **mode)

    def prepared(num_beams: int, count: int) -> Callable[[], int]:
        batch = sources(count, vocab_size, setting.device)
        config = search_config(num_beams, vocab_size)
        return lambda: model.generate(**batch, generation_config=config, **cached).shape[1] - 1

    return prepared


def translating(setting: Setting, dtype: torch.dtype) -> Callable[[int, int], Callable[[], int]]:
    """Return the same for CTranslate2.

    Raises:
        SkipPart: CTranslate2 is not installed, or has no CUDA.
    """
    if importlib.util.find_spec("ctranslate2") is None:
        raise SkipPart("ctranslate2 is not installed")
    import ctranslate2

    from vaswani_transformer.convert import to_ctranslate2

    if setting.device.type not in ("cpu", "cuda") or (setting.is_cuda and not ctranslate2.get_cuda_device_count()):
        raise SkipPart(f"this ctranslate2 has no {setting.device.type}")
    model = make_model("base", setting).eval()
    with tempfile.TemporaryDirectory() as folder:
        to_ctranslate2(model, None, folder, force=True)
        kind = "float32" if dtype == torch.float32 else "bfloat16"
        if kind not in ctranslate2.get_supported_compute_types(setting.device.type):
            raise SkipPart(f"ctranslate2 has no {kind} on this {setting.device.type}")
        translator = ctranslate2.Translator(folder, device=setting.device.type, compute_type=kind)

    def prepared(num_beams: int, count: int) -> Callable[[], int]:
        batch = sources(count, model.config.vocab_size, torch.device("cpu"))
        rows = zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True)
        texts = [[str(token) for token in row[mask].tolist()] for row, mask in rows]
        options = {"max_decoding_length": TARGET_LENGTH, "min_decoding_length": TARGET_LENGTH, "max_batch_size": count}
        return lambda: len(translator.translate_batch(texts, beam_size=num_beams, **options)[0].hypotheses[0])

    return prepared


@torch.inference_mode()
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


PARALLEL = (
    VaswaniNatForConditionalGeneration,
    VaswaniCmlmForConditionalGeneration,
    VaswaniIterativeVaeForConditionalGeneration,
)


@torch.inference_mode()
def parallel_part(setting: Setting) -> Iterator[Row]:
    """Measure the sentences a second of the models that decode in parallel."""
    for kind in PARALLEL:
        masks = {"mask_token_id": 3} if "mask_token_id" in kind.config_class.__annotations__ else {}
        config = kind.config_class(**masks, **(TINY if setting.is_tiny else {}))
        model = kind(config).eval().to(setting.device)
        for count in (1, 2) if setting.is_tiny else (1, 32, 256):
            batch = sources(count, config.vocab_size - 1, setting.device)
            seconds = seconds_of(
                setting, lambda batch=batch, model=model: model.generate(**batch), 1 if setting.is_tiny else 3
            )
            yield {"model": kind.__name__, "batch": count, "precision": "fp32", "sentences/s": count / seconds}


def needs_inductor(setting: Setting) -> str | None:
    return None if setting.is_tiny or importlib.util.find_spec("triton") else "triton is not installed"


def needs_cuda(setting: Setting) -> str | None:
    return None if setting.is_cuda else "flash attention needs CUDA"


def parts() -> list[Part]:
    """Return the parts in the order in which they run."""
    made, arms = [], ("ours", "ours, CUDA graphs", "marian", "ctranslate2")
    for shape in ("base", "big"):
        for arm in ("ours", "marian, same batches", "marian, random batches"):
            run = functools.partial(training_part, arm=arm, shape=shape)
            made.append(Part(f"speed: train {shape}, {arm}", TRAINING, run, 90))
        if shape == "base":
            run = functools.partial(training_part, arm="ours", shape=shape, compiles=True)
            made.append(Part("speed: train base, ours, compiled", TRAINING, run, 150, needs_inductor))
            run = functools.partial(training_part, arm="ours", shape=shape, attention="flash_attention_2")
            made.append(Part("speed: train base, ours, flash_attention_2", TRAINING, run, 90, needs_cuda))
    made.append(Part("speed: profile", TIME, profile_part))
    made.append(Part("speed: waits", TIME, synchronization_part))
    made.append(Part("speed: loss", LOSS, loss_part))
    for arm, dtype in itertools.product(arms, (torch.float32, torch.bfloat16)):
        run = functools.partial(decoding_part, arm=arm, dtype=dtype)
        made.append(Part(f"speed: decode, {arm}, {'fp32' if dtype == torch.float32 else 'bf16'}", DECODING, run, 90))
    made.append(Part("speed: decode in parallel", DECODING, parallel_part, 90))
    return made
