"""The encoder: a stack of N layers over the embedded source (3.1).

B batch, S source.
"""

from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .attention import SelfAttention, padding_mask
from .config import VaswaniTransformerConfig
from .embeddings import InputEmbedding, ScaledEmbedding, text_positions
from .layers import VaswaniTransformerEncoderLayer
from .pretrained import VaswaniTransformerPreTrainedModel, check_mask, embed_text, tensor_parallel_plan
from .restricted import Window


class VaswaniTransformerEncoder(VaswaniTransformerPreTrainedModel):
    """A stack of N identical layers over the embedded source (3.1)."""

    is_stack = True
    _tp_plan = tensor_parallel_plan("self_attn")
    _fsdp_plan = {"layers.*": "free_full_weight"}
    _can_record_outputs = {"hidden_states": VaswaniTransformerEncoderLayer, "attentions": SelfAttention}

    def __init__(self, config: VaswaniTransformerConfig) -> None:
        super().__init__(config)
        self.embed_tokens = ScaledEmbedding(config)
        self.input_embedding = InputEmbedding(config)
        self.layers = nn.ModuleList(
            VaswaniTransformerEncoderLayer(config, layer_idx) for layer_idx in range(config.encoder_layers)
        )
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: object,
    ) -> BaseModelOutput:
        """Encode a source.

        Args:
            input_ids: (B, S) token ids.
            attention_mask: (B, S), 0 where a token is padding, on either side; None: every token counts.
            position_ids: (B, S); None: counted over unmasked tokens.
            inputs_embeds: (B, S, d_model), scaled embeddings in place of `input_ids`.

        Returns:
            `last_hidden_state` (B, S, d_model), and on request `hidden_states` (N + 1 of them) and `attentions`.
        """
        inputs_embeds = embed_text(self.embed_tokens, input_ids, inputs_embeds)  # (B, S, d_model)
        if input_ids is not None:
            self.warn_if_padding_and_no_attention_mask(input_ids, attention_mask)
        rows, length = inputs_embeds.shape[:2]
        check_mask(attention_mask, rows, length, "attention_mask", queries=length)
        max_position = length if position_ids is None else None
        if position_ids is None:
            position_ids = text_positions(inputs_embeds, attention_mask)  # (B or 1, S)
        if self.config.attention_window is None:
            mask = padding_mask(self.config, inputs_embeds, attention_mask)
        else:
            mask = Window(self.config, inputs_embeds).mask(attention_mask)
        hidden_states = self.input_embedding(inputs_embeds, position_ids, max_position)
        for layer in self.layers:
            hidden_states = layer(hidden_states, mask, **kwargs)  # (B, S, d_model)
        return BaseModelOutput(last_hidden_state=hidden_states)
