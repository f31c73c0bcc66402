"""The steps of an evaluation that the Trainer's loop lacks."""

import torch
from torch import Tensor

from tests.helpers import LargestTensor
from training.evaluation import sentence_losses


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
