"""Log-probabilities of the tokens of translations, and their word alignments, by a forced pass.

R translations, S source, T target, V vocabulary, H heads, I source words, J target words.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..loss import token_cross_entropy
from ..support.command import UserError
from ..support.loading import eager_attention, eval_mode
from ..tokenizer import source_encoder

SCORING_TOKENS = 2048  # target tokens scored at a time
NO_WORD = -1  # the word of a token that the text does not show, such as `</s>`


@dataclass(frozen=True)
class Details:
    """Tokens of a translation, and the words of the source that its words come from.

    tokens: the tokens, including `</s>`.
    token_log_probabilities: their log-probabilities in nats.
    alignment: pairs of the indices of a source word and a target word. White space separates words, so a word includes
        its punctuation marks.
    """

    tokens: list[str]
    token_log_probabilities: list[float]
    alignment: list[tuple[int, int]]

    @property
    def pharaoh(self) -> str:
        """Alignment in Pharaoh format, such as `0-0 1-2`."""
        return " ".join(f"{source}-{target}" for source, target in self.alignment)


def special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the ids of all special tokens, also of those that a user has added."""
    added = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return {*tokenizer.all_special_ids} | added


def words_of_tokens(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], hidden: Collection[int]) -> list[int]:
    """Return the index of each token's word, the last one of the text up to this token; `hidden` ids have none."""
    words = []
    shown: list[int] = []
    for index in ids:
        if index in hidden:
            words.append(NO_WORD)
            continue
        shown.append(index)
        words.append(len(cast(str, tokenizer.decode(shown)).split()) - 1)
    return words


def words_of_source(tokenizer: PreTrainedTokenizerBase, text: str, ids: Sequence[int]) -> list[int]:
    """Return the index of each token's word in the text, or `NO_WORD`, by its characters if the tokenizer is fast."""
    if not tokenizer.is_fast:
        return words_of_tokens(tokenizer, ids, special_ids(tokenizer) - {tokenizer.unk_token_id})
    encoded = source_encoder(tokenizer)(text, return_offsets_mapping=True, verbose=False)
    words = []
    for index, whole, (start, end) in zip(ids, encoded["input_ids"], encoded["offset_mapping"], strict=False):
        is_in_text = index == whole and text[start:end].strip()  # not the `</s>` of a truncated text
        words.append(len(text[:end].split()) - 1 if is_in_text else NO_WORD)
    return words


def align(weights: Tensor, source_words: Sequence[int], target_words: Sequence[int]) -> list[tuple[int, int]]:
    """Return pairs of a source word and a target word, in order.

    Each target word has the source word that it attends to most: the weight of two words is the sum over their tokens.

    Args:
        weights: (T, S), cross-attention.
        source_words, target_words: S and T indices of words, `NO_WORD` for a token without one.
    """
    sources = torch.tensor(sorted({*source_words} - {NO_WORD}))  # (I,)
    targets = torch.tensor(sorted({*target_words} - {NO_WORD}))  # (J,)
    if not (len(sources) and len(targets)):
        return []
    in_source = (torch.tensor(source_words)[:, None] == sources).to(weights.dtype)  # (S, I)
    in_target = (torch.tensor(target_words) == targets[:, None]).to(weights.dtype)  # (J, T)
    best = (in_target @ weights @ in_source).argmax(1)  # (J,)
    return sorted(zip(sources[best].tolist(), targets.tolist(), strict=True))


@torch.no_grad()
def forced_pass(
    model: PreTrainedModel, tokens: Tensor, mask: Tensor, labels: Tensor, inputs: Tensor, layer: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities (R, T) of `labels`, and the mean cross-attention (R, T, S) of a layer's heads.

    Args:
        model: an autoregressive encoder-decoder.
        tokens, mask: (R, S), the sources.
        labels: (R, T), the targets, -100 at padding.
        inputs: (R, T), the decoder's input.
        layer: the decoder layer, counted from 1; None for the last.

    Raises:
        UserError: the model does not have the layer.
    """
    results = []
    rows = max(1, SCORING_TOKENS // labels.shape[1])
    with eval_mode(model), eager_attention(model):
        for start in range(0, len(labels), rows):
            batch = slice(start, start + rows)
            source = {"input_ids": tokens[batch], "attention_mask": mask[batch]}
            output: Any = cast(Any, model)(
                **source, decoder_input_ids=inputs[batch], output_attentions=True, use_cache=False, return_dict=True
            )
            layers = output.cross_attentions
            if layer is not None and not 1 <= layer <= len(layers):
                problem = f"not one of the model's decoder layers; got {layer}, expected 1 to {len(layers)}"
                raise UserError(f"alignment_layer: {problem}. Choose a different one.")
            weights = layers[-1 if layer is None else layer - 1].float().mean(1)  # (rows, T, S)
            results.append((-token_cross_entropy(output.logits, labels[batch]), weights))
    log_probabilities, weights = zip(*results, strict=True)
    return torch.cat(log_probabilities), torch.cat(weights)


def make_details(
    tokenizer: PreTrainedTokenizerBase, source_words: Sequence[int], target: list[int], scores: Tensor, weights: Tensor
) -> Details:
    """Return the details of a target, from its scores (T,) and weights (T, S), which may be followed by padding."""
    words = words_of_tokens(tokenizer, target, special_ids(tokenizer))
    attention = weights[: len(target), : len(source_words)]
    names = cast(list[str], tokenizer.convert_ids_to_tokens(target))
    return Details(names, scores[: len(target)].tolist(), align(attention, source_words, words))
