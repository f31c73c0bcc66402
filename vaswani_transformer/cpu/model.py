"""Preparing a trained model for the CPU that it decodes on.

B sources, k beams of a source, S source tokens.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any, Never, TypeVar

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import logging

from ..embeddings import Dropout
from ..model import VaswaniTransformerForConditionalGeneration
from ..search import Decoder
from ..stacks import VaswaniTransformerDecoder, VaswaniTransformerEncoder
from .decoder import DecoderStep, PreparedDecoder
from .encoder import PreparedEncoder
from .layers import fuse_qkv, has_plain_layers, replace
from .linear import LAYOUTS, linear_factory

logger = logging.get_logger(__name__)

Model = TypeVar("Model", bound=PreTrainedModel)

STEP_INPUTS = {"attention_mask", "encoder_outputs", "use_cache", "logits_to_keep"}


class Prepared(PreTrainedModel):
    """A model of packed layers, which holds no weights that could be trained, saved, moved or copied.

    Args:
        model: the model, which stays unchanged.
        make_linear: makes a layer with a copy of another one's weights.
    """

    def __init__(self, model: PreTrainedModel, make_linear: Callable[[nn.Linear], nn.Module]) -> None:
        PreTrainedModel.__init__(self, copy.deepcopy(model.config))  # Transformers notes what the class records
        vars(self).update(copy.deepcopy(vars(model), deepcopy_memo(model)))
        fuse_qkv(self)
        for module in [module for module in self.modules() if getattr(module, "keeps_float32", False)]:
            replace(module, nn.Linear, linear_factory("float32") or copy.deepcopy)
        replace(self, nn.Linear, make_linear)
        replace(self, Dropout, lambda _: nn.Identity())
        # Without a window plain products are faster; with one "sdpa" computes long texts block by block.
        window = getattr(self.config, "attention_window", None)
        self.set_attn_implementation("eager" if window is None else "sdpa")
        self.eval().requires_grad_(False)

    def train(self, mode: bool = True) -> Any:
        """Stay in evaluation mode; raise RuntimeError where training mode is requested."""
        if mode:
            raise RuntimeError("A model prepared for inference cannot be trained; train the one it was prepared from.")
        return super().train(False)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Never:
        """Raise RuntimeError: a packed model cannot be saved."""
        raise RuntimeError("A model prepared for inference cannot be saved; save the one it was prepared from.")

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
    """The complete model, whose encoder and decoder steps take the fast path in `generate()`.

    Attributes:
        fast_encoder, decoder_step: None where a stack or a layer of it is a subclass, or cannot be packed.
    """

    def __init__(self, model: PreTrainedModel, make_linear: Callable[[nn.Linear], nn.Module]) -> None:
        super().__init__(model, make_linear)
        encoder, decoder = self.model.encoder, self.model.decoder
        is_plain_encoder = type(encoder) is VaswaniTransformerEncoder and has_plain_layers(encoder)
        is_plain_decoder = type(decoder) is VaswaniTransformerDecoder and has_plain_layers(decoder)
        self.fast_encoder = PreparedEncoder(encoder) if is_plain_encoder else None
        self.decoder_step = DecoderStep(decoder, self.lm_head) if is_plain_decoder else None

    def get_encoder(self, *args: Any, **kwargs: Any) -> Any:
        """Return the encoder, as `generate()` calls it."""
        return super().get_encoder(*args, **kwargs) if self.fast_encoder is None else self.fast_encoder

    def make_decoder(self, inputs: dict[str, Any], beams_per_source: int, **options: bool) -> Decoder:
        """Return the decoder of a search: on the fast path, unless something else observes the steps."""
        if self.decoder_step is None or any(options.values()) or not self.is_plain_search(inputs):
            return super().make_decoder(inputs, beams_per_source, **options)
        memory, mask = inputs["encoder_outputs"][0], inputs.get("attention_mask")
        return PreparedDecoder(self.decoder_step, memory, mask, beams_per_source)

    def is_plain_search(self, inputs: dict[str, Any]) -> bool:
        """Return whether a search needs only the next token's logits."""
        mask, memory = inputs.get("attention_mask"), inputs["encoder_outputs"][0]
        given = {name for name, value in inputs.items() if value is not None and value is not False}
        return (
            STEP_INPUTS.issuperset(given)
            and bool(inputs.get("use_cache"))
            and type(self).forward is VaswaniTransformerForConditionalGeneration.forward
            and self.config._attn_implementation == "eager"
            and self.config.attention_window is None
            and (mask is None or mask.shape == memory.shape[:2])
            and not torch.is_autocast_enabled("cpu")
        )


def prepare_for_inference(model: Model, dtype: str = "float32") -> Model:
    """Return a model that decodes faster on the CPU `model` is on; `generate()` and everything else work as before.

    Its linear layers hold their weights in the layouts that are the fastest on this CPU; the first model of a size is
    timed for about 0.2 s. Its attention uses plain products
    ("eager"), which for sentences are faster on a CPU than torch's fused kernel; for texts of thousands of tokens
    `set_attn_implementation("sdpa")` saves memory. If torch lacks a library for a dtype, the copy has plain layers and
    a warning says so. `parameters()` of the copy are those that are not packed. `generate()` calls no hooks on the copy
    and its layers. In float32 the copy holds the projections of cross-attention's queries and outputs twice, 2
    d_model^2 numbers more a layer.

    Args:
        model: any model of the package, on the CPU and in float32; it stays unchanged.
        dtype: of the products with weights: "float32", with the same results up to rounding; "bfloat16"; or "int8",
            where a sentence's result also depends slightly on the others of its batch.

    Raises:
        ValueError: an unknown dtype, or a model that is wrapped, is not on a CPU in float32 or is itself a prepared
            copy.
        RuntimeError: from the copy, when it is to be trained, saved, moved or copied, or to pass gradients back.
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
    """Return the class of prepared models of a class, which is also a subclass of it."""
    generates = issubclass(model_class, VaswaniTransformerForConditionalGeneration)
    base = PreparedForConditionalGeneration if generates else Prepared
    return type(f"Prepared{model_class.__name__}", (base, model_class), {})


def deepcopy_memo(model: nn.Module) -> dict[int, Tensor]:
    """Return the weights that only linear layers hold, by id, so that `deepcopy` skips them: packing copies them."""
    other_modules = (module for module in model.modules() if type(module) is not nn.Linear)
    kept = {id(weight) for module in other_modules for weight in module.parameters(recurse=False)}
    weights = [module.weight for module in model.modules() if type(module) is nn.Linear]
    return {id(weight): weight for weight in weights if id(weight) not in kept}
