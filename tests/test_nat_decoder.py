"""Relative and positional attention against loops, and the diagonal mask.

B batch, S source, T target.
"""

import math
from typing import Any

import pytest
import torch

from tests.helpers import TINY
from tests.nar_models import tiny_nat
from vaswani_transformer import VaswaniNatConfig
from vaswani_transformer.attention import SelfAttention
from vaswani_transformer.lengths import canvas
from vaswani_transformer.nat_decoder import PositionalAttention, RelativeSelfAttention


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
