"""Lengths, soft copy, relative and positional attention: each against a list or a loop.

B batch, S source, T target.
"""

import math
from typing import Any

import pytest
import torch

from tests.helpers import TINY, padded_batch, random_tokens
from tests.nar_models import tiny_cmlm, tiny_nat
from vaswani_transformer import VaswaniNatConfig
from vaswani_transformer.attention import SelfAttention
from vaswani_transformer.cmlm_masks import sample_masks
from vaswani_transformer.lengths import (
    LengthDifference,
    canvas,
    check_right_padded,
    choose_positions,
    real_tokens,
    soft_copy,
)
from vaswani_transformer.nat_decoder import PositionalAttention, RelativeSelfAttention


@pytest.mark.parametrize("side", ["right", "left"])
def test_soft_copy_equals_a_list_at_every_pair_of_lengths(side: str) -> None:
    """Row i of a target is real row floor(i n / m), for all n, m up to 40."""
    lengths = torch.arange(1, 41)
    for n in range(1, 41):
        rows = torch.arange(40.0).view(1, 40, 1)
        first = 0 if side == "right" else 40 - n
        is_real = (torch.arange(40) >= first) & (torch.arange(40) < first + n)
        copied = soft_copy(rows, is_real[None], lengths, 40)  # (40, 40, 1)
        for m in range(1, 41):
            assert copied[m - 1, :m, 0].tolist() == [first + i * n // m for i in range(m)]


def test_soft_copy_of_several_targets_reads_its_own_source() -> None:
    memory = torch.randn(2, 5, 3)
    is_real = torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1]]).bool()
    lengths = torch.tensor([2, 4, 3, 7])
    actual = soft_copy(memory, is_real, lengths, 7)
    assert torch.equal(actual[:2], soft_copy(memory[:1], is_real[:1], lengths[:2], 7))
    assert torch.equal(actual[2:], soft_copy(memory[1:], is_real[1:], lengths[2:], 7))


def test_soft_copy_passes_the_gradient_to_the_memory() -> None:
    memory = torch.randn(1, 4, 2, requires_grad=True)
    soft_copy(memory, torch.ones(1, 4).bool(), torch.tensor([6]), 6).sum().backward()
    assert memory.grad is not None
    assert memory.grad[0, :, 0].tolist() == [2.0, 1.0, 2.0, 1.0]  # floor(i 4 / 6) = 0 0 1 2 2 3


def test_length_candidates_equal_lists() -> None:
    """max(1, n + class - 20) for all n up to 40 and all classes."""
    head = LengthDifference(4, -20, 20)
    for n in range(1, 41):
        actual = head.lengths(torch.arange(41)[None], torch.tensor([n]))
        assert actual.tolist() == [[max(1, n + label - 20) for label in range(41)]]
        classes = head.classes(torch.full((80,), n), torch.arange(1, 81))
        assert classes.tolist() == [min(20, max(-20, m - n)) + 20 for m in range(1, 81)]


def test_length_pools_real_rows_only() -> None:
    head, memory = LengthDifference(8, -3, 3), torch.randn(2, 5, 8)
    is_real = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]).bool()
    changed = memory.clone()
    changed[0, 3:] = 1e6
    assert torch.equal(head(memory, is_real), head(changed, is_real))


def test_length_token_predicts_no_empty_target() -> None:
    model = tiny_cmlm(max_target_length=5)
    source = model.read_source(model.encode(random_tokens(3, 4))[0], None)
    assert source.length_logits.shape == (3, 6)
    assert source.length_logits[:, 0].tolist() == [-math.inf] * 3
    assert model.length_classes(source, torch.tensor([0, 1, 5, 9])).tolist() == [1, 1, 5, 5]


def test_left_padded_target_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"^labels: .* row 1 .* Pad targets on the right\.$"):
        check_right_padded(torch.tensor([[1, 1, 0], [0, 1, 1]]).bool(), "labels")


def test_lengths_need_a_mask_of_tokens() -> None:
    with pytest.raises(ValueError, match=r"attention_mask: .* got shape \(2, 1, 5, 5\)"):
        real_tokens(torch.ones(2, 1, 5, 5), torch.randn(2, 5, 8))


def relative_attention(**settings: Any) -> RelativeSelfAttention:
    sizes: dict[str, Any] = {**TINY, "d_k": 6, "d_v": 10, **settings}
    config = VaswaniNatConfig(**sizes)
    module = RelativeSelfAttention(config, 0, clip=2).double().eval()
    for table in (module.relative_keys, module.relative_values):
        torch.nn.init.normal_(table.weight)
    return module


@pytest.mark.parametrize("form", ["none", "bool", "float"])
def test_relative_attention_equals_a_triple_loop(form: str) -> None:
    """Equations (3) and (4) of Shaw et al. 2018, term by term in float64."""
    module = relative_attention()
    states = torch.randn(2, 7, 32, dtype=torch.float64)
    allowed = torch.ones(2, 1, 7, 7).bool() if form == "none" else torch.rand(2, 1, 7, 7) < 0.7
    allowed |= torch.eye(7).bool()
    masks = {"none": None, "bool": allowed, "float": torch.zeros(2, 1, 7, 7).double().masked_fill(~allowed, -1e30)}
    query, key, value = module.project(states)
    expected = torch.zeros(2, 7, 4, 10, dtype=torch.float64)
    for batch in range(2):
        for head in range(4):
            for i in range(7):
                clipped = [min(2, max(-2, j - i)) + 2 for j in range(7)]
                keys = key[batch, head] + module.relative_keys.weight[clipped]
                scores = keys @ query[batch, head, i] / math.sqrt(6)
                weights = scores.masked_fill(~allowed[batch, 0, i], -math.inf).softmax(0)
                expected[batch, i, head] = weights @ (value[batch, head] + module.relative_values.weight[clipped])
    actual, weights = module.attend(query, key, value, masks[form])
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
    assert weights is not None
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 7).double())


def test_relative_attention_with_tables_of_zeros_is_self_attention() -> None:
    module = relative_attention()
    plain = SelfAttention(module.config, 0).double().eval()
    plain.load_state_dict({name: weight for name, weight in module.state_dict().items() if "relative" not in name})
    torch.nn.init.zeros_(module.relative_keys.weight)
    torch.nn.init.zeros_(module.relative_values.weight)
    states = torch.randn(2, 5, 32, dtype=torch.float64)
    torch.testing.assert_close(module(states)[0], plain(states)[0], rtol=1e-10, atol=1e-12)


def test_positional_weights_do_not_depend_on_the_words() -> None:
    config = VaswaniNatConfig(**TINY)
    config._attn_implementation = "eager"
    module, positions = PositionalAttention(config, 0).eval(), torch.randn(1, 5, 32)
    (first, weights), (second, other_weights) = (module(torch.randn(3, 5, 32), positions) for _ in range(2))
    assert not torch.equal(first, second)
    assert torch.equal(weights, other_weights)
    assert torch.equal(weights[0], weights[2])


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_diagonal_mask_leaves_a_single_token_its_own_key(implementation: str) -> None:
    decoder: Any = tiny_nat(attn_implementation=implementation).model.decoder
    states = torch.randn(3, 4, 32)
    keys = decoder.self_attention_mask(states, canvas(torch.tensor([1, 2, 4])), None)
    mask = decoder.without_diagonal(keys, states)
    allowed = mask if mask.dtype == torch.bool else mask == 0
    real = canvas(torch.tensor([1, 2, 4])).bool()
    expected = real[:, None, None] & ~torch.eye(4).bool()
    expected[0, 0, 0, 0] = True
    assert torch.equal(allowed.expand(3, 1, 4, 4), expected)
    single = decoder.without_diagonal(None, torch.randn(1, 1, 32))
    assert bool((single if single.dtype == torch.bool else single == 0).all())


def test_random_choice_has_its_size_and_stays_among_the_candidates() -> None:
    is_candidate = torch.rand(200, 9) < 0.6
    counts = torch.minimum(torch.randint(0, 9, (200,)), is_candidate.sum(1))
    chosen = choose_positions(is_candidate, counts)
    assert torch.equal(chosen.sum(1), counts)
    assert not bool((chosen & ~is_candidate).any())


def test_masks_are_uniform_in_number_and_in_position() -> None:
    """Chi-square of k on 1..6 and of the masked position where k = 1; 20.5 is the 99.9th percentile of 5 degrees."""
    masks = sample_masks(canvas(torch.full((12000,), 6), 8).bool(), torch.Generator().manual_seed(1))
    assert not bool(masks[:, 6:].any())
    sizes = masks.sum(1)
    counts = torch.bincount(sizes, minlength=7)[1:].double()
    assert float(((counts - 2000) ** 2 / 2000).sum()) < 20.5
    singles = masks[sizes == 1][:, :6].sum(0).double()
    assert float(((singles - singles.mean()) ** 2 / singles.mean()).sum()) < 20.5


def test_same_seed_draws_the_same_masks() -> None:
    is_real = canvas(torch.tensor([1, 3, 9])).bool()
    first, second = (sample_masks(is_real, torch.Generator().manual_seed(7)) for _ in range(2))
    assert torch.equal(first, second)
    assert first[0].tolist() == [True] + [False] * 8


@pytest.mark.parametrize("side", ["right", "left"])
def test_source_without_any_token_gives_finite_numbers(side: str) -> None:
    """A source without any token counts in full length, and gives finite numbers."""
    tokens, mask = padded_batch([3, 5], side)
    mask[0] = 0
    outputs = tiny_nat()(input_ids=tokens, attention_mask=mask, labels=random_tokens(2, 4))
    assert bool(outputs.logits.isfinite().all())
