"""A device against the CPU: logits, loss, gradients, tokens, training, distribution and checkpoints."""

import contextlib
import copy
import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from tests.gpu.models import PARALLEL, STATIC, collate, collate_for_nar, compile_steps, make_model, make_nar
from tests.gpu.runner import Part, Row, Setting, SkipPart, nothing
from tests.gpu.training_run import Run
from tests.helpers import PAIRS, ROOT, model_of_pairs
from tests.measuring import make_pairs, random_sources
from vaswani_transformer.loss import cross_entropy, projected_cross_entropy
from vaswani_transformer.support.errors import one_line

TABLE = "Correctness"
ATTENTIONS = ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3")
# Differences are norms relative to the CPU's float32. float32 sums in another order differ by about 1e-6 after twelve
# layers; bfloat16 rounds to 2^-9, about a hundred times one after another, which adds up like a random walk.
BOUNDS = {
    torch.float32: {"logits": 1e-4, "loss": 1e-5, "gradients": 1e-3},
    torch.bfloat16: {"logits": 5e-2, "loss": 1e-2, "gradients": 1e-1},
}
SHORT = {torch.float32: "float32", torch.bfloat16: "bf16"}


def relative(actual: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference relative to the norm of what is expected."""
    actual, expected = actual.detach().cpu().double(), expected.detach().cpu().double()
    return float((actual - expected).norm() / expected.norm().clamp(min=1e-30))


def compare(what: str, difference: float, bound: float) -> Row:
    return {"compared": what, "difference": difference, "bound": bound}


def measure(model: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return logits in evaluation mode, and loss and all gradients in training mode without dropout, on the CPU."""
    with torch.no_grad():
        logits = model.eval()(**inputs).logits[inputs["labels"].ne(-100)]
    loss = model.train()(**inputs).loss
    loss.backward()
    gradients = torch.cat([parameter.grad.flatten().float().cpu() for parameter in model.parameters()])
    return {"logits": logits.float().cpu(), "loss": loss.detach().float().cpu(), "gradients": gradients}


@functools.cache
def reference(is_tiny: bool, shape: str = "base") -> tuple[Any, dict[str, Tensor], dict[str, Tensor]]:
    """Return the paper's model `shape` on the CPU, a batch, and the model's results on it in float32."""
    setting = Setting(torch.device("cpu"), is_tiny, Path())
    model = make_model(shape, setting, dropout=0.0, attn_implementation="eager")
    batch = collate(make_pairs(6, model.config.vocab_size))
    return model, batch, measure(copy.deepcopy(model), batch)


def on_device(setting: Setting, attention: str, shape: str = "base") -> tuple[Any, dict[str, Tensor]]:
    """Return the reference's model and batch on the device.

    Raises:
        SkipPart: this machine lacks the attention.
    """
    model, batch, _ = reference(setting.is_tiny, shape)
    model = copy.deepcopy(model)
    try:
        model.set_attn_implementation(attention)
    except (ImportError, ValueError, OSError) as error:  # the last where a kernel would come from the Hub
        raise SkipPart(f"{attention}: {one_line(error, is_complete=True)}") from error
    return model.to(setting.device), {name: tensor.to(setting.device) for name, tensor in batch.items()}


def autocast(setting: Setting, dtype: torch.dtype) -> contextlib.AbstractContextManager:
    return torch.autocast(setting.device.type, dtype, enabled=dtype != torch.float32)


def model_part(setting: Setting, attention: str, dtype: torch.dtype, compiles: bool = False) -> Iterator[Row]:
    """Compare one implementation with the CPU's float32; compiled ones have two layers, for a sixth of the minutes."""
    torch.backends.cuda.matmul.allow_tf32 = False
    shape = "C-n2" if compiles else "base"
    model, batch = on_device(setting, attention, shape)
    expected = reference(setting.is_tiny, shape)[2]
    called = torch.compile(model, fullgraph=True, backend=setting.compiler) if compiles else model
    with autocast(setting, dtype):
        measured = measure(called, batch)
    for name, bound in BOUNDS[dtype].items():
        yield compare(name, relative(measured[name], expected[name]), bound)


def parallel_part(setting: Setting, dtype: torch.dtype) -> Iterator[Row]:
    """Compare the models that predict all words at once with the CPU's float32, with equal random choices."""
    torch.backends.cuda.matmul.allow_tf32 = False
    for name in PARALLEL:
        model = make_nar(name, setting, dropout=0.0, **({"latent_dropout": 0.0} if "VAE" in name else {}))
        batch = collate_for_nar(name, make_pairs(6, model.config.vocab_size))
        moved = copy.deepcopy(model).to(setting.device)
        on_it = {key: tensor.to(setting.device) for key, tensor in batch.items()}
        with mock.patch("vaswani_transformer.latent.gumbel_noise", torch.zeros_like):
            expected = measure(model, batch)
            with autocast(setting, dtype):
                measured = measure(moved, on_it)
        for result, bound in BOUNDS[dtype].items():
            yield compare(f"{name}, {result}", relative(measured[result], expected[result]), bound)
        if dtype == torch.float32:
            passes = {"num_iterations": 4} if name == "CMLM" else {}
            tokens = [
                each.eval().generate(inputs["input_ids"], attention_mask=inputs["attention_mask"], **passes)
                for each, inputs in ((moved, on_it), (model, batch))
            ]
            yield compare(f"{name}, tokens", differing(*tokens), 0.0)


def needs_flash(setting: Setting) -> str | None:
    return None if setting.is_cuda else "flash attention needs CUDA"


def needs_flex(setting: Setting) -> str | None:
    return "flex_attention has no backward pass on a CPU" if setting.device.type == "cpu" else None


NEEDS = {"flash_attention_2": needs_flash, "flash_attention_3": needs_flash, "flex_attention": needs_flex}


def differing(actual: Tensor, expected: Tensor) -> float:
    """Return the share of tokens that differ."""
    if actual.shape != expected.shape:
        return 1.0
    return float(actual.cpu().ne(expected).double().mean())


SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {"num_beams": 1},
    "beam 4": {"num_beams": 4, "length_penalty": 0.6, "length_penalty_type": "gnmt"},
}


def trained_tokens(setting: Setting, dtype: torch.dtype, compiles: bool) -> Iterator[Row]:
    """Compare the tokens of searches with the CPU's float32, by a trained model, whose choices are clear."""
    trained, tokenizer = model_of_pairs()
    batch = tokenizer(list(PAIRS), padding=True, return_tensors="pt")
    batch = {name: batch[name] for name in ("input_ids", "attention_mask")}
    model = copy.deepcopy(trained).to(setting.device, dtype)
    moved = {name: tensor.to(setting.device) for name, tensor in batch.items()}
    cached = STATIC if compiles else {}
    counters["inductor"].clear()
    if compiles:
        compile_steps(model, setting)
    for name, search in SEARCHES.items():
        expected = trained.generate(**batch, max_new_tokens=16, **search)
        for _ in range(3 if compiles else 1):  # CUDA graphs are recorded in the second call and replayed in the third
            generated = model.generate(**moved, max_new_tokens=16, **search, **cached)
        yield compare(f"tokens, {name}", differing(generated, expected), 0.0)
    if compiles:
        yield compare("graphs that inductor runs without CUDA graphs", counters["inductor"]["cudagraph_skips"], 0)


def random_tokens(setting: Setting) -> Iterator[Row]:
    """Compare the tokens of searches with the CPU's by the reference's model, whose logits are close together."""
    torch.backends.cuda.matmul.allow_tf32 = False
    model = reference(setting.is_tiny)[0].eval()
    moved, _ = on_device(setting, "sdpa")
    batch = random_sources(4, model.config.vocab_size)
    on_it = {name: tensor.to(setting.device) for name, tensor in batch.items()}
    for name, search in SEARCHES.items():
        expected = model.generate(**batch, max_new_tokens=20, **search)
        generated = moved.eval().generate(**on_it, max_new_tokens=20, **search)
        yield compare(f"tokens, {name}", differing(generated, expected), 0.0)


def loss_part(setting: Setting) -> Iterator[Row]:
    """Compare the loss, which computes its softmax in place, with torch's in float64, over several chunks."""
    tokens, vocab_size, d_model = (600, 99, 32) if setting.is_tiny else (5000, 37_000, 512)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, d_model, generator=generator)
    weight = torch.randn(vocab_size, d_model, generator=generator) * d_model**-0.5
    labels = torch.randint(vocab_size, (tokens,), generator=generator)
    labels[::7] = -100
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        results = []
        for device, kind in ((setting.device, dtype), (torch.device("cpu"), torch.float64)):
            # Both start from the same rounded numbers, so only sums and later rounding differ.
            sides = [side.to(dtype).to(device, kind).requires_grad_() for side in (hidden, weight)]
            if kind == torch.float64:
                logits = sides[0] @ sides[1].T
                loss = cross_entropy(logits, labels, 0.1)
            else:
                loss = projected_cross_entropy(sides[0], sides[1], labels.to(device), 0.1)
            results.append([loss, *torch.autograd.grad(loss, sides)])
        for name, actual, expected in zip(("loss", "gradient of states", "gradient of weights"), *results, strict=True):
            yield compare(f"{name}, {SHORT[dtype]}", relative(actual, expected), bound)


def training_part(setting: Setting) -> Iterator[Row]:
    """Compare the losses of a run with those of the same run on the CPU, step by step."""
    steps = 6 if setting.is_tiny else 50
    folder = str(setting.folder)
    losses = Run(folder, steps, str(setting.device), setting.is_tiny).losses()
    expected = Run(folder, steps, "cpu", setting.is_tiny).in_a_process()
    furthest = max(abs(one - other) / other for one, other in zip(losses, expected, strict=True))
    yield compare(f"losses of {steps} steps", furthest, 1e-3) | {"first": expected[0], "last": expected[-1]}


def checkpoint_part(setting: Setting) -> Iterator[Row]:
    """Train on the device, resume on the CPU, and resume on the device; compare with an uninterrupted run.

    Each part of the run has a new model and Trainer, and the CPU's also a process without the device.
    """
    steps = 2 if setting.is_tiny else 5
    device, complete = str(setting.device), str(setting.folder / "whole")
    expected = Run(complete, 3 * steps, device, setting.is_tiny).losses()
    losses, resume, folder = [], None, str(setting.folder / "parts")
    for part, where in enumerate((device, "cpu", device), 1):
        run = Run(folder, part * steps, where, setting.is_tiny, resume, saves=True)
        losses += run.losses() if where == device else run.in_a_process()
        resume = f"{folder}/checkpoint-{part * steps}"
    furthest = max(abs(one - other) / other for one, other in zip(losses, expected, strict=True))
    yield compare(f"losses of {3 * steps} steps in three parts", furthest, 1e-3)


def distributed_part(setting: Setting, kind: str) -> Iterator[Row]:
    """Compare a step that all devices share with the same step in one process.

    The processes are started here and not by torchrun, which starts them in sessions of their own: they would outlive
    a part that is ended.
    """
    count = torch.accelerator.device_count() if setting.device.type != "cpu" else 2
    command = [sys.executable, "-m", "tests.gpu.distributed_worker", kind, setting.device.type]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(count), str(setting.folder / "meeting")],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    outputs = [process.communicate()[0] for process in processes]
    if statuses := {process.returncode for process in processes} - {0}:
        raise RuntimeError(f"a process of {count} ended with status {statuses.pop()}")
    for name, difference in json.loads(outputs[0].splitlines()[-1]).items():
        yield compare(f"{name}, {count} processes", difference, 1e-4)


def attention_parts() -> Iterator[Part]:
    """Yield a part for each attention implementation and precision."""
    for attention in ATTENTIONS:
        for dtype in (torch.float32, torch.bfloat16):
            if "flash" not in attention or dtype == torch.bfloat16:
                compiles = attention == "flex_attention"
                run = functools.partial(model_part, attention=attention, dtype=dtype)
                name, needs = f"correct: {attention}, {SHORT[dtype]}", NEEDS.get(attention, nothing)
                yield Part(name, TABLE, run, 180 if compiles else 90, needs, compiles)


def parts() -> list[Part]:
    """Return the parts in the order in which they run."""
    made = list(attention_parts())
    for dtype in (torch.bfloat16, torch.float32):
        run = functools.partial(model_part, attention="sdpa", dtype=dtype, compiles=True)
        made.append(Part(f"correct: compiled, {SHORT[dtype]}", TABLE, run, 120, compiles=True))
    for dtype in (torch.float32, torch.bfloat16):
        run = functools.partial(parallel_part, dtype=dtype)
        made.append(Part(f"correct: non-autoregressive models, {SHORT[dtype]}", TABLE, run, 60))
    made.append(Part("correct: search, base", TABLE, random_tokens, 60))
    for dtype in (torch.float32, torch.bfloat16):
        run = functools.partial(trained_tokens, dtype=dtype, compiles=False)
        made.append(Part(f"correct: search, {SHORT[dtype]}", TABLE, run, 60))
    run = functools.partial(trained_tokens, dtype=torch.float32, compiles=True)
    made.append(Part("correct: search, static cache and CUDA graphs", TABLE, run, 120, compiles=True))
    made.append(Part("correct: loss in place", TABLE, loss_part))
    made.append(Part("correct: training", TABLE, training_part, 90))
    made.append(Part("correct: checkpoints", TABLE, checkpoint_part, 90))
    for kind in ("ddp", "fsdp2"):
        made.append(Part(f"correct: {kind}", TABLE, functools.partial(distributed_part, kind=kind), 90))
    return made
