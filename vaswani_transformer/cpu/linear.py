"""Linear layers with weights in the layout of a CPU's matrix library, in float32, bfloat16 or int8.

R rows of inputs. Which layout is the fastest depends on the CPU, on the weight's shape and on R, so the layouts are
timed. The functions of torch used here belong to its compiler or are deprecated. Only this file uses them, and
`is_supported` tries each layout before any use.
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

MIN_SCALE = 1e-12  # of a row of weights that are all 0
FEW_ROWS, MANY_ROWS = 4, 32  # for which products are timed: a step of a beam search, and a sentence
TIMED_WEIGHTS = 2**20  # the most that are timed of a layer; all layouts read the others at the pace of the memory
REPETITIONS = 5
MARGIN = 0.9  # of the first layout's time, which another one must fall below: timing is noisy


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

    def raw_forward(self) -> Product:
        """Return the product with rows (R, in) in float32 without gradients, as a function."""
        raise NotImplementedError

    def unpacked(self) -> tuple[Tensor, Tensor | None] | None:
        """Return its weight (out, in) and bias in float32, where that loses nothing; else None."""
        return None


class PackedLinear(PreparedLinear):
    """x W^T + b by oneDNN, with W laid out once; `dtype` is that of the products."""

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
    """x W^T + b by torch's own product in float32, with W stored as (in, out)."""

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
    """x W^T + b with W in int8, a scale for each row of W, and x in int8, with one scale for each call.

    Args:
        linear: the layer; the largest weight of a row becomes 127.
        engine: the library, of torch's int8 libraries; None: the default of this CPU.
        reduces_range: whether x has only 7 bits, so that the sum of two products stays within 16; None: where it
            would not.
    """

    def __init__(self, linear: nn.Linear, engine: str | None = None, reduces_range: bool | None = None) -> None:
        super().__init__()
        self.reduces_range = int8_sum_overflows() if reduces_range is None else reduces_range
        weight = linear.weight.detach().float()
        scales = (weight.abs().amax(1) / 127).clamp(min=MIN_SCALE)  # (out,)
        zero_points = torch.zeros_like(scales, dtype=torch.long)
        with warnings.catch_warnings():  # of the deprecation of such tensors; `is_supported` detects their absence
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
        """Return its weight (out, in) as int8 has it, and bias, in float32."""
        weight, bias = torch.ops.quantized.linear_unpack(self.packed)
        return weight.dequantize(), bias


class TwoLayoutLinear(PreparedLinear):
    """A layer in one layout for few rows, and in another for many."""

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
"""The layouts of each dtype; another than the first must be clearly faster to be chosen."""

chosen_layouts: dict[str, str] = {}
"""The fastest layout by dtype, shape, rows and threads, as this process has timed them, or a record says."""


def make_plain(weight: Tensor) -> nn.Linear:
    """Return a layer of a weight (out, in), without drawing random numbers."""
    outputs, inputs = weight.shape
    linear = nn.utils.skip_init(nn.Linear, inputs, outputs, bias=False, dtype=torch.float32).requires_grad_(False)
    linear.weight.copy_(weight)
    return linear


def is_supported(layout: Layout) -> bool:
    """Return whether this build of torch, on this CPU, has the functions that a layout needs."""
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
    # A step of bfloat16, which has 8 bits, is 0.8%.
    return torch.allclose(products, linear(rows[:1]).expand_as(products), rtol=0.02)


@functools.cache
def int8_sum_overflows() -> bool:
    """Return whether a sum of two int8 products overflows, as it does where the CPU lacks instructions for them."""
    engines = {None, "onednn"} & {None, *torch.backends.quantized.supported_engines}
    layers = [QuantizedLinear(make_plain(torch.ones(16, 64)), engine, reduces_range=False) for engine in engines]
    rows = [torch.ones(count, 64, dtype=torch.float32) for count in (2, MANY_ROWS)]
    products = torch.cat([layer(batch) for layer in layers for batch in rows])
    return not torch.allclose(products, torch.full_like(products, 64.0), rtol=0.02)


def best_times(products: list[Product], rows: Tensor) -> list[float]:
    """Return the shortest time of each product, of several in turns, in seconds of this thread's work.

    So what else runs on the machine chooses no layout.
    """
    times = [math.inf] * len(products)
    for _ in range(REPETITIONS):
        for index, product in enumerate(products):
            start = thread_time()
            product(rows)
            times[index] = min(times[index], thread_time() - start)
    return times


def fastest_layouts(dtype: str, layouts: dict[str, Layout], linear: nn.Linear) -> list[str]:
    """Return the layout of a layer for few rows, and that for many; each shape is timed once in a process."""
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
    """Return the function that lays out a plain layer; None if torch has no layout of this dtype here."""
    layouts = {name: layout for name, layout in LAYOUTS[dtype].items() if is_supported(layout)}

    def make(linear: nn.Linear) -> PreparedLinear:
        few, many = fastest_layouts(dtype, layouts, linear)
        layer = layouts[few](linear)
        return layer if few == many else TwoLayoutLinear(layer, layouts[many](linear))

    if len(layouts) == 1:
        return next(iter(layouts.values()))
    return make if layouts else None
