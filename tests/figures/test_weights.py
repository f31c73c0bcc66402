"""The attention weights of a sentence are the model's own, and the model does not change."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel

from tests.helpers import FLOAT32, PAIRS, model_of_pairs, tiny_model
from tests.nar_models import FAMILY
from vaswani_transformer import AttentionMaps, VaswaniTransformerForConditionalGeneration
from vaswani_transformer.embeddings import sinusoids
from vaswani_transformer.figures import attention_maps


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


@pytest.mark.parametrize("source", PAIRS)
def test_target_defaults_to_the_model_s_translation(source: str) -> None:
    model, tokenizer = model_of_pairs()
    maps = attention_maps(model, tokenizer, source)
    assert maps.target == PAIRS[source]
    assert maps.input_tokens[0] == "<s>"
    assert maps.output_tokens[-1] == "</s>"
    assert len(maps.input_tokens) == len(maps.output_tokens)
    assert_same(maps, attention_maps(model, tokenizer, source, PAIRS[source]))


def test_truncated_translation_has_no_end() -> None:
    model, tokenizer = model_of_pairs()
    model = copy.deepcopy(model)
    model.use_paper_decoding()
    model.generation_config.max_new_tokens = 2
    maps = attention_maps(model, tokenizer, "the cat is black")
    assert len(maps.output_tokens) == 2
    assert "</s>" not in maps.output_tokens


def test_empty_texts_have_an_end() -> None:
    model, tokenizer = model_of_pairs()
    maps = attention_maps(model, tokenizer, "", "")
    assert (maps.source_tokens, maps.input_tokens, maps.output_tokens) == (["</s>"], ["<s>"], ["</s>"])


def state_of(model: VaswaniTransformerForConditionalGeneration) -> tuple[Any, ...]:
    """The state of a model that `attention_maps` could change."""
    flags = [module.training for module in model.modules()]
    implementations = [part.config._attn_implementation for part in (model, model.model.encoder, model.model.decoder)]
    return (
        flags,
        implementations,
        model.config.to_dict(),
        model.generation_config.to_dict(),
        torch.get_rng_state().tolist(),
    )


@pytest.mark.parametrize("target", [None, "hola"])
@pytest.mark.parametrize("fails", [False, True])
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


def test_model_without_a_projection_is_an_error() -> None:
    model, tokenizer = model_of_pairs()
    with pytest.raises(ValueError, match="VaswaniTransformerModel generates no text"):
        attention_maps(AutoModel.from_config(model.config), tokenizer, "hello")


@pytest.mark.parametrize("family", FAMILY)
def test_model_of_all_words_at_once_is_an_error(family: str) -> None:
    model = FAMILY[family]()
    with pytest.raises(ValueError, match=rf"{type(model).__name__} predicts all words at once; give an autoregressive"):
        attention_maps(model, model_of_pairs()[1], "hello")


def test_unknown_stack_is_an_error() -> None:
    model, tokenizer = model_of_pairs()
    with pytest.raises(ValueError, match="no such attention; got 'self', expected one of encoder, decoder"):
        attention_maps(model, tokenizer, "hello", "hola").weights("self")
