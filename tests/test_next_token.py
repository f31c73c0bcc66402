"""The shortest way through a prepared decoder computes what its modules compute."""

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache

from tests.helpers import FLOAT32, padded_batch
from tests.test_inference import DTYPES, KINDS, random_model
from vaswani_transformer.inference import prepare_for_inference
from vaswani_transformer.next_token import Drawing

needs_float32 = pytest.mark.skipif("float32" not in DTYPES, reason="no packed layers in float32 here")


def sources_of(attention, count, tokens, targets):
    """States of targets (k B, d_model), a memory (B, K, d_model) of which the last tokens of a source are padding."""
    d_model = attention.config.d_model
    mask = torch.zeros(count, 1, 1, tokens)
    mask[0, :, :, tokens // 2 + 1 :] = torch.finfo(torch.float32).min
    return torch.randn(count * targets, d_model), torch.randn(count, tokens, d_model), mask


@needs_float32
@pytest.mark.parametrize("has_padding", [True, False])
@pytest.mark.parametrize(("count", "tokens"), [(1, 8), (2, 4), (1, 9), (3, 5)])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_drawn_is_what_the_module_draws(kind, count, tokens, has_padding):
    """The products with the weights come first for 32 columns of scores at most, as wide as the model."""
    attention = prepare_for_inference(random_model(**KINDS[kind])).model.decoder.layers[1].cross_attn
    assert (attention.config.d_model, attention.config.num_heads) == (32, 4)
    states, memory, mask = sources_of(attention, count, tokens, targets=3)
    mask = mask if has_padding else None
    true = states + attention(states[:, None], memory, mask)[0][:, 0]
    drawing, calls = Drawing(attention), []
    ask = drawing.ask
    drawing.ask = lambda hidden_states: calls.append(1) or ask(hidden_states)
    draw = drawing.of(*attention.project_memory(memory), mask, 3)
    torch.testing.assert_close(draw(states), true, **FLOAT32)
    assert len(calls) == (count * tokens > 8)


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != "float32"])
def test_products_in_fewer_bits_stay_those_of_the_layers(dtype):
    attention = prepare_for_inference(random_model(), dtype).model.decoder.layers[0].cross_attn
    assert Drawing(attention).weights is None


@needs_float32
@pytest.mark.parametrize("lengths", [[3], [8, 5, 1]])
@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_every_token_has_the_output_of_the_whole_decoder(kind, begins, lengths):
    """From the first token on, or after some that the modules have put into the cache."""
    prepared = prepare_for_inference(random_model(**KINDS[kind]))
    ids, mask = padded_batch(lengths)
    targets = torch.randint(3, 40, (2 * len(lengths), 5))
    with torch.no_grad():
        memory = prepared.get_encoder()(ids, attention_mask=mask).last_hidden_state
        inputs = {"encoder_hidden_states": memory, "encoder_attention_mask": mask}
        true = prepared.model.decoder(targets, **inputs).last_hidden_state
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        start = 0 if begins else 2
        if start:
            prepared.model.decoder(targets[:, :start], past_key_values=cache, **inputs)
        for place in range(start, targets.shape[1]):
            found = prepared.next_output(targets[:, place : place + 1], memory, mask, cache)
            torch.testing.assert_close(found[:, 0], true[:, place], **FLOAT32)
            assert cache.get_seq_length() == place + 1
