"""Token ids of pairs as flat arrays in Arrow's memory, and batches cut from them without a Python object a token.

n pairs, B batch, L the longest row of a batch.
"""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from .steps import Lengths


class Ragged(NamedTuple):
    """Rows of different lengths, one after the other.

    tokens: of all rows.
    lengths: of each row (B,).
    """

    tokens: NDArray[np.integer]
    lengths: Lengths

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> "Ragged":
        lengths = np.fromiter(map(len, rows), np.int32, len(rows))
        return cls(np.fromiter(chain.from_iterable(rows), np.int32, int(lengths.sum())), lengths)

    @classmethod
    def join(cls, parts: Iterable["Ragged"]) -> "Ragged":
        tokens, lengths = zip(*parts, strict=True)
        return cls(np.concatenate(tokens), np.concatenate(lengths))

    def rows(self) -> "Rows":
        return Rows(self.tokens, np.cumsum(self.lengths, dtype=np.int64) - self.lengths, self.lengths)


class Rows:
    """Rows of token ids, each at any place of one array.

    values: the array.
    starts: where each row begins (n,).
    lengths: of each row (n,).
    """

    def __init__(self, values: NDArray[np.integer], starts: NDArray[np.int64], lengths: Lengths) -> None:
        self.values, self.starts, self.lengths = values, starts, lengths

    def take(self, rows: Sequence[int] | NDArray[np.integer] | slice) -> Ragged:
        starts, lengths = self.starts[rows], self.lengths[rows]
        before = np.cumsum(lengths) - lengths
        return Ragged(self.values[np.arange(lengths.sum()) + np.repeat(starts - before, lengths)], lengths)


class ArrowRows(Rows):
    """Rows of token ids in a column of Arrow's lists, which may be files mapped into memory.

    Args:
        column: a `pyarrow.ChunkedArray` of lists of integers.
        rows: which of its rows, and in which order; None: all.
    """

    def __init__(self, column: Any, rows: NDArray[np.integer] | None = None) -> None:
        dtype = np.dtype(column.type.value_type.to_pandas_dtype())
        self.chunks = column.chunks  # own the memory
        addresses = [address_of(chunk, dtype) for chunk in self.chunks]
        if len({address % dtype.itemsize for address in addresses if address}) > 1:  # of other allocators than Arrow's
            self.chunks = [column.combine_chunks()]
            addresses = [address_of(chunk, dtype) for chunk in self.chunks]
        base, lengths, starts = min(filter(None, addresses), default=0), [], []
        for chunk, address in zip(self.chunks, addresses, strict=True):
            offsets = chunk.offsets.to_numpy().astype(np.int64)
            lengths.append(np.diff(offsets).astype(np.int32))
            starts.append(offsets[:-1] + (address - base) // dtype.itemsize if address else 0 * offsets[:-1])
        all_lengths: Lengths = np.concatenate(lengths or [np.zeros(0, np.int32)])
        all_starts: NDArray[np.int64] = np.concatenate(starts or [np.zeros(0, np.int64)])
        if rows is not None:
            all_lengths, all_starts = all_lengths[rows], all_starts[rows]
        values = view_of(base, int((all_starts + all_lengths).max(initial=0)), dtype)
        super().__init__(values, all_starts, all_lengths)

    @classmethod
    def of(cls, dataset: Any, name: str) -> "ArrowRows":
        """Return a column of a data set of `datasets`, without the rows that it has dropped."""
        return cls(dataset.data.column(name), rows_of(dataset))


def address_of(chunk: Any, dtype: np.dtype) -> int:
    """Return where the integers of a chunk's lists begin; 0 if there are none."""
    data = chunk.values.buffers()[1]
    return 0 if data is None else data.address + chunk.values.offset * dtype.itemsize


def view_of(address: int, size: int, dtype: np.dtype) -> NDArray[np.integer]:
    """Return the memory from an address as an array, of which only elements inside Arrow's buffers may be read.

    A table's chunks are anywhere in memory or in mapped files; as one array, rows of many chunks are one operation.
    """
    if not size:
        return np.zeros(0, dtype)
    interface = {"version": 3, "shape": (size,), "typestr": dtype.str, "data": (address, True)}
    return np.asarray(type("View", (), {"__array_interface__": interface})())


def rows_of(dataset: Any) -> NDArray[np.integer] | None:
    """Return which rows of its table a data set of `datasets` has; None for all."""
    return None if dataset._indices is None else dataset._indices.column(0).to_numpy()


class PairTokens(Dataset[dict[str, Any]]):
    """The token ids of pairs in a data set of `datasets`, for `PairCollator`; they stay where the data set has them.

    Args:
        dataset: has the columns `input_ids` and `labels`, and may have columns of whole numbers, which batches get too.

    Attributes:
        source_lengths, target_lengths: the tokens of each pair (n,).
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.sides, rows = {name: ArrowRows.of(dataset, name) for name in ("input_ids", "labels")}, rows_of(dataset)
        numbers = [name for name in dataset.column_names if "int" in str(getattr(dataset.features[name], "dtype", ""))]
        columns = {name: dataset.data.column(name).to_numpy() for name in numbers}
        self.numbers = columns if rows is None else {name: column[rows] for name, column in columns.items()}
        self.source_lengths, self.target_lengths = (side.lengths for side in self.sides.values())

    def __reduce__(self) -> tuple[Any, ...]:
        return PairTokens, (self.dataset,)  # the addresses hold in this process only

    def __len__(self) -> int:
        return len(self.source_lengths)

    def __getitems__(self, rows: list[int]) -> dict[str, Any]:
        """Return the rows of a batch: both sides as `Ragged`, and the numbers as arrays (B,)."""
        sides = {name: side.take(rows) for name, side in self.sides.items()}
        return sides | {name: numbers[rows] for name, numbers in self.numbers.items()}


def pad(rows: Ragged, padding: int, side: str = "right") -> Tensor:
    """Return rows as a tensor (B, L) of int64, with `padding` on one side of the shorter ones."""
    longest = int(rows.lengths.max(initial=0))
    padded = np.full((len(rows.lengths), longest), padding, dtype=np.int64)
    padded[is_token(rows.lengths, longest, side)] = rows.tokens
    return torch.from_numpy(padded)


def is_token(lengths: Lengths, longest: int, side: str) -> NDArray[np.bool_]:
    """Return which positions of padded rows hold a token (B, L)."""
    places = np.arange(longest)
    return (places if side == "right" else places[::-1]) < lengths[:, None]


class PairCollator:
    """Padded tensors of a batch of `PairTokens`, the same that `DataCollatorForSeq2Seq` makes of lists.

    Args:
        tokenizer: names the padding and its side.
        model: prepares `decoder_input_ids` if it can; None: batches have none.
        label_pad_token_id: the padding of labels.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, model: nn.Module | None = None, label_pad_token_id: int = -100
    ) -> None:
        self.padding, self.side = tokenizer.pad_token_id, tokenizer.padding_side
        self.label_pad_token_id = label_pad_token_id
        self.prepare = getattr(model, "prepare_decoder_input_ids_from_labels", None)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        """Return `input_ids`, `attention_mask`, `labels` and `decoder_input_ids` (B, L), and the numbers (B,)."""
        sources, labels = batch["input_ids"], pad(batch["labels"], self.label_pad_token_id, self.side)
        input_ids = pad(sources, self.padding, self.side)
        mask = torch.from_numpy(is_token(sources.lengths, input_ids.shape[1], self.side).astype(np.int64))
        numbers = {name: torch.as_tensor(value) for name, value in batch.items() if not isinstance(value, Ragged)}
        tensors = {"input_ids": input_ids, "attention_mask": mask, **numbers, "labels": labels}
        return tensors if self.prepare is None else tensors | {"decoder_input_ids": self.prepare(labels=labels)}
