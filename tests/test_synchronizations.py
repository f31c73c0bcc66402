"""The host waits for an accelerator no more often than listed here, and the counter counts every wait."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.gpu_parts import Setting, batch_for, make_model
from bench.measuring import collate, make_pairs
from tests.helpers import FLOAT32, padded_batch, tiny_model
from tests.synchronizations import SynchronizationCounter, move, pretended_device
from vaswani_transformer.batching.schedule import paper_adam

TINY_CPU = Setting(torch.device("cpu"), True, Path())
WAITING: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "if": (lambda values: bool((values > 0).any()), "item"),
    "tolist": (lambda values: values.tolist(), "tolist"),
    "cpu": (lambda values: values.to("cpu", non_blocking=True), "copy to the host"),  # numbers exist after a wait
    "mask": (lambda values: values[values > 1], "indexing with a mask"),
    "list": (lambda values: values + torch.tensor([1, 2, 3], device=values.device), "copy to the device"),
}


@pytest.mark.parametrize("name", WAITING)
def test_operation_that_the_host_waits_for_is_counted_once(name: str) -> None:
    function, kind = WAITING[name]
    with pretended_device() as device:
        values = torch.arange(3).to(device)
        with SynchronizationCounter() as counter:
            function(values)
    assert counter.counts == {kind: 1}


def test_operation_that_mixes_both_devices_is_an_error() -> None:
    with pretended_device() as device:
        values = torch.arange(3, device=device)
        assert values.device == device
        assert (values + torch.tensor(1)).tolist() == [1, 2, 3]
        assert values[torch.arange(2)].tolist() == [0, 1]
        for mix in (lambda: values + torch.ones(3), lambda: torch.where(torch.ones(3).bool(), values, 0)):
            with pytest.raises(RuntimeError, match=r"to be on the same device; got one of shape .* at tests/test_"):
                mix()


def batch() -> dict[str, Tensor]:
    torch.manual_seed(0)
    source, mask = padded_batch([5, 3])
    target, is_target = padded_batch([4, 6])
    return {"input_ids": source, "attention_mask": mask, "labels": target.masked_fill(is_target == 0, -100)}


# The loss waits for the number of tokens; NAT and IterativeVAE check that labels are padded on the right, which CMLM's
# collator does on the host; glancing and the latents wait once for the number of real positions.
STEPS = {
    "AR": {"nonzero": 1},
    "NAT": {"item": 1, "nonzero": 1},
    "GLAT": {"item": 1, "nonzero": 2},
    "CMLM": {"nonzero": 1},
    "IterativeVAE": {"item": 1, "nonzero": 2},
}


@pytest.mark.parametrize("name", STEPS)
def test_training_step_waits_as_often_as_listed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vaswani_transformer.iterative_vae.gumbel_noise", torch.zeros_like)  # equal on both devices
    settings: dict[str, Any] = {"dropout": 0.0, "attn_implementation": "sdpa"}
    if name == "AR":
        inputs: dict[str, Any] = batch()
        models: list[Any] = [tiny_model(**settings, position_embedding="learned").train() for _ in range(2)]
    else:
        family = "NAT" if name == "GLAT" else name
        inputs = batch_for(family, make_pairs(3, 99))
        settings |= {"latent_dropout": 0.0, "decoder_layers": 3} if name == "IterativeVAE" else {}
        models = [make_model(family, TINY_CPU, **settings).train() for _ in range(2)]
        for model in models:
            model.glancing_ratio = 0.5 if name == "GLAT" else 0.0
        if name == "NAT":
            del inputs["glancing_draws"]
    loss = models[0](**inputs).loss
    loss.backward()
    with pretended_device() as device:
        model = move(models[1])
        optimizer = paper_adam(model.parameters())
        inputs = {key: tensor.to(device) for key, tensor in inputs.items()}
        with SynchronizationCounter() as counter:
            outputs = model(**inputs)
            outputs.loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
            gradients: list[Any] = [parameter.grad for parameter in model.parameters()]
            optimizer.step()
        assert counter.counts == STEPS[name], counter.places
        torch.testing.assert_close(outputs.loss.cpu(), loss)
    for mine, parameter in zip(gradients, models[0].parameters(), strict=True):
        torch.testing.assert_close(mine.host, parameter.grad, **FLOAT32)


# Of a call and of each iteration of CMLM.
NAR_SEARCHES = {"NAT": (4, 0), "CMLM": (2, 2), "IterativeVAE": (5, 0)}


@pytest.mark.parametrize("name", NAR_SEARCHES)
def test_parallel_decoding_waits_as_often_as_listed(name: str) -> None:
    once, each = NAR_SEARCHES[name]
    model = make_model(name, TINY_CPU, attn_implementation="sdpa").eval()
    batch = collate(make_pairs(3, 99))
    for passes in (1, 2) if each else (1,):
        settings = {"num_iterations": passes} if each else {}
        expected = model.generate(batch["input_ids"], attention_mask=batch["attention_mask"], **settings)
        with pretended_device() as device:
            moved: Any = move(copy.deepcopy(model))
            inputs: dict[str, Any] = {key: batch[key].to(device) for key in ("input_ids", "attention_mask")}
            with SynchronizationCounter() as counter:
                tokens = moved.generate(**inputs, **settings)
            assert torch.equal(tokens.cpu(), expected)
        assert counter.counts.total() == once + passes * each, counter.places


@pytest.mark.parametrize(("num_beams", "most"), [(1, 2), (4, 3)])
def test_decoded_token_waits_at_most_as_often_as_listed(num_beams: int, most: int) -> None:
    """The difference between searches of two lengths, which leaves out what a call does once."""
    inputs, waits = batch(), []
    del inputs["labels"]
    model: Any = tiny_model(attn_implementation="sdpa")
    expected = model.generate(**inputs, min_new_tokens=8, max_new_tokens=8, num_beams=num_beams)
    with pretended_device() as device:
        move(model)
        inputs: dict[str, Any] = {name: tensor.to(device) for name, tensor in inputs.items()}
        for length in (4, 8):
            lengths: dict[str, Any] = {"min_new_tokens": length, "max_new_tokens": length}
            with SynchronizationCounter() as counter:
                tokens = model.generate(**inputs, **lengths, num_beams=num_beams)
            waits.append(counter)
        assert torch.equal(tokens.cpu(), expected)
    assert waits[1].counts.total() - waits[0].counts.total() <= 4 * most, waits[1].places - waits[0].places
