"""Count, without a GPU, the operations for which the host would wait for one.

A GPU works through a queue that the host fills. The host waits until that queue is empty if it needs a result
(`.item()`, `if tensor`, indexing with a boolean mask, `.tolist()`), or for a copy between pageable memory and the
device. Within `counted_waits` every tensor lies on the CPU and reports a GPU as its device, so code takes the path for
accelerators.
"""

import collections
import contextlib
import traceback
from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers import ROOT

DEVICE, HOST = torch.device("cuda"), torch.device("cpu")
# Operations whose result, or its size, the host must know.
WAITING = {
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
        if name in WAITING:
            self.waits.record(WAITING[name])
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
