"""Positions, attention and layers follow the paper's formulas, and layers equal torch's with the same weights."""

import math
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.backends import cuda
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.activations import ACT2FN
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.attention import FlashKernels, additive, multi_head
from tests.batches import (
    FLOAT32,
    assert_dropped,
    assert_equal_at_tokens,
    masked_batch,
    padded_batch,
    random_tokens,
    source_batch,
)
from tests.models import tiny_config, tiny_model
from vaswani_transformer.layers import (
    AddAndNorm,
    CrossAttention,
    Dropout,
    FeedForward,
    InputEmbedding,
    MultiHeadAttention,
    ScaledEmbedding,
    SelfAttention,
    SinusoidalPositions,
    VaswaniTransformerDecoderLayer,
    VaswaniTransformerEncoderLayer,
    count_positions,
    padding_mask,
    read_table,
    scaled_dot_product_attention,
    sinusoids,
    without_cudnn,
)


def positional_encoding(positions: np.ndarray, d_model: int) -> np.ndarray:
    """Section 3.5 written out in float64: PE(pos, 2i) = sin(pos / 10000^(2i/d_model)), PE(pos, 2i+1) the cosine."""
    encoding = np.zeros((len(positions), d_model))
    for i in range(d_model // 2):
        angles = positions.astype(np.float64) / 10000.0 ** (2 * i / d_model)
        encoding[:, 2 * i] = np.sin(angles)
        encoding[:, 2 * i + 1] = np.cos(angles)
    return encoding


@given(st.lists(st.lists(st.sampled_from([0, 1]), min_size=6, max_size=6), min_size=1, max_size=4))
def test_positions_count_only_tokens(rows: list[list[int]]) -> None:
    counted = count_positions(torch.tensor(rows)).tolist()
    for row, positions in zip(rows, counted, strict=True):
        assert [position for position, token in zip(positions, row, strict=True) if token] == list(range(sum(row)))
        assert min(positions) >= 0
        assert max(positions) < max(sum(row), 1)


@pytest.mark.parametrize("position_type", ["sinusoidal", "learned"])
def test_embeddings_and_positions_are_added_in_the_embeddings_dtype(position_type: str) -> None:
    embedding = InputEmbedding(tiny_config(position_embedding=position_type)).eval().to(torch.bfloat16)
    embeds = torch.randn(2, 300, 32)
    positions = torch.arange(300)[None]
    exact = embeds.to(torch.bfloat16).float() + embedding.positions(positions).float()
    added = embedding(embeds.to(torch.bfloat16), positions)
    assert added.dtype == torch.bfloat16
    # One rounding: bfloat16 keeps 8 bits, so half a unit in the last place is 2^-9 of the value.
    torch.testing.assert_close(added.float(), exact, rtol=2**-8, atol=1e-6)


def test_positions_are_exact_in_half_precision() -> None:
    positions = SinusoidalPositions(tiny_config()).to(torch.bfloat16)(torch.arange(1000)[None])
    assert positions.dtype == torch.float32
    np.testing.assert_allclose(positions[0].numpy(), positional_encoding(np.arange(1000), 32), atol=1e-4)


@pytest.mark.parametrize("d_model", [2, 32, 512, 1024])
def test_sinusoids_equal_the_formula_to_1e_4(d_model: int) -> None:
    """To position 1,000: float32 holds an angle of 1,000 to 6e-5."""
    positions = np.arange(1001)
    error = sinusoids(torch.from_numpy(positions), d_model).double().numpy() - positional_encoding(positions, d_model)
    assert abs(error).max() < 1e-4


def test_embeddings_are_scaled_by_the_root_of_d_model() -> None:
    tokens = random_tokens(2, 3)
    embedding = ScaledEmbedding(tiny_config())
    torch.testing.assert_close(embedding(tokens), embedding.weight[tokens] * math.sqrt(32))
    plain = ScaledEmbedding(tiny_config(scale_embedding=False))
    assert torch.equal(plain(tokens), plain.weight[tokens])


def test_table_may_be_no_parameter() -> None:
    """FSDP1 replaces parameters during a pass by views of one tensor for many."""
    embedding = ScaledEmbedding(tiny_config())
    table = embedding.weight.detach()
    del embedding.weight
    embedding.weight = table
    assert read_table(embedding, len(table), table.device, embedding.embed_scale) is table


def test_dropout_applies_to_the_sum_of_embedding_and_position() -> None:
    embedding = InputEmbedding(tiny_config(dropout=0.25)).train()
    embeds, positions = torch.full((1, 200, 32), 3.0), torch.arange(200)[None]
    assert_dropped(embedding(embeds, positions), embeds + sinusoids(positions, 32), 0.25)


@pytest.mark.parametrize("is_source", [True, False])
def test_text_longer_than_the_learned_positions_is_an_error(is_source: bool) -> None:
    model = tiny_model(position_embedding="learned", max_position_embeddings=8)
    lengths = (9, 4) if is_source else (4, 9)
    with pytest.raises(ValueError, match=r"9 tokens .* 8 learned positions; .*max_position_embeddings"):
        model(input_ids=random_tokens(2, lengths[0]), decoder_input_ids=random_tokens(2, lengths[1]))


def test_cached_step_beyond_the_learned_positions_is_an_error() -> None:
    decoder = tiny_model(position_embedding="learned", max_position_embeddings=4).get_decoder()
    cache = decoder(random_tokens(1, 4), use_cache=True).past_key_values
    with pytest.raises(ValueError, match=r"5 tokens .* 4 learned positions"):
        decoder(random_tokens(1, 1), past_key_values=cache)


probabilities = st.floats(0, 1, exclude_max=True, allow_nan=False)
shapes = st.lists(st.integers(0, 7), max_size=3)


@settings(deadline=None)
@given(probabilities, shapes, st.sampled_from([torch.float32, torch.float64, torch.bfloat16]), st.booleans())
def test_elements_and_gradients_are_dropped_or_scaled(
    p: float, shape: list[int], dtype: torch.dtype, is_transposed: bool
) -> None:
    """The scale is 1 / (1 - p), p rounded to 1/65536 and below 1; bfloat16 rounds the factor to 8 bits."""
    input = torch.ones(shape, dtype=dtype)
    input = (input.T.contiguous().T if is_transposed and len(shape) == 2 else input).requires_grad_()
    with torch.device("meta"):  # another default device changes nothing
        output = Dropout(p).train()(input)
    output.sum().backward()
    share = min(round(p * 65536), 65535) / 65536
    kept = output[output != 0]
    torch.testing.assert_close(kept, torch.full_like(kept, 1 / (1 - share)))
    assert input.grad is not None
    assert torch.equal(input.grad, output)
    assert output.shape == input.shape
    assert output.dtype == dtype


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5, 0.9])
def test_dropped_share_is_the_probability(p: float) -> None:
    """Of 2^20 elements within five standard deviations, so the mean of the output is that of the input."""
    torch.manual_seed(0)
    output = Dropout(p).train()(torch.ones(2**20))
    deviation = (p * (1 - p) / 2**20) ** 0.5
    assert abs(float((output == 0).double().mean()) - p) < 5 * deviation
    assert abs(float(output.double().mean()) - 1) < 5 * deviation / (1 - p)


def test_elements_of_one_draw_are_dropped_independently() -> None:
    """At p = 1/2 all 16 patterns of four neighbors are equally frequent: chi-squared of 15 degrees, 99.99% below 45."""
    torch.manual_seed(0)
    kept = Dropout(0.5).train()(torch.ones(2**16, 4)).ne(0)
    counts = (kept.long() @ torch.tensor([1, 2, 4, 8])).bincount(minlength=16)
    assert float(((counts - 2**12) ** 2 / 2**12).sum()) < 45


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
    monkeypatch.setattr("vaswani_transformer.layers.without_cudnn", lambda device: without_cudnn(gpu))
    MODELS["sdpa"](**inputs)
    assert seen == [True] * 6 + [False] * 6
    with pytest.raises(KeyError), without_cudnn(gpu):
        raise KeyError
    assert cuda.cudnn_sdp_enabled()
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), without_cudnn(gpu):
        assert cuda.cudnn_sdp_enabled()


TORCH: dict[str, Any] = {"d_model": 32, "nhead": 4, "dim_feedforward": 64, "layer_norm_eps": 1e-6, "batch_first": True}


def random_weights(module: nn.Module) -> None:
    """Set every parameter, norms and biases too, to random values."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)


def copy_attention(theirs: nn.MultiheadAttention, ours: MultiHeadAttention) -> None:
    theirs.in_proj_weight.copy_(torch.cat([ours.q_proj.weight, ours.k_proj.weight, ours.v_proj.weight]))
    theirs.out_proj.weight.copy_(ours.o_proj.weight)
    theirs.in_proj_bias.zero_()
    theirs.out_proj.bias.zero_()


@torch.no_grad()
def torch_layer(ours: VaswaniTransformerEncoderLayer | VaswaniTransformerDecoderLayer) -> Any:
    """Return torch's layer of the same stack with the same weights."""
    norms = [ours.self_attn_add_norm.norm, ours.feed_forward_add_norm.norm]
    theirs: Any
    if isinstance(ours, VaswaniTransformerDecoderLayer):
        theirs = nn.TransformerDecoderLayer(**TORCH, norm_first=False)
        copy_attention(theirs.multihead_attn, ours.cross_attn)
        norms.insert(1, ours.cross_attn_add_norm.norm)
    else:
        theirs = nn.TransformerEncoderLayer(**TORCH, norm_first=False)
    copy_attention(theirs.self_attn, ours.self_attn)
    theirs.linear1.load_state_dict(ours.feed_forward.fc1.state_dict())
    theirs.linear2.load_state_dict(ours.feed_forward.fc2.state_dict())
    for number, norm in enumerate(norms, start=1):
        getattr(theirs, f"norm{number}").load_state_dict(norm.state_dict())
    return theirs.eval()


def is_padding(lengths: list[int]) -> Tensor:
    """Return (B, longest), true after the end of each text: torch's key_padding_mask."""
    return torch.arange(max(lengths)) >= torch.tensor(lengths)[:, None]


lengths = st.lists(st.integers(1, 6), min_size=1, max_size=3)


@settings(max_examples=20)
@given(lengths)
def test_encoder_layer_equals_torch(lengths: list[int]) -> None:
    ours = VaswaniTransformerEncoderLayer(tiny_config(attn_implementation="eager"), 0).eval()
    random_weights(ours)
    theirs = torch_layer(ours)
    states, hidden = torch.randn(len(lengths), max(lengths), 32), is_padding(lengths)
    output = ours(states, additive(~hidden)[:, None, None])
    expected = theirs(states, src_key_padding_mask=hidden)
    torch.testing.assert_close(output[~hidden], expected[~hidden], **FLOAT32)


@settings(max_examples=20)
@given(st.data())
def test_decoder_layer_equals_torch(data: st.DataObject) -> None:
    sources = data.draw(lengths)
    targets = data.draw(st.lists(st.integers(1, 6), min_size=len(sources), max_size=len(sources)))
    ours = VaswaniTransformerDecoderLayer(tiny_config(attn_implementation="eager"), 0).eval()
    random_weights(ours)
    theirs = torch_layer(ours)
    memory, hidden_source = torch.randn(len(sources), max(sources), 32), is_padding(sources)
    states, hidden_target = torch.randn(len(targets), max(targets), 32), is_padding(targets)
    later = torch.ones(max(targets), max(targets), dtype=torch.bool).triu(1)
    output = ours(
        states,
        additive(~(later | hidden_target[:, None]))[:, None],
        encoder_hidden_states=memory,
        encoder_attention_mask=additive(~hidden_source)[:, None, None],
    )
    expected = theirs(
        states, memory, tgt_mask=later, tgt_key_padding_mask=hidden_target, memory_key_padding_mask=hidden_source
    )
    torch.testing.assert_close(output[~hidden_target], expected[~hidden_target], **FLOAT32)


def test_feed_forward_network_is_equation_2() -> None:
    feed_forward = FeedForward(tiny_config()).eval()
    random_weights(feed_forward)
    states = torch.randn(2, 3, 32)
    fc1, fc2 = feed_forward.fc1, feed_forward.fc2
    inner = torch.maximum(torch.zeros(()), states @ fc1.weight.T + fc1.bias)
    torch.testing.assert_close(feed_forward(states), inner @ fc2.weight.T + fc2.bias)


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
def test_activation_is_the_config_s(activation: str) -> None:
    feed_forward = FeedForward(tiny_config(activation_function=activation)).eval()
    states = torch.randn(2, 3, 32)
    expected = feed_forward.fc2(ACT2FN[activation](feed_forward.fc1(states)))
    assert torch.equal(feed_forward(states), expected)


def test_dropout_applies_to_the_sublayer_before_the_residual() -> None:
    """If dropout drops the complete sublayer, the norm of the residual remains (5.4)."""
    add_and_norm = AddAndNorm(tiny_config(dropout=0.5)).train()
    residual, output = torch.randn(1, 32), torch.full((1, 32), 1e6)
    normalized = add_and_norm(residual, output)
    dropped = add_and_norm.norm(residual + torch.where(normalized > 0, 2e6, 0.0))
    torch.testing.assert_close(normalized, dropped)


def test_norm_comes_last() -> None:
    """By hand: x + Sublayer(x) = (3, 1) + (1, -1) = (4, 0) has mean 2 and std 2, so its norm is (1, -1)."""
    config = tiny_config(d_model=2, num_heads=1)
    output = AddAndNorm(config).eval()(torch.tensor([[3.0, 1.0]]), torch.tensor([[1.0, -1.0]]))
    torch.testing.assert_close(output, torch.tensor([[1.0, -1.0]]))


def test_dropout_drops_nothing_of_the_residual() -> None:
    residual, add_and_norm = torch.randn(5, 32), AddAndNorm(tiny_config(dropout=0.5)).train()
    assert torch.equal(add_and_norm(residual, torch.zeros(5, 32)), add_and_norm.norm(residual))
