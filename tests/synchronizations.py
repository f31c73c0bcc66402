"""Count, without a GPU, the operations for which the host would wait for one.

A GPU works through a queue that the host fills. The host waits until that queue is empty if it needs a result
(`.item()`, `if tensor`, indexing with a boolean mask, `.tolist()`), or for a copy between pageable memory and the
device. `pretended_device` runs real code on tensors that report an accelerator's device and hold their numbers on the
CPU. So code takes the path for accelerators and gives real results. `SynchronizationCounter` counts every such
operation with the line that calls it.
"""

import collections
import contextlib
import os
import sysconfig
import traceback
from collections.abc import Generator
from typing import Any, Self
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from tests.helpers import ROOT

INSTALLED = (sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["purelib"])
# The only other device type than the CPU that every build of torch knows and that needs no driver.
DEVICE = torch.device("meta")
HOST = torch.device("cpu")
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
MIXING = ("aten::copy_", "aten::_to_copy", *INDEXING)  # take tensors of the host too
# Functions that read a tensor's memory without the dispatcher.
READING = {Tensor.tolist: "tolist", Tensor.numpy: "numpy"}
MAKING = (torch.tensor, torch.as_tensor)


class DeviceTensor(Tensor):
    """A tensor of `DEVICE` whose numbers lie on the CPU in `host`."""

    host: Tensor

    @staticmethod
    def __new__(cls: type["DeviceTensor"], host: Tensor) -> "DeviceTensor":
        made = Tensor._make_wrapper_subclass(
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=DEVICE,
            requires_grad=False,
        )
        made.host = host
        return made

    @classmethod
    def __torch_dispatch__(  # ty: ignore[incompatible-method-override] - torch has a C function
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return dispatch(func, args, kwargs or {})


COUNTERS: list["SynchronizationCounter"] = []  # that which counts, if any


def record(kind: str) -> None:
    """Count a synchronization, with the line that calls it."""
    for counter in COUNTERS:
        counter.counts[kind] += 1
        counter.places[f"{kind} at {calling_line()}"] += 1


def calling_line() -> str:
    """Return the innermost line of the checkout on the stack, outside this file."""
    for frame, number in traceback.walk_stack(None):
        path = frame.f_code.co_filename
        if path != __file__ and path.startswith(str(ROOT)) and not path.startswith(INSTALLED):
            return f"{os.path.relpath(path, ROOT)}:{number} ({frame.f_code.co_name})"
    return "an unknown line"


def dispatch(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on the numbers of its tensors, and count it if a host would wait for it."""
    is_on_device = False

    def unwrap(tensor: Tensor) -> Tensor:
        nonlocal is_on_device
        if isinstance(tensor, DeviceTensor):
            is_on_device = True
            return tensor.host
        return tensor

    host_args, host_kwargs = tree_map_only(Tensor, unwrap, (args, kwargs))
    name = function._schema.name
    if is_on_device and name not in MIXING:
        check_devices(name, args, kwargs)
    goes_to_device = is_on_device
    if host_kwargs.get("device") is not None:
        goes_to_device = torch.device(host_kwargs["device"]).type == DEVICE.type
        host_kwargs["device"] = HOST
        host_kwargs.pop("pin_memory", None)
    if is_on_device and name in WAITING:
        record(WAITING[name])
    elif (
        is_on_device and name in INDEXING and torch.bool in [index.dtype for index in host_args[1] if index is not None]
    ):
        record("indexing with a mask")
    elif name == "aten::repeat_interleave" and is_on_device and host_kwargs.get("output_size") is None:
        record("repeat_interleave")
    elif name == "aten::_to_copy" and is_on_device != goes_to_device:
        if not goes_to_device or not host_kwargs.get("non_blocking"):
            record("copy to the device" if goes_to_device else "copy to the host")
    elif name == "aten::copy_" and isinstance(args[0], DeviceTensor) != isinstance(args[1], DeviceTensor):
        record("copy to the device" if isinstance(args[0], DeviceTensor) else "copy to the host")
    result = function(*host_args, **host_kwargs)
    if not goes_to_device:
        return result
    wrapped = tree_map(lambda value: DeviceTensor(value) if isinstance(value, Tensor) else value, result)
    return return_and_correct_aliasing(function, args, kwargs, wrapped) if is_on_device else wrapped


def check_devices(name: str, args: Any, kwargs: dict[str, Any]) -> None:
    """Raise RuntimeError as an accelerator does where an operation mixes its tensors with ones of the host.

    Numbers (tensors without dimensions) may lie on the host.
    """
    for tensor in tree_leaves((args, kwargs)):
        if isinstance(tensor, Tensor) and tensor.dim() and not isinstance(tensor, DeviceTensor):
            raise RuntimeError(
                f"{name}: expected all tensors to be on the same device; got one of shape {tuple(tensor.shape)} on the "
                f"{tensor.device.type} at {calling_line()}"
            )


class DeviceMode(TorchDispatchMode):
    """Makes tensors that are created on `DEVICE`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})


class ReadingMode(TorchFunctionMode):
    """Handles calls that bypass the dispatcher: tensors made of Python numbers, and reading complete tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READING and isinstance(args[0], DeviceTensor):
            record(READING[func])
            return func(args[0].host, *args[1:], **(kwargs or {}))
        device = (kwargs or {}).get("device")
        if func in MAKING and device is not None and torch.device(device).type == DEVICE.type:
            is_moved = not isinstance(args[0], DeviceTensor)
            made = func(args[0].host if not is_moved else args[0], *args[1:], **{**kwargs, "device": HOST})
            if is_moved and made.numel():
                record("copy to the device")
            return DeviceTensor(made)
        return func(*args, **(kwargs or {}))


class SynchronizationCounter:
    """Counts synchronizations within a `with` block.

    Attributes:
        counts: the number of each kind.
        places: the number of each kind at each line.
    """

    def __enter__(self) -> Self:
        self.counts: collections.Counter[str] = collections.Counter()
        self.places: collections.Counter[str] = collections.Counter()
        COUNTERS.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        COUNTERS.remove(self)


@contextlib.contextmanager
def pretended_device() -> Generator[torch.device]:
    """Yield a device that behaves as an accelerator without autocast; `to` moves tensors and models to it."""
    no_autocast: dict[str, Any] = {
        "is_autocast_enabled": lambda *_: False,
        "autocast": lambda *_, **__: contextlib.nullcontext(),
    }
    with mock.patch.multiple(torch, **no_autocast), ReadingMode(), DeviceMode():
        yield DEVICE


def move(model: nn.Module) -> nn.Module:
    """Move a model to the pretended device in place and return it; tied weights stay tied."""
    moved: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                weight = moved.setdefault(
                    id(parameter), nn.Parameter(DeviceTensor(parameter.detach()), parameter.requires_grad)
                )
                module._parameters[name] = weight
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = DeviceTensor(buffer)
    return model
