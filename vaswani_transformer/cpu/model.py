"""Preparation of a trained model for decoding on a CPU."""

import copy
import functools
from collections.abc import Callable
from typing import Any, Never, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.generation import GenerationConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import logging

from ..layers import CausalSelfAttention, Dropout, SelfAttention
from ..model import VaswaniTransformerForConditionalGeneration
from ..search import Stepper
from ..stacks import CACHE
from ..support.command import UserError
from .decoder import DecoderStep, PreparedStepper
from .encoder import PreparedEncoder, fuse_qkv, is_plain
from .linear import LAYOUTS, LinearPacker, PreparedLinear

logger = logging.get_logger(__name__)

Model = TypeVar("Model", bound=PreTrainedModel)

STEP_INPUTS = {"attention_mask", "encoder_outputs", "use_cache", "logits_to_keep"}


def check_plain_layers(model: nn.Module) -> None:
    """Raise UserError for a module that computes more than its class does with loaded weights.

    These are adapters, quantized or sharded layers, hooks except those by which Transformers records outputs, and
    weights on the device "meta".
    """
    for name, module in model.named_modules():
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        is_plain = (
            (type(module) is nn.Linear or not name.endswith(("_proj", "lm_head", "fc1", "fc2")))
            and type(module).__module__.partition(".")[0] != "peft"
            and not hasattr(module, "_hf_hook")
            and all(str(getattr(hook, "__module__", "")).startswith("transformers.") for hook in hooks)
            and all(type(weight) is nn.Parameter for weight in module.parameters(recurse=False))
            and not (type(module) is nn.Linear and module.weight.is_meta)
        )
        if not is_plain:
            raise UserError(
                f"{name or 'model'} is a {type(module).__name__} that is wrapped, or whose weight is not loaded; merge "
                "adapters with merge_and_unload(), remove hooks, and load the model without device_map, quantization "
                "or prepare_for_inference."
            )


def replace(model: nn.Module, make: Callable[[Any], nn.Module], *types: type[nn.Module]) -> None:
    """Replace each module of exactly one of these types with the result of `make`."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) in types:
                setattr(module, name, make(child))


def weights_of_linears(model: nn.Module) -> list[Tensor]:
    """Return the weights that only plain linear layers use, unlike an embedding's that a projection shares."""
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    others = [module for module in model.modules() if type(module) is not nn.Linear]
    shared = {id(weight) for module in others for weight in module.parameters(recurse=False)}
    return [linear.weight for linear in linears if id(linear.weight) not in shared]


class Prepared(PreTrainedModel):
    """Model with packed layers, which cannot be trained, saved, moved or copied.

    A prepared model is an instance of its model's class too (see `prepared_class`), but it does not call the
    constructor of that class: this would draw new weights and build the modules of the config, where the model may
    have modules that its user changed. Instead it takes over copies of all attributes of the model, among them its
    modules, and then replaces modules.

    Args:
        model: the original model, which is not changed.
        dtype: a key of `LAYOUTS`.
        recorded: layouts to use instead of timing.

    Attributes:
        layouts: the layouts of the linear layers, by dtype, shape, rows and threads; empty without a choice.
        stays_in_evaluation: True; a search need not walk over the modules to make sure.
    """

    stays_in_evaluation = True

    def __init__(self, model: PreTrainedModel, dtype: str, recorded: dict[str, str]) -> None:
        # Transformers registers here the outputs that the class can record. The attributes are replaced below.
        PreTrainedModel.__init__(self, copy.deepcopy(model.config))

        # deepcopy takes an object in its memo as copied already. Packing copies these weights anyway.
        memo = {id(weight): weight for weight in weights_of_linears(model)}
        vars(self).update(copy.deepcopy(vars(model), memo))

        # A module that keeps float32 comes first, so that the second packer finds none of its layers. In float32 there
        # is always a packed layout, since "torch" is a plain product.
        float32_packer = LinearPacker("float32", recorded)
        packer = LinearPacker(dtype, recorded)
        if not packer.supported:
            logger.warning("torch %s cannot pack layers in %s here; the copy has plain ones.", torch.__version__, dtype)
        replace(self, fuse_qkv, SelfAttention, CausalSelfAttention)
        for module in list(self.modules()):
            if getattr(module, "keeps_float32", False):
                replace(module, float32_packer, nn.Linear)
        replace(self, packer, nn.Linear)
        replace(self, lambda _: nn.Identity(), Dropout)
        self.layouts = {**float32_packer.used, **packer.used}

        # "eager" is faster for sentences; with a window "sdpa" computes long texts block by block.
        window = getattr(self.config, "attention_window", None)
        self.set_attn_implementation("eager" if window is None else "sdpa")
        self.eval().requires_grad_(False)

    def get_memory_footprint(self, *args: Any, **kwargs: Any) -> int:
        """Return the bytes of all weights, including the packed ones."""
        packed = sum(module.num_bytes for module in self.modules() if isinstance(module, PreparedLinear))
        return super().get_memory_footprint(*args, **kwargs) + packed

    def train(self, mode: bool = True) -> Any:
        """Stay in evaluation mode; raise RuntimeError for training mode."""
        if mode:
            raise RuntimeError("A model prepared for inference cannot be trained; train the original model.")
        return super().train(False)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Never:
        """Raise RuntimeError: a packed model cannot be saved."""
        raise RuntimeError("A model prepared for inference cannot be saved; save the original model.")

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> Never:
        """Raise RuntimeError: packed projections keep their size."""
        raise RuntimeError("A model prepared for inference cannot be resized; resize the original model.")

    set_input_embeddings = resize_token_embeddings
    push_to_hub = save_pretrained
    with_remote_code = save_pretrained
    state_dict = save_pretrained

    def __reduce_ex__(self, protocol: Any) -> Never:
        raise RuntimeError(
            "A model prepared for inference cannot be copied or pickled; prepare the original model again, also in "
            "each process that decodes."
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Any:
        moved = fn(torch.zeros(1, dtype=torch.float32, device="cpu"))
        if (moved.dtype, moved.device.type) != (torch.float32, "cpu"):
            raise RuntimeError(
                f"A model prepared for inference stays in float32 on the CPU and cannot become {moved.dtype} on "
                f"{moved.device.type}; move the original model."
            )
        return super()._apply(fn, *args, **kwargs)


class PreparedForConditionalGeneration(Prepared, VaswaniTransformerForConditionalGeneration):
    """The paper's model with the fast path in `generate()`.

    Attributes:
        fast_encoder, decoder_step: None if the stack, or a layer of it, is a subclass or cannot be packed.
    """

    def __init__(self, model: PreTrainedModel, dtype: str, recorded: dict[str, str]) -> None:
        super().__init__(model, dtype, recorded)
        encoder = self.model.encoder
        decoder = self.model.decoder
        self.fast_encoder = PreparedEncoder(encoder) if is_plain(encoder) else None
        self.decoder_step = DecoderStep(decoder, self.lm_head) if is_plain(decoder) else None

    def get_memory_footprint(self, *args: Any, **kwargs: Any) -> int:
        """Return the bytes of all weights, including the packed ones and those that the decoder's step copies."""
        layers = [] if self.decoder_step is None else self.decoder_step.layers
        copied = sum(weight.nbytes for layer in layers for weight in layer.cross_attention.weights)
        return super().get_memory_footprint(*args, **kwargs) + copied

    def get_encoder(self, *args: Any, **kwargs: Any) -> Any:
        """Return the encoder for `generate()`."""
        if self.fast_encoder is None:
            return super().get_encoder(*args, **kwargs)
        return self.fast_encoder

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:  # Transformers declares a bool, and returns nothing
        """Make the default cache of `generate()` without its layers, which the search would discard."""
        is_default = (
            model_kwargs.get(CACHE) is None
            and generation_config.cache_implementation is None
            and generation_config.use_cache is not False
            and not generation_config.is_assistant
            and self.config.attention_window is None
        )
        if is_default:
            model_kwargs[CACHE] = EncoderDecoderCache(DynamicCache(), DynamicCache())
        else:
            cast(Any, super())._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)

    def make_stepper(self, inputs: dict[str, Any], beams_per_source: int, **options: bool) -> Stepper:
        """Return the stepper of a search, with the fast path if only the next token's logits are needed."""
        memory = inputs["encoder_outputs"][0]  # (B, S, d_model)
        mask = inputs.get("attention_mask")
        passed = {name for name, value in inputs.items() if value is not None and value is not False}
        needs_only_logits = (
            not any(options.values())
            and STEP_INPUTS.issuperset(passed)
            and bool(inputs.get("use_cache"))
            and type(self).forward is VaswaniTransformerForConditionalGeneration.forward
            and self.config._attn_implementation == "eager"
            and self.config.attention_window is None
            and (mask is None or mask.shape == memory.shape[:2])
            and not torch.is_autocast_enabled("cpu")
        )
        if self.decoder_step is None or not needs_only_logits:
            return super().make_stepper(inputs, beams_per_source, **options)
        return PreparedStepper(self.decoder_step, memory, mask, beams_per_source)


def prepare_for_inference(model: Model, dtype: str = "float32", layouts: dict[str, str] | None = None) -> Model:
    """Return a copy of a model that decodes faster on this CPU.

    Its linear layers use the weight layouts that are fastest on this CPU; timing them takes about 0.2 s for the first
    model of a size. Layouts round differently. For the same rounding in a later process, save the copy's `layouts`, and
    pass them to it. Its attention implementation is "eager", which is fastest for sentences. For texts of thousands of
    tokens `set_attn_implementation("sdpa")` saves memory. If torch does not support `dtype` on this CPU, the copy has
    plain layers, with a warning. `parameters()` of the copy returns only parameters that are not packed. `generate()`
    does not call hooks on the copy. In float32 and int8 the copy needs 2 d_model^2 more float32 numbers per
    decoder layer.

    Args:
        model: any model of the package, on the CPU and in float32; it is not changed.
        dtype: dtype of the products with weights: "float32", with the same results up to rounding; "bfloat16"; or
            "int8", with which a result also depends slightly on the other sentences of the batch.
        layouts: the `layouts` of an earlier copy, used instead of timing where this CPU supports them.

    Raises:
        ValueError: the dtype is unknown, or the model or a layer is wrapped, not on a CPU in float32, or already
            prepared.
        RuntimeError: raised by the copy on training, saving, moving, copying or backpropagation.
    """
    if dtype not in LAYOUTS:
        raise ValueError(f"dtype is {dtype!r}; choose one of {', '.join(LAYOUTS)}.")
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"model: is wrapped, or is not a Transformers model; got a {type(model).__name__}, expected the result of "
            "from_pretrained. Pass merge_and_unload() of a PEFT model, or _orig_mod of a compiled one."
        )
    if isinstance(model, Prepared):
        raise ValueError("model: already prepared for inference. Pass the original model.")
    check_plain_layers(model)
    weights = sorted({f"{weight.dtype} on {weight.device.type}" for weight in model.parameters()})
    if weights != ["torch.float32 on cpu"]:
        raise ValueError(
            f"model: got weights of {' and '.join(weights)}, expected torch.float32 on cpu. "
            "Move it with .to('cpu', torch.float32) first."
        )
    with torch.device("cpu"):
        return prepared_class(type(model))(model, dtype, layouts or {})


@functools.cache
def prepared_class(model_class: type[PreTrainedModel]) -> Any:
    """Return the subclass of `model_class` for prepared models.

    It is made at run time, because the model's class may be any: a family of this package, a single stack, or a
    subclass of a user's. Callers that ask `isinstance(model, ...)`, and overridden methods, work as with the original.
    """
    generates = issubclass(model_class, VaswaniTransformerForConditionalGeneration)
    base = PreparedForConditionalGeneration if generates else Prepared
    return type(f"Prepared{model_class.__name__}", (base, model_class), {})
