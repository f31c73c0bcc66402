"""The encoder-decoder of the paper, and the same with its output projection, its loss and its search (Figure 1).

B batch, S source, T target, k target rows of one source row, V vocabulary.
"""

from typing import Unpack

from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput
from transformers.utils import TransformersKwargs, can_return_tuple

from .body import EncoderDecoder, ProjectedModel
from .config import VaswaniTransformerConfig
from .generation import PaperBeamSearch
from .loss import without_padding
from .pretrained import CACHE


def shift_right(labels: Tensor, config: VaswaniTransformerConfig) -> Tensor:
    """Return `labels` (B, T) "offset by one position" (3.1): the start token, then all but the last label.

    Labels of -100 become padding.
    """
    if config.target_start_token_id is None or config.pad_token_id is None:
        raise ValueError(
            f"bos_token_id ({config.bos_token_id}), decoder_start_token_id ({config.decoder_start_token_id}) and "
            f"pad_token_id ({config.pad_token_id}) leave labels without a start or without padding; set pad_token_id "
            "and one of the other two, or give decoder_input_ids."
        )
    shifted = nn.functional.pad(labels[:, :-1], (1, 0), value=config.target_start_token_id)  # (B, T)
    return shifted.masked_fill(shifted == -100, config.pad_token_id)


class VaswaniTransformerModel(EncoderDecoder):
    """Encoder and decoder over one embedding matrix (3.1, 3.4), without the output projection."""


class VaswaniTransformerForConditionalGeneration(ProjectedModel, PaperBeamSearch, GenerationMixin):
    """The paper's model: encoder, decoder and the projection to the vocabulary (Figure 1)."""

    body_class = VaswaniTransformerModel

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """Return `labels` (B, T) shifted right, for a data collator; see `shift_right`."""
        return shift_right(labels, self.config)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: tuple[Tensor, ...] | BaseModelOutput | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        decoder_position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        skip_logits: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqLMOutput:
        """Compute the logits of a target's next tokens, or the loss of a target.

        Args:
            labels: (B, T) target token ids with their end token, not shifted; -100 or `<pad>` where there is nothing
                to learn. Shifted right they make `decoder_input_ids` where those are not given.
            logits_to_keep: compute logits for this many last target positions, or for these indices; 0 for all.
            skip_logits: whether to leave out `logits` when there are labels; None: in training mode only.
            num_items_in_batch: the number of target tokens to divide the summed loss by; None: those of `labels`.

            The others are those of `VaswaniTransformerModel`.

        Returns:
            With `labels` a `loss`, the mean over target tokens in nats, label-smoothed in training mode. In evaluation
            mode it is the plain negative log-likelihood, so that its exponential is the paper's perplexity. It is 0 if
            no label is a token. `logits` are (k B, T, V), or None where they are skipped. The rest is the output of
            `VaswaniTransformerModel`.

        Raises:
            ValueError: the stacks' errors; labels without a start token to shift them by.
        """
        num_items_in_batch = kwargs.pop("num_items_in_batch", None)
        if labels is not None:
            labels, num_items_in_batch = without_padding(labels, num_items_in_batch, self.config)
            use_cache = False if use_cache is None else use_cache
            if decoder_input_ids is None and decoder_inputs_embeds is None:
                decoder_input_ids = shift_right(labels, self.config)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            encoder_outputs=encoder_outputs,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            decoder_inputs_embeds=decoder_inputs_embeds,
            decoder_position_ids=decoder_position_ids,
            use_cache=use_cache,
            return_dict=True,
            **kwargs,
        )
        loss, logits = self.loss_and_logits(
            outputs.last_hidden_state, labels, logits_to_keep, skip_logits, num_items_in_batch
        )
        return Seq2SeqLMOutput(
            loss=loss,
            logits=logits,
            **{CACHE: getattr(outputs, CACHE)},
            decoder_hidden_states=outputs.decoder_hidden_states,
            decoder_attentions=outputs.decoder_attentions,
            cross_attentions=outputs.cross_attentions,
            encoder_last_hidden_state=outputs.encoder_last_hidden_state,
            encoder_hidden_states=outputs.encoder_hidden_states,
            encoder_attentions=outputs.encoder_attentions,
        )
