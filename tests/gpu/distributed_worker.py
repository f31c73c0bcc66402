"""One process of a step that all devices share; prints how far it is from the same step in one process.

Usage, once for each RANK: python -m tests.gpu.distributed_worker ddp|fsdp2 DEVICE_TYPE RANK COUNT FILE
FILE is one that no process has made yet, by which they find each other.
"""

import copy
import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.helpers import random_batch, tiny_model
from vaswani_transformer.batching.schedule import paper_adam, paper_schedule


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def distribute(model: Any, kind: str, device: torch.device) -> Any:
    """Return the model wrapped in DDP, or with its layers, and then everything else, sharded in place."""
    if kind == "ddp":
        return DistributedDataParallel(model, device_ids=None if device.type == "cpu" else [device.index])
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in (*model.model.encoder.layers, *model.model.decoder.layers):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def main(kind: str, device_type: str, rank: int, count: int, file: str) -> None:
    device = torch.device(device_type)
    if device_type != "cpu":
        device = torch.device(device_type, rank)
        torch.accelerator.set_device_index(device)
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, f"file://{file}", rank=rank, world_size=count)
    torch.set_num_threads(1)
    plain = tiny_model(dropout=0.0).to(device).train()
    model = copy.deepcopy(plain)
    shared = distribute(model, kind, device)
    torch.manual_seed(0)
    batch = random_batch(batch=2 * count)
    batch = {"input_ids": batch["input_ids"].to(device), "labels": batch["decoder_input_ids"].to(device)}
    rank_batch = {name: tensor[rank::count] for name, tensor in batch.items()}
    loss = shared(**rank_batch).loss
    loss.backward()
    plain_loss = plain(**batch).loss
    plain_loss.backward()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    expected = dict(plain.named_parameters())
    differences: dict[str, float] = {"loss": abs(float(mean / count - plain_loss.detach()))}
    gradients = {name: full(weight.grad) - expected[name].grad for name, weight in model.named_parameters()}
    differences["gradients"] = max(float(difference.abs().max()) for difference in gradients.values())
    for parameters in (model.parameters(), plain.parameters()):
        optimizer = paper_adam(parameters)
        paper_schedule(optimizer, d_model=32, warmup_steps=4000)
        optimizer.step()
    weights = {name: full(weight.detach()) - expected[name].detach() for name, weight in model.named_parameters()}
    differences["weights after a step"] = max(float(difference.abs().max()) for difference in weights.values())
    if rank == 0:
        print(json.dumps(differences), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:3], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
