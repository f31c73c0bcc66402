"""The fast path through a prepared encoder and decoder computes what its modules compute, also with its beam cache."""

import copy
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache

from tests.batches import FLOAT32, padded_batch, source_batch
from tests.cpu.packed import DTYPES, KINDS, decided_call
from tests.models import random_model
from vaswani_transformer import (
    VaswaniTransformerConfig,
    VaswaniTransformerForConditionalGeneration,
    VaswaniTransformerModel,
    prepare_for_inference,
)
from vaswani_transformer.cpu.decoder import BeamCache, CachedCrossAttention, DecoderStep, PreparedStepper
from vaswani_transformer.cpu.encoder import PreparedEncoder
from vaswani_transformer.layers import InputEmbedding, VaswaniTransformerDecoderLayer
from vaswani_transformer.stacks import CACHE, VaswaniTransformerDecoder

needs_float32 = pytest.mark.skipif("float32" not in DTYPES, reason="no packed layers in float32 here")


@pytest.mark.skipif("int8" not in DTYPES, reason="no packed layers in int8 here")
def test_weight_absorption_in_int8_uses_the_weights_that_its_layers_have() -> None:
    """Absorption does not round the inputs, so it is closer to the float32 result than the layers are."""
    model = random_model()
    attention: Any = prepare_for_inference(model, "int8").model.decoder.layers[1].cross_attn
    states, memory = torch.randn(3, 32), torch.randn(1, 8, 32)  # at most 32 columns of scores are absorbed
    cached = CachedCrossAttention(attention)
    with torch.no_grad():
        absorbed = cached.over(cached.source_key_values(memory), None, 3)(states) - states
    layers = attention(states[:, None], memory)[0][:, 0]
    original: Any = model.model.decoder.layers[1].cross_attn
    plain = original(states[:, None], memory)[0][:, 0].detach()
    assert (absorbed - plain).norm() < 1.1 * (layers - plain).norm()
    torch.testing.assert_close(absorbed, layers, rtol=0.0, atol=float(plain.abs().max()) / 20)


@needs_float32
@pytest.mark.parametrize("lengths", [[9], [4, 2]])
@pytest.mark.parametrize("prompt", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_decoder_step_has_the_logits_of_the_complete_decoder(kind: str, prompt: int, lengths: list[int]) -> None:
    """The steps take one token at a time, or the first three at once; weights are absorbed for eight source tokens."""
    prepared = prepare_for_inference(random_model(**KINDS[kind]))
    ids, mask = padded_batch(lengths)
    targets = torch.randint(3, 40, (2 * len(lengths), 5))
    with torch.no_grad():
        memory = prepared.get_encoder()(ids, attention_mask=mask).last_hidden_state
        true = prepared(attention_mask=mask, encoder_outputs=(memory,), decoder_input_ids=targets).logits
        stepper = PreparedStepper(cast(DecoderStep, prepared.decoder_step), memory, mask, 2)
        for length in range(prompt, targets.shape[1] + 1):
            torch.testing.assert_close(stepper.step(targets[:, :length]), true[:, length - 1], **FLOAT32)


@needs_float32
@pytest.mark.parametrize("beams", [1, 3])
def test_prepared_model_finds_the_same_under_autocast_and_another_default_device(beams: int) -> None:
    """Under autocast attention would multiply in bfloat16, which a packed layer does not take, so its modules run."""
    model = random_model()
    prepared = prepare_for_inference(model)
    call = decided_call(model, [5, 3], max_new_tokens=8, num_beams=beams)
    true = prepared.generate(**call)
    with torch.autocast("cpu", torch.bfloat16):
        assert prepared.generate(**call).shape[0] == 2
    with torch.device("meta"):
        assert torch.equal(prepared.to("cpu").generate(**call), true)
        assert torch.equal(prepare_for_inference(model).generate(**call), true)


class ModelOfRolledLogits(VaswaniTransformerForConditionalGeneration):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits.roll(1, dims=-1)
        return output


class OppositeLayer(VaswaniTransformerDecoderLayer):
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return -super().forward(*args, **kwargs)


class DecoderOfOppositeLayers(VaswaniTransformerDecoder):
    layer_class = OppositeLayer


class BodyOfOppositeLayers(VaswaniTransformerModel):
    decoder_class = DecoderOfOppositeLayers


class ModelOfOppositeLayers(VaswaniTransformerForConditionalGeneration):
    body_class = BodyOfOppositeLayers


class OppositeEmbedding(InputEmbedding):
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return -super().forward(*args, **kwargs)


class ModelOfOppositeEmbeddings(VaswaniTransformerForConditionalGeneration):
    def __init__(self, config: VaswaniTransformerConfig) -> None:
        super().__init__(config)
        self.model.decoder.input_embedding = OppositeEmbedding(config)


@needs_float32
@pytest.mark.parametrize("model_class", [ModelOfRolledLogits, ModelOfOppositeLayers, ModelOfOppositeEmbeddings])
@pytest.mark.parametrize("beams", [1, 3])
def test_subclass_with_another_forward_layer_or_embedding_takes_every_step_of_a_search(
    model_class: type[VaswaniTransformerForConditionalGeneration], beams: int
) -> None:
    model = model_class(random_model().config).eval()
    call = decided_call(model, [5, 3], num_beams=beams, min_new_tokens=4, max_new_tokens=4)
    assert torch.equal(prepare_for_inference(model).generate(**call), model.generate(**call))


@needs_float32
@pytest.mark.parametrize("lengths", [[6, 1, 3], [2, 2]])
@pytest.mark.parametrize("side", ["left", None])
@pytest.mark.parametrize("kind", KINDS)
def test_encoder_pass_has_the_states_of_the_complete_encoder(
    kind: str, side: str | None, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = prepare_for_inference(random_model(**KINDS[kind])).get_encoder()
    ids, mask = padded_batch(lengths, side or "right")
    inputs = {"input_ids": ids} | ({} if side is None else {"attention_mask": mask})
    true = encoder(**inputs, output_hidden_states=True).last_hidden_state
    taken, step = [], PreparedEncoder.fast_pass
    monkeypatch.setattr(PreparedEncoder, "fast_pass", lambda *args: taken.append(1) or step(*args))
    actual = encoder(**inputs).last_hidden_state
    assert len(encoder(**inputs, output_hidden_states=True).hidden_states) == 3
    assert encoder(**inputs, return_dict=False)[0].shape == true.shape
    assert len(taken) == 1
    is_token = mask.bool() if side else torch.ones_like(mask).bool()
    torch.testing.assert_close(actual[is_token], true[is_token], **FLOAT32)


LAYERS, HEADS, WIDTHS = 2, 3, (4, 5)  # of keys and of values


def new_token(rows: int) -> list[tuple[Tensor, Tensor]]:
    keys, values = WIDTHS
    return [(torch.randn(rows, HEADS, 1, keys), torch.randn(rows, HEADS, 1, values)) for _ in range(LAYERS)]


def attended(kept: Tensor, mask: Tensor, targets: int) -> Tensor:
    """Return the entries (k B, H, T, d) that each beam attends to, in order, among all stored ones (B, H, T k, d)."""
    sources, heads, length, _ = kept.shape
    every = (mask.expand(sources * heads, targets, length) == 0).unflatten(0, (sources, heads))
    assert torch.equal(every, every[:, :1].expand_as(every))
    every = every[:, 0]  # (B, k, T k)
    rows = [kept[source][:, is_seen] for source, of_source in enumerate(every) for is_seen in of_source]
    return torch.stack(rows)


@settings(max_examples=40)
@given(st.integers(0, 1000), st.integers(1, 4), st.integers(1, 4), st.integers(1, 40))
def test_beam_attends_to_what_a_cache_with_a_row_per_beam_holds(
    seed: int, sources: int, targets: int, steps: int
) -> None:
    torch.manual_seed(seed)
    plain, cache = DynamicCache(), BeamCache(LAYERS, sources, HEADS, targets, *WIDTHS)
    for _ in range(steps):
        cache.append_slot()
        for index, (key, value) in enumerate(new_token(sources * targets)):
            by_source = torch.cat((key, value), dim=-1).unflatten(0, (sources, targets))[:, :, :, 0].transpose(1, 2)
            true, (keys, values) = plain.update(key, value, index), cache.write(index, by_source)
            for true_part, cached_part in zip(true, (keys.transpose(1, 2), values), strict=True):
                cached_heads = cached_part.unflatten(0, (sources, HEADS))
                assert torch.equal(attended(cached_heads, cache.mask, targets), true_part)
        assert cache.length == plain.get_seq_length()
        beams: Any = (torch.randint(targets, (sources, targets)) + torch.arange(sources)[:, None] * targets).flatten()
        plain.reorder_cache(beams)
        cache.reorder(beams)
        if sources > 1 and torch.rand(()) < 0.3:
            stay = torch.randperm(sources)[: torch.randint(1, sources, ())].sort().values
            plain.batch_select_indices((stay[:, None] * targets + torch.arange(targets)).flatten())
            cache.keep(stay)
            sources = len(stay)


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, 5),
        ({"num_beams": 2}, 5),
        ({"return_dict_in_generate": True}, 0),
        ({"num_beams": 2, "cache_implementation": "static"}, 0),
        ({"past_key_values": EncoderDecoderCache(DynamicCache(), DynamicCache())}, 0),
        ({"decoder_attention_mask": torch.ones(2, 1)}, 0),
        ({"output_attentions": True}, 0),
    ],
    ids=str,
)
def test_fast_path_is_taken_unless_the_call_needs_more(
    options: dict[str, Any], steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, step = [], DecoderStep.__call__
    monkeypatch.setattr(DecoderStep, "__call__", lambda *args: taken.append(args) or step(*args))
    model = random_model()
    call = (
        decided_call(model, [5, 3], max_new_tokens=5, min_new_tokens=5, num_beams=options.get("num_beams", 1)) | options
    )
    generated, true = (side.generate(**copy.deepcopy(call)) for side in (prepare_for_inference(model), model))
    assert len(taken) == steps
    assert torch.equal(*(side if torch.is_tensor(side) else side.sequences for side in (generated, true)))


@pytest.mark.parametrize("num_beams", [1, 2])
def test_prepared_model_returns_a_cache_of_every_layer(num_beams: int) -> None:
    model = random_model()
    call = source_batch([5, 3], max_new_tokens=5, min_new_tokens=5, num_beams=num_beams, return_dict_in_generate=True)
    caches: list[Any] = [side.generate(**call).past_key_values for side in (prepare_for_inference(model), model)]
    layers = [[*cache.self_attention_cache.layers, *cache.cross_attention_cache.layers] for cache in caches]
    shapes = [[layer.keys.shape for layer in cached] for cached in layers]
    assert len(shapes[0]) == 2 * model.config.decoder_layers
    assert shapes[0] == shapes[1]


def test_loop_of_the_caller_gets_a_cache_from_a_prepared_model() -> None:
    model = random_model()
    call = decided_call(model, [5, 3], max_new_tokens=3, min_new_tokens=3, num_beams=1)
    call = {name: call[name] for name in ("input_ids", "attention_mask")}
    lengths = []

    def loop(model: Any, input_ids: Tensor, **inputs: Any) -> Tensor:
        inputs = {name: inputs[name] for name in ("encoder_outputs", "attention_mask", CACHE)}
        for _ in range(3):
            outputs = model(decoder_input_ids=input_ids[:, -1:], use_cache=True, return_dict=True, **inputs)
            lengths.append(inputs[CACHE].get_seq_length())
            input_ids = torch.cat((input_ids, outputs.logits[:, -1:].argmax(-1)), dim=1)
        return input_ids

    settings = {"custom_generate": loop, "num_beams": 1}
    generated, true = (side.generate(**call, **settings) for side in (prepare_for_inference(model), model))
    assert lengths == [1, 2, 3, 1, 2, 3]
    assert torch.equal(generated, true)
