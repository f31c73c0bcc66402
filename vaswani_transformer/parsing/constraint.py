"""Logits processor that restricts `generate()` to well-formed linear trees.

B sentences, k beams per sentence, R = k B rows, T target tokens so far, C tokens of trees, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel, PreTrainedTokenizerBase

from ..support.loading import is_non_autoregressive
from ..translation.translator import Constraint
from .linear import LINEAR_TOKEN, PLACE
from .trees import split_tokenized

OPENING, WORD_PLACE, CLOSING, END = range(4)
"""Kinds of tokens of linear trees."""


@dataclass(frozen=True)
class TreeTokens:
    """Tokens of linear trees in a vocabulary.

    ids: (C,), token ids.
    kinds: (C,), `OPENING`, `WORD_PLACE`, `CLOSING` or `END`.
    steps: (V,), change of the depth: 1 for opening labels, -1 for closing labels, else 0.
    places: (V,), 1 for places, else 0.
    closing: (V,), id of the matching closing label for opening labels, else -1.
    """

    ids: Tensor
    kinds: Tensor
    steps: Tensor
    places: Tensor
    closing: Tensor

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> Self | None:
        """Return the tokens of trees among a tokenizer's added tokens; None without places or an end token.

        Args:
            tokenizer: the tokenizer.
            vocab_size: V, the size of the model's vocabulary.
        """
        tokens = {text: index for text, index in tokenizer.get_added_vocab().items() if LINEAR_TOKEN.fullmatch(text)}
        place_ids = [index for text, index in tokens.items() if text.startswith(PLACE)]
        if not place_ids or tokenizer.eos_token_id is None:
            return None
        kinds = torch.full((vocab_size,), -1)
        steps = torch.zeros(vocab_size, dtype=torch.long)
        places = torch.zeros(vocab_size, dtype=torch.long)
        closing = torch.full((vocab_size,), -1)

        # Labels of which one of the pair is missing cannot occur in a tree.
        for text, closing_id in tokens.items():
            opening_id = tokens.get(f"({text[1:]}") if text.startswith(")") else None
            if opening_id is not None:
                kinds[opening_id] = OPENING
                steps[opening_id] = 1
                closing[opening_id] = closing_id
                kinds[closing_id] = CLOSING
                steps[closing_id] = -1
        kinds[place_ids] = WORD_PLACE
        places[place_ids] = 1
        kinds[tokenizer.eos_token_id] = END
        ids = (kinds >= 0).nonzero()[:, 0]
        return cls(ids, kinds[ids], steps, places, closing)

    def to(self, device: torch.device) -> Self:
        """Return a copy on a device."""
        return type(self)(**{name: values.to(device) for name, values in vars(self).items()})


class WellFormedTrees(LogitsProcessor):
    """Logits processor that permits only prefixes of well-formed linear trees over given numbers of words.

    Every constituent has a word and is closed by its label, a tree has a place for every word, and it fits within the
    limit. If a sentence has too many words for its limit, the last ones get no place. Rows in which a different
    processor has excluded all permitted tokens, such as for a forced first token, are not changed.

    Args:
        tokens: tokens of trees.
        word_counts: (B,), number of words of each sentence.
        limits: (B,), largest number of new tokens of each target, including `</s>`.
        prompt_length: number of tokens that each target begins with.
    """

    def __init__(self, tokens: TreeTokens, word_counts: Sequence[int], limits: Tensor, prompt_length: int = 1) -> None:
        self.tokens = tokens.to(limits.device)
        self.words = torch.tensor(word_counts, device=limits.device).minimum(limits - 1)
        self.lengths = limits + prompt_length

    def keep(self, sources: Tensor) -> None:
        """Drop all other sentences; `sources` are indices into the current ones."""
        self.words = self.words[sources]
        self.lengths = self.lengths[sources]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return `scores` (R, V) with -inf for tokens that must not follow `input_ids` (R, T)."""
        permitted = self.permitted(input_ids)  # (R, C)
        possible = scores.index_select(1, self.tokens.ids)
        is_free = ~(permitted & (possible > -torch.inf)).any(1, keepdim=True)
        possible.masked_fill_(~(permitted | is_free), -torch.inf)
        return scores.masked_fill(~is_free, -torch.inf).index_copy_(1, self.tokens.ids, possible)

    def permitted(self, input_ids: Tensor) -> Tensor:
        """Return a mask (R, C) of the tokens of trees that may follow `input_ids` (R, T)."""
        tokens = self.tokens
        rows, length = input_ids.shape
        beams = rows // len(self.words)

        # What the target so far has opened and placed.
        steps = tokens.steps[input_ids]  # (R, T)
        depths = steps.cumsum(1)
        depth = depths[:, -1]  # (R,)
        words_left = self.words.repeat_interleave(beams) - tokens.places[input_ids].sum(1)  # (R,)
        tokens_left = self.lengths.repeat_interleave(beams) - length  # (R,)
        spare = tokens_left - words_left - depth - 1  # after the remaining words, closing labels and the end

        # The last opening label at the current depth is that of the innermost open constituent.
        is_reaching = (steps > 0) & (depths == depth[:, None])
        innermost = (is_reaching * torch.arange(length, device=input_ids.device)).amax(1, keepdim=True)
        closing = tokens.closing[input_ids.gather(1, innermost)]  # (R, 1)
        can_close = (depth > 0) & (steps[:, -1] <= 0)

        # A column for each kind of token, in the order of the kinds; of the closing labels only one is permitted.
        can_open = (words_left > 0) & (spare >= 2)
        can_place = words_left > 0
        can_end = (words_left <= 0) & (depth <= 0)
        kinds = torch.stack((can_open, can_place, torch.zeros_like(can_close), can_end), dim=1)  # (R, 4)
        return kinds[:, tokens.kinds] | ((tokens.ids == closing) & can_close[:, None])


def tree_constraint(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Constraint | None:
    """Return a function that makes the processor for a batch of sentences with space-separated words.

    None for a non-autoregressive model, and if the vocabulary has no added tokens for labels and places.
    """
    vocab_size = max(len(tokenizer), model.config.get_text_config(decoder=True).vocab_size)
    tokens = None if is_non_autoregressive(model) else TreeTokens.of(tokenizer, vocab_size)
    if tokens is None:
        return None
    return lambda texts, limits: WellFormedTrees(tokens, [len(split_tokenized(text)) for text in texts], limits)
