"""CMLM, a conditional masked language model, and its decoding by Mask-Predict (Ghazvininejad et al. 2019).

B batch, S source, T target, k target rows per source row, l lengths of a length beam, R iterations, V vocabulary. The
decoder is the paper's without the causal mask. A length token before the source predicts the target length m. In
training the number of masked tokens is uniform on 1..m, as in section 3.1; the authors' code draws from 1..m-1.
"""

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.utils.data import get_worker_info
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import logging

from .config import positive_int
from .layers import read_table, text_positions
from .lengths import LengthConfig, LengthHead
from .loss import recount
from .model import EncoderDecoder
from .nar import NarTargets
from .nar_decoder import (
    LengthTarget,
    MeasuredSource,
    NarDecoder,
    TargetInputs,
    canvas,
    check_right_padded,
    choose_positions,
    given_mask,
    real_tokens,
)
from .settings import TOKEN_IDS, NarSettings, as_token_ids
from .stacks import as_encoder_output, check_mask, embed_text

logger = logging.get_logger(__name__)


def sample_masks(
    is_real: Tensor, generator: torch.Generator | None = None, draws: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Return the positions (B, T) to mask: k of the m tokens of each row, with k uniform on 1..m.

    `draws`, (B,) and (B, T), uniform on [0, 1), determine k and the positions; if None, they come from `generator`.
    """
    lengths = is_real.sum(1)  # (B,), m
    if draws is None:
        count_draws = torch.rand(lengths.shape, generator=generator, device=is_real.device)
        position_draws = torch.rand(is_real.shape, generator=generator, device=is_real.device)
    else:
        count_draws, position_draws = draws
    counts = torch.minimum((count_draws * lengths).long() + 1, lengths)  # (B,), k
    return choose_positions(is_real, counts, position_draws)


def mask_targets(batch: dict[str, Any], is_masked: Tensor, mask_token_id: int, pad_token_id: int) -> dict[str, Any]:
    """Return `batch` with the tokens of its `labels` masked where `is_masked` (B, T).

    `decoder_input_ids` (B, T) are the targets with `<mask>`, `labels` (B, T) are the masked tokens, and
    `target_lengths` (B,) count all tokens.
    """
    labels: Tensor = batch["labels"]
    is_real = labels.ne(-100)
    check_right_padded(labels)
    tokens = labels.masked_fill(~is_real, pad_token_id)
    return {
        **batch,
        "decoder_input_ids": tokens.masked_fill(is_masked, mask_token_id),
        "labels": labels.masked_fill(~is_masked, -100),
        "target_lengths": is_real.sum(1),
    }


def check_masked(input_ids: Tensor, labels: Tensor, mask_token_id: int) -> None:
    """Raise ValueError if a word with a label is not masked; skipped in a compiled graph."""
    if not torch.compiler.is_compiling() and bool((labels.ne(-100) & input_ids.ne(mask_token_id)).any()):
        raise ValueError(
            "decoder_input_ids: a word with a label must be <mask>, or the model sees what it learns to predict; got a "
            "different token, as in targets shifted right, expected <mask>. Leave decoder_input_ids out, or mask with "
            "a MaskingCollator."
        )


class MaskingCollator:
    """Data collator that masks the targets of a wrapped collator, to train a CMLM with Transformers' Trainer.

    With it the Trainer counts the masked tokens, which makes the loss exact under gradient accumulation and over
    several processes. A batch has `decoder_input_ids` (B, T), the targets with `<mask>`; `labels` (B, T), -100 except
    at masked tokens; and `target_lengths` (B,). Metrics over labels need the plain collator. The generator of the masks
    is not saved, so a resumed run draws different masks than an uninterrupted one.

    Args:
        collator: returns batches with `labels` padded on the right with -100 or `<pad>`, such as
            `DataCollatorForSeq2Seq`.
        mask_token_id, pad_token_id: ids of `<mask>` and `<pad>`.
        seed: seed of the masks.
    """

    def __init__(
        self, collator: Callable[[Sequence[Any]], dict[str, Any]], mask_token_id: int, pad_token_id: int, seed: int = 0
    ) -> None:
        self.collator = collator
        self.mask_token_id = mask_token_id
        self.pad_token_id = pad_token_id
        self.seed = seed
        self.generator: torch.Generator | None = None

    def __call__(self, features: Sequence[Any]) -> dict[str, Any]:
        """Return the masked batch of `features`."""
        # Each worker draws its own masks; a forked one starts with the generator of its parent.
        worker = get_worker_info()
        seed = self.seed if worker is None else self.seed + worker.seed
        seed = seed % 2**64
        if self.generator is None or self.generator.initial_seed() != seed:
            self.generator = torch.Generator().manual_seed(seed)

        batch = {**self.collator(features)}
        batch["labels"] = batch["labels"].masked_fill(batch["labels"] == self.pad_token_id, -100)
        is_masked = sample_masks(batch["labels"].ne(-100), self.generator)  # (B, T)
        return mask_targets(batch, is_masked, self.mask_token_id, self.pad_token_id)


@strict
class VaswaniCmlmConfig(LengthConfig):
    """Hyperparameters of CMLM.

    Args:
        mask_token_id: id of `<mask>`; required by the model.
        max_target_length: C, the largest target length that the model can predict; longer targets are trained as C.
    """

    model_type = "vaswani_cmlm"

    mask_token_id: int | None = None
    max_target_length: int = positive_int(default=256)

    def validate_mask_token_id(self) -> None:
        """Check that `<mask>` differs from the other special tokens."""
        if any(self.mask_token_id in as_token_ids(getattr(self, name)) for name in TOKEN_IDS):
            raise ValueError(
                f"mask_token_id ({self.mask_token_id}) is also the start, padding or end token; add a separate "
                'token: tokenizer.add_special_tokens({"mask_token": "<mask>"}).'
            )


class VaswaniCmlmModel(EncoderDecoder):
    """Encoder and non-autoregressive decoder with a shared embedding matrix, without predictions."""

    config_class = VaswaniCmlmConfig
    decoder_class = NarDecoder


class VaswaniCmlmForConditionalGeneration(LengthHead, GenerationMixin):
    """CMLM, with `generate()` by Mask-Predict: `num_iterations` passes over `length_beam_size` lengths.

    Without `decoder_input_ids`, `forward` masks the `labels`: in training mode by `sample_masks`, in evaluation mode
    all of them. With `decoder_input_ids` (`<mask>` at every word that has a label, `<pad>` on the right), the lengths
    are `target_lengths`, else those of `decoder_attention_mask`, else the number of tokens before `<pad>`. In
    evaluation mode the loss always covers every token, masked or not, and `num_items_in_batch` is scaled accordingly.
    `encoder_outputs` have S + 1 rows, the first of which is the length token.
    """

    config_class = VaswaniCmlmConfig
    body_class = VaswaniCmlmModel
    family_settings = (*LengthHead.family_settings, "num_iterations")
    unmixed = "lm_head|table|length_token"

    def __init__(self, config: VaswaniCmlmConfig) -> None:
        super().__init__(config)
        mask_id = config.mask_token_id
        pad_id = config.pad_token_id
        if mask_id is None or pad_id is None or pad_id in config.end_token_ids:
            raise ValueError(
                f"mask_token_id, pad_token_id: a CMLM needs <mask>, <pad> and a separate end token; got {mask_id}, "
                f"{pad_id} and eos_token_id {config.eos_token_id}, expected three ids. Add missing tokens to the "
                'tokenizer, <mask> by add_special_tokens({"mask_token": "<mask>"}), and set their ids.'
            )
        self.num_length_classes = config.max_target_length
        self.length_token = nn.Embedding(config.max_target_length + 1, config.d_model)
        self.post_init()

    def use_mask_predict(self, iterations: int = 10, length_beam_size: int = 5) -> None:
        """Set the decoding of Ghazvininejad et al. 2019: 10 iterations, 5 lengths."""
        self.generation_config = self.config.make_generation_config(
            num_iterations=iterations, length_beam_size=length_beam_size
        )

    def length_table(self, device: torch.device) -> Tensor:
        """Return L (C + 1, d_model): row 0 embeds the length token (3.3), and row c scores length c."""
        return read_table(self.length_token, self.config.max_target_length + 1, device)

    def encode(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        encoder_outputs: tuple[Tensor, ...] | BaseModelOutput | None = None,
        **inputs: Any,
    ) -> BaseModelOutput:
        """Run the encoder on the length token and the source, unless `encoder_outputs` are given."""
        if encoder_outputs is None:
            self.model.check_adapters()
            encoder_outputs = self.run_encoder(input_ids, attention_mask, return_dict=True, **inputs)
        return as_encoder_output(encoder_outputs)

    def get_encoder(self, modality: str | None = None) -> Any:
        """Return an encoder that prepends the length token to the source."""
        encoder = copy(super().get_encoder(modality))  # shares weights and layers
        encoder.forward = self.run_encoder
        return encoder

    def set_encoder(self, encoder: nn.Module, modality: str | None = None) -> None:
        """Use a different encoder; one of `get_encoder()` without its length token, which this model prepends."""
        if getattr(vars(encoder).get("forward"), "__name__", None) == "run_encoder":
            encoder = copy(encoder)
            del encoder.forward
        super().set_encoder(encoder, modality)

    def run_encoder(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """Return the encoder's output (B, S + 1, d_model), with the length token at index 0.

        The length token has the same position as the first word.
        """
        inputs_embeds = embed_text(self.model.encoder.embed_tokens, input_ids, inputs_embeds)  # (B, S, d_model)
        if input_ids is not None:
            self.warn_if_padding_and_no_attention_mask(input_ids, attention_mask)
        check_mask(attention_mask, *inputs_embeds.shape[:2], name="attention_mask")
        if position_ids is None:
            position_ids = text_positions(inputs_embeds, attention_mask)  # (B or 1, S)

        # The length token in front: its embedding, position 0, and a mask that shows it.
        length_token = self.length_table(inputs_embeds.device)[:1] * self.config.embedding_scale  # (1, d_model)
        length_token = length_token.to(inputs_embeds.dtype).expand(len(inputs_embeds), 1, -1)  # (B, 1, d_model)
        if attention_mask is not None:
            attention_mask = torch.cat([torch.ones_like(attention_mask[:, :1]), attention_mask], dim=1)  # (B, S + 1)
        return self.model.encoder(
            attention_mask=attention_mask,
            position_ids=nn.functional.pad(position_ids, (1, 0)),  # (B or 1, S + 1)
            inputs_embeds=torch.cat([length_token, inputs_embeds], dim=1),  # (B, S + 1, d_model)
            **kwargs,
        )

    def read_source(self, states: Tensor, attention_mask: Tensor | None) -> MeasuredSource:
        """Return the states of the words (B, S, d_model) with the logits of lengths 0 to C.

        The logits are x_0 L^T, where x_0 is the state of the length token; length 0 is excluded.
        """
        rows, width = states.shape[:2]
        if attention_mask is not None and attention_mask.shape == (rows, width):
            raise ValueError(
                f"encoder_outputs: the state of the length token is missing; got shape {(rows, width)}, expected "
                f"{(rows, width + 1)}. Encode by get_encoder() of this model, not of its body."
            )
        memory = states[:, 1:]
        table = self.length_table(states.device).to(states.dtype)  # (C + 1, d_model)
        first_length = torch.zeros(rows, dtype=torch.long, device=states.device)  # (B,), class 0 is length 0
        logits = nn.functional.linear(states[:, 0], table)  # (B, C + 1)
        logits = logits.index_fill(1, first_length[:1], float("-inf"))
        return MeasuredSource(memory, attention_mask, real_tokens(attention_mask, memory), logits, first_length)

    def target_mask(self, source: MeasuredSource, inputs: TargetInputs) -> Tensor:
        """Return the target mask (k B, T), from the lengths, else the decoder's words, else as in every model."""
        device = source.memory.device
        words = inputs.inputs_embeds if inputs.input_ids is None else inputs.input_ids
        if inputs.lengths is not None:
            target = inputs.labels if words is None else words
            width = None if target is None else target.shape[1]
            return canvas(inputs.lengths.to(device), width)
        if words is not None and inputs.attention_mask is not None:
            return inputs.attention_mask.to(device).ne(0).long()
        if inputs.input_ids is not None:
            return inputs.input_ids.ne(self.config.token_id("pad_token_id")).long()
        mask = given_mask(source, inputs if words is None else TargetInputs(inputs_embeds=words))
        return canvas(self.best_lengths(source, 1).flatten()) if mask is None else mask

    def make_target(self, source: MeasuredSource, inputs: TargetInputs) -> LengthTarget:
        """Return the target, with `<mask>` at the words that the model predicts."""
        mask = self.target_mask(source, inputs)
        mask_id = self.config.token_id("mask_token_id")
        pad_id = self.config.token_id("pad_token_id")
        all_masked = {"input_ids": torch.where(mask.bool(), mask_id, pad_id)}
        has_words = inputs.input_ids is not None or inputs.inputs_embeds is not None
        words = {"input_ids": inputs.input_ids, "inputs_embeds": inputs.inputs_embeds}
        labels = inputs.labels

        # Without labels, the model predicts the caller's masked words, or a whole target.
        if labels is None:
            return LengthTarget(mask, decoder_inputs=words if has_words else all_masked, source=source)

        # In evaluation mode it predicts all words at once, also those that the decoder's input shows.
        if not self.training:
            complete = labels
            if inputs.input_ids is not None:
                is_shown = mask.bool() & labels.eq(-100) & inputs.input_ids.ne(mask_id)
                complete = torch.where(is_shown, inputs.input_ids, labels)
            num_items = recount(inputs.num_items, labels, complete)
            return LengthTarget(mask, complete, num_items, all_masked, source=source)

        # In training mode it predicts the masked words, which a MaskingCollator or the caller chose.
        if has_words:
            is_from_collator = inputs.lengths is not None
            if inputs.input_ids is not None and not is_from_collator:
                check_masked(inputs.input_ids, labels, mask_id)
            return LengthTarget(mask, labels, inputs.num_items, words, source=source)

        # Nobody chose any.
        if inputs.num_items is not None:
            logger.warning_once(
                "The loss is divided by all target tokens, as num_items_in_batch counts them, but the model masks only "
                "some of them. Use a MaskingCollator as data collator; it masks before the Trainer counts."
            )
        masked = mask_targets({"labels": labels}, sample_masks(labels.ne(-100)), mask_id, pad_id)
        decoder_inputs = {"input_ids": masked["decoder_input_ids"]}
        return LengthTarget(mask, masked["labels"], inputs.num_items, decoder_inputs, source=source)

    def decode_targets(self, source: MeasuredSource, lengths: Tensor, settings: NarSettings) -> NarTargets:
        """Predict a target for each of `lengths` (l B,) in R iterations of Mask-Predict (3.2).

        Iteration t masks the k_t = max(1, floor(m (R - t) / R)) least likely tokens and predicts them again. The others
        keep their tokens and probabilities.
        """
        iterations = settings.num_iterations  # R
        is_real = canvas(lengths).bool()  # (l B, T)
        tokens = torch.full_like(is_real, self.config.token_id("pad_token_id"), dtype=torch.long)
        log_probs = torch.zeros(is_real.shape, device=lengths.device)
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        history = []
        for iteration in range(iterations):
            # The least likely tokens; at first all.
            is_masked = is_real
            if iteration > 0:
                counts = (lengths * (iterations - iteration) // iterations).clamp(min=1)  # (l B,), k_t
                order = log_probs.masked_fill(~is_real, float("inf")).sort(dim=1, stable=True).indices
                ranks = order.argsort(dim=1)
                is_masked = ranks < counts[:, None]  # (l B, T)

            # Their prediction from the other tokens.
            tokens = tokens.masked_fill(is_masked, self.config.token_id("mask_token_id"))
            states = self.model.decoder.run(source, is_real.long(), cache, input_ids=tokens)[0]  # (l B, T, d_model)
            is_last = iteration == iterations - 1
            new_tokens, new_log_probs = self.read_words(
                states, lengths, is_masked, settings.suppress_tokens, settings.reads_scores or not is_last
            )
            tokens = torch.where(is_masked, new_tokens, tokens)
            log_probs = torch.where(is_masked, new_log_probs, log_probs)
            history.append(tokens)
        return NarTargets(tokens, log_probs, history)
