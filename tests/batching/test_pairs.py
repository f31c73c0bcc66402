"""Batches from flat arrays against those that the stock collator makes of lists."""

import pickle
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pyarrow as pa
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DataCollatorForSeq2Seq

from tests.models import model_of_pairs, tiny_model
from vaswani_transformer import PairCollator, PairTokens
from vaswani_transformer.batching.pairs import ArrowRows

IDS = st.lists(st.integers(3, 60), max_size=9)
MODEL, TOKENIZER = tiny_model(), model_of_pairs()[1]


def of_lists(rows: list[tuple[list[int], list[int]]]) -> datasets.Dataset:
    sides = datasets.Features({name: datasets.List(datasets.Value("int32")) for name in ("input_ids", "labels")})
    columns = dict(zip(sides, map(list, zip(*rows, strict=True)), strict=True))
    return datasets.Dataset.from_dict(columns, sides).add_column("number", np.arange(1, len(rows) + 1))


def assert_same_batches(dataset: datasets.Dataset, pairs: PairTokens, batch: list[int]) -> None:
    side = TOKENIZER.padding_side
    try:
        for TOKENIZER.padding_side in ("right", "left"):
            expected = DataCollatorForSeq2Seq(TOKENIZER, MODEL)([dataset[index] for index in batch])
            collated = PairCollator(TOKENIZER, MODEL)(pairs.__getitems__(batch))
            assert collated.keys() == expected.keys()
            assert all(collated[name].dtype == expected[name].dtype for name in expected)
            assert all(torch.equal(collated[name], expected[name]) for name in expected)
    finally:
        TOKENIZER.padding_side = side


@given(st.lists(st.tuples(IDS, IDS), min_size=1, max_size=30), st.data())
def test_collator_makes_the_tensors_that_the_stock_collator_makes_of_lists(
    rows: list[tuple[list[int], list[int]]], data: st.DataObject
) -> None:
    """Also of a selection, and of a concatenation, whose chunks are far from each other."""
    one = of_lists(rows)
    kept = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1))
    for dataset in (one, one.select(kept), datasets.concatenate_datasets([one.select(kept), of_lists(rows)])):
        pairs = PairTokens(dataset)
        assert pairs.source_lengths.tolist() == [len(ids) for ids in dataset["input_ids"]]
        assert pairs.target_lengths.tolist() == [len(ids) for ids in dataset["labels"]]
        assert_same_batches(dataset, pairs, data.draw(st.lists(st.integers(0, len(dataset) - 1), min_size=1)))


def rows_of(column: pa.ChunkedArray) -> ArrowRows:
    table = pa.table({"ids": column})
    return ArrowRows(SimpleNamespace(data=table, _indices=None), "ids")


def test_sliced_chunk_has_its_own_rows() -> None:
    column = pa.chunked_array([pa.array([[1], [2, 3], []]).slice(1), pa.array([[4, 5]]), pa.array([[9], [6]])[1:]])
    rows = rows_of(column)
    assert rows.take([3, 0, 1, 2]).tokens.tolist() == [6, 2, 3, 4, 5]
    assert rows.lengths.tolist() == [2, 0, 2, 1]


def test_pairs_in_files_stay_mapped_and_go_to_another_process_by_name(tmp_path: Path) -> None:
    rows = [([number % 50 + 3] * (number % 7 + 1), [5] * (number % 5 + 1)) for number in range(2500)]
    of_lists(rows).save_to_disk(tmp_path, num_shards=3)
    dataset = datasets.Dataset.load_from_disk(tmp_path)
    assert len(dataset.cache_files) == 3
    batch = [2499, 0, 1200, 900, 1700]
    assert_same_batches(dataset, PairTokens(dataset), batch)
    pickled = pickle.dumps(PairTokens(dataset))
    assert len(pickled) < 5000
    assert_same_batches(dataset, pickle.loads(pickled), batch)
