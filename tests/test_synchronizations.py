"""The host waits for an accelerator no more often than listed here."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.gpu_parts import Setting, batch_for, make_model
from bench.measuring import collate, make_pairs
from tests.helpers import FLOAT32, padded_batch, source_batch, tiny_model
from tests.synchronizations import counted_waits

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
    with counted_waits() as waits:
        function(torch.arange(3))
    assert waits == {kind: 1}


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
    monkeypatch.setattr("vaswani_transformer.iterative_vae.gumbel_noise", torch.zeros_like)
    settings: dict[str, Any] = {"dropout": 0.0, "attn_implementation": "sdpa"}
    if name == "AR":
        target, is_target = padded_batch([4, 6])
        inputs = source_batch([5, 3], labels=target.masked_fill(is_target == 0, -100))
        model: Any = tiny_model(**settings, position_embedding="learned").train()
    else:
        family = "NAT" if name == "GLAT" else name
        inputs = batch_for(family, make_pairs(3, 99))
        settings |= {"latent_dropout": 0.0, "decoder_layers": 3} if name == "IterativeVAE" else {}
        model = make_model(family, TINY_CPU, **settings).train()
        model.glancing_ratio = 0.5 if name == "GLAT" else 0.0
        if name == "NAT":
            del inputs["glancing_draws"]

    def gradients() -> tuple[Tensor, ...]:
        weights = list(model.parameters())
        return torch.autograd.grad(model(**inputs).loss, weights, materialize_grads=True)

    expected = gradients()
    with counted_waits() as waits:
        found = gradients()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    assert waits == STEPS[name], waits.places
    torch.testing.assert_close(found, expected, **FLOAT32)


# Of a call and of each iteration of CMLM.
NAR_SEARCHES = {"NAT": (4, 0), "CMLM": (2, 2), "IterativeVAE": (5, 0)}


@pytest.mark.parametrize("name", NAR_SEARCHES)
def test_parallel_decoding_waits_as_often_as_listed(name: str) -> None:
    once, each = NAR_SEARCHES[name]
    model: Any = make_model(name, TINY_CPU, attn_implementation="sdpa").eval()
    batch = collate(make_pairs(3, 99))
    for passes in (1, 2) if each else (1,):
        call: dict[str, Any] = {"attention_mask": batch["attention_mask"]} | (
            {"num_iterations": passes} if each else {}
        )
        expected = model.generate(batch["input_ids"], **call)
        with counted_waits() as waits:
            tokens = model.generate(batch["input_ids"], **call)
        assert torch.equal(tokens, expected)
        assert waits.total() == once + passes * each, waits.places


@pytest.mark.parametrize(("num_beams", "most"), [(1, 2), (4, 3)])
def test_decoded_token_waits_at_most_as_often_as_listed(num_beams: int, most: int) -> None:
    """The difference between searches of two lengths, which leaves out what a call does once."""
    model, counts = tiny_model(attn_implementation="sdpa"), []
    for length in (4, 8):
        call = source_batch([5, 3], min_new_tokens=length, max_new_tokens=length, num_beams=num_beams)
        expected = model.generate(**call)
        with counted_waits() as waits:
            tokens = model.generate(**call)
        assert torch.equal(tokens, expected)
        counts.append(waits)
    assert counts[1].total() - counts[0].total() <= 4 * most, counts[1].places - counts[0].places
