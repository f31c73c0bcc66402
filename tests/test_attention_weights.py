"""The attention weights of a sentence are the model's own, its words can be read, and the model stays as it was."""

import copy
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModel

from tests.helpers import FLOAT32, PAIRS, model_of_pairs, tiny_model
from vaswani_transformer import VaswaniTransformerTokenizer
from vaswani_transformer.attention_weights import attentions_of, readable_pieces, spelt, visible
from vaswani_transformer.embeddings import sinusoids

# Any text but for the character that stands for bytes which are none, and the stroke of our own fractions.
any_text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd\u2044"))
SPLIT = re.compile("(.)([⁰¹²³⁴⁵⁶⁷⁸⁹]+)\u2044([₀₁₂₃₄₅₆₇₈₉]+)", flags=re.DOTALL)
PLAIN = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹₀₁₂₃₄₅₆₇₈₉", "0123456789" * 2)


def unsplit(text):
    """Each character that several tokens spell once, where its last token stands."""

    def once(found):
        return found[1] if found[2].translate(PLAIN) == found[3].translate(PLAIN) else ""

    return SPLIT.sub(once, text)


def pieces(tokenizer, text):
    return readable_pieces(tokenizer, tokenizer(text, add_special_tokens=False).input_ids)


def assert_same(one, other):
    assert (one.source_pieces, one.read_pieces, one.written_pieces, one.target) == (
        (other.source_pieces, other.read_pieces, other.written_pieces, other.target)
    )
    for stack in ("encoder", "decoder", "cross"):
        assert np.array_equal(one.weights(stack), other.weights(stack))


@given(any_text)
def test_the_pieces_spell_the_whole_text(text):
    _, tokenizer = model_of_pairs()
    ids = tokenizer(text, add_special_tokens=False).input_ids
    texts = spelt(tokenizer, ids)
    assert len(texts) == len(ids)
    assert unsplit("".join(texts)) == text


@given(any_text)
def test_every_token_is_shown_and_none_is_garbled(text):
    _, tokenizer = model_of_pairs()
    ids = tokenizer(text).input_ids
    shown = readable_pieces(tokenizer, ids)
    assert len(shown) == len(ids)
    assert all(shown)
    assert not any(character in word for word in shown for character in " \n\t\x00\ufffdĠ")


def test_pieces_are_shown_as_words_and_their_parts():
    tokenizer = VaswaniTransformerTokenizer.train_from_iterator(["hello world", "a book"] * 3, vocab_size=280)
    assert pieces(tokenizer, "hello world") == ["hello", "world"]
    assert pieces(tokenizer, "a book is a bookkeeper's") == [
        *("a", "book", "␣", "i", "·s", "␣", "a", "book", "·k", "·e", "·e", "·p", "·e", "·r", "'", "s")
    ]
    assert pieces(tokenizer, "a,  book") == ["a", ",", "␣", "book"]
    assert pieces(tokenizer, "\n\t\x07") == ["⏎", "⇥", "\\x07"]
    assert pieces(tokenizer, "🙂") == [f"🙂{part}\u2044₄" for part in "¹²³⁴"]
    assert readable_pieces(tokenizer, [0, *tokenizer("hello").input_ids]) == ["<s>", "hello", "</s>"]


def test_word_pieces_are_shown_in_the_same_way():
    texts = ["the cat is black", "the books are blacker"] * 3
    tokenizer = VaswaniTransformerTokenizer.train_from_iterator(texts, vocab_size=60, algorithm="wordpiece")
    shown = pieces(tokenizer, "the cats")
    assert shown[0] == "the"
    assert "".join(shown[1:]).replace("·", "") == "cats"
    assert not any("#" in piece for piece in shown)


def test_bytes_that_are_no_character_are_told():
    _, tokenizer = model_of_pairs()
    first, *_ = tokenizer("🙂", add_special_tokens=False).input_ids
    assert readable_pieces(tokenizer, [first, first, *tokenizer("a").input_ids])[-1] == "</s>"
    assert readable_pieces(tokenizer, [first]) == ["\ufffd"]


def test_what_cannot_be_seen_is_escaped():
    assert visible("\u200d") == "\\u200d"
    assert visible("\u200d¹\u2044₃") == "\\u200d¹\u2044₃"
    assert visible("a\u200db") == "a\u200db"
    assert visible("ing", before="book") == "·ing"
    assert visible(".", before="book") == "."


def test_every_row_of_weights_is_a_distribution_over_what_it_may_see():
    model, tokenizer = model_of_pairs()
    found = attentions_of(model, tokenizer, "hello world", "hola amigo")
    source, target = len(found.source_pieces), len(found.written_pieces)
    assert found.encoder.shape == (2, 4, source, source)
    assert found.decoder.shape == (2, 4, target, target)
    assert found.cross.shape == (2, 4, target, source)
    for stack in ("encoder", "decoder", "cross"):
        weights = found.weights(stack)
        assert weights.dtype == np.float32
        assert weights.shape[2:] == (len(found.queries(stack)), len(found.keys(stack)))
        np.testing.assert_allclose(weights.sum(-1), 1, **FLOAT32)
    assert not np.triu(found.decoder, 1).any()


def test_the_first_layer_s_weights_are_equation_1():
    model, tokenizer = model_of_pairs()
    ids = torch.tensor(tokenizer("this is a book").input_ids)
    states = model.model.shared.weight[ids] * model.config.d_model**0.5 + sinusoids(torch.arange(len(ids)), 64)
    attention = model.model.encoder.layers[0].self_attn
    for head in range(4):
        rows = slice(16 * head, 16 * (head + 1))
        query, key = states @ attention.q_proj.weight[rows].T, states @ attention.k_proj.weight[rows].T
        expected = torch.softmax(query @ key.T / 16**0.5, dim=-1)
        found = attentions_of(model, tokenizer, "this is a book", "x").encoder[0, head]
        np.testing.assert_allclose(found, expected.numpy(), **FLOAT32)


@pytest.mark.parametrize("source", PAIRS)
def test_without_a_target_it_is_the_model_s_own_translation(source):
    model, tokenizer = model_of_pairs()
    found = attentions_of(model, tokenizer, source)
    assert found.target == PAIRS[source]
    assert found.read_pieces[0] == "<s>"
    assert found.written_pieces[-1] == "</s>"
    assert len(found.read_pieces) == len(found.written_pieces)
    assert_same(found, attentions_of(model, tokenizer, source, PAIRS[source]))


def test_a_translation_that_is_cut_short_has_no_end():
    model, tokenizer = model_of_pairs()
    model = copy.deepcopy(model)
    model.use_paper_decoding()
    model.generation_config.max_new_tokens = 2
    found = attentions_of(model, tokenizer, "the cat is black")
    assert len(found.written_pieces) == 2
    assert "</s>" not in found.written_pieces


def test_empty_texts_have_their_ends():
    model, tokenizer = model_of_pairs()
    found = attentions_of(model, tokenizer, "", "")
    assert (found.source_pieces, found.read_pieces, found.written_pieces) == (["</s>"], ["<s>"], ["</s>"])


def state_of(model):
    """All that a look at the weights could leave changed."""
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
def test_the_model_is_left_as_it_was(target, fails, monkeypatch):
    _, tokenizer = model_of_pairs()
    model = tiny_model(vocab_size=len(tokenizer), dropout=0.5).train()
    model.model.encoder.layers[0].eval()
    model.set_attn_implementation("sdpa")
    before = state_of(model)
    if fails:
        monkeypatch.setattr(model.model.decoder.layers[1], "forward", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            attentions_of(model, tokenizer, "hello", target)
    else:
        assert_same(attentions_of(model, tokenizer, "hello", target), attentions_of(model, tokenizer, "hello", target))
    assert state_of(model) == before


def test_a_model_that_writes_nothing_is_refused():
    model, tokenizer = model_of_pairs()
    with pytest.raises(ValueError, match="VaswaniTransformerModel writes no text"):
        attentions_of(AutoModel.from_config(model.config), tokenizer, "hello")


def test_an_unknown_attention_is_refused():
    model, tokenizer = model_of_pairs()
    with pytest.raises(ValueError, match="'self' is not an attention of the model; choose one of encoder, decoder"):
        attentions_of(model, tokenizer, "hello", "hola").weights("self")
