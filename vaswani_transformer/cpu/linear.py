"""Linear layers with weights packed for the CPU's matrix libraries, in float32, bfloat16 or int8.

R rows of inputs. The fastest layout depends on the CPU, the weight's shape and R, so the layouts are timed. Some torch
functions used here are private or deprecated; `is_supported` tries each layout before its use.
"""

import functools
import math
import warnings
from collections.abc import Callable
from itertools import pairwise
from time import thread_time

import torch
from torch import Tensor, nn

Product = Callable[[Tensor], Tensor]
Parameters = tuple[Tensor, Tensor | None]  # weight (out, in) and bias, in float32

MIN_SCALE = 1e-12  # for rows of zeros
TIMED_ROWS = (4, 32, 128)  # a beam search step of one sentence, of eight and of 32
PACKED_ROWS = 32  # that oneDNN packs for
TIMED_WEIGHTS = 2**20  # largest weight to time; larger ones are bound by memory bandwidth
REPETITIONS = 4
MARGIN = 0.9  # another layout must be faster by this factor, since a layer with two holds its weight twice


class PreparedLinear(nn.Module):
    """Inference-only linear layer x W^T + b with a packed copy of W.

    Attributes:
        product: returns the product with rows (R, in) in float32.
        unpacked: returns the parameters; None if they are not available in float32.
    """

    def __init__(self, product: Product, unpacked: Callable[[], Parameters | None]) -> None:
        super().__init__()
        self.product, self.unpacked = product, unpacked

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the product in the dtype of `hidden_states` (..., in)."""
        if hidden_states.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                "A model prepared for inference passes no gradients back; call it under torch.no_grad(), or call the "
                "one it was prepared from."
            )
        product = self.product(hidden_states.float().reshape(-1, hidden_states.shape[-1]))  # (R, out)
        return product.view(*hidden_states.shape[:-1], product.shape[1]).to(hidden_states.dtype)


def pack(weight: Tensor, bias: Tensor | None, dtype: torch.dtype = torch.float32) -> PreparedLinear:
    """Return the layer by oneDNN, with packed W and products in `dtype`."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.to(dtype).contiguous(), PACKED_ROWS)
    operator = torch.ops.mkldnn._linear_pointwise.default
    apply = getattr(operator, "_op", operator)  # without the overhead of Python's dispatch
    if dtype == torch.float32:
        return PreparedLinear(lambda rows: apply(rows, packed, bias, "none", [], ""), lambda: (packed.to_dense(), bias))
    rounded = None if bias is None else bias.to(dtype)
    return PreparedLinear(lambda rows: apply(rows.to(dtype), packed, rounded, "none", [], "").float(), lambda: None)


def transpose(weight: Tensor, bias: Tensor | None) -> PreparedLinear:
    """Return the layer by torch, with W stored as (in, out)."""
    columns = weight.t().clone(memory_format=torch.contiguous_format)  # a row is contiguous already
    if bias is None:
        return PreparedLinear(lambda rows: rows.mm(columns), lambda: (columns.t(), None))
    return PreparedLinear(lambda rows: torch.addmm(bias, rows, columns), lambda: (columns.t(), bias))


def quantize(
    weight: Tensor, bias: Tensor | None, engine: str | None = None, reduces_range: bool | None = None
) -> PreparedLinear:
    """Return the layer with W in int8 with a scale per row, and x in int8 with a scale per call.

    Args:
        engine: torch's int8 library; None for the default of this CPU.
        reduces_range: whether x has only 7 bits, so that the sum of two products fits into 16 bits; None for only if it
            would overflow.
    """
    has_7_bits = int8_sum_overflows() if reduces_range is None else reduces_range
    scales = (weight.abs().amax(1) / 127).clamp(min=MIN_SCALE)  # (out,)
    zero_points = torch.zeros_like(scales, dtype=torch.long)
    with warnings.catch_warnings():  # such tensors are deprecated
        warnings.filterwarnings("ignore", r"torch\.quantize_per_tensor", UserWarning)
        quantized = torch.quantize_per_channel(weight, scales, zero_points, 0, torch.qint8)
    chosen = torch.backends.quantized.engine
    torch.backends.quantized.engine = engine or chosen
    try:
        packed = torch.ops.quantized.linear_prepack(quantized, bias)
    finally:
        torch.backends.quantized.engine = chosen
    operator = torch.ops.quantized.linear_dynamic.default
    apply = getattr(operator, "_op", operator)

    def dequantized() -> Parameters:
        weight, bias = torch.ops.quantized.linear_unpack(packed)
        return weight.dequantize(), bias

    return PreparedLinear(lambda rows: apply(rows, packed, has_7_bits), dequantized)


Layout = Callable[[Tensor, Tensor | None], PreparedLinear]  # of a weight (out, in) and a bias, without gradients

LAYOUTS: dict[str, dict[str, Layout]] = {
    "float32": {"onednn": pack, "torch": transpose},
    "bfloat16": {"onednn": functools.partial(pack, dtype=torch.bfloat16)},
    "int8": {"default": quantize, "onednn": functools.partial(quantize, engine="onednn")},
}
"""Layouts of each dtype, the default first."""

ROUNDING = {"float32": 0.0, "bfloat16": 0.0, "int8": 0.5 / 127}
"""Largest error of an unpacked weight, relative to the largest of its row."""

chosen_layouts: dict[str, str] = {}
"""Fastest layout by dtype, shape, rows and threads, from timings of this process or a record."""


def is_supported(layout: Layout, rounding: float = 0.0) -> bool:
    """Return whether torch supports a layout on this CPU."""
    weight = torch.arange(1024, dtype=torch.float32, device="cpu").view(16, 64) / 1023
    rows = torch.ones(PACKED_ROWS, 64, dtype=torch.float32, device="cpu")
    try:
        layer = layout(weight, None)
        products, parameters = torch.cat([layer.product(rows[:2]), layer.product(rows)]), layer.unpacked()
    except (RuntimeError, AttributeError, TypeError):
        return False
    if parameters is not None and not torch.allclose(parameters[0], weight, rtol=0.0, atol=rounding):
        return False
    # bfloat16 has a relative precision of 0.8%.
    return torch.allclose(products, weight.sum(1).expand_as(products), rtol=0.02)


@functools.cache
def int8_sum_overflows() -> bool:
    """Return whether a sum of two int8 products overflows 16 bits, as on CPUs without VNNI instructions."""
    engines = {None, "onednn"} & {None, *torch.backends.quantized.supported_engines}
    layers = [
        quantize(torch.ones(16, 64, dtype=torch.float32), None, engine, reduces_range=False) for engine in engines
    ]
    rows = [torch.ones(count, 64, dtype=torch.float32) for count in (2, PACKED_ROWS)]
    products = torch.cat([layer.product(batch) for layer in layers for batch in rows])
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


def fastest_layouts(dtype: str, layouts: dict[str, Layout], weight: Tensor) -> list[str]:
    """Return the layouts of `weight` for `TIMED_ROWS`, in which each must win over that of fewer rows.

    Each shape is timed once per process.
    """
    sample = weight[: max(1, TIMED_WEIGHTS // weight.shape[1])]
    shape, threads = f"{sample.shape[1]} to {sample.shape[0]}", torch.get_num_threads()
    counts = {f"{dtype}, {shape}, {count} rows, {threads} threads": count for count in TIMED_ROWS}
    if any(chosen_layouts.get(key) not in list(layouts) for key in counts):
        products = [layout(sample, None).product for layout in layouts.values()]
        chosen = 0
        for key, count in counts.items():
            times = best_times(products, torch.ones(count, sample.shape[1], dtype=torch.float32))
            if min(times) < MARGIN * times[chosen]:
                chosen = times.index(min(times))
            chosen_layouts[key] = list(layouts)[chosen]
    return [chosen_layouts[key] for key in counts]


def linear_factory(dtype: str) -> Callable[[nn.Linear], nn.Module] | None:
    """Return the function that packs a plain layer; None if torch does not support `dtype` on this CPU."""
    layouts = {name: layout for name, layout in LAYOUTS[dtype].items() if is_supported(layout, ROUNDING[dtype])}

    def make(linear: nn.Linear) -> PreparedLinear:
        weight, bias = linear.weight.detach(), None if linear.bias is None else linear.bias.detach()
        names = fastest_layouts(dtype, layouts, weight) if len(layouts) > 1 else list(layouts)
        layers = {name: layouts[name](weight, bias) for name in set(names)}
        first = layers[names[0]]
        if len(layers) == 1:
            return first
        few, some, many = (layers[name].product for name in names)
        low, high = (math.isqrt(less * more) for less, more in pairwise(TIMED_ROWS))

        def product(rows: Tensor) -> Tensor:
            count = rows.shape[0]
            return few(rows) if count <= low else some(rows) if count <= high else many(rows)

        return PreparedLinear(product, first.unpacked)

    return make if layouts else None
