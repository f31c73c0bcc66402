"""The checks of `bench.gpu`: a device against the CPU.

V vocabulary.
"""

import copy
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from bench.gpu_models import (
    SHORT,
    STATIC,
    TINY,
    Batch,
    Setting,
    autocast,
    batch_for,
    compile_steps,
    make_model,
    sampled,
    set_attention,
    to,
)  # fmt: skip
from bench.measuring import Row, collate, make_pairs, random_sources
from vaswani_transformer import paper_adam, paper_schedule
from vaswani_transformer.loss import cross_entropy, projected_cross_entropy

# Differences are norms relative to the CPU's float32. float32 sums in a different order differ by about 1e-6 after
# twelve layers; bfloat16 rounds to 2^-9, about a hundred times in sequence, which adds up like a random walk.
BOUNDS = {
    torch.float32: {"logits": 1e-4, "loss": 1e-5, "gradients": 1e-3},
    torch.bfloat16: {"logits": 5e-2, "loss": 1e-2, "gradients": 1e-1},
}
SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {"num_beams": 1},
    "beam 4": {"num_beams": 4, "length_penalty": 0.6, "length_penalty_type": "gnmt"},
}


def relative(actual: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference, relative to the norm of the expected tensor."""
    actual = actual.detach().cpu().double()
    expected = expected.detach().cpu().double()
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
    if logits.shape[:2] == is_target.shape:  # those of CTC and DAG are of slots
        logits = logits[is_target]
    loss = model.train()(**inputs).loss
    loss.backward()
    gradients = [weight.grad.flatten().float().cpu() for weight in model.parameters() if weight.grad is not None]
    return {"logits": logits.float().cpu(), "loss": loss.detach().float().cpu(), "gradients": torch.cat(gradients)}


def model_part(setting: Setting, attention: str, dtype: torch.dtype, compiles: bool = False) -> Iterator[Row]:
    """Compare one implementation with the CPU's float32; a compiled model has two layers, to save minutes."""
    torch.backends.cuda.matmul.allow_tf32 = False
    model = make_model("C-n2" if compiles else "base", setting, dropout=0.0, attn_implementation="eager")
    batch = collate(make_pairs(6, model.config.vocab_size))
    moved = copy.deepcopy(model)
    set_attention(moved, attention, setting)
    expected = measure(model, batch)
    moved = moved.to(setting.device)
    called = torch.compile(moved, fullgraph=True, backend=setting.compiler) if compiles else moved
    with autocast(setting, dtype):
        measured = measure(called, to(setting.device, batch))
    for name, bound in BOUNDS[dtype].items():
        yield compare(name, relative(measured[name], expected[name]), bound)


def generate(model: Any, batch: Batch, **settings: Any) -> Tensor:
    return model.eval().generate(batch["input_ids"], attention_mask=batch["attention_mask"], **settings)


def parallel_part(setting: Setting, dtype: torch.dtype) -> Iterator[Row]:
    """Compare the non-autoregressive models with the CPU's float32, with equal random choices."""
    torch.backends.cuda.matmul.allow_tf32 = False
    latents: dict[str, Any] = {"latent_dropout": 0.0}
    for name in ("NAT", "CTC", "DAG", "CMLM", "IterativeVAE"):  # FlowSeq draws its latents on the device
        model = make_model(name, setting, dropout=0.0, **(latents if "VAE" in name else {}))
        batch = batch_for(name, make_pairs(6, model.config.vocab_size))
        moved = copy.deepcopy(model).to(setting.device)
        moved_batch = to(setting.device, batch)
        expected = measure(model, batch)
        with autocast(setting, dtype):
            measured = measure(moved, moved_batch)
        for result, bound in BOUNDS[dtype].items():
            if (name, result) == ("IterativeVAE", "logits") and dtype != torch.float32:
                continue  # they depend on the words that the layers commit, which rounding can change
            yield compare(f"{name}, {result}", relative(measured[result], expected[result]), bound)

        # Tokens, where rounding decides nothing.
        if dtype == torch.float32:
            passes = {"num_iterations": 4} if name == "CMLM" else {}
            tokens = generate(moved, moved_batch, **passes)
            yield compare(f"{name}, tokens", differing(tokens, generate(model, batch, **passes)), 0.0)


def search_part(setting: Setting, compiles: bool = False) -> Iterator[Row]:
    """Compare the tokens of searches with the CPU's, by random weights; compiled ones with a static cache."""
    torch.backends.cuda.matmul.allow_tf32 = False
    model = make_model("C-n2" if compiles else "base", setting).eval()
    moved = copy.deepcopy(model).to(setting.device)
    cached = STATIC if compiles else {}
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
            states = hidden.to(dtype).to(device, kind).requires_grad_()
            weights = weight.to(dtype).to(device, kind).requires_grad_()
            if kind == torch.float64:
                loss = cross_entropy(states @ weights.T, labels, 0.1)
            else:
                loss = projected_cross_entropy(states, weights, labels.to(device), 0.1)
            results.append([loss, *torch.autograd.grad(loss, (states, weights))])
        for name, actual, expected in zip(("loss", "gradient of states", "gradient of weights"), *results, strict=True):
            yield compare(f"{name}, {SHORT[dtype]}", relative(actual, expected), bound)


def train(setting: Setting, devices: list[str], steps: int) -> list[float]:
    """Return the losses of `steps` float32 steps on each device in turn; a checkpoint's file leads to the next."""
    size = {} if setting.is_tiny else {"vocab_size": 2000, "d_model": 128, "num_heads": 4, "d_ff": 512}
    pairs = make_pairs(200 if setting.is_tiny else 2000, size.get("vocab_size", TINY["vocab_size"]))
    batches = itertools.cycle(list(sampled(pairs, 400 if setting.is_tiny else 2000)))
    losses = []
    saved = setting.folder / "checkpoint.pt"
    saved.unlink(missing_ok=True)
    for device in map(torch.device, devices):
        # A new process would begin so: a model, its optimizer and schedule, and what the checkpoint says.
        model = make_model("C-n2", setting, dropout=0.0, attn_implementation="sdpa", **size).to(device).train()
        optimizer = paper_adam(model.parameters())
        schedule = paper_schedule(optimizer, model.config.d_model, warmup_steps=100)
        if saved.exists():
            checkpoint = torch.load(saved, map_location=device)
            model.load_state_dict(checkpoint["model"])
            optimizer.load_state_dict(checkpoint["optimizer"])
            schedule.load_state_dict(checkpoint["schedule"])

        for _ in range(steps):
            loss = model(**to(device, collate([pairs[row] for row in next(batches)]))).loss
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(float(loss))
        checkpoint = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "schedule": schedule.state_dict(),
        }
        torch.save(checkpoint, saved)
    return losses


def training_part(setting: Setting) -> Iterator[Row]:
    """Compare the losses of a run with the CPU's, and of one that goes from the device to the CPU and back."""
    torch.backends.cuda.matmul.allow_tf32 = False
    device = str(setting.device)
    count = 2 if setting.is_tiny else 17
    expected = train(setting, ["cpu"], 3 * count)
    for what, devices in (("losses", [device]), ("losses, resumed on the CPU and back", [device, "cpu", device])):
        losses = train(setting, devices, 3 * count // len(devices))
        difference = max(abs(loss - other) / other for loss, other in zip(losses, expected, strict=True))
        yield compare(f"{what}, {3 * count} steps", difference, 1e-3)


def largest_difference(shared: list[Any], plain: list[Any]) -> float:
    """Return the largest difference between tensors that may be sharded and tensors that are not."""
    differences = []
    for tensor, expected in zip(shared, plain, strict=True):
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        differences.append(float((full - expected).abs().max()))
    return max(differences)


def flat_weights(model: Any) -> Tensor:
    """Return all weights of a model, which may be sharded, as one vector."""
    weights = [weight.detach() for weight in model.parameters()]
    return torch.cat([(w.full_tensor() if isinstance(w, DTensor) else w.clone()).flatten() for w in weights])


def join_group(rank: int, device_type: str, count: int, folder: str) -> torch.device:
    """Make this process one of `count` that work together, and return its device."""
    device = torch.device("cpu") if device_type == "cpu" else torch.device(device_type, rank)
    if device_type != "cpu":
        torch.accelerator.set_device_index(device)
    torch.set_num_threads(1)
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, f"file://{folder}/meeting", rank=rank, world_size=count)
    return device


def share(model: Any, kind: str, device: torch.device, count: int) -> Any:
    """Return a model that `count` processes train together."""
    if kind == "ddp":
        return DistributedDataParallel(model, device_ids=None if device.type == "cpu" else [device.index])
    mesh = init_device_mesh(device.type, (count,))
    for layer in (*model.model.encoder.layers, *model.model.decoder.layers):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def share_step(rank: int, kind: str, device_type: str, count: int, folder: str) -> None:
    """Take one process's part of a step; the first process writes how far it is from the same step in one process."""
    # A model that all processes share, and the same in this process alone.
    device = join_group(rank, device_type, count, folder)
    plain = make_model("base", Setting(device, True, Path(folder)), dropout=0.0).to(device).train()
    model = copy.deepcopy(plain)
    shared = share(model, kind, device, count)

    # The loss and the gradients: each process has its rows of the batch.
    tokens = torch.randint(4, 99, (2 * count, 12), generator=torch.Generator().manual_seed(0)).to(device)
    batch = {"input_ids": tokens[:, :7], "labels": tokens[:, 7:]}
    loss = shared(**{name: tensor[rank::count] for name, tensor in batch.items()}).loss
    loss.backward()
    plain_loss = plain(**batch).loss
    plain_loss.backward()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    differences = {"loss": abs(float(mean / count - plain_loss.detach()))}
    gradients = [weight.grad for weight in model.parameters()]
    differences["gradients"] = largest_difference(gradients, [weight.grad for weight in plain.parameters()])

    # The change of the weights by a step of the optimizer, whose first step is as long for every gradient.
    changes = []
    for trained in (model, plain):
        before = flat_weights(trained)
        optimizer = paper_adam(trained.parameters())
        paper_schedule(optimizer, d_model=32, warmup_steps=4000)
        optimizer.step()
        changes.append(flat_weights(trained) - before)
    differences["update"] = float((changes[0] - changes[1]).norm() / changes[1].norm())

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
        yield compare(f"{name}, {count} processes", difference, 0.01 if name == "update" else 1e-4)
