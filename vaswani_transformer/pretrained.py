"""Base class of every model: initialization, parallelism plans, and saving with code."""

import copy
import os
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.generation import GenerationConfig
from transformers.modeling_utils import PreTrainedModel

from .config import VaswaniTransformerConfig
from .settings import NAR_SETTINGS, SEARCH_SETTINGS

FAMILY_PREFIX = "vaswani_"  # prefix of the package's model types
_ATTENTION_PLAN = {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "o_proj": "rowwise"}
_FEED_FORWARD_PLAN = {"layers.*.feed_forward.fc1": "colwise", "layers.*.feed_forward.fc2": "rowwise"}


def tensor_parallel_plan(*attentions: str) -> dict[str, str]:
    """Return a stack's tensor-parallel plan, which splits heads, inner units and the rows of embeddings."""
    plan = {"embed_tokens": "embedding_rowwise", **_FEED_FORWARD_PLAN}
    for name in attentions:
        for projection, style in _ATTENTION_PLAN.items():
            plan[f"layers.*.{name}.{projection}"] = style
    return plan


class VaswaniTransformerPreTrainedModel(PreTrainedModel):
    """Base class of the package's models: initialization, capabilities, saving and publishing.

    Attributes:
        is_stack: whether the class is an encoder or decoder, which several model families share.

    Raises:
        ValueError: the configuration belongs to a different model family, and the class is not a stack.
    """

    is_stack: ClassVar[bool] = False
    config_class = VaswaniTransformerConfig
    config: VaswaniTransformerConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    _own_auto_class = "AutoModel"
    supports_gradient_checkpointing = True
    _no_split_modules = ["VaswaniTransformerEncoderLayer"]  # Transformers adds those of submodules
    _skip_keys_device_placement = ["past_key_values", "cache"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True

    def __init__(self, config: VaswaniTransformerConfig, *args: Any, **kwargs: Any) -> None:
        if not self.is_stack:
            self.check_family(config)
        super().__init__(config, *args, **kwargs)

    @classmethod
    def check_family(cls, config: VaswaniTransformerConfig) -> None:
        """Raise ValueError for the configuration of a different family, whose weights would not fit."""
        saved = config.model_type
        expected = getattr(cls.config_class, "model_type", saved)
        if saved != expected and saved.startswith(FAMILY_PREFIX) and expected.startswith(FAMILY_PREFIX):
            raise ValueError(
                f"{config.name_or_path or 'config'}: was saved from a different model family; got {saved}, "
                f"expected {expected} for {cls.__name__}. Load it with {cls._own_auto_class}, which picks the right "
                "class."
            )

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialize as tensor2tensor does, since the paper does not state an initialization.

        Projections are Glorot-uniform. Embeddings and learned positions are normal with standard deviation
        d_model^-0.5. Biases are 0, and norms have gain 1.
        """
        if isinstance(module, nn.Linear):
            init.xavier_uniform_(module.weight)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, mean=0.0, std=self.config.d_model**-0.5)
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)

    @classmethod
    def register_for_auto_class(cls, auto_class: str | None = None) -> None:
        """Make `save_pretrained` add the package's code, which `auto_class` loads with `trust_remote_code=True`.

        Args:
            auto_class: the Auto class; None for the one with which this package registers the model.
        """
        super().register_for_auto_class(auto_class or cls._own_auto_class)
        if cls.config_class is not None:
            cls.config_class.register_for_auto_class()

    def with_remote_code(self) -> Self:
        """Return a shallow copy, registered for its Auto class, that saves its code and an `auto_map`."""
        published = copy.copy(self)
        published._auto_class = self._own_auto_class
        published.is_remote_code = lambda: True  # Transformers' method asks the class, which is not registered
        published.config = copy.copy(self.config)
        vars(published.config).update(auto_map={}, _auto_class="AutoConfig")
        return published

    def push_to_hub(self, repo_id: str, **settings: Any) -> str:
        """Publish the model and its code in one commit; `settings` are those of Transformers."""
        return super(VaswaniTransformerPreTrainedModel, self.with_remote_code()).push_to_hub(repo_id, **settings)

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """Save the model; add code only after `register_for_auto_class()` or with `push_to_hub=True`.

        The configuration contains an `auto_map` only if the code is saved. Shards replace an earlier single file.

        Raises:
            ValueError: loading the folder would not return this model.
        """
        self.check_saved_as_it_is(Path(save_directory))
        if kwargs.get("push_to_hub") and not self.is_remote_code():
            self.with_remote_code().save_pretrained(save_directory, *args, **kwargs)
            return
        if not self.is_remote_code():
            self.config.__dict__.pop("auto_map", None)
        if not (self.is_remote_code() and self.can_generate()):
            self.config.__dict__.pop("custom_pipelines", None)
        if self.can_generate():
            self.keep_own_settings(self.generation_config)
        super().save_pretrained(save_directory, *args, **kwargs)

        # Loading prefers a single file, so one of an earlier save would win over these shards.
        folder = Path(save_directory)
        name = ".".join(filter(None, ("model", kwargs.get("variant"))))
        if any(folder.glob(f"{name}-*-of-*.safetensors")):
            (folder / f"{name}.safetensors").unlink(missing_ok=True)

    @staticmethod
    def keep_own_settings(generation_config: GenerationConfig) -> None:
        """Make Transformers load the settings of this package too.

        It would drop them from a generation config that it derived from the model's configuration.
        """
        if not vars(generation_config).keys().isdisjoint((*SEARCH_SETTINGS, *NAR_SETTINGS)):
            generation_config._from_model_config = False

    def check_saved_as_it_is(self, folder: Path) -> None:
        """Raise ValueError if a model loaded from `folder` would get an adapter, or a different scale of embeddings."""
        if (folder / "adapter_config.json").exists() and not self._hf_peft_config_loaded:
            raise ValueError(
                f"{folder}: contains adapter_config.json, so loading it would apply that adapter to this complete "
                "model. Save the model in a different folder."
            )
        if self.config.scale_embedding and type(self.get_input_embeddings()) is nn.Embedding:
            raise ValueError(
                "embeddings: a loaded model would multiply them by sqrt(d_model); got an Embedding, expected a "
                "ScaledEmbedding. Set config.scale_embedding to False to keep them unscaled."
            )

    @property
    def dummy_inputs(self) -> dict[str, Tensor]:
        """Return a small batch for tracing: two sources of five tokens and two targets."""
        tokens = torch.arange(10, device=self.device).view(2, 5) % self.config.vocab_size
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "decoder_input_ids": tokens}
