"""Preparing a trained model for the CPU that it decodes on."""

import copy
import warnings
from collections.abc import Callable
from typing import Any, Never, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import logging

from .dropout import Dropout

logger = logging.get_logger(__name__)

Model = TypeVar("Model", bound=PreTrainedModel)

PACKED_FOR = 32  # rows; the layout chosen for so many is as good for any number from 4 on
LEAST_SCALE = 1e-12  # of a row of weights that are all 0


def refuse_gradients(hidden_states: Tensor) -> None:
    """The packed products have no derivative, and torch would only warn of it, later and without a place."""
    if hidden_states.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            "A model prepared for inference passes no gradients back; call it under torch.no_grad(), or call the one "
            "it was prepared from."
        )


class PackedLinear(nn.Module):
    """x W^T + b, with W laid out once as the CPU's matrix library, oneDNN, wants it.

    Args:
        linear: the layer, whose weights are copied.
        dtype: that of the products; inputs and outputs keep theirs.
    """

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.weight = pack(linear.weight.detach().to(dtype))
        self.bias = None if linear.bias is None else linear.bias.detach().to(dtype)

    def forward(self, hidden_states: Tensor) -> Tensor:
        refuse_gradients(hidden_states)
        if hidden_states.dtype == self.dtype:
            return apply_packed(hidden_states, self.weight, self.bias)
        return apply_packed(hidden_states.to(self.dtype), self.weight, self.bias).to(hidden_states.dtype)


def pack(weight: Tensor) -> Tensor:
    """A weight (out, in) in the library's layout; torch has these functions for its own compiler."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACKED_FOR)


def apply_packed(hidden_states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(hidden_states, weight, bias, "none", [], "")


class QuantizedLinear(nn.Module):
    """x W^T + b with W in 8 bits, a scale for each row of W, and x in 8 bits with a scale for all its rows as it comes.

    Args:
        linear: the layer; the largest weight of a row becomes 127.
        reduces_range: whether x has 7 bits alone, so that the sum of two products stays within 16.
    """

    def __init__(self, linear: nn.Linear, reduces_range: bool) -> None:
        super().__init__()
        self.reduces_range = reduces_range
        weight = linear.weight.detach().float()
        scales = (weight.abs().amax(1) / 127).clamp(min=LEAST_SCALE)  # (out,)
        zero_points = torch.zeros_like(scales, dtype=torch.long)
        with warnings.catch_warnings():  # that such tensors will go one day; `works` finds out when they have gone
            warnings.filterwarnings("ignore", r"torch\.quantize_per_tensor", UserWarning)
            quantized = torch.quantize_per_channel(weight, scales, zero_points, 0, torch.qint8)
        bias = None if linear.bias is None else linear.bias.detach().float()
        self.packed = torch.ops.quantized.linear_prepack(quantized, bias)

    def forward(self, hidden_states: Tensor) -> Tensor:
        refuse_gradients(hidden_states)
        product = torch.ops.quantized.linear_dynamic(hidden_states.float(), self.packed, self.reduces_range)
        return product.to(hidden_states.dtype)


def works(make: Callable[[nn.Linear], nn.Module]) -> bool:
    """Whether this build of torch, on this CPU, has the functions that a packed layer needs."""
    linear = probe(0.1)
    try:
        found = make(linear)(torch.ones(2, 64))
    except (RuntimeError, AttributeError):
        return False
    return torch.allclose(found, torch.full_like(found, 6.4), rtol=0.02)  # bfloat16 has 8 bits, so a step is 0.8%


def overflows() -> bool:
    """Whether a sum of two products of 8 bits overflows, as it does where the CPU lacks instructions for such sums."""
    found = QuantizedLinear(probe(1.0), reduces_range=False)(torch.ones(2, 64))
    return not torch.allclose(found, torch.full_like(found, 64.0), rtol=0.02)


def probe(weight: float) -> nn.Linear:
    """A layer of one weight in 64 by 16 places, made without drawing the caller's random numbers."""
    linear = nn.utils.skip_init(nn.Linear, 64, 16, bias=False)
    nn.init.constant_(linear.weight, weight)
    return linear.requires_grad_(False)


LAYERS: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "float32": lambda linear: PackedLinear(linear, torch.float32),
    "bfloat16": lambda linear: PackedLinear(linear, torch.bfloat16),
    "int8": lambda linear: QuantizedLinear(linear, overflows()),
}


class Prepared:
    """What a prepared copy refuses: it holds no weights that could be trained, saved or moved."""

    def train(self, mode: bool = True) -> Any:
        if mode:
            raise RuntimeError("A model prepared for inference cannot be trained; train the one it was prepared from.")
        return cast(Any, super()).train(False)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Never:
        raise RuntimeError("A model prepared for inference cannot be saved; save the one it was prepared from.")

    push_to_hub = state_dict = save_pretrained

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Any:
        moved = fn(torch.zeros(1))
        if (moved.dtype, moved.device.type) != (torch.float32, "cpu"):
            raise RuntimeError(
                f"A model prepared for inference stays where it was prepared, and cannot become {moved.dtype} on "
                f"{moved.device.type}; move the one it was prepared from."
            )
        return cast(Any, super())._apply(fn, *args, **kwargs)


def prepare_for_inference(model: Model, dtype: str = "float32") -> Model:
    """A copy of `model` that decodes faster on the CPU it is on; `generate()` and all else are as before.

    Its linear layers hold their weights as the CPU's matrix library wants them. Its attention is computed by plain
    products ("eager"), which for sentences are faster on a CPU than torch's fused kernel; for texts of thousands of
    tokens `set_attn_implementation("sdpa")` saves memory. Where torch lacks a library for a dtype, the copy has plain
    layers and a warning says so. `parameters()` of the copy are those that are not packed.

    Args:
        model: any model of the package, on the CPU and in float32; it is left as it is.
        dtype: of the products with weights: "float32", with the same results up to rounding; "bfloat16"; or "int8",
            where a sentence's result also hangs a little on the others of its batch.

    Raises:
        ValueError: an unknown dtype, or a model that is not on a CPU in float32 or is itself a prepared copy.
        RuntimeError: from the copy, when it is to be trained, saved or moved, or to pass gradients back.
    """
    if dtype not in LAYERS:
        raise ValueError(f"dtype is {dtype!r}; choose one of {', '.join(LAYERS)}.")
    if isinstance(model, Prepared):
        raise ValueError("The model is prepared for inference already; give the one it was prepared from.")
    kinds = sorted({f"{weight.dtype} on {weight.device.type}" for weight in model.parameters()})
    if kinds != ["torch.float32 on cpu"]:
        raise ValueError(f"The model has weights of {' and '.join(kinds)}; move it by .to('cpu', torch.float32) first.")
    if works(LAYERS[dtype]):
        prepared = copy.deepcopy(model, cast(Any, weights_to_pack(model)))
        replace(prepared, nn.Linear, LAYERS[dtype])
    else:
        prepared = copy.deepcopy(model)
        logger.warning("torch %s cannot pack layers in %s here; the copy has plain ones.", torch.__version__, dtype)
    replace(prepared, Dropout, lambda _: nn.Identity())
    cast(Any, prepared).__class__ = type(f"Prepared{type(model).__name__}", (Prepared, type(model)), {})
    prepared.set_attn_implementation("eager")
    return prepared.eval().requires_grad_(False)


def weights_to_pack(model: nn.Module) -> dict[int, Tensor]:
    """The weights of linear layers alone, by id as `deepcopy` knows what not to copy: packing copies them anyhow."""
    kept = {
        id(weight)
        for module in model.modules()
        if type(module) is not nn.Linear
        for weight in module.parameters(recurse=False)
    }
    weights = [module.weight for module in model.modules() if type(module) is nn.Linear]
    return {id(weight): weight for weight in weights if id(weight) not in kept}


def replace(model: nn.Module, kind: type, make: Callable[[Any], nn.Module]) -> None:
    """Put what `make` makes of each module of exactly this kind in its place."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is kind:
                setattr(module, name, make(child))


__all__ = ["prepare_for_inference"]
