"""Linear layers with weights packed for the CPU's matrix libraries, in float32, bfloat16 or int8.

R rows of inputs. The fastest layout depends on the CPU, the weight's shape and R, so the layouts are timed. Some torch
functions used here are private or deprecated; `is_supported` tries each layout before its use.
"""

import functools
import math
import warnings
from collections.abc import Callable
from time import thread_time
from typing import Any

import torch
from torch import Tensor, nn

Product = Callable[[Tensor], Tensor]

MIN_SCALE = 1e-12  # for rows of zeros
FEW_ROWS, MANY_ROWS = 4, 32  # timed numbers of rows: a beam search step, and a sentence
TIMED_WEIGHTS = 2**20  # largest weight to time; larger ones are bound by memory bandwidth
REPETITIONS = 5
MARGIN = 0.9  # another layout must be faster than the first by this factor


def raw_op(operator: Any) -> Callable[..., Tensor]:
    """Return an operator as torch's compiled function, without the overhead of Python's dispatch."""
    return getattr(operator, "_op", operator)


class PreparedLinear(nn.Module):
    """Base class of inference-only layers with a packed copy of the weights of `linear`."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the product in the dtype of `hidden_states` (..., in)."""
        if hidden_states.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                "A model prepared for inference passes no gradients back; call it under torch.no_grad(), or call the "
                "one it was prepared from."
            )
        product = self.raw_forward()(hidden_states.float().reshape(-1, hidden_states.shape[-1]))  # (R, out)
        return product.view(*hidden_states.shape[:-1], product.shape[1]).to(hidden_states.dtype)

    def raw_forward(self) -> Product:
        """Return a function that computes the product with rows (R, in) in float32."""
        raise NotImplementedError

    def unpacked(self) -> tuple[Tensor, Tensor | None] | None:
        """Return the weight (out, in) and bias in float32; None if the packed weight is rounded."""
        return None


class PackedLinear(PreparedLinear):
    """x W^T + b by oneDNN, with packed W and products in `dtype`."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        weight = linear.weight.detach().to(dtype).contiguous()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, MANY_ROWS)
        self.bias = None if linear.bias is None else linear.bias.detach().to(dtype)

    def raw_forward(self) -> Product:
        weight, bias, dtype = self.weight, self.bias, self.dtype
        apply = raw_op(torch.ops.mkldnn._linear_pointwise.default)
        if dtype == torch.float32:
            return lambda rows: apply(rows, weight, bias, "none", [], "")
        return lambda rows: apply(rows.to(dtype), weight, bias, "none", [], "").float()

    def unpacked(self) -> tuple[Tensor, Tensor | None] | None:
        return (self.weight.to_dense(), self.bias) if self.dtype == torch.float32 else None


class TransposedLinear(PreparedLinear):
    """x W^T + b by torch in float32, with W stored as (in, out)."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight.detach().t().contiguous()
        self.bias = None if linear.bias is None else linear.bias.detach()

    def raw_forward(self) -> Product:
        weight, bias = self.weight, self.bias
        return (lambda rows: rows.mm(weight)) if bias is None else (lambda rows: torch.addmm(bias, rows, weight))

    def unpacked(self) -> tuple[Tensor, Tensor | None] | None:
        return self.weight.t(), self.bias


class QuantizedLinear(PreparedLinear):
    """x W^T + b with W in int8 with a scale per row, and x in int8 with a scale per call.

    Args:
        linear: the layer to quantize.
        engine: torch's int8 library; None for the default of this CPU.
        reduces_range: whether x has only 7 bits, so that the sum of two products fits into 16 bits; None for only if it
            would overflow.
    """

    def __init__(self, linear: nn.Linear, engine: str | None = None, reduces_range: bool | None = None) -> None:
        super().__init__()
        self.reduces_range = int8_sum_overflows() if reduces_range is None else reduces_range
        weight = linear.weight.detach().float()
        scales = (weight.abs().amax(1) / 127).clamp(min=MIN_SCALE)  # (out,)
        zero_points = torch.zeros_like(scales, dtype=torch.long)
        with warnings.catch_warnings():  # such tensors are deprecated
            warnings.filterwarnings("ignore", r"torch\.quantize_per_tensor", UserWarning)
            quantized = torch.quantize_per_channel(weight, scales, zero_points, 0, torch.qint8)
        bias = None if linear.bias is None else linear.bias.detach().float()
        chosen = torch.backends.quantized.engine
        torch.backends.quantized.engine = engine or chosen
        try:
            self.packed = torch.ops.quantized.linear_prepack(quantized, bias)
        finally:
            torch.backends.quantized.engine = chosen

    def raw_forward(self) -> Product:
        packed, reduces_range = self.packed, self.reduces_range
        apply = raw_op(torch.ops.quantized.linear_dynamic.default)
        return lambda rows: apply(rows, packed, reduces_range)

    def unpacked(self) -> tuple[Tensor, Tensor | None] | None:
        """Return the dequantized weight (out, in) and the bias, in float32."""
        weight, bias = torch.ops.quantized.linear_unpack(self.packed)
        return weight.dequantize(), bias


class TwoLayoutLinear(PreparedLinear):
    """Layer with one layout for few rows and another for many."""

    def __init__(self, few: PreparedLinear, many: PreparedLinear) -> None:
        super().__init__()
        self.few, self.many = few, many

    def raw_forward(self) -> Product:
        few, many, between = self.few.raw_forward(), self.many.raw_forward(), math.isqrt(FEW_ROWS * MANY_ROWS)
        return lambda rows: few(rows) if rows.shape[0] <= between else many(rows)

    def unpacked(self) -> tuple[Tensor, Tensor | None] | None:
        return self.few.unpacked()


Layout = Callable[[nn.Linear], PreparedLinear]

LAYOUTS: dict[str, dict[str, Layout]] = {
    "float32": {"onednn": lambda linear: PackedLinear(linear, torch.float32), "torch": TransposedLinear},
    "bfloat16": {"onednn": lambda linear: PackedLinear(linear, torch.bfloat16)},
    "int8": {"default": QuantizedLinear, "onednn": lambda linear: QuantizedLinear(linear, "onednn")},
}
"""Layouts of each dtype, the default first."""

chosen_layouts: dict[str, str] = {}
"""Fastest layout by dtype, shape, rows and threads, from timings of this process or a record."""


def make_plain(weight: Tensor) -> nn.Linear:
    """Return a linear layer with a weight (out, in), without random initialization."""
    outputs, inputs = weight.shape
    linear = nn.utils.skip_init(nn.Linear, inputs, outputs, bias=False, dtype=torch.float32).requires_grad_(False)
    linear.weight.copy_(weight)
    return linear


def is_supported(layout: Layout) -> bool:
    """Return whether torch supports a layout on this CPU."""
    linear = make_plain(torch.arange(1024).view(16, 64) / 1023)
    rows = torch.ones(MANY_ROWS, 64, dtype=torch.float32)
    try:
        layer = layout(linear)
        products, parameters = torch.cat([layer(rows[:2]), layer(rows)]), layer.unpacked()
    except (RuntimeError, AttributeError, TypeError):
        return False
    step = 1 / 127 if isinstance(layer, QuantizedLinear) else 0.0
    if parameters is not None and not torch.allclose(parameters[0], linear.weight, rtol=0.0, atol=step / 2):
        return False
    # bfloat16 has a relative precision of 0.8%.
    return torch.allclose(products, linear(rows[:1]).expand_as(products), rtol=0.02)


@functools.cache
def int8_sum_overflows() -> bool:
    """Return whether a sum of two int8 products overflows 16 bits, as on CPUs without VNNI instructions."""
    engines = {None, "onednn"} & {None, *torch.backends.quantized.supported_engines}
    layers = [QuantizedLinear(make_plain(torch.ones(16, 64)), engine, reduces_range=False) for engine in engines]
    rows = [torch.ones(count, 64, dtype=torch.float32) for count in (2, MANY_ROWS)]
    products = torch.cat([layer(batch) for layer in layers for batch in rows])
    return not torch.allclose(products, torch.full_like(products, 64.0), rtol=0.02)


def best_times(products: list[Product], rows: Tensor) -> list[float]:
    """Return the shortest CPU time of each product in seconds, timed alternately."""
    times = [math.inf] * len(products)
    for _ in range(REPETITIONS):
        for index, product in enumerate(products):
            start = thread_time()
            product(rows)
            times[index] = min(times[index], thread_time() - start)
    return times


def fastest_layouts(dtype: str, layouts: dict[str, Layout], linear: nn.Linear) -> list[str]:
    """Return a layer's fastest layouts for few rows and for many; each shape is timed once per process."""
    sample = make_plain(linear.weight.detach()[: max(1, TIMED_WEIGHTS // linear.in_features)])
    shape = f"{sample.in_features} to {sample.out_features}"
    counts = {
        f"{dtype}, {shape}, {count} rows, {torch.get_num_threads()} threads": count for count in (FEW_ROWS, MANY_ROWS)
    }
    if any(chosen_layouts.get(key) not in list(layouts) for key in counts):
        products = [layout(sample).raw_forward() for layout in layouts.values()]
        for key, count in counts.items():
            times = best_times(products, torch.ones(count, sample.in_features, dtype=torch.float32))
            fastest = times.index(min(times))
            chosen_layouts[key] = list(layouts)[fastest if times[fastest] < MARGIN * times[0] else 0]
    return [chosen_layouts[key] for key in counts]


def linear_factory(dtype: str) -> Callable[[nn.Linear], nn.Module] | None:
    """Return the function that packs a plain layer; None if torch does not support `dtype` on this CPU."""
    layouts = {name: layout for name, layout in LAYOUTS[dtype].items() if is_supported(layout)}

    def make(linear: nn.Linear) -> PreparedLinear:
        few, many = fastest_layouts(dtype, layouts, linear)
        layer = layouts[few](linear)
        return layer if few == many else TwoLayoutLinear(layer, layouts[many](linear))

    if len(layouts) == 1:
        return next(iter(layouts.values()))
    return make if layouts else None
