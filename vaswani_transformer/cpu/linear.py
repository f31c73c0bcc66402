"""Linear layers with weights in the layout of a CPU's matrix library, in float32, bfloat16 or int8.

R rows of inputs. The functions of torch used here belong to its compiler or are deprecated. Only this file uses them,
and `is_supported` tries each dtype before any use.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

PACKING_ROWS = 32  # the layout for this number of rows is as fast for any number from 4 on
MIN_SCALE = 1e-12  # of a row of weights that are all 0
NARROW_WIDTH, NARROW_ENTRIES = 256, 2**22  # of weights that are multiplied faster without packing
LARGE_BATCH_ROWS = 32  # from which on int8 matmuls are faster by oneDNN than by FBGEMM


def raw_op(operator: Any) -> Callable[..., Tensor]:
    """Return an operator as torch's compiled function, without what its call does in Python before.

    A call with a packed int8 weight searches each argument for an object of torch's compiler, and a decoder step makes
    a dozen such calls. `len` of a tensor is Python too; code that runs in every step reads `shape` instead.
    """
    return getattr(operator, "_op", operator)


class PreparedLinear(nn.Module):
    """A layer without derivatives, with a copy of the weights of a plain one, `linear`."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the product in the dtype of `hidden_states` (..., in)."""
        if hidden_states.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                "A model prepared for inference passes no gradients back; call it under torch.no_grad(), or call the "
                "one it was prepared from."
            )
        product = self.raw_forward()(hidden_states.float().reshape(-1, hidden_states.shape[-1]))  # (R, out)
        return product.view(*hidden_states.shape[:-1], product.shape[1]).to(hidden_states.dtype)

    def raw_forward(self) -> Callable[[Tensor], Tensor]:
        """Return the product with rows (R, in) in float32 without gradients, as a function."""
        raise NotImplementedError

    def unpacked(self) -> tuple[Tensor, Tensor | None] | None:
        """Return its weight (out, in) and bias in float32, where that loses nothing; else None."""
        return None


class PackedLinear(PreparedLinear):
    """x W^T + b, with W laid out once for the CPU's matrix library, oneDNN; `dtype` is that of the products."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        weight = linear.weight.detach().to(dtype).contiguous()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, PACKING_ROWS)
        self.bias = None if linear.bias is None else linear.bias.detach().to(dtype)

    def raw_forward(self) -> Callable[[Tensor], Tensor]:
        weight, bias, dtype = self.weight, self.bias, self.dtype
        apply = raw_op(torch.ops.mkldnn._linear_pointwise.default)
        if dtype == torch.float32:
            return lambda rows: apply(rows, weight, bias, "none", [], "")
        return lambda rows: apply(rows.to(dtype), weight, bias, "none", [], "").float()

    def unpacked(self) -> tuple[Tensor, Tensor | None] | None:
        return (self.weight.to_dense(), self.bias) if self.dtype == torch.float32 else None


class TransposedLinear(PreparedLinear):
    """x W^T + b in float32 with W stored as (in, out).

    A call of oneDNN takes as long as the product of a narrow layer with a few rows; torch's own is shorter.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight.detach().t().contiguous()
        self.bias = None if linear.bias is None else linear.bias.detach()

    def raw_forward(self) -> Callable[[Tensor], Tensor]:
        weight, bias = self.weight, self.bias
        return (lambda rows: rows.mm(weight)) if bias is None else (lambda rows: torch.addmm(bias, rows, weight))

    def unpacked(self) -> tuple[Tensor, Tensor | None] | None:
        return self.weight.t(), self.bias


def pack_quantized(weight: Tensor, bias: Tensor | None, engine: str) -> Any:
    """Return a quantized weight (out, in) in the layout of one of torch's int8 libraries."""
    chosen = torch.backends.quantized.engine
    torch.backends.quantized.engine = engine
    try:
        return torch.ops.quantized.linear_prepack(weight, bias)
    finally:
        torch.backends.quantized.engine = chosen


class QuantizedLinear(PreparedLinear):
    """x W^T + b with W in int8, a scale for each row of W, and x in int8, with one scale for each call.

    W has two layouts if torch has both oneDNN and FBGEMM, one faster for few rows and one for many.

    Args:
        linear: the layer; the largest weight of a row becomes 127.
        reduces_range: whether x has only 7 bits, so that the sum of two products stays within 16.
    """

    def __init__(self, linear: nn.Linear, reduces_range: bool) -> None:
        super().__init__()
        self.reduces_range = reduces_range
        weight = linear.weight.detach().float()
        scales = (weight.abs().amax(1) / 127).clamp(min=MIN_SCALE)  # (out,)
        zero_points = torch.zeros_like(scales, dtype=torch.long)
        with warnings.catch_warnings():  # of the deprecation of such tensors; `is_supported` detects their absence
            warnings.filterwarnings("ignore", r"torch\.quantize_per_tensor", UserWarning)
            quantized = torch.quantize_per_channel(weight, scales, zero_points, 0, torch.qint8)
        bias = None if linear.bias is None else linear.bias.detach().float()
        chosen = torch.backends.quantized.engine
        has_both = "onednn" in torch.backends.quantized.supported_engines
        self.packed_small_batch = pack_quantized(quantized, bias, chosen)
        self.packed_large_batch = pack_quantized(quantized, bias, "onednn") if has_both else self.packed_small_batch

    def raw_forward(self) -> Callable[[Tensor], Tensor]:
        small, large, reduces_range = self.packed_small_batch, self.packed_large_batch, self.reduces_range
        apply = raw_op(torch.ops.quantized.linear_dynamic.default)
        return lambda rows: apply(rows, small if rows.shape[0] < LARGE_BATCH_ROWS else large, reduces_range)

    def unpacked(self) -> tuple[Tensor, Tensor | None] | None:
        """Return its weight (out, in) as int8 has it, and bias, in float32."""
        weight, bias = torch.ops.quantized.linear_unpack(self.packed_small_batch)
        return weight.dequantize(), bias


def probe_linear(weight: float | Tensor) -> nn.Linear:
    """Return a layer 64 wide with 16 outputs, of one weight or of those given, without drawing random numbers."""
    linear = nn.utils.skip_init(nn.Linear, 64, 16, bias=False, dtype=torch.float32).requires_grad_(False)
    linear.weight.copy_(torch.as_tensor(weight))
    return linear


def is_supported(make: Callable[[nn.Linear], Any]) -> bool:
    """Return whether this build of torch, on this CPU, has the functions that a packed layer needs."""
    linear = probe_linear(torch.arange(1024).view(16, 64).float() / 1023)
    rows = torch.ones(LARGE_BATCH_ROWS, 64, dtype=torch.float32)
    try:
        layer = make(linear)
        products, parameters = torch.cat([layer(rows[:2]), layer(rows)]), layer.unpacked()
    except (RuntimeError, AttributeError, TypeError):
        return False
    step = 1 / 127 if isinstance(layer, QuantizedLinear) else 0.0
    if parameters is not None and not torch.allclose(parameters[0], linear.weight, rtol=0.0, atol=step / 2):
        return False
    # A step of bfloat16, which has 8 bits, is 0.8%.
    return torch.allclose(products, linear(rows[:1]).expand_as(products), rtol=0.02)


def int8_sum_overflows() -> bool:
    """Return whether a sum of two int8 products overflows, as it does where the CPU lacks instructions for them."""
    layer = QuantizedLinear(probe_linear(1.0), reduces_range=False)
    products = torch.cat([layer(torch.ones(rows, 64, dtype=torch.float32)) for rows in (2, LARGE_BATCH_ROWS)])
    return not torch.allclose(products, torch.full_like(products, 64.0), rtol=0.02)


LINEAR_FACTORIES: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "float32": lambda linear: PackedLinear(linear, torch.float32),
    "bfloat16": lambda linear: PackedLinear(linear, torch.bfloat16),
    "int8": lambda linear: QuantizedLinear(linear, int8_sum_overflows()),
}


def linear_factory(dtype: str) -> Callable[[nn.Linear], nn.Module] | None:
    """Return the function that packs a plain layer; None if torch has no packed ones in this dtype here."""
    make = LINEAR_FACTORIES[dtype]
    if not is_supported(make):
        return None
    if dtype != "float32":
        return make
    return lambda linear: TransposedLinear(linear) if is_narrow(linear) else make(linear)


def is_narrow(linear: nn.Linear) -> bool:
    """Return whether a layer is faster as a `TransposedLinear`."""
    return min(linear.weight.shape) <= NARROW_WIDTH and linear.weight.numel() <= NARROW_ENTRIES
