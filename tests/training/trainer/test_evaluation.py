"""The steps of an evaluation that the Trainer's loop lacks."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers import LargestTensor
from training.trainer.evaluation import evaluation_batches, sentence_losses


def summed(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits.float().transpose(1, 2), labels, reduction="none").sum(1)


def test_sentence_losses_are_the_same_in_chunks_and_make_no_copy_of_all_logits() -> None:
    batch, length, vocab_size = 19, 7, 50
    logits = torch.randn(batch, length, vocab_size).bfloat16()
    labels = torch.randint(vocab_size, (batch, length)).masked_fill(torch.rand(batch, length) < 0.3, -100)
    with LargestTensor() as largest:
        losses = sentence_losses(logits, labels, rows=8)
    assert largest.numel == 8 * length * vocab_size
    torch.testing.assert_close(losses, summed(logits, labels), rtol=0, atol=0)


SIDES = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=40)


@given(SIDES, st.integers(1, 8), st.integers(1, 100))
def test_evaluation_batches_hold_each_pair_once_and_few_long_ones(
    pairs: list[tuple[int, int]], size: int, tokens: int
) -> None:
    sources, targets = (list(side) for side in zip(*pairs, strict=True))
    batches = evaluation_batches(sources, targets, size, tokens)
    assert sorted(pair for batch in batches for pair in batch) == list(range(len(pairs)))
    order = [sources[pair] for batch in batches for pair in batch]
    assert order == sorted(order, reverse=True)
    for batch in batches:
        assert len(batch) <= size
        assert len(batch) == 1 or len(batch) * max(max(pairs[pair]) for pair in batch) <= tokens


def test_evaluation_batches_of_pairs_within_the_limit_are_full() -> None:
    assert evaluation_batches([3, 9, 5, 5, 8], [1, 1, 10, 2, 9], size=2, tokens=20) == [[1, 4], [2, 3], [0]]
    assert evaluation_batches([3, 9, 5, 5, 8], [1, 1, 11, 2, 9], size=2, tokens=20) == [[1, 4], [2], [3, 0]]
