"""The host waits for an accelerator no more often than listed here, counted without a GPU.

A GPU works through a queue that the host fills. The host waits until that queue is empty if it needs a result
(`.item()`, `if tensor`, indexing with a boolean mask, `.tolist()`), or for a copy between pageable memory and the
device. Within `counted_waits` every tensor lies on the CPU and reports a GPU as its device, so code takes the path for
accelerators.
"""

import collections
import contextlib
import traceback
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from bench.gpu_models import Setting, batch_for, make_model
from bench.measuring import collate, make_pairs
from tests import ROOT
from tests.batches import FLOAT32, padded_batch, source_batch
from tests.models import tiny_model

DEVICE, HOST = torch.device("cuda"), torch.device("cpu")
# Operations whose result, or its size, the host must know.
WAITING_OPERATIONS = {
    "aten::_local_scalar_dense": "item",
    "aten::nonzero": "nonzero",
    "aten::masked_select": "masked_select",
    "aten::equal": "equal",
    "aten::_unique2": "unique",
    "aten::bincount": "bincount",
}
INDEXING = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
# Functions that wait without an operation.
READING = {Tensor.tolist: "tolist", Tensor.numpy: "numpy", Tensor.cpu: "copy to the host"}


class Waits(collections.Counter[str]):
    """The number of waits of each kind, and in `places` at each line of the checkout."""

    def __init__(self) -> None:
        super().__init__()
        self.places: collections.Counter[str] = collections.Counter()

    def record(self, kind: str) -> None:
        self[kind] += 1
        stack = ((frame.f_code.co_filename, number) for frame, number in traceback.walk_stack(None))
        places = (f"{path}:{number}" for path, number in stack if path.startswith(str(ROOT)) and path != __file__)
        self.places[f"{kind} at {next(places, 'an unknown line')}"] += 1


class Operations(TorchDispatchMode):
    """Counts operations that wait."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self.waits = waits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name in WAITING_OPERATIONS:
            self.waits.record(WAITING_OPERATIONS[name])
        elif name in INDEXING and torch.bool in [index.dtype for index in args[1] if index is not None]:
            self.waits.record("indexing with a mask")
        elif name == "aten::repeat_interleave" and kwargs.get("output_size") is None:
            self.waits.record("repeat_interleave")
        return func(*args, **(kwargs or {}))


class Devices(TorchFunctionMode):
    """Lets every tensor report `DEVICE`, makes tensors on the CPU in place of it, and counts copies."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self.waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == Tensor.device.__get__:
            return DEVICE
        given = [each for each in (*args, *(kwargs or {}).values()) if not isinstance(each, Tensor)]
        if func is Tensor.to and (HOST in given or "cpu" in given):
            self.waits.record("copy to the host")
        elif func in READING:
            self.waits.record(READING[func])
        result = self.on_the_host(func, args, kwargs or {})
        if func in (torch.tensor, torch.as_tensor) and DEVICE in given and args[0] is given[0] and result.numel():
            self.waits.record("copy to the device")
        return result

    def on_the_host(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call a function with `HOST` in place of `DEVICE`."""

        def moved(value: Any) -> Any:
            return HOST if isinstance(value, torch.device) else value

        return func(*map(moved, args), **{name: moved(value) for name, value in kwargs.items()})


@contextlib.contextmanager
def counted_waits() -> Generator[Waits]:
    """Count the waits of the block, whose tensors report `DEVICE`."""
    waits = Waits()
    with Devices(waits), Operations(waits):
        yield waits


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


# The loss waits for the number of tokens, except that of CTC and DAG; they, NAT and IterativeVAE check that labels are
# padded on the right, which CMLM's collator does on the host; GLAT's glancing waits once for the number of real
# positions, and IterativeVAE for the number of losses of all layers but the last.
STEPS = {
    "AR": {"nonzero": 1},
    "NAT": {"item": 1, "nonzero": 1},
    "GLAT": {"item": 1, "nonzero": 2},
    "CTC": {"item": 1},
    "DAG": {"item": 1},
    "CMLM": {"nonzero": 1},
    "IterativeVAE": {"item": 1, "nonzero": 2},
}


@pytest.mark.parametrize("name", STEPS)
def test_training_step_waits_as_often_as_listed(name: str) -> None:
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
        model.glancing_ratio = 0.5 if name in ("GLAT", "CTC", "DAG") else 0.0
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


# Of a call, once of them for scores that are NaN, and of each iteration of CMLM.
NAR_SEARCHES = {"NAT": (5, 0), "CTC": (4, 0), "DAG": (4, 0), "CMLM": (3, 2), "IterativeVAE": (7, 0)}


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
