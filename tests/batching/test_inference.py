"""Batches of texts for a model in evaluation mode."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from vaswani_transformer.batching.inference import batches_by_length

lengths_of_texts = st.lists(st.integers(1, 60), max_size=40)


@given(lengths=lengths_of_texts, budget=st.integers(1, 300))
def test_batch_keeps_to_its_budget_and_every_text_is_in_one(lengths: list[int], budget: int) -> None:
    batches = batches_by_length(lengths, budget)
    assert sorted(itertools.chain(*batches)) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(16, *(lengths[index] for index in batch)) <= budget
    ordered = [lengths[index] for batch in batches for index in batch]
    assert ordered == sorted(lengths, reverse=True)
