"""The parts of `bench.gpu`: a device against the CPU, then speed, and last those that compile, which takes minutes.

B batch, S source, T target, V vocabulary.
"""

import contextlib
import copy
import functools
import gc
import itertools
import json
import os
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import GenerationConfig
from transformers.trainer_pt_utils import LabelSmoother

from bench import measuring
from bench.measuring import TARGET_LENGTH, Pairs, Row, collate, lengths_of, make_pairs, marian_like, random_sources
from vaswani_transformer import (
    MaskingCollator,
    TokenBudgetBatchSampler,
    VaswaniCmlmForConditionalGeneration,
    VaswaniCtcForConditionalGeneration,
    VaswaniFlowSeqForConditionalGeneration,
    VaswaniIterativeVaeForConditionalGeneration,
    VaswaniNatForConditionalGeneration,
    VaswaniTransformerConfig,
    VaswaniTransformerForConditionalGeneration,
    paper_adam,
    paper_schedule,
)
from vaswani_transformer import loss as loss_module
from vaswani_transformer.convert import to_ctranslate2
from vaswani_transformer.loss import cross_entropy, projected_cross_entropy

ATTENTIONS = ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3")
# Differences are norms relative to the CPU's float32. float32 sums in another order differ by about 1e-6 after twelve
# layers; bfloat16 rounds to 2^-9, about a hundred times one after another, which adds up like a random walk.
BOUNDS = {
    torch.float32: {"logits": 1e-4, "loss": 1e-5, "gradients": 1e-3},
    torch.bfloat16: {"logits": 5e-2, "loss": 1e-2, "gradients": 1e-1},
}
SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16"}
TINY: dict[str, Any] = dict(zip(measuring.SIZES, (99, 32, 4, 64, 2, 2), strict=True))
PARALLEL: dict[str, Any] = {
    "NAT": VaswaniNatForConditionalGeneration,
    "CTC": VaswaniCtcForConditionalGeneration,
    "CMLM": VaswaniCmlmForConditionalGeneration,
    "IterativeVAE": VaswaniIterativeVaeForConditionalGeneration,
    "FlowSeq": VaswaniFlowSeqForConditionalGeneration,
}
MASK = 3  # CMLM's token
SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {"num_beams": 1},
    "beam 4": {"num_beams": 4, "length_penalty": 0.6, "length_penalty_type": "gnmt"},
}
STATIC: dict[str, Any] = {"cache_implementation": "static", "disable_compile": True}  # `compile_steps` compiles
PEAKS = {"H100": 989, "H200": 989, "A100": 312, "L4": 121, "L40": 181, "4090": 165}  # dense TFLOP/s in bf16
WARM_UP, GIB = 3, 2**30
Batch = dict[str, Tensor]


class SkipPart(Exception):  # noqa: N818 - it is no error
    """A part cannot run here; the message says why."""


@dataclass(frozen=True)
class Setting:
    """The device, size and empty folder that a part runs with."""

    device: torch.device
    is_tiny: bool
    folder: Path

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def compiler(self) -> str:
        """The backend of torch.compile; a CPU checks only that there is one graph and that it is right."""
        return "eager" if self.device.type == "cpu" else "inductor"

    def synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize()


@dataclass(frozen=True)
class Part:
    """A check or measurement.

    Attributes:
        name: its name in the results; the words before the colon are its table.
        run: yields rows; the part fails if a row's `difference` is above its `bound`.
        limit: seconds until its process is ended; `CPU_PATIENCE` times as many on a CPU.
        is_slow: whether it compiles kernels first, which takes minutes; such parts come last.
    """

    name: str
    run: Callable[[Setting], Iterator[Row]]
    limit: float = 90.0
    is_slow: bool = False


# Models and batches


def config_of(name: str, setting: Setting, **overrides: Any) -> VaswaniTransformerConfig:
    """Return the config of the paper's model `name`, or a tiny one."""
    if setting.is_tiny:
        return VaswaniTransformerConfig(**{**TINY, **overrides})
    return VaswaniTransformerConfig.from_paper(name, **overrides)


def make_model(name: str, setting: Setting, **overrides: Any) -> Any:
    """Return a model on the CPU, the same one at each call: of the paper, or of PARALLEL; NAT and CTC glance."""
    torch.manual_seed(1)
    if name not in PARALLEL:
        return VaswaniTransformerForConditionalGeneration(config_of(name, setting, **overrides))
    kind, mask = PARALLEL[name], {"mask_token_id": MASK} if name == "CMLM" else {}
    model = kind(kind.config_class(**{**(TINY if setting.is_tiny else {}), **mask, **overrides}))
    if name in ("NAT", "CTC"):
        model.glancing_ratio = 0.5
    return model


def make_marian(name: str, setting: Setting) -> Any:
    torch.manual_seed(1)
    return marian_like(config_of(name, setting))


def batch_for(name: str, pairs: Pairs) -> Batch:
    """Return a training batch whose random choices are made: CMLM's masks, and the draws of glancing and revealing."""
    if name == "CMLM":
        return MaskingCollator(collate, MASK, 1)(pairs)
    batch = collate(pairs)
    (rows, length), generator = batch["labels"].shape, torch.Generator().manual_seed(0)
    if name == "NAT":
        batch["glancing_draws"] = torch.rand(rows, length, generator=generator)
    elif name == "CTC":
        slots = 2 * batch["input_ids"].shape[1]
        batch["glancing_draws"] = torch.rand(rows, slots, generator=generator)
    elif name == "IterativeVAE":
        batch["reveal_draws"] = torch.rand(rows, 1 + length, generator=generator)
    return batch


def to(device: torch.device, batch: Batch) -> Batch:
    return {name: tensor.to(device) for name, tensor in batch.items()}


def set_attention(model: Any, attention: str, setting: Setting) -> None:
    """Set the attention of a model.

    Raises:
        SkipPart: this machine lacks it.
    """
    if "flash" in attention and not setting.is_cuda:
        raise SkipPart("flash attention needs CUDA")
    if attention == "flex_attention" and setting.device.type == "cpu":
        raise SkipPart("flex_attention has no backward pass on a CPU")
    try:
        model.set_attn_implementation(attention)
    except (ImportError, ValueError, OSError) as error:  # the last where a kernel would come from the Hub
        raise SkipPart(f"{attention}: {str(error).splitlines()[0]}") from error


def compile_steps(model: Any, setting: Setting) -> None:
    """Compile `forward`, with CUDA graphs on CUDA, for all steps of a search but the first.

    The first step makes the tensors of the static cache. Made within a graph they have no fixed address, and then CUDA
    graphs are left out or fail. Transformers compiles no first step either.
    """
    mode: dict[str, Any] = {"mode": "reduce-overhead"} if setting.is_cuda else {}
    plain = model.forward
    compiled = torch.compile(plain, fullgraph=True, dynamic=False, backend=setting.compiler, **mode)

    @functools.wraps(plain)
    def forward(*args: Any, past_key_values: Any = None, **inputs: Any) -> Any:
        is_first = past_key_values is None or not past_key_values.self_attention_cache.layers[0].is_initialized
        return (plain if is_first else compiled)(*args, past_key_values=past_key_values, **inputs)

    model.forward = forward


def sampled(pairs: Pairs, tokens: int, accumulation: int = 1) -> TokenBudgetBatchSampler:
    """Return batches of `tokens` source and target tokens."""
    return TokenBudgetBatchSampler(*lengths_of(pairs), tokens, tokens, accumulation=accumulation)


# Correctness


def relative(actual: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference relative to the norm of what is expected."""
    actual, expected = actual.detach().cpu().double(), expected.detach().cpu().double()
    return float((actual - expected).norm() / expected.norm().clamp(min=1e-30))


def compare(what: str, difference: float, bound: float) -> Row:
    return {"compared": what, "difference": difference, "bound": bound}


def differing(actual: Tensor, expected: Tensor) -> float:
    """Return the share of tokens that differ."""
    return float(actual.cpu().ne(expected).double().mean()) if actual.shape == expected.shape else 1.0


def measure(model: Any, inputs: Batch) -> Batch:
    """Return logits in evaluation mode, and loss and all gradients in training mode without dropout, on the CPU."""
    is_target = inputs["labels"].ne(-100)
    with torch.no_grad():
        logits = model.eval()(**inputs).logits
    if logits.shape[:2] == is_target.shape:  # CTC's are of slots
        logits = logits[is_target]
    loss = model.train()(**inputs).loss
    loss.backward()
    gradients = [weight.grad.flatten().float().cpu() for weight in model.parameters() if weight.grad is not None]
    return {"logits": logits.float().cpu(), "loss": loss.detach().float().cpu(), "gradients": torch.cat(gradients)}


def autocast(setting: Setting, dtype: torch.dtype) -> contextlib.AbstractContextManager:
    return torch.autocast(setting.device.type, dtype, enabled=dtype != torch.float32)


def model_part(setting: Setting, attention: str, dtype: torch.dtype, compiles: bool = False) -> Iterator[Row]:
    """Compare one implementation with the CPU's float32; a compiled model has two layers, to save minutes."""
    torch.backends.cuda.matmul.allow_tf32 = False
    model = make_model("C-n2" if compiles else "base", setting, dropout=0.0, attn_implementation="eager")
    batch, moved = collate(make_pairs(6, model.config.vocab_size)), copy.deepcopy(model)
    set_attention(moved, attention, setting)
    expected, moved = measure(model, batch), moved.to(setting.device)
    called = torch.compile(moved, fullgraph=True, backend=setting.compiler) if compiles else moved
    with autocast(setting, dtype):
        measured = measure(called, to(setting.device, batch))
    for name, bound in BOUNDS[dtype].items():
        yield compare(name, relative(measured[name], expected[name]), bound)


def parallel_part(setting: Setting, dtype: torch.dtype) -> Iterator[Row]:
    """Compare the non-autoregressive models with the CPU's float32, with equal random choices."""
    torch.backends.cuda.matmul.allow_tf32 = False
    latents: dict[str, Any] = {"latent_dropout": 0.0}
    for name in ("NAT", "CTC", "CMLM", "IterativeVAE"):  # FlowSeq draws its latents on the device
        model = make_model(name, setting, dropout=0.0, **(latents if "VAE" in name else {}))
        batch = batch_for(name, make_pairs(6, model.config.vocab_size))
        moved, on_it = copy.deepcopy(model).to(setting.device), to(setting.device, batch)
        expected = measure(model, batch)
        with autocast(setting, dtype):
            measured = measure(moved, on_it)
        for result, bound in BOUNDS[dtype].items():
            if (name, result) == ("IterativeVAE", "logits") and dtype != torch.float32:
                continue  # they depend on the words that the layers commit, which rounding can change
            yield compare(f"{name}, {result}", relative(measured[result], expected[result]), bound)
        if dtype == torch.float32:
            passes = {"num_iterations": 4} if name == "CMLM" else {}
            tokens = [
                each.eval().generate(inputs["input_ids"], attention_mask=inputs["attention_mask"], **passes)
                for each, inputs in ((moved, on_it), (model, batch))
            ]
            yield compare(f"{name}, tokens", differing(*tokens), 0.0)


def search_part(setting: Setting, compiles: bool = False) -> Iterator[Row]:
    """Compare the tokens of searches with the CPU's, by random weights; compiled ones with a static cache."""
    torch.backends.cuda.matmul.allow_tf32 = False
    model = make_model("C-n2" if compiles else "base", setting).eval()
    moved, cached = copy.deepcopy(model).to(setting.device), STATIC if compiles else {}
    batch = random_sources(4, model.config.vocab_size)
    if compiles:
        compile_steps(moved, setting)
    for name, search in SEARCHES.items():
        expected = model.generate(**batch, max_new_tokens=20, **search)
        for _ in range(3 if compiles else 1):  # CUDA graphs are recorded in the second call and replayed in the third
            generated = moved.generate(**to(setting.device, batch), max_new_tokens=20, **search, **cached)
        yield compare(f"tokens, {name}", differing(generated, expected), 0.0)
    if compiles:
        from torch._dynamo.utils import counters

        yield compare("graphs that inductor runs without CUDA graphs", counters["inductor"]["cudagraph_skips"], 0)


def loss_part(setting: Setting) -> Iterator[Row]:
    """Compare the loss, which computes its softmax in place, with torch's in float64, over several chunks."""
    tokens, vocab_size, d_model = (600, 99, 32) if setting.is_tiny else (5000, 37_000, 512)
    hidden = torch.randn(tokens, d_model)
    weight = torch.randn(vocab_size, d_model) * d_model**-0.5
    labels = torch.randint(vocab_size, (tokens,))
    labels[::7] = -100
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        results = []
        for device, kind in ((setting.device, dtype), (torch.device("cpu"), torch.float64)):
            # Both start from the same rounded numbers, so only sums and later rounding differ.
            sides = [side.to(dtype).to(device, kind).requires_grad_() for side in (hidden, weight)]
            if kind == torch.float64:
                loss = cross_entropy(sides[0] @ sides[1].T, labels, 0.1)
            else:
                loss = projected_cross_entropy(sides[0], sides[1], labels.to(device), 0.1)
            results.append([loss, *torch.autograd.grad(loss, sides)])
        for name, actual, expected in zip(("loss", "gradient of states", "gradient of weights"), *results, strict=True):
            yield compare(f"{name}, {SHORT[dtype]}", relative(actual, expected), bound)


def train(setting: Setting, devices: list[str], steps: int) -> list[float]:
    """Return the losses of `steps` float32 steps on each device, from one to the next by a checkpoint's file."""
    size = {} if setting.is_tiny else {"vocab_size": 2000, "d_model": 128, "num_heads": 4, "d_ff": 512}
    pairs = make_pairs(200 if setting.is_tiny else 2000, size.get("vocab_size", TINY["vocab_size"]))
    batches = itertools.cycle(list(sampled(pairs, 400 if setting.is_tiny else 2000)))
    losses, saved = [], setting.folder / "checkpoint.pt"
    saved.unlink(missing_ok=True)
    for device in map(torch.device, devices):
        model = make_model("C-n2", setting, dropout=0.0, attn_implementation="sdpa", **size).to(device).train()
        optimizer = paper_adam(model.parameters())
        schedule = paper_schedule(optimizer, model.config.d_model, warmup_steps=100)
        stateful = (model, optimizer, schedule)
        if saved.exists():
            for each, state in zip(stateful, torch.load(saved, map_location=device), strict=True):
                each.load_state_dict(state)
        for _ in range(steps):
            loss = model(**to(device, collate([pairs[row] for row in next(batches)]))).loss
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(float(loss))
        torch.save([each.state_dict() for each in stateful], saved)
    return losses


def training_part(setting: Setting) -> Iterator[Row]:
    """Compare the losses of a run with the CPU's, and of one that goes from the device to the CPU and back."""
    torch.backends.cuda.matmul.allow_tf32 = False
    device, count = str(setting.device), 2 if setting.is_tiny else 17
    expected = train(setting, ["cpu"], 3 * count)
    for what, devices in (("losses", [device]), ("losses, resumed on the CPU and back", [device, "cpu", device])):
        losses = train(setting, devices, 3 * count // len(devices))
        furthest = max(abs(one - other) / other for one, other in zip(losses, expected, strict=True))
        yield compare(f"{what}, {3 * count} steps", furthest, 1e-3)


def furthest(shared: list[Any], plain: list[Any]) -> float:
    """Return the largest difference between tensors, of which the first ones may be sharded."""
    full = [tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for tensor in shared]
    return max(float((one - other).abs().max()) for one, other in zip(full, plain, strict=True))


def share_step(rank: int, kind: str, device_type: str, count: int, folder: str) -> None:
    """Take one process's part of a step; the first writes how far it is from the same step in one process."""
    device = torch.device("cpu") if device_type == "cpu" else torch.device(device_type, rank)
    if device_type != "cpu":
        torch.accelerator.set_device_index(device)
    torch.set_num_threads(1)
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, f"file://{folder}/meeting", rank=rank, world_size=count)
    plain = make_model("base", Setting(device, True, Path(folder)), dropout=0.0).to(device).train()
    model = copy.deepcopy(plain)
    if kind == "ddp":
        shared = DistributedDataParallel(model, device_ids=None if device.type == "cpu" else [device.index])
    else:
        mesh = init_device_mesh(device.type, (count,))
        for layer in (*model.model.encoder.layers, *model.model.decoder.layers):
            fully_shard(layer, mesh=mesh)
        shared = fully_shard(model, mesh=mesh)
    tokens = torch.randint(4, 99, (2 * count, 12), generator=torch.Generator().manual_seed(0)).to(device)
    batch = {"input_ids": tokens[:, :7], "labels": tokens[:, 7:]}
    loss = shared(**{name: tensor[rank::count] for name, tensor in batch.items()}).loss
    loss.backward()
    plain_loss = plain(**batch).loss
    plain_loss.backward()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    differences = {"loss": abs(float(mean / count - plain_loss.detach()))}
    differences["gradients"] = furthest(*([weight.grad for weight in each.parameters()] for each in (model, plain)))
    for each in (model, plain):
        optimizer = paper_adam(each.parameters())
        paper_schedule(optimizer, d_model=32, warmup_steps=4000)
        optimizer.step()
    differences["weights"] = furthest(*([weight.detach() for weight in each.parameters()] for each in (model, plain)))
    if rank == 0:
        Path(folder, "differences.json").write_text(json.dumps(differences))
    dist.barrier()
    dist.destroy_process_group()


def distributed_part(setting: Setting, kind: str) -> Iterator[Row]:
    """Compare a step that all devices share with the same step in one process."""
    os.environ["OMP_NUM_THREADS"] = "1"
    count = torch.accelerator.device_count() if setting.device.type != "cpu" else 2
    method = "fork" if setting.device.type == "cpu" else "spawn"
    arguments = (kind, setting.device.type, count, str(setting.folder))
    torch.multiprocessing.start_processes(share_step, arguments, count, start_method=method)
    for name, difference in json.loads((setting.folder / "differences.json").read_text()).items():
        yield compare(f"{name}, {count} processes", difference, 1e-4)


# Speed


def paper_tokens(setting: Setting) -> int:
    """Return the number of tokens on each side of a step (5.1)."""
    return 400 if setting.is_tiny else 25_000


def seconds_of(setting: Setting, call: Any) -> float:
    """Return the median seconds of a call after one to warm up."""
    rounds = 1 if setting.is_tiny else 3
    taken = [measuring.seconds_of(call, time.perf_counter, setting.synchronize) for _ in range(rounds + 1)]
    return statistics.median(taken[1:])


def training_flops(config: Any, pairs: Pairs) -> int:
    """Return the operations of the matrix products of a training step: two a product, backward twice the forward."""
    sources, targets = (torch.tensor(lengths) for lengths in lengths_of(pairs))
    d, attention = config.d_model, 2 * config.num_heads * config.head_dim + 2 * config.num_heads * config.value_head_dim
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


def train_arm(setting: Setting, arm: str, shape: str, accumulation: int, compiles: bool, attention: str) -> Row:
    """Return the metrics of some paper steps of an arm, taken twice: new shapes may make libraries prepare kernels."""
    step, config = step_of(setting, arm, shape, compiles, attention)
    warm_up, count = 8 if compiles and not setting.is_tiny else WARM_UP, 2 if setting.is_tiny else 10
    pairs = make_pairs(200 if setting.is_tiny else 40_000, config.vocab_size)
    sampler: Any = sampled(pairs, paper_tokens(setting), accumulation)
    if "random" in arm:
        size = max(1, paper_tokens(setting) // (measuring.MEAN_LENGTH * accumulation))
        order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(0))
        sampler = [rows.tolist() for rows in order.split(size)]
    rows = list(itertools.islice(sampler, (warm_up + count) * accumulation))
    batches = [collate([pairs[row] for row in each]) for each in rows]
    steps = [batches[first : first + accumulation] for first in range(0, len(batches), accumulation)]
    if setting.is_cuda:
        torch.cuda.reset_peak_memory_stats()
    for micro_batches in steps[:warm_up]:
        step(micro_batches)

    def run() -> None:
        for micro_batches in steps[warm_up:]:
            step(micro_batches)

    new, seconds = (measuring.seconds_of(run, time.perf_counter, setting.synchronize) for _ in range(2))
    learned = [pairs[row] for each in rows[warm_up * accumulation :] for row in each]
    sources, targets = map(sum, lengths_of(learned))
    positions = sum(
        batch[name].numel() for each in steps[warm_up:] for batch in each for name in ("input_ids", "labels")
    )
    teraflops = training_flops(config, learned) / seconds / 1e12
    name = torch.cuda.get_device_name() if setting.is_cuda else ""
    peak = next((value for known, value in PEAKS.items() if known in name), None)
    return {
        **{"precision": "fp32" if setting.device.type == "cpu" else "bf16", "micro-batches": accumulation},
        **{"ms a step": 1000 * seconds / count, "ms a step of new shapes": 1000 * new / count},
        **{"target tokens/s": targets / seconds, "TFLOP/s": teraflops},
        "MFU": None if peak is None else f"{teraflops / peak:.1%}",
        "peak GiB": torch.cuda.max_memory_allocated() / GIB if setting.is_cuda else None,
        "padding": f"{1 - (sources + targets) / positions:.1%}",
    }


def train_part(
    setting: Setting, arm: str, shape: str, compiles: bool = False, attention: str = "sdpa"
) -> Iterator[Row]:
    """Measure an arm, in as few micro-batches as memory holds."""
    for accumulation in (1, 2, 4, 8, 16):
        try:
            yield train_arm(setting, arm, shape, accumulation, compiles, attention)
            return
        except torch.OutOfMemoryError:
            pass  # the traceback holds the tensors until the handler ends
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
        seen = [one for one in caught if "synchroniz" in str(one.message)]
        waits = Counter(f"{'/'.join(one.filename.split('/')[-2:])}:{one.lineno}" for one in seen)
        yield from ({"step of": name, "line": line, "waits": count} for line, count in waits.items())


def chunks_part(setting: Setting) -> Iterator[Row]:
    """Measure the loss for several sizes of its chunks."""
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
        SkipPart: CTranslate2 is not installed, has no CUDA, or lacks the libraries of its version of CUDA.
    """
    try:
        import ctranslate2
    except ImportError as error:
        raise SkipPart(str(error)) from error

    device, folder = setting.device.type, str(setting.folder / "ctranslate2")
    kind = "float32" if dtype == torch.float32 else "bfloat16"
    to_ctranslate2(make_model("base", setting).eval(), None, folder, force=True)
    try:
        if kind not in ctranslate2.get_supported_compute_types(device):
            raise SkipPart(f"ctranslate2 has no {kind} on this {device}")
        translator = ctranslate2.Translator(folder, device=device, compute_type=kind)
        translator.translate_batch([["5"]], max_decoding_length=2)  # it loads CUDA's libraries now
    except (RuntimeError, ValueError) as error:
        raise SkipPart(f"ctranslate2: {error}") from error
    return translator


@torch.no_grad()
def decoding_part(setting: Setting, arm: str, dtype: torch.dtype) -> Iterator[Row]:
    """Measure output tokens a second of an arm."""
    model: Any = (make_marian if arm == "marian" else make_model)("base", setting).eval()
    vocab_size, cached = model.config.vocab_size, STATIC if "graphs" in arm else {}
    translator = translator_of(setting, dtype) if arm == "ctranslate2" else None
    set_attention(model, "sdpa", setting)
    model = model.to(setting.device, dtype)
    model.generation_config = GenerationConfig(decoder_start_token_id=0, pad_token_id=1)
    if cached:
        compile_steps(model, setting)
    for num_beams, count in itertools.product((4, 1), (1, 2) if setting.is_tiny else (1, 32, 256)):
        sources, config = random_sources(count, vocab_size), measuring.endless_search(num_beams, vocab_size)
        inputs, written = to(setting.device, sources), set()
        if translator is not None:
            search = measuring.endless_ctranslate2(translator, sources, num_beams, TARGET_LENGTH)
        else:
            search = functools.partial(model.generate, **inputs, generation_config=config, **cached)

        def call(search: Any = search, written: set[int] = written) -> None:
            found = search()
            written.add(found if isinstance(found, int) else found.shape[1] - 1)

        seconds = seconds_of(setting, call)
        if written != {TARGET_LENGTH}:
            raise RuntimeError(f"{written} tokens were written, not {TARGET_LENGTH}; the figures would not compare.")
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


def parts() -> list[Part]:
    """Return the parts in the order in which they run."""
    made, both = [], (torch.float32, torch.bfloat16)

    def add(name: str, run: Any, limit: float = 90, is_slow: bool = False, **settings: Any) -> None:
        made.append(Part(name, functools.partial(run, **settings), limit, is_slow))

    for attention, dtype in itertools.product(ATTENTIONS, both):
        if "flash" not in attention or dtype == torch.bfloat16:
            is_flex = attention == "flex_attention"
            name, limit = f"correct: {attention}, {SHORT[dtype]}", 180 if is_flex else 90
            add(name, model_part, limit, is_flex, attention=attention, dtype=dtype)
    for dtype in both:
        add(f"correct: compiled, {SHORT[dtype]}", model_part, 120, True, attention="sdpa", dtype=dtype)
        add(f"correct: non-autoregressive models, {SHORT[dtype]}", parallel_part, dtype=dtype)
    add("correct: search", search_part)
    add("correct: search, static cache and CUDA graphs", search_part, 120, True, compiles=True)
    add("correct: loss in place", loss_part)
    add("correct: training", training_part)
    for kind in ("ddp", "fsdp2"):
        add(f"correct: {kind}", distributed_part, kind=kind)
    for shape, arm in itertools.product(("base", "big"), ("ours", "marian, same batches", "marian, random batches")):
        add(f"train: {shape}, {arm}", train_part, arm=arm, shape=shape)
    add("train: base, ours, flash_attention_2", train_part, arm="ours", shape="base", attention="flash_attention_2")
    add("train: base, ours, compiled", train_part, 300, True, arm="ours", shape="base", compiles=True)
    add("waits: training steps", waits_part)
    add("loss: chunks", chunks_part)
    for arm, dtype in itertools.product(("ours", "marian", "ctranslate2", "ours, CUDA graphs"), both):
        is_compiled = "graphs" in arm
        limit, name = 150 if is_compiled else 90, f"decode: {arm}, {SHORT[dtype]}"
        add(name, decoding_part, limit, is_compiled, arm=arm, dtype=dtype)
    for dtype in both:
        add(f"decode in parallel: {SHORT[dtype]}", parallel_decoding_part, dtype=dtype)
    return sorted(made, key=lambda part: part.is_slow)
