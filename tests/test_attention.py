"""Attention equals a loop over equation (1) in every implementation, and masks decide which positions it attends to."""

from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.backends import cuda
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.attention import FlashKernels, additive, multi_head
from tests.batches import FLOAT32, assert_equal_at_tokens, masked_batch, padded_batch, random_tokens, source_batch
from tests.models import tiny_config, tiny_model
from vaswani_transformer.attention import (
    CrossAttention,
    SelfAttention,
    padding_mask,
    scaled_dot_product_attention,
    without_cudnn,
)

IMPLEMENTATIONS = ["eager", "sdpa"]
MODELS = {name: tiny_model(attn_implementation=name).requires_grad_(False) for name in IMPLEMENTATIONS}


@given(st.integers(1, 6), st.data())
def test_prediction_depends_only_on_the_past(position: int, data: st.DataObject) -> None:
    implementation = data.draw(st.sampled_from(IMPLEMENTATIONS))
    model = MODELS[implementation]
    batch = {"input_ids": torch.tensor([[5, 6, 7]]), "decoder_input_ids": torch.arange(8, 15)[None]}
    later = data.draw(st.lists(st.integers(0, 98), min_size=7 - position, max_size=7 - position))
    changed = batch["decoder_input_ids"].clone()
    changed[0, position:] = torch.tensor(later)
    before = model(**batch).logits[:, :position]
    after = model(**batch | {"decoder_input_ids": changed}).logits[:, :position]
    torch.testing.assert_close(after, before, **FLOAT32)


def test_source_positions_attend_to_all_source_positions() -> None:
    encoder = tiny_model().get_encoder()
    tokens = random_tokens(1, 6)
    states = encoder(tokens).last_hidden_state
    for position in range(6):
        changed = tokens.clone()
        changed[0, position] = 3
        moved = (encoder(changed).last_hidden_state - states).abs().amax(-1)
        assert (moved > 1e-4).all()


@settings(max_examples=25)
@given(
    heads=st.integers(1, 4),
    d_k=st.integers(1, 9),
    d_v=st.integers(1, 9),
    lengths=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    bias=st.booleans(),
    implementation=st.sampled_from(IMPLEMENTATIONS),
    seed=st.integers(0, 2**32),
)
def test_attention_equals_a_loop_over_equation_1(
    heads: int, d_k: int, d_v: int, lengths: tuple[int, int], bias: bool, implementation: str, seed: int
) -> None:
    torch.manual_seed(seed)
    config = tiny_config(num_heads=heads, d_k=d_k, d_v=d_v, attention_bias=bias, attn_implementation=implementation)
    attention = CrossAttention(config, layer_idx=0).eval()
    states, memory = torch.randn(1, lengths[0], 32), torch.randn(1, lengths[1], 32)
    visible = torch.rand(lengths) < 0.6
    visible[:, 0] = True  # every query attends to something
    attended, _ = attention(states, memory, additive(visible)[None, None])
    expected = multi_head(attention, states[0], memory[0], visible)
    np.testing.assert_allclose(attended[0].detach().numpy(), expected, **FLOAT32)


def test_self_attention_equals_a_loop_over_its_states() -> None:
    attention = SelfAttention(tiny_config(d_v=5, attn_implementation="eager"), layer_idx=0).eval()
    states, visible = torch.randn(1, 5, 32), torch.ones(5, 5).tril().bool()
    attended, weights = attention(states, additive(visible)[None, None])
    np.testing.assert_allclose(
        attended[0].detach().numpy(), multi_head(attention, states[0], states[0], visible), **FLOAT32
    )
    assert weights.shape == (1, 4, 5, 5)
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 4, 5))
    assert (weights.triu(1) == 0).all()


@pytest.mark.parametrize("bias", [False, True])
def test_projections_have_biases_only_on_request(bias: bool) -> None:
    names = [
        name for name, _ in SelfAttention(tiny_config(attention_bias=bias), 0).named_parameters() if "bias" in name
    ]
    assert names == (["q_proj.bias", "k_proj.bias", "v_proj.bias", "o_proj.bias"] if bias else [])


def test_attention_weights_are_dropped_only_in_training() -> None:
    attention = SelfAttention(tiny_config(attention_dropout=0.5, attn_implementation="eager"), layer_idx=0)
    states = torch.randn(1, 5, 32)
    assert (attention.train()(states)[1] == 0).any()
    assert not torch.equal(attention.train()(states)[0], attention(states)[0])
    assert torch.equal(attention.eval()(states)[0], attention(states)[0])


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize(("d_k", "d_v"), [(None, None), (4, 12), (12, 4)])
def test_sdpa_equals_eager(is_padded: bool, d_k: int | None, d_v: int | None) -> None:
    batch = masked_batch([7, 4, 1], [5, 2, 3])
    mask = batch["decoder_attention_mask"] if is_padded else torch.ones(3, 5)
    if not is_padded:
        del batch["attention_mask"], batch["decoder_attention_mask"]
    eager, sdpa = (tiny_model(d_k=d_k, d_v=d_v, attn_implementation=name) for name in IMPLEMENTATIONS)
    assert_equal_at_tokens(sdpa(**batch).logits, eager(**batch).logits, mask)


def test_beams_take_no_sums_of_flex_attention_for_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an accelerator flex attention returns the logarithms of its sums (B, H, Q) where others return weights."""

    def with_sums(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        attended, weights = scaled_dot_product_attention(module, query, key, value, *args, **kwargs)
        return attended, weights.sum(-1).log()

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "attention_with_sums", with_sums)
    attention = CrossAttention(tiny_config(attn_implementation="eager"), layer_idx=0).eval()
    states, memory = torch.randn(4, 1, 32), torch.randn(2, 5, 32)
    expected, _ = attention(states, memory)
    attention.config._attn_implementation_internal = "attention_with_sums"
    attended, weights = attention(states, memory)
    assert torch.equal(attended, expected)
    assert weights is None


@pytest.mark.parametrize("targets", [[8, 8], [1, 1], [4, 2]], ids=str)
@pytest.mark.parametrize("sources", [[5, 5], [5, 2]], ids=str)
@pytest.mark.parametrize("d_v", [None, 4, 12])
def test_flash_attention_equals_eager(
    monkeypatch: pytest.MonkeyPatch, d_v: int | None, sources: list[int], targets: list[int]
) -> None:
    """With and without padding, for targets shorter and longer than the source; the kernels need d_v = d_k, here 8."""
    FlashKernels.install(monkeypatch)
    model, batch = tiny_model(d_v=d_v, attn_implementation="eager"), masked_batch(sources, targets)
    expected = model(**batch).logits
    model.config._attn_implementation_internal = "flash_attention_2"
    assert_equal_at_tokens(model(**batch).logits, expected, batch["decoder_attention_mask"])


@settings(max_examples=20)
@given(
    rows=st.integers(1, 4),
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    target=st.integers(1, 4),
    side=st.sampled_from(["left", "right"]),
    implementation=st.sampled_from(IMPLEMENTATIONS),
)
def test_several_target_rows_per_source_equal_repeated_sources(
    rows: int, lengths: list[int], target: int, side: str, implementation: str
) -> None:
    model = MODELS[implementation]
    batch, targets = source_batch(lengths, side), random_tokens(rows * len(lengths), target)
    copies = {name: values.repeat_interleave(rows, 0) for name, values in batch.items()}
    shared, repeated = (
        model(**sources, decoder_input_ids=targets, output_attentions=True) for sources in (batch, copies)
    )
    torch.testing.assert_close(shared.logits, repeated.logits, **FLOAT32)
    if implementation == "eager":
        torch.testing.assert_close(shared.cross_attentions, repeated.cross_attentions, **FLOAT32)


def test_target_rows_that_are_no_multiple_of_the_sources_are_an_error() -> None:
    model = tiny_model()
    with pytest.raises(ValueError, match=r"rows do not match the source; got 5 for 2 .*same number"):
        model(input_ids=random_tokens(2, 3), decoder_input_ids=random_tokens(5, 3))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_source_of_only_padding_gives_finite_numbers(implementation: str) -> None:
    model = MODELS[implementation]
    source, mask = random_tokens(2, 4), torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]])
    assert model(input_ids=source, attention_mask=mask, decoder_input_ids=random_tokens(2, 3)).logits.isfinite().all()


def test_mask_on_an_accelerator_is_made_without_a_look_at_its_numbers() -> None:
    """The device "meta" stands for one: its tensors have no numbers."""
    (_, mask), config = padded_batch([4, 2]), tiny_config(attn_implementation="sdpa")
    queries, memory = torch.zeros(2, 3, 32), torch.zeros(2, 4, 32)
    masks = (padding_mask(config, queries.to(device), mask.to(device), memory.to(device)) for device in ("cpu", "meta"))
    on_cpu, on_accelerator = (cast(Tensor, each) for each in masks)
    assert on_accelerator.dtype == on_cpu.dtype == torch.bool
    assert on_accelerator.shape == on_cpu.expand(2, 1, 3, 4).shape


def test_cudnn_makes_no_plans_for_sdpa_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, seen = torch.device("cuda"), []

    def attend(*args: Any, **kwargs: Any) -> Any:
        seen.append(cuda.cudnn_sdp_enabled())
        return sdpa(*args, **kwargs)

    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", attend)
    inputs = {"input_ids": random_tokens(2, 3), "decoder_input_ids": random_tokens(2, 3)}
    MODELS["sdpa"](**inputs)
    monkeypatch.setattr("vaswani_transformer.attention.without_cudnn", lambda device: without_cudnn(gpu))
    MODELS["sdpa"](**inputs)
    assert seen == [True] * 6 + [False] * 6
    with pytest.raises(KeyError), without_cudnn(gpu):
        raise KeyError
    assert cuda.cudnn_sdp_enabled()
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), without_cudnn(gpu):
        assert cuda.cudnn_sdp_enabled()
