"""Token ids of pairs as flat arrays in Arrow's memory, and their collation into batches.

n pairs, B batch, L the longest row of a batch.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from .sampler import Lengths


class Ragged(NamedTuple):
    """Concatenated rows of different lengths.

    tokens: tokens of all rows.
    lengths: (B,), length of each row.
    """

    tokens: NDArray[np.integer]
    lengths: Lengths


class ArrowRows:
    """View of the rows of token ids in a column of a data set of `datasets`, without a copy."""

    def __init__(self, dataset: Any, name: str) -> None:
        # A column consists of chunks, which have the tokens of many rows in a line and the offset of each row.
        column = dataset.data.column(name)
        self.values = [chunk.values.to_numpy() for chunk in column.chunks]  # views
        offsets = [chunk.offsets.to_numpy().astype(np.int64) for chunk in column.chunks]
        empty = np.zeros(0, np.int64)  # for a column without chunks
        chunks = np.repeat(np.arange(len(offsets)), [len(chunk) - 1 for chunk in offsets])
        starts = np.concatenate([empty, *(chunk[:-1] for chunk in offsets)])
        lengths = np.concatenate([empty, *(np.diff(chunk) for chunk in offsets)]).astype(np.int32)

        # A shuffled or filtered data set is its complete table with the indices of its rows.
        self.rows: Any = slice(None) if dataset._indices is None else dataset._indices.column(0).to_numpy()
        self.chunks = chunks[self.rows]
        self.starts = starts[self.rows]
        self.lengths = lengths[self.rows]

    def take(self, rows: Sequence[int]) -> Ragged:
        chunks = self.chunks[rows].tolist()
        starts = self.starts[rows]
        lengths = self.lengths[rows]
        ends = starts + lengths
        pieces = [
            self.values[chunk][start:end]
            for chunk, start, end in zip(chunks, starts.tolist(), ends.tolist(), strict=True)
        ]
        return Ragged(np.concatenate(pieces), lengths)


class PairTokens(Dataset[dict[str, Any]]):
    """Token ids of pairs in a data set of `datasets`, without a copy, for `PairCollator`.

    Args:
        dataset: data set with the columns `input_ids` and `labels`; columns of integers are also in the batches.

    Attributes:
        source_lengths, target_lengths: (n,), number of tokens of each pair.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.sides = {name: ArrowRows(dataset, name) for name in ("input_ids", "labels")}
        rows = self.sides["labels"].rows
        self.numbers = {}
        for name in dataset.column_names:
            dtype = getattr(dataset.features[name], "dtype", "")
            if "int" in str(dtype):
                self.numbers[name] = dataset.data.column(name).to_numpy()[rows]
        self.source_lengths = self.sides["input_ids"].lengths
        self.target_lengths = self.sides["labels"].lengths

    def __reduce__(self) -> tuple[Any, ...]:
        return PairTokens, (self.dataset,)  # its pickle refers to files

    def __len__(self) -> int:
        return len(self.source_lengths)

    def __getitems__(self, rows: list[int]) -> dict[str, Any]:
        """Return a batch with both sides as `Ragged`, and integer columns as arrays (B,)."""
        batch: dict[str, Any] = {name: side.take(rows) for name, side in self.sides.items()}
        for name, numbers in self.numbers.items():
            batch[name] = numbers[rows]
        return batch


def pad(rows: Ragged, padding: int, side: str = "right") -> tuple[Tensor, Tensor]:
    """Return rows as an int64 tensor (B, L), with `padding` on the given side, and the mask (B, L) of their tokens."""
    positions = np.arange(int(rows.lengths.max(initial=0)))
    if side == "left":
        positions = positions[::-1]
    is_token = positions < rows.lengths[:, None]
    padded = np.full(is_token.shape, padding, dtype=np.int64)
    padded[is_token] = rows.tokens
    return torch.from_numpy(padded), torch.from_numpy(is_token.astype(np.int64))


class PairCollator:
    """Data collator for `PairTokens`, with the same results as `DataCollatorForSeq2Seq`.

    Args:
        tokenizer: tokenizer that determines the padding token and its side.
        model: model that prepares `decoder_input_ids`, if it can; None for none.
        label_pad_token_id: padding of labels.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, model: nn.Module | None = None, label_pad_token_id: int = -100
    ) -> None:
        self.padding = tokenizer.pad_token_id
        self.side = tokenizer.padding_side
        self.label_pad_token_id = label_pad_token_id
        self.prepare = getattr(model, "prepare_decoder_input_ids_from_labels", None)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        """Return `input_ids`, `attention_mask`, `labels`, `decoder_input_ids` (B, L), and integer columns (B,)."""
        input_ids, mask = pad(batch["input_ids"], self.padding, self.side)
        labels, _ = pad(batch["labels"], self.label_pad_token_id, self.side)
        tensors = {"input_ids": input_ids, "attention_mask": mask}
        for name, column in batch.items():
            if not isinstance(column, Ragged):
                tensors[name] = torch.as_tensor(column)
        tensors["labels"] = labels
        if self.prepare is not None:
            tensors["decoder_input_ids"] = self.prepare(labels=labels)
        return tensors
