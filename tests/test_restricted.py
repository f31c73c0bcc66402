"""Restricted self-attention equals a loop over neighborhoods, in every implementation, in training and in decoding."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.attention import FlashKernels, multi_head
from tests.batches import FLOAT32, assert_equal_at_tokens, masked_batch, padded_batch, random_tokens, source_batch
from tests.models import LargestTensor, random_model, tiny_config, tiny_model
from vaswani_transformer import prepare_for_inference
from vaswani_transformer.layers import CausalSelfAttention, SelfAttention
from vaswani_transformer.restricted import MIN_BLOCK, window_mask

LONG = 4 * MIN_BLOCK  # from here on sdpa computes blocks
REACH = 3
MODELS = {
    name: tiny_model(attention_window=REACH, attn_implementation=name).requires_grad_(False)
    for name in ("eager", "sdpa")
}
EXACT = copy.deepcopy(MODELS["sdpa"]).double()  # rounding decides between no tokens of its searches


def windowed(attention: SelfAttention, states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    mask = window_mask(attention.config, states, attention_mask, is_causal=attention.is_causal)
    return attention(states, mask)[0]


@settings(max_examples=20, deadline=None)
@given(
    reach=st.sampled_from([1, 2, 5, 33, 50]),
    length=st.one_of(st.integers(1, 12), st.integers(LONG - 2, LONG + 40)),
    widths=st.sampled_from([(None, None), (5, 9)]),
    kind=st.sampled_from([SelfAttention, CausalSelfAttention]),
    implementation=st.sampled_from(["eager", "sdpa"]),
    seed=st.integers(0, 2**32),
)
def test_window_equals_a_loop_over_neighborhoods(
    reach: int,
    length: int,
    widths: tuple[int | None, int | None],
    kind: type[SelfAttention],
    implementation: str,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    config = tiny_config(
        num_heads=2, d_k=widths[0], d_v=widths[1], attention_window=reach, attn_implementation=implementation
    )
    attention, states = kind(config, layer_idx=0).eval(), torch.randn(1, length, 32)
    distance = torch.arange(length) - torch.arange(length)[:, None]
    near = (distance >= -reach) & (distance <= (0 if attention.is_causal else reach))
    expected = multi_head(attention, states[0], states[0], near)
    np.testing.assert_allclose(windowed(attention, states)[0].detach().numpy(), expected, **FLOAT32)


@pytest.mark.parametrize("kind", [SelfAttention, CausalSelfAttention])
def test_blocks_have_the_gradients_of_one_product(kind: type[SelfAttention]) -> None:
    torch.manual_seed(0)
    states, gradient = torch.randn(2, LONG + 5, 32, requires_grad=True), torch.randn(2, LONG + 5, 32)
    mask = torch.ones(2, LONG + 5, dtype=torch.long)
    mask[1, 70:] = 0
    gradient = gradient * mask[:, :, None]
    gradients = []
    for implementation in ("eager", "sdpa"):
        torch.manual_seed(1)
        attention = kind(tiny_config(attention_window=REACH, attn_implementation=implementation), layer_idx=0)
        inputs = [states, *attention.parameters()]
        gradients.append(torch.autograd.grad(windowed(attention, states, mask), inputs, gradient))
    torch.testing.assert_close(*gradients, **FLOAT32)


def test_blocks_never_hold_a_number_for_each_pair_of_tokens() -> None:
    model, tokens = MODELS["sdpa"], random_tokens(1, 1024)
    with LargestTensor() as largest:
        model(input_ids=tokens, decoder_input_ids=random_tokens(1, 2))
    assert largest.numel < 1024**2 / 4
    with LargestTensor() as largest:
        model.model.decoder(input_ids=tokens, use_cache=False)
    assert largest.numel < 1024**2 / 4


@pytest.mark.parametrize("implementation", MODELS)
@pytest.mark.parametrize("length", [9, LONG])
def test_window_decides_what_a_position_depends_on(implementation: str, length: int) -> None:
    """Explicit `position_ids` do not change it: here they are the same number everywhere."""
    config = {"encoder_layers": 1, "decoder_layers": 1, "attention_window": REACH}
    model = tiny_model(**config, attn_implementation=implementation).requires_grad_(False)
    tokens, position = random_tokens(1, length), length // 2
    changed, same = tokens.clone(), torch.zeros(1, length, dtype=torch.long)
    changed[0, position] = 3
    for stack, first in ((model.model.encoder, -REACH), (model.model.decoder, 0)):
        states = [stack(ids, position_ids=same).last_hidden_state[0] for ids in (tokens, changed)]
        moved = (states[0] - states[1]).abs().amax(-1) > 1e-5
        assert moved.nonzero().flatten().tolist() == list(range(position + first, position + REACH + 1))


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_padding_on_either_side_changes_nothing(data: st.DataObject) -> None:
    """Padding is on either side of short and long texts, or on both."""
    model = MODELS[data.draw(st.sampled_from(["eager", "sdpa"]))]
    count = data.draw(st.sampled_from([1, 6, LONG - 5]))
    length = count + data.draw(st.integers(0, 40))
    first = data.draw(st.integers(0, length - count))
    columns = list(range(first, first + count))
    tokens = random_tokens(1, count)
    padded, mask = torch.full((1, length), 1), torch.zeros(1, length, dtype=torch.long)
    padded[0, columns], mask[0, columns] = tokens[0], 1
    single = model(input_ids=tokens, decoder_input_ids=tokens).logits
    padded_logits = model(
        input_ids=padded, attention_mask=mask, decoder_input_ids=padded, decoder_attention_mask=mask
    ).logits[:, columns]
    torch.testing.assert_close(padded_logits, single, **FLOAT32)


@pytest.mark.parametrize("implementation", MODELS)
def test_packed_texts_get_the_window_in_addition_to_their_mask(implementation: str) -> None:
    """A caller's mask (B, 1, Q, K) separates two packed texts; each has the states that it has by itself."""
    model, lengths = MODELS[implementation], [6, 9]
    first, second = (random_tokens(1, length) for length in lengths)
    text = torch.tensor([0] * 6 + [1] * 9)
    same_text = (text[:, None] == text)[None, None]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    mask = same_text if implementation == "sdpa" else torch.zeros(same_text.shape).masked_fill(~same_text, -1e30)
    states = model.model.encoder(torch.cat((first, second), 1), attention_mask=mask, position_ids=positions)
    single = [model.model.encoder(tokens).last_hidden_state for tokens in (first, second)]
    torch.testing.assert_close(states.last_hidden_state, torch.cat(single, 1), **FLOAT32)


@pytest.mark.parametrize("implementation", MODELS)
@pytest.mark.parametrize("chunks", [[1] * 9, [4, 1, 1, 3]], ids=str)
def test_cache_of_r_keys_gives_the_logits_of_the_whole_target(implementation: str, chunks: list[int]) -> None:
    model, source, target = MODELS[implementation], random_tokens(2, 5), random_tokens(2, 9)
    complete = model(input_ids=source, decoder_input_ids=target).logits
    encoded, steps = model.get_encoder()(source), []
    cache: Any = None
    for chunk in target.split(chunks, dim=1):
        step = model(encoder_outputs=encoded, decoder_input_ids=chunk, past_key_values=cache, use_cache=True)
        cache = step.past_key_values
        steps.append(step.logits)
    torch.testing.assert_close(torch.cat(steps, 1), complete, **FLOAT32)
    for self_layer, source_layer in zip(
        cache.self_attention_cache.layers, cache.cross_attention_cache.layers, strict=True
    ):
        assert self_layer.keys.shape[2] == self_layer.values.shape[2] == REACH
        assert source_layer.keys.shape[2] == 5


@pytest.mark.parametrize("search", [{}, {"num_beams": 4, "length_penalty_type": "gnmt"}], ids=str)
@pytest.mark.parametrize("has_prompt", [False, True])
def test_generation_with_and_without_a_cache_is_the_same(search: dict[str, Any], has_prompt: bool) -> None:
    batch = source_batch([7, 3], max_new_tokens=12, min_new_tokens=9)
    if has_prompt:
        target, target_mask = padded_batch([5, 2], "left")
        batch |= {"decoder_input_ids": target, "decoder_attention_mask": target_mask}
    expected, generated = (EXACT.generate(**batch, **search, use_cache=cached) for cached in (False, True))
    assert torch.equal(generated, expected)


def test_other_ways_of_decoding_give_the_same_tokens() -> None:
    source = random_tokens(1, 7)
    options: dict[str, Any] = {"max_new_tokens": 12, "min_new_tokens": 12}
    expected = EXACT.generate(source, **options)
    ways = [
        {"cache_implementation": "static", "disable_compile": True},
        {"prompt_lookup_num_tokens": 2},
        {"assistant_model": copy.deepcopy(MODELS["eager"]).double()},
        {"past_key_values": EncoderDecoderCache(DynamicCache(), DynamicCache())},
    ]
    for way in ways:
        assert torch.equal(EXACT.generate(source, **options, **way), expected), way


@pytest.mark.parametrize("beams", [1, 4])
def test_prepared_model_decodes_to_the_same_scores(beams: int) -> None:
    model = random_model(attention_window=REACH)
    call = source_batch([LONG, 9], num_beams=beams, max_new_tokens=8, min_new_tokens=8)
    call |= {"return_dict_in_generate": True, "output_logits": True}
    expected, generated = (each.generate(**call) for each in (model, prepare_for_inference(model)))
    torch.testing.assert_close(generated.logits, expected.logits, **FLOAT32)


@pytest.mark.parametrize("targets", [[3, 3], [9, 4]], ids=str)
def test_flash_attention_gets_the_window(monkeypatch: pytest.MonkeyPatch, targets: list[int]) -> None:
    FlashKernels.install(monkeypatch)
    model = tiny_model(attention_window=REACH).requires_grad_(False)
    model.config._attn_implementation_internal = "flash_attention_2"
    batch = masked_batch([11, 6], targets)
    assert_equal_at_tokens(model(**batch).logits, MODELS["eager"](**batch).logits, batch["decoder_attention_mask"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [SelfAttention, CausalSelfAttention])
def test_flex_attention_equals_eager_and_leaves_blocks_out(kind: type[SelfAttention]) -> None:
    widths = {"d_k": 16, "d_v": 32}  # it needs powers of two from 16
    states = torch.randn(2, 600, 32)
    mask = torch.ones(2, 600, dtype=torch.long)
    mask[1, 590:] = 0
    attended = []
    for implementation in ("flex_attention", "eager"):
        torch.manual_seed(1)
        config = tiny_config(**widths, attention_window=REACH, attn_implementation=implementation)
        attention = kind(config, layer_idx=0).eval().requires_grad_(False)
        attended.append(windowed(attention, states, mask))
    assert_equal_at_tokens(*attended, mask)
    config = tiny_config(attention_window=REACH, attn_implementation="flex_attention")
    block_mask: Any = window_mask(config, states, mask, is_causal=kind is CausalSelfAttention)
    assert block_mask.sparsity() > 40  # of 5 x 5 blocks the diagonal and its neighbors, at most 13, are computed


def test_attention_that_takes_no_window_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "of_the_test", lambda *_: None)
    model = tiny_model(attention_window=REACH)
    model.config._attn_implementation_internal = "of_the_test"
    with pytest.raises(ValueError, match="attention_window: cannot be applied; got the attention implementation"):
        model(input_ids=random_tokens(1, 3), decoder_input_ids=random_tokens(1, 3))


def test_dropout_of_weights_reaches_blocks() -> None:
    config = tiny_config(attention_window=REACH, attention_dropout=0.5, attn_implementation="sdpa")
    attention, states = SelfAttention(config, layer_idx=0), torch.randn(1, LONG, 32)
    assert not torch.equal(windowed(attention.train(), states), windowed(attention, states))
    assert torch.equal(windowed(attention.eval(), states), windowed(attention, states))
