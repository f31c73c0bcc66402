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

from .steps import Lengths


class Ragged(NamedTuple):
    """Concatenated rows of different lengths.

    tokens: tokens of all rows.
    lengths: (B,), length of each row.
    """

    tokens: NDArray[np.integer]
    lengths: Lengths


class ArrowRows:
    """View of rows of token ids in an Arrow column.

    Args:
        column: a `pyarrow.ChunkedArray` of lists of integers.
        rows: indices of the rows, in order; None for all.
    """

    def __init__(self, column: Any, rows: NDArray[np.integer] | None = None) -> None:
        self.values = [chunk.values.to_numpy() for chunk in column.chunks]  # views
        offsets = [chunk.offsets.to_numpy().astype(np.int64) for chunk in column.chunks]
        nothing = [np.zeros(0, np.int64)]  # for a column without chunks
        chunks = np.repeat(np.arange(len(offsets)), [len(each) - 1 for each in offsets])
        starts = np.concatenate([each[:-1] for each in offsets] or nothing)
        lengths = np.concatenate([np.diff(each) for each in offsets] or nothing).astype(np.int32)
        chosen = slice(None) if rows is None else rows
        self.chunks, self.starts, self.lengths = chunks[chosen], starts[chosen], lengths[chosen]

    @classmethod
    def of(cls, dataset: Any, name: str) -> "ArrowRows":
        """Return a column of a data set of `datasets`, with its selected rows."""
        return cls(dataset.data.column(name), rows_of(dataset))

    def take(self, rows: Sequence[int]) -> Ragged:
        lengths = self.lengths[rows]
        places = zip(self.chunks[rows], self.starts[rows], lengths, strict=True)
        tokens = [self.values[chunk][start : start + length] for chunk, start, length in places]
        return Ragged(np.concatenate(tokens), lengths)


def rows_of(dataset: Any) -> NDArray[np.integer] | None:
    """Return the indices of a data set's rows in its Arrow table; None for all."""
    return None if dataset._indices is None else dataset._indices.column(0).to_numpy()


class PairTokens(Dataset[dict[str, Any]]):
    """Token ids of pairs in a data set of `datasets`, without a copy, for `PairCollator`.

    Args:
        dataset: data set with the columns `input_ids` and `labels`; columns of integers are also in the batches.

    Attributes:
        source_lengths, target_lengths: (n,), number of tokens of each pair.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.sides, rows = {name: ArrowRows.of(dataset, name) for name in ("input_ids", "labels")}, rows_of(dataset)
        numbers = [name for name in dataset.column_names if "int" in str(getattr(dataset.features[name], "dtype", ""))]
        columns = {name: dataset.data.column(name).to_numpy() for name in numbers}
        self.numbers = columns if rows is None else {name: column[rows] for name, column in columns.items()}
        self.source_lengths, self.target_lengths = (side.lengths for side in self.sides.values())

    def __reduce__(self) -> tuple[Any, ...]:
        return PairTokens, (self.dataset,)  # its pickle refers to files

    def __len__(self) -> int:
        return len(self.source_lengths)

    def __getitems__(self, rows: list[int]) -> dict[str, Any]:
        """Return a batch with both sides as `Ragged`, and integer columns as arrays (B,)."""
        sides = {name: side.take(rows) for name, side in self.sides.items()}
        return sides | {name: numbers[rows] for name, numbers in self.numbers.items()}


def pad(rows: Ragged, padding: int, side: str = "right") -> Tensor:
    """Return rows as an int64 tensor (B, L), with `padding` on the given side."""
    longest = int(rows.lengths.max(initial=0))
    padded = np.full((len(rows.lengths), longest), padding, dtype=np.int64)
    padded[is_token(rows.lengths, longest, side)] = rows.tokens
    return torch.from_numpy(padded)


def is_token(lengths: Lengths, longest: int, side: str) -> NDArray[np.bool_]:
    """Return a mask (B, L) of the tokens in padded rows."""
    places = np.arange(longest)
    return (places if side == "right" else places[::-1]) < lengths[:, None]


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
        self.padding, self.side = tokenizer.pad_token_id, tokenizer.padding_side
        self.label_pad_token_id = label_pad_token_id
        self.prepare = getattr(model, "prepare_decoder_input_ids_from_labels", None)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        """Return `input_ids`, `attention_mask`, `labels`, `decoder_input_ids` (B, L), and integer columns (B,)."""
        sources, labels = batch["input_ids"], pad(batch["labels"], self.label_pad_token_id, self.side)
        input_ids = pad(sources, self.padding, self.side)
        mask = torch.from_numpy(is_token(sources.lengths, input_ids.shape[1], self.side).astype(np.int64))
        numbers = {name: torch.as_tensor(value) for name, value in batch.items() if not isinstance(value, Ragged)}
        tensors = {"input_ids": input_ids, "attention_mask": mask, **numbers, "labels": labels}
        return tensors if self.prepare is None else tensors | {"decoder_input_ids": self.prepare(labels=labels)}
