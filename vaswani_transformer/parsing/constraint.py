"""A search that can only write well-formed linear trees: a logits processor for `generate()` of any model.

B sentences, k beams of a sentence, R rows: k B, T tokens of a target so far, C tokens of trees, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel, PreTrainedTokenizerBase

from ..support.modes import is_non_autoregressive
from ..translation.translator import Constraint
from .linear import LINEAR_TOKEN, PLACE
from .words import split_tokenized


@dataclass(frozen=True)
class TreeTokens:
    """The tokens of a vocabulary that linear trees consist of.

    ids: (C,) the tokens.
    kinds: (C,) 0 for an opening label, 1 for a place, 2 for a closing label, 3 for the end.
    steps: (V,) how many constituents a token opens: 1, -1 or 0.
    places: (V,) how many places it has: 1 or 0.
    closing: (V,) the closing label of an opening one; -1 for any other token.
    """

    ids: Tensor
    kinds: Tensor
    steps: Tensor
    places: Tensor
    closing: Tensor

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> Self | None:
        """Return those of a tokenizer whose added tokens are labels and places; None if it has no places or no end.

        Args:
            tokenizer: the tokenizer.
            vocab_size: V, the entries of the model's vocabulary.
        """
        tokens = {text: index for text, index in tokenizer.get_added_vocab().items() if LINEAR_TOKEN.fullmatch(text)}
        places = {index for text, index in tokens.items() if text.startswith(PLACE)}
        if not places or tokenizer.eos_token_id is None:
            return None
        closing = {
            index: tokens[f"){text[1:]}"]
            for text, index in tokens.items()
            if index not in places and text[0] == "(" and f"){text[1:]}" in tokens
        }
        groups = (closing.keys(), places, closing.values(), {tokenizer.eos_token_id})  # in the order of `kinds`
        kinds = {index: kind for kind, group in enumerate(groups) for index in group}
        steps, counts, closing_labels = (torch.full((vocab_size,), value) for value in (0, 0, -1))
        steps[list(closing)] = 1
        steps[list(closing.values())] = -1
        counts[list(places)] = 1
        closing_labels[list(closing)] = torch.tensor(list(closing.values()), dtype=torch.long)
        ids = sorted(kinds)
        return cls(torch.tensor(ids), torch.tensor([kinds[index] for index in ids]), steps, counts, closing_labels)

    def to(self, device: torch.device) -> Self:
        """Return the same on a device."""
        return type(self)(**{name: values.to(device) for name, values in vars(self).items()})


class WellFormedTrees(LogitsProcessor):
    """A processor that leaves a search only the beginnings of well-formed linear trees over given numbers of words.

    Every constituent is closed by its label and has a word, a tree has as many places as its sentence has words, and
    each open constituent and each word has room within the limit. A sentence of more words than its limit gets as many
    places as fit. A row in which another processor has excluded all of that, as for a forced first token, stays as it
    is.

    Args:
        tokens: the tokens of trees.
        word_counts: (B,) the words of each sentence.
        limits: (B,) the new tokens that each target may have, `</s>` included.
        prompt_length: the tokens that each target begins with.
    """

    def __init__(self, tokens: TreeTokens, word_counts: Sequence[int], limits: Tensor, prompt_length: int = 1) -> None:
        self.tokens = tokens.to(limits.device)
        self.words = torch.tensor(word_counts, device=limits.device).minimum(limits - 1)
        self.lengths = limits + prompt_length

    def keep(self, sources: Tensor) -> None:
        """Process only the rows of these sentences from now on, by index."""
        self.words, self.lengths = self.words[sources], self.lengths[sources]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return `scores` (R, V) with -inf for each token that may not follow `input_ids` (R, T)."""
        permitted = self.permitted(input_ids)  # (R, C)
        possible = scores.index_select(1, self.tokens.ids)
        is_free = ~(permitted & (possible > -torch.inf)).any(1, keepdim=True)
        possible.masked_fill_(~(permitted | is_free), -torch.inf)
        return scores.masked_fill(~is_free, -torch.inf).index_copy_(1, self.tokens.ids, possible)

    def permitted(self, input_ids: Tensor) -> Tensor:
        """Return whether each token of trees (R, C) may follow `input_ids` (R, T)."""
        tokens, (rows, length) = self.tokens, input_ids.shape
        words, lengths = (each.repeat_interleave(rows // len(each)) for each in (self.words, self.lengths))  # (R,)
        steps = tokens.steps[input_ids]  # (R, T)
        depths = steps.cumsum(1)
        depth = depths[:, -1]
        words_left = words - tokens.places[input_ids].sum(1)
        spare = lengths - length - words_left - depth - 1  # tokens more than words, open constituents and the end need
        # The last label that reached the present depth is that of the innermost open constituent.
        is_reaching = (steps > 0) & (depths == depth[:, None])
        innermost = (is_reaching * torch.arange(length, device=input_ids.device)).amax(1, keepdim=True)
        closing = tokens.closing[input_ids.gather(1, innermost)]  # (R, 1)
        can_close = (depth > 0) & (steps[:, -1] <= 0)
        can_open, is_over = (words_left > 0) & (spare >= 2), (words_left <= 0) & (depth <= 0)
        kinds = torch.stack((can_open, words_left > 0, torch.zeros_like(can_close), is_over), dim=1)  # (R, 4)
        return kinds[:, tokens.kinds] | ((tokens.ids == closing) & can_close[:, None])


def tree_constraint(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Constraint | None:
    """Return what makes the processor of a batch of sentences, whose words spaces separate.

    None for a model that predicts all tokens at once, and where labels and places are no added tokens of the
    vocabulary: its output is free, and `delinearize` repairs it.
    """
    vocab_size = max(len(tokenizer), model.config.get_text_config(decoder=True).vocab_size)
    tokens = None if is_non_autoregressive(model) else TreeTokens.of(tokenizer, vocab_size)
    if tokens is None:
        return None
    return lambda texts, limits: WellFormedTrees(tokens, [len(split_tokenized(text)) for text in texts], limits)
