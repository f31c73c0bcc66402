"""Preparation of a trained model for decoding on a CPU."""

import copy
import functools
from collections.abc import Callable
from typing import Any, Never, TypeVar

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import logging

from ..attention import CausalSelfAttention, SelfAttention
from ..embeddings import Dropout
from ..model import VaswaniTransformerForConditionalGeneration
from ..search import Stepper
from .fast_path import DecoderStep, PreparedEncoder, PreparedStepper, fuse_qkv, is_plain
from .linear import LAYOUTS, linear_factory

logger = logging.get_logger(__name__)

Model = TypeVar("Model", bound=PreTrainedModel)

STEP_INPUTS = {"attention_mask", "encoder_outputs", "use_cache", "logits_to_keep"}


def replace(model: nn.Module, make: Callable[[Any], nn.Module], *types: type[nn.Module]) -> None:
    """Replace each module of exactly one of these types with the result of `make`."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) in types:
                setattr(module, name, make(child))


class Prepared(PreTrainedModel):
    """Model with packed layers, which cannot be trained, saved, moved or copied.

    Args:
        model: the original model, which is not changed.
        make_linear: returns the packed copy of a linear layer.
    """

    def __init__(self, model: PreTrainedModel, make_linear: Callable[[nn.Linear], nn.Module]) -> None:
        PreTrainedModel.__init__(self, copy.deepcopy(model.config))  # Transformers notes what the class records
        # Weights that only linear layers hold are not copied, since packing copies them.
        linears = [module for module in model.modules() if type(module) is nn.Linear]
        others = (module for module in model.modules() if type(module) is not nn.Linear)
        kept = {id(weight) for module in others for weight in module.parameters(recurse=False)}
        memo = {id(linear.weight): linear.weight for linear in linears if id(linear.weight) not in kept}
        vars(self).update(copy.deepcopy(vars(model), memo))
        replace(self, fuse_qkv, SelfAttention, CausalSelfAttention)
        for module in [module for module in self.modules() if getattr(module, "keeps_float32", False)]:
            replace(module, linear_factory("float32") or copy.deepcopy, nn.Linear)
        replace(self, make_linear, nn.Linear)
        replace(self, lambda _: nn.Identity(), Dropout)
        # "eager" is faster for sentences; with a window "sdpa" computes long texts block by block.
        window = getattr(self.config, "attention_window", None)
        self.set_attn_implementation("eager" if window is None else "sdpa")
        self.eval().requires_grad_(False)

    def train(self, mode: bool = True) -> Any:
        """Stay in evaluation mode; raise RuntimeError for training mode."""
        if mode:
            raise RuntimeError("A model prepared for inference cannot be trained; train the one it was prepared from.")
        return super().train(False)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Never:
        """Raise RuntimeError: a packed model cannot be saved."""
        raise RuntimeError("A model prepared for inference cannot be saved; save the one it was prepared from.")

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> Never:
        """Raise RuntimeError: packed projections keep their size."""
        raise RuntimeError("A model prepared for inference cannot be resized; resize the one it was prepared from.")

    set_input_embeddings = resize_token_embeddings
    push_to_hub = with_remote_code = state_dict = save_pretrained

    def __reduce_ex__(self, protocol: Any) -> Never:
        raise RuntimeError(
            "A model prepared for inference cannot be copied or pickled; prepare the one it was prepared from again, "
            "also in each process that decodes."
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Any:
        moved = fn(torch.zeros(1, dtype=torch.float32, device="cpu"))
        if (moved.dtype, moved.device.type) != (torch.float32, "cpu"):
            raise RuntimeError(
                f"A model prepared for inference stays where it was prepared, and cannot become {moved.dtype} on "
                f"{moved.device.type}; move the one it was prepared from."
            )
        return super()._apply(fn, *args, **kwargs)


class PreparedForConditionalGeneration(Prepared, VaswaniTransformerForConditionalGeneration):
    """The paper's model with the fast path in `generate()`.

    Attributes:
        fast_encoder, decoder_step: None if the stack, or a layer of it, is a subclass or cannot be packed.
    """

    def __init__(self, model: PreTrainedModel, make_linear: Callable[[nn.Linear], nn.Module]) -> None:
        super().__init__(model, make_linear)
        encoder, decoder = self.model.encoder, self.model.decoder
        self.fast_encoder = PreparedEncoder(encoder) if is_plain(encoder) else None
        self.decoder_step = DecoderStep(decoder, self.lm_head) if is_plain(decoder) else None

    def get_encoder(self, *args: Any, **kwargs: Any) -> Any:
        """Return the encoder for `generate()`."""
        return super().get_encoder(*args, **kwargs) if self.fast_encoder is None else self.fast_encoder

    def make_stepper(self, inputs: dict[str, Any], beams_per_source: int, **options: bool) -> Stepper:
        """Return the stepper of a search, with the fast path if only the next token's logits are needed."""
        mask, memory = inputs.get("attention_mask"), inputs["encoder_outputs"][0]
        given = {name for name, value in inputs.items() if value is not None and value is not False}
        needs_only_logits = (
            not any(options.values())
            and STEP_INPUTS.issuperset(given)
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


def prepare_for_inference(model: Model, dtype: str = "float32") -> Model:
    """Return a copy of a model that decodes faster on this CPU.

    Its linear layers use the weight layouts that are fastest on this CPU; timing them takes about 0.2 s for the first
    model of a size. Its attention implementation is "eager", which is fastest for sentences. For texts of thousands of
    tokens `set_attn_implementation("sdpa")` saves memory. If torch does not support `dtype` on this CPU, the copy has
    plain layers, with a warning. `parameters()` of the copy returns only parameters that are not packed. `generate()`
    does not call hooks on the copy. In float32 the copy needs 2 d_model^2 more numbers per decoder layer.

    Args:
        model: any model of the package, on the CPU and in float32; it is not changed.
        dtype: dtype of the products with weights: "float32", with the same results up to rounding; "bfloat16"; or
            "int8", with which a result also depends slightly on the other sentences of the batch.

    Raises:
        ValueError: the dtype is unknown, or the model is wrapped, not on a CPU in float32, or already prepared.
        RuntimeError: raised by the copy on training, saving, moving, copying or backpropagation.
    """
    if dtype not in LAYOUTS:
        raise ValueError(f"dtype is {dtype!r}; choose one of {', '.join(LAYOUTS)}.")
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"model: is wrapped, or no model of Transformers; got a {type(model).__name__}, expected what "
            "from_pretrained returns. Give merge_and_unload() of a PEFT model, or _orig_mod of a compiled one."
        )
    if isinstance(model, Prepared):
        raise ValueError("The model is prepared for inference already; give the one it was prepared from.")
    weights = sorted({f"{weight.dtype} on {weight.device.type}" for weight in model.parameters()})
    if weights != ["torch.float32 on cpu"]:
        raise ValueError(
            f"The model has weights of {' and '.join(weights)}; move it by .to('cpu', torch.float32) first."
        )
    with torch.device("cpu"):
        make_linear = linear_factory(dtype)
        if make_linear is None:
            logger.warning("torch %s cannot pack layers in %s here; the copy has plain ones.", torch.__version__, dtype)
        return prepared_class(type(model))(model, make_linear or copy.deepcopy)


@functools.cache
def prepared_class(model_class: type[PreTrainedModel]) -> Any:
    """Return the subclass of `model_class` for prepared models."""
    generates = issubclass(model_class, VaswaniTransformerForConditionalGeneration)
    base = PreparedForConditionalGeneration if generates else Prepared
    return type(f"Prepared{model_class.__name__}", (base, model_class), {})
