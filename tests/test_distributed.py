"""The model split over two processes by its plans has the logits and the training step of the complete model.

As a program this file is one of the two processes.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

from tests.batches import random_batch
from tests.forks import ForkedCommand
from tests.models import tiny_model
from tests.training.runs import TWO_PROCESSES
from vaswani_transformer import VaswaniTransformerForConditionalGeneration
from vaswani_transformer.batching.optimization import paper_adam, paper_schedule


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def distance(first: Tensor | None, second: Tensor | None) -> float:
    assert first is not None
    assert second is not None
    return (full(first) - full(second)).detach().abs().max().item()


def main(kind: str, folder: str) -> None:
    """Print, from one of two processes, how far a split model is from the complete one; `kind` is tensor or fsdp."""
    assert os.environ["WORLD_SIZE"] == "2"
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    model = tiny_model(vocab_size=100, dropout=0.0)
    if dist.get_rank() == 0:
        model.save_pretrained(folder)
    dist.barrier()
    size = dist.get_world_size()
    config = DistributedConfig(tp_size=size, tp_plan="auto") if kind == "tensor" else DistributedConfig(fsdp_size=size)
    split = VaswaniTransformerForConditionalGeneration.from_pretrained(folder, distributed_config=config)

    torch.manual_seed(0)
    batch = random_batch()
    labels = batch["decoder_input_ids"] % 100
    with torch.no_grad():
        logits = distance(split.eval()(**batch).logits, model(**batch).logits)
    split_loss = split.train()(input_ids=batch["input_ids"], labels=labels).loss
    loss = model.train()(input_ids=batch["input_ids"], labels=labels).loss
    split_loss.backward()
    loss.backward()
    own = dict(model.named_parameters())
    gradient = max(distance(weight.grad, own[name].grad) for name, weight in split.named_parameters())
    for parameters in (split.parameters(), model.parameters()):
        optimizer = paper_adam(parameters)
        paper_schedule(optimizer, d_model=32, warmup_steps=4)
        optimizer.step()
    first: Any = split.model.encoder.layers[0]
    differences = {
        "logits": logits,
        "loss": distance(split_loss.detach(), loss.detach()),
        "gradient": gradient,
        "weights after a step": max(distance(weight, own[name]) for name, weight in split.named_parameters()),
        "is_split": type(first.self_attn.q_proj.weight).__name__,
        "is_tied": split.lm_head.weight is split.model.shared.weight,
    }
    if dist.get_rank() == 0:
        print(json.dumps(differences))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tensor", "fsdp"])
def test_model_split_over_two_processes_equals_the_complete_model(kind: str, tmp_path: Path) -> None:
    command = ForkedCommand(__file__, [kind, str(tmp_path)], launch=TWO_PROCESSES)
    output, errors = command.communicate(timeout=300)
    assert command.returncode == 0, errors
    differences = json.loads(output.splitlines()[-1])
    assert differences.pop("is_split") == "DTensor"
    assert differences.pop("is_tied")
    for name, difference in differences.items():  # sums of float32 in another order
        assert difference < 1e-5, name


if __name__ == "__main__":
    main(*sys.argv[1:])
