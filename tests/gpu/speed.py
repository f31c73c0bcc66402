"""Speed of training on a device: a paper step against Marian's, its operations, its waits, and the loss."""

import contextlib
import functools
import gc
import importlib.util
import itertools
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from tests.gpu.correctness import needs_flash
from tests.gpu.decoding import seconds_of
from tests.gpu.models import (
    PARALLEL,
    collate,
    collate_for_marian,
    collate_for_nar,
    config_of,
    make_marian,
    make_model,
    make_nar,
)
from tests.gpu.runner import Part, Row, Setting, SkipPart
from tests.gpu.synchronizations import SynchronizationCounter, move, pretended_device
from tests.gpu.training_run import TokenBudgetTrainer, arguments, sampler_of
from tests.measuring import MEAN_LENGTH, TARGET_LENGTH, Pairs, StepClock, make_pairs, random_sources
from training.recipe.flops import peak_teraflops, training_flops  # the only import from the training package
from vaswani_transformer import loss as loss_module
from vaswani_transformer.batching.schedule import paper_adam
from vaswani_transformer.support.errors import one_line

TRAINING, TIME, LOSS = "Training", "Where the time of a step goes", "Loss"
WARM_UP = 3  # steps
COMPILER_WARM_UP = 8  # steps with enough different lengths for the compiler to make a graph for all
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
    setting: Setting, config: Any, pairs: Pairs, timed: list[list[int]], new: float, seconds: float, accumulation: int
) -> Row:
    """Return the metrics of steps on the micro-batches `timed`, which took `new` seconds, and `seconds` repeated."""
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
        "ms a step of new shapes": 1000 * new / timed_steps(setting),
        "target tokens/s": targets / seconds,
        "TFLOP/s": teraflops,
        "MFU": None if peak is None else f"{teraflops / peak:.1%}",
        "peak GiB": peak_gib(setting),
        "micro-batches": accumulation,
        "padding": f"{1 - real / positions:.1%}",
    }


def train(setting: Setting, arm: str, shape: str, attention: str, compiles: bool, accumulation: int) -> Row:
    """Return the metrics of some paper steps of an arm in the Trainer, which takes them twice.

    The first time their shapes are new, and libraries may prepare kernels for each one.
    """
    warm_up = COMPILER_WARM_UP if compiles and not setting.is_tiny else WARM_UP
    config, tokens, count = config_of(shape, setting), paper_tokens(setting), warm_up + timed_steps(setting)
    pairs = make_pairs(200 if setting.is_tiny else 40_000, config.vocab_size)
    sampler: Any = sampler_of(pairs, tokens, accumulation)
    if arm == "marian, random batches":
        sampler = random_batches(pairs, tokens, accumulation)
    batches = list(itertools.islice(sampler, count * accumulation))  # all arms train on the same pairs
    timed = batches[warm_up * accumulation :]
    is_bf16 = setting.device.type != "cpu"
    settings: dict[str, Any] = {"bf16": is_bf16, "logging_steps": 1000, "gradient_accumulation_steps": accumulation}
    settings |= {"use_cpu": setting.device.type == "cpu", "torch_compile": compiles}
    if compiles:
        settings["torch_compile_backend"] = setting.compiler
    if arm == "ours":
        model: Any = make_model(shape, setting, attn_implementation="eager")
        model.set_attn_implementation(attention)
    else:
        model, settings["label_smoothing_factor"] = make_marian(shape, setting), 0.1
    collator = collate if arm == "ours" else collate_for_marian
    args = arguments(setting.folder, count + timed_steps(setting), **settings)
    trainer = TokenBudgetTrainer(model, args, pairs, batches + timed, collate=collator)
    new, known = StepClock(warm_up, setting.synchronize, last=count), StepClock(count, setting.synchronize)
    trainer.add_callback(new)
    trainer.add_callback(known)
    reset_peak(setting)
    trainer.train()
    named = {"model": shape, "precision": "bf16" if is_bf16 else "fp32"}
    return named | measured(setting, config, pairs, timed, new.seconds, known.seconds, accumulation)


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
        except (ImportError, ValueError, OSError) as error:
            raise SkipPart(f"{attention}: {one_line(error, is_complete=True)}") from error
        gc.collect()  # the Trainer is part of a cycle
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
    # An operation's time on the device is that of its kernels, which are events too.
    operations = [event for event in profiler.key_averages() if event.device_type == DeviceType.CPU]
    events = sorted(operations, key=lambda event: getattr(event, name), reverse=True)
    total = sum(getattr(event, name) for event in events) or 1
    for event in events[:15]:
        spent = getattr(event, name)
        yield {
            "operation": event.key[:80],
            "ms a step": spent / 1000 / timed_steps(setting),
            "share": f"{spent / total:.1%}",
            "calls a step": round(event.count / timed_steps(setting)),
        }


def count_waits(setting: Setting, call: Callable[[], Any]) -> Counter[str]:
    """Return how often the host waits for the device at each line of a call, as torch warns about it on CUDA."""
    if not setting.is_cuda:
        with SynchronizationCounter() as counter:
            call()
        return counter.places
    call()
    setting.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    seen = [one for one in caught if "synchroniz" in str(one.message)]
    return Counter(f"{'/'.join(one.filename.split('/')[-2:])}:{one.lineno}" for one in seen)


def synchronization_part(setting: Setting) -> Iterator[Row]:
    """Count how often training steps and searches wait for the device; without CUDA on a pretended device."""
    tokens = TARGET_LENGTH
    searches = {"greedy": 1, "beam 4": 4}
    with contextlib.ExitStack() as stack:
        device = setting.device if setting.is_cuda else stack.enter_context(pretended_device())
        to_device = (lambda model: model.to(device)) if setting.is_cuda else move
        for name in ("base", *PARALLEL):
            model = make_model(name, setting) if name == "base" else make_nar(name, setting)
            batch = collate_for_nar(name, make_pairs(8, model.config.vocab_size))
            batch = {key: tensor.to(device) for key, tensor in batch.items()}
            model = to_device(model).train()
            waits = count_waits(setting, lambda model=model, batch=batch: model(**batch).loss.backward())
            yield from ({"operation": f"{name}, step: {line}", "calls a step": waits[line]} for line in waits)
        model: Any = to_device(make_model("base", setting)).eval()
        batch = {name: tensor.to(device) for name, tensor in random_sources(4, model.config.vocab_size).items()}
        for name, beams in searches.items():
            search = {"max_new_tokens": tokens, "min_new_tokens": tokens, "num_beams": beams}
            waits = count_waits(setting, lambda search=search: model.generate(**batch, **search))
            yield {"operation": f"waits of {name} for {tokens} tokens", "calls a step": waits.total()}


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
            loss_module.ACCELERATOR_CHUNK = chunk  # ty: ignore[invalid-assignment] - ty takes it for a constant
            reset_peak(setting)
            seconds = seconds_of(setting, call, timed_steps(setting))
            yield {"chunk": chunk, "padding": padding, "ms": 1000 * seconds, "peak GiB": peak_gib(setting)}
    finally:
        loss_module.ACCELERATOR_CHUNK = usual


def needs_inductor(setting: Setting) -> str | None:
    return None if setting.is_tiny or importlib.util.find_spec("triton") else "triton is not installed"


def parts() -> list[Part]:
    """Return the parts in the order in which they run."""
    made = []
    for shape in ("base", "big"):
        for arm in ("ours", "marian, same batches", "marian, random batches"):
            run = functools.partial(training_part, arm=arm, shape=shape)
            made.append(Part(f"speed: train {shape}, {arm}", TRAINING, run, 90))
        if shape == "base":
            run = functools.partial(training_part, arm="ours", shape=shape, compiles=True)
            made.append(Part("speed: train base, ours, compiled", TRAINING, run, 300, needs_inductor, compiles=True))
            run = functools.partial(training_part, arm="ours", shape=shape, attention="flash_attention_2")
            made.append(Part("speed: train base, ours, flash_attention_2", TRAINING, run, 90, needs_flash))
    made.append(Part("speed: profile", TIME, profile_part))
    made.append(Part("speed: waits", TIME, synchronization_part))
    made.append(Part("speed: loss", LOSS, loss_part))
    return made
