"""Linear layers with weights packed for the CPU's matrix libraries, in float32, bfloat16 or int8.

A layout is a way to pack a weight. The fastest one depends on the CPU, the weight's shape and the number of input rows
(R), so the layouts are timed. Some torch functions used here are private or deprecated; `is_supported` tries each
layout before its use.
"""

import bisect
import copy
import functools
import itertools
import math
import warnings
from collections.abc import Callable
from time import thread_time
from typing import Any

import torch
from torch import Tensor, nn

Product = Callable[[Tensor], Tensor]
Parameters = tuple[Tensor, Tensor | None]  # weight (out, in) and bias, in float32

MIN_SCALE = 1e-12  # for rows of zeros
TIMED_ROWS = (1, 4, 32, 128)  # a step of greedy search for one sentence; of beam search for one, eight and 32
PACKED_ROWS = 32  # that oneDNN packs for
TIMED_WEIGHTS = 2**20  # largest weight to time; larger ones are bound by memory bandwidth
REPETITIONS = 4
MARGIN = 0.9  # how much faster a second layout must be, since a layer with two layouts stores its weight twice


class PreparedLinear(nn.Module):
    """Inference-only linear layer x W^T + b with a packed copy of W.

    Attributes:
        product: returns the product with rows (R, in) in float32.
        unpacked: returns the parameters; None if they are not available in float32.
        num_bytes: size of the packed parameters.
    """

    def __init__(self, product: Product, unpacked: Callable[[], Parameters | None], num_bytes: int = 0) -> None:
        super().__init__()
        self.product = product
        self.unpacked = unpacked
        self.num_bytes = num_bytes

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the product in the dtype of `hidden_states` (..., in)."""
        if hidden_states.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                "A model prepared for inference does not compute gradients; call it under torch.no_grad(), or call "
                "the original model."
            )
        rows = hidden_states.float().reshape(-1, hidden_states.shape[-1])
        product = self.product(rows)  # (R, out)
        return product.view(*hidden_states.shape[:-1], product.shape[1]).to(hidden_states.dtype)


def compiled(operator: Any) -> Callable[..., Tensor]:
    """Return the compiled function of a torch operator, which skips the overhead of Python's dispatch."""
    return getattr(operator, "_op", operator)


def size_of(weight: Tensor, bias: Tensor | None, dtype: torch.dtype = torch.float32) -> int:
    """Return the bytes of a weight in `dtype` and a bias."""
    return weight.numel() * dtype.itemsize + (0 if bias is None else bias.nbytes)


def pack(weight: Tensor, bias: Tensor | None, dtype: torch.dtype = torch.float32) -> PreparedLinear:
    """Return the layer by oneDNN, with packed W and products in `dtype`."""
    packed_weight = torch.ops.mkldnn._reorder_linear_weight(weight.to(dtype).contiguous(), PACKED_ROWS)
    packed_bias = None if bias is None else bias.to(dtype)
    linear = compiled(torch.ops.mkldnn._linear_pointwise.default)

    def float32_product(rows: Tensor) -> Tensor:
        return linear(rows, packed_weight, packed_bias, "none", [], "")

    def rounded_product(rows: Tensor) -> Tensor:
        return linear(rows.to(dtype), packed_weight, packed_bias, "none", [], "").float()

    num_bytes = size_of(weight, bias, dtype)
    if dtype == torch.float32:
        return PreparedLinear(float32_product, lambda: (packed_weight.to_dense(), bias), num_bytes)
    return PreparedLinear(rounded_product, lambda: None, num_bytes)


def transpose(weight: Tensor, bias: Tensor | None) -> PreparedLinear:
    """Return the layer by torch, with W stored as (in, out)."""
    # `contiguous()` would not copy a weight of one row, whose transpose is contiguous already.
    columns = weight.t().clone(memory_format=torch.contiguous_format)

    num_bytes = size_of(weight, bias)
    if bias is None:
        return PreparedLinear(lambda rows: rows.mm(columns), lambda: (columns.t(), None), num_bytes)
    return PreparedLinear(lambda rows: torch.addmm(bias, rows, columns), lambda: (columns.t(), bias), num_bytes)


def quantize(
    weight: Tensor, bias: Tensor | None, engine: str | None = None, reduces_range: bool | None = None
) -> PreparedLinear:
    """Return the layer with W in int8 with a scale per row, and x in int8 with a scale per call.

    Args:
        engine: torch's int8 library; None for the default of this CPU.
        reduces_range: whether x has only 7 bits, so that the sum of two products fits into 16 bits; None for only if it
            would overflow.
    """
    if reduces_range is None:
        reduces_range = int8_sum_overflows()

    # The scale of a row maps its largest weight to 127.
    scales = (weight.abs().amax(1) / 127).clamp(min=MIN_SCALE)  # (out,)
    zero_points = torch.zeros_like(scales, dtype=torch.long)
    with warnings.catch_warnings():  # such tensors are deprecated
        warnings.filterwarnings("ignore", r"torch\.quantize_per_tensor", UserWarning)
        quantized = torch.quantize_per_channel(weight, scales, zero_points, 0, torch.qint8)

    # torch packs for its current engine, which is a global setting; a packed weight remembers its own.
    current_engine = torch.backends.quantized.engine
    torch.backends.quantized.engine = engine or current_engine
    try:
        packed = torch.ops.quantized.linear_prepack(quantized, bias)
    finally:
        torch.backends.quantized.engine = current_engine
    linear = compiled(torch.ops.quantized.linear_dynamic.default)

    def product(rows: Tensor) -> Tensor:
        return linear(rows, packed, reduces_range)

    def dequantized() -> Parameters:
        weight, bias = torch.ops.quantized.linear_unpack(packed)
        return weight.dequantize(), bias

    return PreparedLinear(product, dequantized, size_of(weight, bias, torch.int8))


Layout = Callable[[Tensor, Tensor | None], PreparedLinear]  # of a weight (out, in) and a bias, without gradients

LAYOUTS: dict[str, dict[str, Layout]] = {
    "float32": {"onednn": pack, "torch": transpose},
    "bfloat16": {"onednn": functools.partial(pack, dtype=torch.bfloat16)},
    "int8": {"default": quantize, "onednn": functools.partial(quantize, engine="onednn")},
}
"""Layouts of each dtype, the default first."""

ROUNDING = {"float32": 0.0, "bfloat16": 0.0, "int8": 0.5 / 127}
"""Largest error of an unpacked weight, relative to the largest of its row."""


def is_supported(layout: Layout, rounding: float = 0.0) -> bool:
    """Return whether torch supports a layout on this CPU."""
    weight = torch.arange(1024, dtype=torch.float32, device="cpu").view(16, 64) / 1023
    rows = torch.ones(PACKED_ROWS, 64, dtype=torch.float32, device="cpu")
    try:
        layer = layout(weight, None)
        products = torch.cat([layer.product(rows[:2]), layer.product(rows)])
        parameters = layer.unpacked()
    except (RuntimeError, AttributeError, TypeError):
        return False
    if parameters is not None and not torch.allclose(parameters[0], weight, rtol=0.0, atol=rounding):
        return False
    # bfloat16 has a relative precision of 0.8%.
    return torch.allclose(products, weight.sum(1).expand_as(products), rtol=0.02)


@functools.cache
def int8_sum_overflows() -> bool:
    """Return whether a sum of two int8 products overflows 16 bits, as on CPUs without VNNI instructions."""
    engines: list[str | None] = [None]
    if "onednn" in torch.backends.quantized.supported_engines:
        engines.append("onednn")
    weight = torch.ones(16, 64, dtype=torch.float32)
    for engine in engines:
        layer = quantize(weight, None, engine, reduces_range=False)
        for count in (2, PACKED_ROWS):
            product = layer.product(torch.ones(count, 64, dtype=torch.float32))
            if not torch.allclose(product, torch.full_like(product, 64.0), rtol=0.02):
                return True
    return False


def best_times(products: list[Product], rows: Tensor) -> list[float]:
    """Return the shortest CPU time of each product in seconds, timed alternately."""
    times = [math.inf] * len(products)
    for _ in range(REPETITIONS):
        for index, product in enumerate(products):
            start = thread_time()
            product(rows)
            times[index] = min(times[index], thread_time() - start)
    return times


def fastest_layouts(layouts: dict[str, Layout], weight: Tensor) -> list[str]:
    """Return the name of the fastest layout for each of `TIMED_ROWS`.

    A layout for more rows replaces the one before only if it is faster by `MARGIN`.
    """
    names = list(layouts)
    products = [layout(weight, None).product for layout in layouts.values()]
    fastest = []
    chosen = 0
    for count in TIMED_ROWS:
        times = best_times(products, torch.ones(count, weight.shape[1], dtype=torch.float32))
        if min(times) < MARGIN * times[chosen]:
            chosen = times.index(min(times))
        fastest.append(names[chosen])
    return fastest


timed_layouts: dict[str, str] = {}
"""Cache of the layouts that were the fastest in this process, so that each shape is timed once."""


def choose_layouts(dtype: str, layouts: dict[str, Layout], weight: Tensor, recorded: dict[str, str]) -> dict[str, str]:
    """Return the name of the layout of `weight` for each of `TIMED_ROWS`.

    The keys name all that the times depend on, so that a record of them can be used again. The layouts are timed unless
    each key is in `recorded` with a layout that this CPU supports.
    """
    sample = weight[: max(1, TIMED_WEIGHTS // weight.shape[1])]
    shape = f"{sample.shape[1]} to {sample.shape[0]}"
    threads = torch.get_num_threads()
    keys = [f"{dtype}, {shape}, {count} rows, {threads} threads" for count in TIMED_ROWS]
    for known in (recorded, timed_layouts):
        if all(known.get(key) in list(layouts) for key in keys):
            return {key: known[key] for key in keys}
    fastest = dict(zip(keys, fastest_layouts(layouts, sample), strict=True))
    timed_layouts.update(fastest)
    return fastest


class LinearPacker:
    """Makes packed copies of linear layers in one dtype.

    Args:
        dtype: a key of `LAYOUTS`.
        recorded: layouts of an earlier packer, to use instead of timing.

    Attributes:
        supported: the layouts that torch supports on this CPU; if there are none, copies are plain layers.
        used: the layouts chosen so far, by dtype, shape, rows and threads.
    """

    def __init__(self, dtype: str, recorded: dict[str, str]) -> None:
        self.dtype = dtype
        self.recorded = recorded
        self.supported = {
            name: layout for name, layout in LAYOUTS[dtype].items() if is_supported(layout, ROUNDING[dtype])
        }
        self.used: dict[str, str] = {}

    def __call__(self, linear: nn.Linear) -> nn.Module:
        """Return the copy of a layer."""
        weight = linear.weight.detach()
        bias = None if linear.bias is None else linear.bias.detach()
        if not self.supported:
            return copy.deepcopy(linear)
        if len(self.supported) == 1:  # without a choice there is nothing to time or to record
            (layout,) = self.supported.values()
            return layout(weight, bias)
        chosen = choose_layouts(self.dtype, self.supported, weight, self.recorded)
        self.used.update(chosen)
        layers = {name: self.supported[name](weight, bias) for name in set(chosen.values())}
        return by_rows([layers[name] for name in chosen.values()])


def by_rows(layers: list[PreparedLinear]) -> PreparedLinear:
    """Return the layer that computes by one of `layers`, those for `TIMED_ROWS`, whichever is nearest in rows."""
    distinct = {id(layer): layer for layer in layers}.values()
    if len(distinct) == 1:
        return layers[0]
    products = [layer.product for layer in layers]
    # The geometric mean is where the ratios to two timed numbers of rows are equal.
    bounds = [math.isqrt(few * many) for few, many in itertools.pairwise(TIMED_ROWS)]

    def product(rows: Tensor) -> Tensor:
        return products[bisect.bisect_left(bounds, rows.shape[0])](rows)

    num_bytes = sum(layer.num_bytes for layer in distinct)
    return PreparedLinear(product, layers[0].unpacked, num_bytes)
