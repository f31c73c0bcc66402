"""Preparing a trained model for the CPU that it decodes on.

B batch, k target rows of one source row, V vocabulary.
"""

import copy
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Never, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import EncoderDecoderCache
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import logging

from .attention import CausalSelfAttention, SelfAttention
from .beam_cache import BeamCache
from .decoder import VaswaniTransformerDecoder
from .dropout import Dropout
from .encoder import VaswaniTransformerEncoder
from .flat_encoder import GENERATES, flatten_encoder, in_place_of
from .generation import COURSE
from .layers import FeedForward
from .model import VaswaniTransformerForConditionalGeneration
from .next_token import NextOutput, without_detours

logger = logging.get_logger(__name__)

Model = TypeVar("Model", bound=PreTrainedModel)

STEP_INPUTS = {
    "decoder_input_ids",
    "attention_mask",
    "encoder_outputs",
    "past_key_values",
    "use_cache",
    "return_dict",
    "logits_to_keep",
}
PACKED_FOR = 32  # rows; the layout chosen for so many is as good for any number from 4 on
LEAST_SCALE = 1e-12  # of a row of weights that are all 0
MANY = 32  # rows, from which on products of 8 bits are faster by oneDNN than by FBGEMM


def refuse_gradients(hidden_states: Tensor) -> None:
    """The packed products have no derivative, and torch would only warn of it, later and without a place."""
    if hidden_states.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            "A model prepared for inference passes no gradients back; call it under torch.no_grad(), or call the one "
            "it was prepared from."
        )


class PreparedLinear(nn.Module):
    """A layer without derivatives, which can apply the ReLU behind it along with its product."""

    has_relu = False

    def unpacked(self) -> tuple[Tensor, Tensor | None] | None:
        """Its weight (out, in) and bias in float32, where it computes with these."""
        return None

    def without_detours(self) -> Callable[[Tensor], Tensor]:
        """`forward` for inputs in float32 without gradients, as a function of its own."""
        return self.forward


class PackedLinear(PreparedLinear):
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
        activation = "relu" if self.has_relu else "none"
        if hidden_states.dtype == self.dtype:
            return apply_packed(hidden_states, self.weight, self.bias, activation)
        product = apply_packed(hidden_states.to(self.dtype), self.weight, self.bias, activation)
        return product.to(hidden_states.dtype)

    def without_detours(self) -> Callable[[Tensor], Tensor]:
        if self.dtype != torch.float32:
            return self.forward
        weight, bias, activation = self.weight, self.bias, "relu" if self.has_relu else "none"
        apply = torch.ops.mkldnn._linear_pointwise.default
        return lambda hidden_states: apply(hidden_states, weight, bias, activation, [], "")

    def unpacked(self) -> tuple[Tensor, Tensor | None] | None:
        return (self.weight.to_dense(), self.bias) if self.dtype == torch.float32 else None


def pack(weight: Tensor) -> Tensor:
    """A weight (out, in) in the library's layout; torch has these functions for its own compiler."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACKED_FOR)


def apply_packed(hidden_states: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(hidden_states, weight, bias, activation, [], "")


def pack_quantized(weight: Tensor, bias: Tensor | None, engine: str) -> Any:
    """A quantised weight (out, in) in the layout of one of torch's libraries for products of 8 bits."""
    chosen = torch.backends.quantized.engine
    torch.backends.quantized.engine = engine
    try:
        return torch.ops.quantized.linear_prepack(weight, bias)
    finally:
        torch.backends.quantized.engine = chosen


class QuantizedLinear(PreparedLinear):
    """x W^T + b with W in 8 bits, a scale for each row of W, and x in 8 bits with a scale for all its rows as it comes.

    W is kept in two layouts where torch has oneDNN beside its own library, each the faster for few rows or for many.

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
        chosen = torch.backends.quantized.engine
        has_both = "onednn" in torch.backends.quantized.supported_engines
        self.for_few = pack_quantized(quantized, bias, chosen)
        self.for_many = pack_quantized(quantized, bias, "onednn") if has_both else self.for_few

    def forward(self, hidden_states: Tensor) -> Tensor:
        refuse_gradients(hidden_states)
        packed = self.for_few if math.prod(hidden_states.shape[:-1]) < MANY else self.for_many
        product = torch.ops.quantized.linear_dynamic.default(hidden_states.float(), packed, self.reduces_range)
        # A ReLU within the product is not sure to be there: torch keeps what it made for oneDNN from call to call.
        return (product.relu_() if self.has_relu else product).to(hidden_states.dtype)


def works(make: Callable[[nn.Linear], nn.Module]) -> bool:
    """Whether this build of torch, on this CPU, has the functions that a packed layer needs."""
    linear = probe(0.1)
    try:
        layer = make(linear)
        found = torch.cat([layer(torch.ones(rows, 64)) for rows in (2, MANY)])
        ordered = probe(torch.arange(1024.0).view(16, 64))
        parameters = getattr(make(ordered), "unpacked", lambda: None)()
    except (RuntimeError, AttributeError):
        return False
    if parameters is not None and not torch.equal(parameters[0], ordered.weight):
        return False
    return torch.allclose(found, torch.full_like(found, 6.4), rtol=0.02)  # bfloat16 has 8 bits, so a step is 0.8%


def overflows() -> bool:
    """Whether a sum of two products of 8 bits overflows, as it does where the CPU lacks instructions for such sums."""
    layer = QuantizedLinear(probe(1.0), reduces_range=False)
    found = torch.cat([layer(torch.ones(rows, 64)) for rows in (2, MANY)])
    return not torch.allclose(found, torch.full_like(found, 64.0), rtol=0.02)


def probe(weight: float | Tensor) -> nn.Linear:
    """A layer of 64 by 16 places, of one weight or of those given, made without drawing the caller's random numbers."""
    linear = nn.utils.skip_init(nn.Linear, 64, 16, bias=False).requires_grad_(False)
    linear.weight.copy_(torch.as_tensor(weight))
    return linear


LAYERS: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "float32": lambda linear: PackedLinear(linear, torch.float32),
    "bfloat16": lambda linear: PackedLinear(linear, torch.bfloat16),
    "int8": lambda linear: QuantizedLinear(linear, overflows()),
}


class OneProjection(SelfAttention):
    """Self-attention whose queries, keys and values are made by one product."""

    qkv_proj: nn.Module

    def joined_widths(self) -> list[int]:
        """How many of the outputs are queries of all heads, and how many each head's keys beside its values."""
        return [self.config.num_heads * width for width in (self.head_dim, self.head_dim + self.value_head_dim)]

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        widths = (self.head_dim, self.value_head_dim)
        query, keys_and_values = self.qkv_proj(hidden_states).split(self.joined_widths(), dim=-1)
        key, value = self.split_heads(keys_and_values, sum(widths)).split(widths, dim=-1)
        return self.split_heads(query, self.head_dim), key, value


class OneCausalProjection(OneProjection, CausalSelfAttention):
    """The same in a decoder."""


ONE_PROJECTION = {SelfAttention: OneProjection, CausalSelfAttention: OneCausalProjection}


def join_projections(model: nn.Module) -> None:
    """Give each self-attention whose three projections are linear layers a single one in their place."""
    for module in cast(Any, list(model.modules())):
        names = ("q_proj", "k_proj", "v_proj")
        if type(module) not in ONE_PROJECTION or any(type(getattr(module, name)) is not nn.Linear for name in names):
            continue
        linears = [getattr(module, name) for name in names]
        outputs = sum(linear.out_features for linear in linears)
        joined = nn.utils.skip_init(nn.Linear, module.config.d_model, outputs, bias=linears[0].bias is not None)
        for name, joined_part in joined.named_parameters():
            query, *others = (getattr(linear, name).detach() for linear in linears)
            by_head = [part.unflatten(0, (module.config.num_heads, -1)) for part in others]
            joined_part.data = torch.cat([query, torch.cat(by_head, dim=1).flatten(0, 1)])
        for name in names:
            delattr(module, name)
        module.qkv_proj, module.__class__ = joined, ONE_PROJECTION[type(module)]


def join_activations(model: nn.Module) -> None:
    """Have the packed layers before a ReLU apply it."""
    for module in model.modules():
        if not isinstance(module, FeedForward) or not isinstance(module.activation, nn.ReLU):
            continue
        if isinstance(module.fc1, PreparedLinear):
            module.fc1.has_relu, module.activation = True, nn.Identity()


@dataclass
class NextLogits:
    """What a search loop takes from a step: `logits` (k B, 1, V) and the cache, which is the one it gave."""

    logits: Tensor
    past_key_values: EncoderDecoderCache

    def __contains__(self, name: str) -> bool:
        return name in ("logits", "past_key_values")

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


def are_joined(stack: VaswaniTransformerEncoder | VaswaniTransformerDecoder) -> bool:
    """Whether the projections of every layer's self-attention could be joined."""
    return all(isinstance(cast(Any, layer).self_attn, OneProjection) for layer in stack.layers)


class Prepared:
    """What a prepared copy refuses: it holds no weights that could be trained, saved, moved or copied."""

    def train(self, mode: bool = True) -> Any:
        if mode:
            raise RuntimeError("A model prepared for inference cannot be trained; train the one it was prepared from.")
        return cast(Any, super()).train(False)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Never:
        raise RuntimeError("A model prepared for inference cannot be saved; save the one it was prepared from.")

    push_to_hub = with_remote_code = state_dict = save_pretrained

    def __reduce_ex__(self, protocol: Any) -> Never:
        raise RuntimeError(
            "A model prepared for inference cannot be copied or pickled; prepare the one it was prepared from again, "
            "also in each process that decodes."
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Any:
        moved = fn(torch.zeros(1))
        if (moved.dtype, moved.device.type) != (torch.float32, "cpu"):
            raise RuntimeError(
                f"A model prepared for inference stays where it was prepared, and cannot become {moved.dtype} on "
                f"{moved.device.type}; move the one it was prepared from."
            )
        return cast(Any, super())._apply(fn, *args, **kwargs)


class PreparedGeneration(Prepared):
    """What a prepared copy does otherwise in `generate()`: each token takes the shortest way."""

    next_output: NextOutput | None = None
    next_logits: Callable[[Tensor], Tensor]

    @in_place_of(VaswaniTransformerForConditionalGeneration.generate)
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        token = GENERATES.set(True)
        try:
            return cast(Any, super()).generate(*args, **kwargs)
        finally:
            GENERATES.reset(token)

    @in_place_of(VaswaniTransformerForConditionalGeneration.prepare_inputs_for_generation)
    def prepare_inputs_for_generation(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Once a search has taken the short way, the inputs that it takes."""
        course, cache = COURSE.get(), kwargs.get("past_key_values")
        if course is None or not isinstance(getattr(cache, "self_attention_cache", None), BeamCache):
            return cast(Any, super()).prepare_inputs_for_generation(input_ids, *args, **kwargs)
        course.leave(cache)
        inputs = {name: kwargs.get(name) for name in ("past_key_values", "encoder_outputs", "attention_mask")}
        return course.select(inputs | {"decoder_input_ids": input_ids[:, -1:]})

    @in_place_of(VaswaniTransformerForConditionalGeneration.forward)
    def forward(self, *args: Any, **inputs: Any) -> Any:
        if args or not self.is_step(inputs):
            return cast(Any, super()).forward(*args, **inputs)
        ids, cache, memory = (inputs[name] for name in ("decoder_input_ids", "past_key_values", "encoder_outputs"))
        output = cast(Any, self).next_output(ids, memory[0], inputs.get("attention_mask"), cache)
        return NextLogits(self.next_logits(output), cache)

    def is_step(self, inputs: dict[str, Any]) -> bool:
        """Whether a search loop asks for one more token of each target, and for nothing else."""
        course = COURSE.get()
        if course is None or not course.owns_cache or not STEP_INPUTS.issuperset(inputs):
            return False
        cache, mask = cast(Any, inputs.get("past_key_values")), inputs.get("attention_mask")
        if cache is not course.cache or torch.is_autocast_enabled("cpu"):
            return False
        if isinstance(cache.self_attention_cache, BeamCache):  # an earlier step of the same search has asked all
            return True
        config = cast(Any, self).config
        wants_more = config.output_attentions or config.output_hidden_states
        return (
            self.next_output is not None
            and config._attn_implementation == "eager"
            and not wants_more
            and inputs["decoder_input_ids"].shape[1] == 1
            and inputs.get("encoder_outputs") is not None
            and (mask is None or mask.dim() == 2)
        )


def prepare_for_inference(model: Model, dtype: str = "float32") -> Model:
    """A copy of `model` that decodes faster on the CPU it is on; `generate()` and all else are as before.

    Its linear layers hold their weights as the CPU's matrix library wants them. Its attention is computed by plain
    products ("eager"), which for sentences are faster on a CPU than torch's fused kernel; for texts of thousands of
    tokens `set_attn_implementation("sdpa")` saves memory. Where torch lacks a library for a dtype, the copy has plain
    layers and a warning says so. `parameters()` of the copy are those that are not packed. In `generate()` hooks on its
    layers are not called, and those on the whole get a step's logits and cache alone. In float32 the projections of
    cross-attention's queries and outputs are kept twice, 2 d_model^2 numbers more a layer.

    Args:
        model: any model of the package, on the CPU and in float32; it is left as it is.
        dtype: of the products with weights: "float32", with the same results up to rounding; "bfloat16"; or "int8",
            where a sentence's result also hangs a little on the others of its batch.

    Raises:
        ValueError: an unknown dtype, or a model that is not on a CPU in float32 or is itself a prepared copy.
        RuntimeError: from the copy, when it is to be trained, saved, moved or copied, or to pass gradients back.
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
        join_projections(prepared)
        replace(prepared, nn.Linear, LAYERS[dtype])
        join_activations(prepared)
    else:
        prepared = copy.deepcopy(model)
        logger.warning("torch %s cannot pack layers in %s here; the copy has plain ones.", torch.__version__, dtype)
    replace(prepared, Dropout, lambda _: nn.Identity())
    kind = PreparedGeneration if isinstance(model, VaswaniTransformerForConditionalGeneration) else Prepared
    cast(Any, prepared).__class__ = of_the_same_name(kind, type(model))
    prepared.set_attn_implementation("eager")
    if isinstance(prepared, PreparedGeneration):
        encoder, decoder = cast(Any, prepared).model.encoder, cast(Any, prepared).model.decoder
        prepared.next_output = NextOutput(decoder) if are_joined(decoder) else None
        prepared.next_logits = without_detours(cast(Any, prepared).lm_head)
        if are_joined(encoder):
            flatten_encoder(encoder)
    return prepared.eval().requires_grad_(False)


def of_the_same_name(kind: type, model: type) -> type:
    """A class of models of this kind; by a class's name Transformers knows which outputs it can record."""
    names = {name: getattr(model, name) for name in ("__module__", "__qualname__")}
    return type(model.__name__, (kind, model), names)


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
