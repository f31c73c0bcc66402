"""The attention weights of a sentence are the model's own, and the model does not change."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.batches import FLOAT32
from tests.models import FAMILY, LENGTH_FAMILY, PAIRS, SLOT_FAMILY, family_of_pairs, model_of_pairs, tiny_model
from vaswani_transformer import prepare_for_inference
from vaswani_transformer.figures import AttentionMaps, attention_maps
from vaswani_transformer.figures.weights import last_pass
from vaswani_transformer.layers import sinusoids


def assert_same(one: AttentionMaps, other: AttentionMaps) -> None:
    assert (one.source_tokens, one.input_tokens, one.output_tokens, one.target) == (
        (other.source_tokens, other.input_tokens, other.output_tokens, other.target)
    )
    for stack in ("encoder", "decoder", "cross"):
        assert np.array_equal(one.weights(stack), other.weights(stack))


def test_rows_of_weights_are_distributions_over_visible_positions() -> None:
    model, tokenizer = model_of_pairs()
    maps = attention_maps(model, tokenizer, "hello world", "hola amigo")
    source, target = len(maps.source_tokens), len(maps.output_tokens)
    assert maps.encoder.shape == (2, 4, source, source)
    assert maps.decoder.shape == (2, 4, target, target)
    assert maps.cross.shape == (2, 4, target, source)
    for stack in ("encoder", "decoder", "cross"):
        weights = maps.weights(stack)
        assert weights.dtype == np.float32
        assert weights.shape[2:] == (len(maps.queries(stack)), len(maps.keys(stack)))
        np.testing.assert_allclose(weights.sum(-1), 1, **FLOAT32)
    assert not np.triu(maps.decoder, 1).any()


def test_first_layer_weights_are_equation_1() -> None:
    model, tokenizer = model_of_pairs()
    ids = torch.tensor(tokenizer("this is a book").input_ids)
    states = model.model.shared.weight[ids] * model.config.d_model**0.5 + sinusoids(torch.arange(len(ids)), 64)
    attention: Any = model.model.encoder.layers[0].self_attn
    for head in range(4):
        rows = slice(16 * head, 16 * (head + 1))
        query, key = states @ attention.q_proj.weight[rows].T, states @ attention.k_proj.weight[rows].T
        expected = torch.softmax(query @ key.T / 16**0.5, dim=-1)
        weights = attention_maps(model, tokenizer, "this is a book", "x").encoder[0, head]
        np.testing.assert_allclose(weights, expected.numpy(), **FLOAT32)


def test_target_defaults_to_the_model_s_translation() -> None:
    (model, tokenizer), source = model_of_pairs(), "hello world"
    maps = attention_maps(model, tokenizer, source)
    assert maps.target == PAIRS[source]
    assert maps.input_tokens[0] == "<s>"
    assert maps.output_tokens[-1] == "</s>"
    assert len(maps.input_tokens) == len(maps.output_tokens)
    assert_same(maps, attention_maps(model, tokenizer, source, PAIRS[source]))


def test_empty_texts_have_an_end() -> None:
    model, tokenizer = model_of_pairs()
    maps = attention_maps(model, tokenizer, "", "")
    assert (maps.source_tokens, maps.input_tokens, maps.output_tokens) == (["</s>"], ["<s>"], ["</s>"])


def state_of(model: Any) -> tuple[Any, ...]:
    """The state of a model that `attention_maps` could change."""
    flags = [module.training for module in model.modules()]
    implementations = [part.config._attn_implementation for part in (model, model.model.encoder, model.model.decoder)]
    settings = (model.config.to_dict(), model.generation_config.to_dict())
    return flags, implementations, *settings, torch.get_rng_state().tolist()


@pytest.mark.parametrize(("target", "fails"), [(None, False), ("hola", True)])
def test_model_is_unchanged_afterwards(target: str | None, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    _, tokenizer = model_of_pairs()
    model = tiny_model(vocab_size=len(tokenizer), dropout=0.5).train()
    model.model.encoder.layers[0].eval()
    model.set_attn_implementation("sdpa")
    before = state_of(model)
    if fails:
        monkeypatch.setattr(model.model.decoder.layers[1], "forward", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            attention_maps(model, tokenizer, "hello", target)
    else:
        assert_same(
            attention_maps(model, tokenizer, "hello", target), attention_maps(model, tokenizer, "hello", target)
        )
    assert state_of(model) == before


@pytest.mark.parametrize(("family", "prepares"), [*((family, False) for family in FAMILY), ("cmlm", True)])
def test_maps_of_all_words_at_once_are_those_of_the_last_pass(family: str, prepares: bool) -> None:
    model, tokenizer = family_of_pairs(family, dropout=0.5)
    model = prepare_for_inference(model) if prepares else model
    settings: dict[str, Any] = {"length_beam_size": 3} if family in LENGTH_FAMILY else {}
    settings |= {"num_iterations": 3} if family == "cmlm" else {}
    batch = tokenizer(["this is a book"], return_tensors="pt")
    shown = last_pass(model, batch, settings)
    assert shown.target == model.generate(**batch, **settings)[0, 1:].tolist()
    if family in SLOT_FAMILY:
        assert len(shown.labels) == model.config.upsampling * batch["input_ids"].shape[1]
    mask = torch.ones(1, len(shown.labels), dtype=torch.long)
    read = {"decoder_input_ids": torch.tensor([shown.inputs])} if family == "cmlm" else {}
    model.set_attn_implementation("eager")
    outputs = model(**batch, **read, decoder_attention_mask=mask, output_attentions=True)
    maps, source = attention_maps(model, tokenizer, "this is a book", **settings), batch["input_ids"].shape[1]
    for weights, expected in ((maps.decoder, outputs.decoder_attentions), (maps.cross, outputs.cross_attentions)):
        np.testing.assert_allclose(weights, torch.cat(expected).detach(), **FLOAT32)
        np.testing.assert_allclose(weights.sum(-1), 1, **FLOAT32)
    expected = torch.cat(outputs.encoder_attentions).detach()[..., -source:, -source:]
    np.testing.assert_allclose(maps.encoder, expected, **FLOAT32)
    assert maps.decoder[..., 0, -1].all()  # a position attends to later ones
    for stack in ("encoder", "decoder", "cross"):
        assert maps.weights(stack).shape[2:] == (len(maps.queries(stack)), len(maps.keys(stack)))


def test_last_pass_of_a_cmlm_reads_masks_and_words() -> None:
    model, tokenizer = family_of_pairs("cmlm", dropout=0.5)
    maps = attention_maps(model, tokenizer, "this is a book", num_iterations=2)
    assert maps.input_tokens.count("<mask>") == max(1, len(maps.output_tokens) // 2)


@pytest.mark.parametrize("family", FAMILY)
def test_model_of_all_words_at_once_is_unchanged_afterwards_and_takes_no_target(family: str) -> None:
    model, tokenizer = family_of_pairs(family, dropout=0.5)
    model.train().set_attn_implementation("sdpa")
    before = state_of(model)
    assert_same(attention_maps(model, tokenizer, "hello"), attention_maps(model, tokenizer, "hello"))
    assert state_of(model) == before
    stacks = (model.model.encoder, model.model.decoder)
    assert not any(stack._forward_hooks or stack._forward_pre_hooks for stack in stacks)
    with pytest.raises(ValueError, match=f"target: not supported by {type(model).__name__}, which predicts all"):
        attention_maps(model, tokenizer, "hello", "hola")
