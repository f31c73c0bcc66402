"""Padding, caches, positions and the way of calling change nothing; sizes, ties and initialization are the paper's."""

import copy
import math
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache, StaticCache, modeling_utils
from transformers.modeling_outputs import BaseModelOutput

from tests.batches import FLOAT32, padded_batch, random_batch, random_tokens, targets
from tests.models import EVERY_FAMILY, SLOT_FAMILY, assert_matrix_shared, tiny_model
from vaswani_transformer import (
    VaswaniTransformerConfig,
    VaswaniTransformerForConditionalGeneration,
    prepare_for_inference,
)
from vaswani_transformer.stacks import CACHE

POSITION_TYPES = ["sinusoidal", "learned"]
MODELS = {
    position_type: tiny_model(position_embedding=position_type).requires_grad_(False)
    for position_type in POSITION_TYPES
}
lengths = st.lists(st.integers(1, 6), min_size=1, max_size=4)


@settings(max_examples=50)
@given(
    texts=st.lists(st.tuples(st.integers(1, 8), st.integers(1, 6)), min_size=2, max_size=4),
    sides=st.tuples(*[st.sampled_from(["left", "right"])] * 2),
    position_type=st.sampled_from(POSITION_TYPES),
    filler=st.integers(0, 98),
)
def test_padding_changes_nothing_whatever_its_tokens(
    texts: list[tuple[int, int]], sides: tuple[str, str], position_type: str, filler: int
) -> None:
    """Sources and targets of these lengths are padded on these sides."""
    model = MODELS[position_type]
    source, mask = padded_batch([length for length, _ in texts], sides[0], filler)
    target, target_mask = padded_batch([length for _, length in texts], sides[1], filler)
    masks = {"attention_mask": mask, "decoder_attention_mask": target_mask}
    padded = model(input_ids=source, decoder_input_ids=target, **masks)
    for row, (kept, kept_target) in enumerate(zip(mask.bool(), target_mask.bool(), strict=True)):
        single = model(input_ids=source[row, kept][None], decoder_input_ids=target[row, kept_target][None])
        torch.testing.assert_close(padded.logits[row, kept_target], single.logits[0], **FLOAT32)
        states = padded.encoder_last_hidden_state[row, kept]
        torch.testing.assert_close(states, single.encoder_last_hidden_state[0], **FLOAT32)


@settings(max_examples=25)
@given(
    lengths=lengths,
    padding=st.integers(0, 3),
    position_type=st.sampled_from(POSITION_TYPES),
    is_static=st.booleans(),
    step=st.integers(1, 3),
)
def test_cached_steps_equal_one_pass(
    lengths: list[int], padding: int, position_type: str, is_static: bool, step: int
) -> None:
    model = MODELS[position_type]
    source, source_mask = padded_batch(lengths)
    target, target_mask = padded_batch([6] * (len(lengths) - 1) + [6 - padding], side="left")
    batch = {"input_ids": source, "attention_mask": source_mask, "decoder_input_ids": target}
    if padding:
        batch["decoder_attention_mask"] = target_mask
    complete = model(**batch).logits
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    if is_static:
        sizes = (6, source.shape[1])
        cache = EncoderDecoderCache(*(StaticCache(model.config, max_cache_len=size) for size in sizes))
    kept, logits = target_mask.bool(), []
    for start in range(0, target.shape[1], step):
        batch["decoder_input_ids"] = target[:, start : start + step]
        if padding:
            batch["decoder_attention_mask"] = target_mask[:, : start + step]
        outputs = model(**batch, past_key_values=cache, use_cache=True)
        assert outputs.past_key_values is cache
        logits.append(outputs.logits)
    torch.testing.assert_close(torch.cat(logits, 1)[kept], complete[kept], **FLOAT32)


def test_padding_tokens_count_without_a_mask() -> None:
    model, target = MODELS["sinusoidal"], random_tokens(1, 3)
    source = torch.tensor([[5, 6, 1, 1]])
    everything = model(input_ids=source, decoder_input_ids=target).logits
    masked = model(input_ids=source, attention_mask=torch.ones_like(source), decoder_input_ids=target).logits
    torch.testing.assert_close(everything, masked, **FLOAT32)
    two = model(input_ids=source[:, :2], decoder_input_ids=target).logits
    assert (everything - two).abs().max() > 1e-2


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_padded_source_without_a_mask_is_a_warning(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is Transformers' own; every way to a source of tokens passes it."""
    warnings: list[str] = []
    monkeypatch.setattr(modeling_utils.logger, "warning_once", warnings.append)
    model, (tokens, mask) = EVERY_FAMILY[family](), padded_batch([3, 5])
    for attention_mask in (mask, None):
        model.generate(tokens, attention_mask=attention_mask, max_new_tokens=3)
        model(tokens, attention_mask=attention_mask, labels=random_tokens(2, 3))
        assert ["attention_mask" in text for text in warnings] == [True] * (2 if attention_mask is None else 0)


def test_cache_has_either_name_of_transformers_in_a_call() -> None:
    model, batch = MODELS["sinusoidal"], random_batch(2, 5, 3)
    step = {"input_ids": batch["input_ids"], "decoder_input_ids": random_tokens(2, 1), "use_cache": True}
    for called in (model, model.model):
        by_name = {}
        for name in ("past_key_values", "cache"):
            cache = getattr(called(**batch, use_cache=True), CACHE)
            outputs = called(**step, **{name: cache})
            assert outputs[CACHE] is cache
            assert cache.get_seq_length() == 4
            by_name[name] = outputs[0]
        assert torch.equal(by_name["cache"], by_name["past_key_values"])


def test_cache_is_returned_as_config_or_call_request() -> None:
    batch = random_batch()
    model = tiny_model()
    assert model(**batch).past_key_values is not None
    assert model(**batch, use_cache=False).past_key_values is None
    assert model(**batch, labels=batch["decoder_input_ids"]).past_key_values is None
    frugal = tiny_model(use_cache=False)
    assert frugal(**batch).past_key_values is None
    assert frugal(**batch, use_cache=True).past_key_values is not None


@pytest.mark.parametrize("position_type", POSITION_TYPES)
def test_position_ids_are_accepted(position_type: str) -> None:
    model, batch = MODELS[position_type], random_batch(2, 5, 4)
    expected = model(**batch).logits
    source, target = torch.arange(5)[None], torch.arange(4).expand(2, 4)
    given_positions = model(**batch, position_ids=source, decoder_position_ids=target).logits
    torch.testing.assert_close(given_positions, expected, **FLOAT32)
    for moved in (model(**batch, position_ids=2 * source), model(**batch, decoder_position_ids=2 * target)):
        assert (moved.logits - expected).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_ids": None}, "exactly one of input_ids and inputs_embeds; got neither"),
        ({"decoder_inputs_embeds": torch.zeros(3, 5, 32)}, "of decoder_input_ids and decoder_inputs_embeds; got both"),
    ],
)
def test_no_input_or_two_inputs_are_an_error(changes: dict[str, Tensor | None], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MODELS["sinusoidal"](**random_batch() | changes)


@pytest.mark.parametrize("shape", [(3, 8), (1, 7), (7,)], ids=str)
def test_source_mask_of_another_shape_is_an_error(shape: tuple[int, ...]) -> None:
    model, batch = MODELS["sinusoidal"], random_batch(3, 7, 5)
    encoded = model.get_encoder()(batch["input_ids"])
    message = rf"attention_mask: does not fit .*got shape {re.escape(str(shape))}, expected \(3, 7\)"
    for source in ({"input_ids": batch["input_ids"]}, {"encoder_outputs": encoded}):
        for decoding in (model, prepare_for_inference(model)):
            with pytest.raises(ValueError, match=message):
                decoding.generate(**source, attention_mask=torch.ones(shape), max_new_tokens=3)
        with pytest.raises(ValueError, match=message):
            model(**batch | source, attention_mask=torch.ones(shape))
    with pytest.raises(ValueError, match=message):
        model.get_encoder()(batch["input_ids"], attention_mask=torch.ones(shape))


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_stacks_that_a_model_returns_can_be_set_again(family: str) -> None:
    model, expected = (EVERY_FAMILY[family]().double() for _ in range(2))
    for _ in range(2):
        model.set_encoder(model.get_encoder())
        model.set_decoder(model.get_decoder())
    source = random_tokens(2, 5)
    assert torch.equal(model.generate(source, max_new_tokens=5), expected.generate(source, max_new_tokens=5))
    assert model.state_dict().keys() == expected.state_dict().keys()


def test_source_mask_of_four_dimensions_may_have_a_row_for_each_query_of_a_source() -> None:
    model, (source, mask), target = MODELS["sinusoidal"], padded_batch([5, 2]), random_tokens(4, 3)
    encoded = model.get_encoder()(source, attention_mask=mask)
    inputs: dict[str, Any] = {"encoder_outputs": encoded, "decoder_input_ids": target}
    by_query = mask.bool()[:, None, None].expand(2, 1, 6, 5)
    expected = model(**inputs, attention_mask=mask).logits
    torch.testing.assert_close(model(**inputs, attention_mask=by_query).logits, expected, **FLOAT32)


@pytest.mark.parametrize("cached", [0, 2])
def test_target_mask_of_another_shape_is_an_error(cached: int) -> None:
    """With a cache the mask covers the tokens in it too; a static cache may have a mask of its own width."""
    model, batch = MODELS["sinusoidal"], random_batch(2, 5, 4)
    tokens = batch.pop("decoder_input_ids")
    for width in (2, 5):
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        if cached:
            model(**batch, decoder_input_ids=tokens[:, :cached], past_key_values=cache, use_cache=True)
        rest = {"decoder_input_ids": tokens[:, cached:], "past_key_values": cache, "use_cache": True}
        with pytest.raises(ValueError, match=rf"decoder_attention_mask: .*\(2, {width}\), expected \(2, 4\)"):
            model(**batch, **rest, decoder_attention_mask=torch.ones(2, width))
    plain = model(**batch, decoder_input_ids=tokens).logits
    causal = torch.ones(4, 4, dtype=torch.bool).tril().expand(2, 1, 4, 4)
    logits = model(**batch, decoder_input_ids=tokens, decoder_attention_mask=causal).logits
    torch.testing.assert_close(logits, plain, **FLOAT32)


@pytest.mark.parametrize("shape", [(2, 0), (0, 3)], ids=str)
def test_text_without_tokens_and_empty_batch_are_an_error(shape: tuple[int, int]) -> None:
    model, nothing = MODELS["sinusoidal"], torch.zeros(shape, dtype=torch.long)
    for decoding in (model, prepare_for_inference(model)):
        for limit in ("max_new_tokens", "max_source_relative_length"):
            limits: dict[str, Any] = {limit: 3}
            with pytest.raises(
                ValueError, match=rf"^input_ids: empty batch or sequence; got shape {re.escape(str(shape))}"
            ):
                decoding.generate(nothing, num_beams=2, **limits)
        with pytest.raises(ValueError, match=r"^decoder_input_ids: empty batch or sequence"):
            decoding(random_tokens(2, 3), decoder_input_ids=nothing)


@pytest.mark.parametrize("as_tuple", [True, False])
def test_encoder_outputs_replace_the_source(as_tuple: bool) -> None:
    model, (source, mask), target = MODELS["sinusoidal"], padded_batch([5, 2]), random_tokens(2, 3)
    encoded = model.get_encoder()(source, attention_mask=mask)
    outputs = model(
        encoder_outputs=tuple(encoded.values()) if as_tuple else encoded, attention_mask=mask, decoder_input_ids=target
    )
    expected = model(input_ids=source, attention_mask=mask, decoder_input_ids=target).logits
    assert torch.equal(outputs.logits, expected)


def test_decoder_runs_without_an_encoder() -> None:
    decoder, tokens = MODELS["sinusoidal"].get_decoder(), random_tokens(2, 5)
    outputs = decoder(tokens, use_cache=True)
    assert outputs.last_hidden_state.shape == (2, 5, 32)
    drawn = decoder(tokens, encoder_hidden_states=torch.randn(2, 4, 32))
    assert (drawn.last_hidden_state - outputs.last_hidden_state).abs().max() > 1e-2
    shorter = decoder(tokens[:, :4], use_cache=True)
    step = decoder(tokens[:, 4:], past_key_values=shorter.past_key_values)
    torch.testing.assert_close(step.last_hidden_state[:, 0], outputs.last_hidden_state[:, 4], **FLOAT32)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("options", [{}, {"position_embedding": "learned"}], ids=["sinusoidal", "learned"])
@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_gradient_checkpointing_gives_the_same_gradients(family: str, options: dict[str, str]) -> None:
    """With learned positions the reentrant kind, which gives gradients to positional arguments only."""
    batch = {"input_ids": random_tokens(2, 5), "labels": targets(4, 3)}
    gradients, calls = [], []
    for is_checkpointing in (False, True):
        model = EVERY_FAMILY[family](**options).train()
        if is_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": bool(options)})
        feed_forward = model.model.decoder.layers[0].feed_forward
        feed_forward.register_forward_hook(lambda *_, mark=is_checkpointing: calls.append(mark))
        torch.manual_seed(3)  # the same dropout masks
        model(**batch).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(gradients[1], gradients[0], **FLOAT32)
    assert calls == [False, True, True]  # once without checkpointing, twice with it


def test_all_parameters_get_gradients() -> None:
    model = tiny_model(attention_bias=True, position_embedding="learned", tie_word_embeddings=False).train()
    model(input_ids=random_tokens(2, 5), labels=random_tokens(2, 4)).loss.backward()
    unmoved = [
        name for name, parameter in model.named_parameters() if parameter.grad is None or not parameter.grad.any()
    ]
    # A constant added to every score of a query does not change the softmax.
    assert all(name.endswith("k_proj.bias") for name in unmoved)


# Parameters in millions by the name of the model, as Table 3 prints them.
TABLE_3 = {
    "base": 65,
    "big": 213,
    "B-dk16": 58,
    "B-dk32": 60,
    "C-n2": 36,
    "C-n4": 50,
    "C-n8": 80,
    "C-dmodel256": 28,
    "C-dmodel1024": 168,
    "C-dff1024": 53,
    "C-dff4096": 90,
}


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_share_one_matrix_and_only_the_projection_can_be_untied(tied: bool) -> None:
    model = tiny_model(tie_word_embeddings=tied)
    assert_matrix_shared(model, tied)


@pytest.mark.parametrize("tied", [True, False])
def test_resizing_the_embeddings_keeps_ties(tied: bool) -> None:
    model = tiny_model(tie_word_embeddings=tied)
    before = model.model.shared.weight.detach().clone()
    model.resize_token_embeddings(128)
    assert_matrix_shared(model, tied)
    assert torch.equal(model.model.shared.weight[:99], before)
    assert model(input_ids=torch.tensor([[5, 127]]), labels=torch.tensor([[6, 126]])).logits.shape == (1, 2, 128)


@torch.no_grad()
@pytest.mark.parametrize("tied", [True, False])
def test_initialization_is_tensor2tensor_s(tied: bool) -> None:
    """Glorot-uniform projections, embeddings and learned positions of std d_model^-0.5, norms 1 and 0."""
    sizes: dict[str, Any] = {"vocab_size": 1000, "d_model": 128, "d_v": 32, "d_ff": 256}
    model = tiny_model(**sizes, position_embedding="learned", attention_bias=True, tie_word_embeddings=tied)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and not (tied and name == "lm_head"):
            bound = math.sqrt(6 / (module.in_features + module.out_features))
            assert module.weight.abs().max() <= bound
            # The std of a uniform distribution is its bound over sqrt(3), known to 1 % from 16,384 numbers or more.
            assert float(module.weight.std()) == pytest.approx(bound / math.sqrt(3), rel=0.03)
        elif isinstance(module, nn.Embedding):
            assert float(module.weight.std()) == pytest.approx(128**-0.5, rel=0.03)
            assert abs(float(module.weight.mean())) < 0.002  # the std of this mean is 0.00025 or less
        elif isinstance(module, nn.LayerNorm):
            assert (module.weight == 1).all()
            assert (module.bias == 0).all()
        if isinstance(module, nn.Linear) and module.bias is not None:
            assert (module.bias == 0).all()


def matches(pattern: str, name: str) -> bool:
    return re.fullmatch(pattern.replace(".", r"\.").replace("*", r"\d+"), name) is not None


@pytest.mark.parametrize("part", ["", "model", "model.encoder", "model.decoder"])
def test_plans_name_every_matrix_and_nothing_else(part: str) -> None:
    model: Any = tiny_model().get_submodule(part)
    modules = {name: module for name, module in model.named_modules() if isinstance(module, (nn.Linear, nn.Embedding))}
    for name in modules:
        assert any(matches(pattern, name) for pattern in model.tp_plan)
    for pattern in model.tp_plan:
        assert any(matches(pattern, name) for name in modules)
    for pattern in model._fsdp_plan:
        assert any(matches(pattern, name) for name, _ in model.named_modules())


@pytest.mark.parametrize("name", TABLE_3)
def test_models_of_table_3_have_their_printed_sizes(name: str) -> None:
    """With a vocabulary of 41,100 all rows but one have the printed size."""
    config = VaswaniTransformerConfig.from_paper(name, vocab_size=36000 if name == "big" else 41100)
    with torch.device("meta"):
        model = VaswaniTransformerForConditionalGeneration(config)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6) == TABLE_3[name]


def test_projection_with_a_bias_is_not_saved(tmp_path: Path) -> None:
    """It would be lost when the model is loaded."""
    model = tiny_model()
    model.lm_head = nn.Linear(model.config.d_model, model.config.vocab_size)
    with pytest.raises(ValueError, match=r"^lm_head: its bias would be lost .* Save a projection without bias\.$"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_position_after_omitted_logits_is_an_error_that_names_skip_logits(family: str) -> None:
    batch = {"input_ids": random_tokens(3, 6), "labels": targets(5, 4, 3)}
    model = EVERY_FAMILY[family]().train()
    outputs = model(**batch)
    assert outputs[0] is outputs.loss is outputs["loss"]
    assert outputs[:1] == (outputs.loss,)
    assert outputs.logits is None
    assert len(outputs.to_tuple()) == len(outputs.values()) == len(outputs)
    for position in (1, -1, slice(2), slice(1, None), slice(None)):
        with pytest.raises(ValueError, match=r"^outputs\[.*\]: .* Pass skip_logits=False to forward, [^\n]*$"):
            outputs[position]
    copied = pickle.loads(pickle.dumps(type(outputs)(**{name: value.detach() for name, value in outputs.items()})))
    assert (type(copied), float(copied[0])) == (type(outputs), float(outputs.loss.detach()))
    length = 6 * model.config.upsampling if family in SLOT_FAMILY else 5
    shape = (3, length, 99)
    loss, logits = model(**batch, skip_logits=False)[:2]
    assert (loss.shape, logits.shape) == ((), shape)
    assert model(**batch, return_dict=False)[1].shape == shape  # a tuple cannot say what it lacks
    assert model.eval()(**batch)[1].shape == shape


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_replaced_embeddings_count_for_ids_and_their_hooks_run(family: str, tmp_path: Path) -> None:
    model, calls = EVERY_FAMILY[family](), []
    embedding = torch.nn.Embedding(99, 32)
    model.set_input_embeddings(embedding)
    model.tie_weights()
    embedding.register_forward_hook(lambda *_: calls.append(1))
    source, labels = random_tokens(3, 6), targets(5, 4, 3)
    torch.testing.assert_close(
        model(input_ids=source, labels=labels).loss,
        model(inputs_embeds=model.get_input_embeddings()(source), labels=labels).loss,
    )
    assert len(calls) > 1
    with pytest.raises(ValueError, match=r"^embeddings: .* Set config.scale_embedding to False"):
        model.save_pretrained(tmp_path)
    model.config.scale_embedding = False
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    torch.testing.assert_close(
        again(input_ids=source, labels=labels).loss, model(input_ids=source, labels=labels).loss, **FLOAT32
    )


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_functional_gradient_is_that_of_the_backward_pass_in_training_mode(family: str) -> None:
    model, batch = EVERY_FAMILY[family]().train(), {"input_ids": random_tokens(3, 6), "labels": targets(5, 4, 3)}

    def loss(weights: dict[str, Tensor]) -> Tensor:
        torch.manual_seed(0)
        return torch.func.functional_call(model, weights, (), batch).loss

    weights = dict(model.named_parameters())
    gradients = torch.func.grad(loss)({name: weight.detach() for name, weight in weights.items()})
    loss(weights).backward()
    for name, weight in weights.items():
        torch.testing.assert_close(gradients[name], torch.zeros(()) if weight.grad is None else weight.grad)


@pytest.mark.parametrize("form", [dict, lambda outputs: outputs.to_tuple(), lambda outputs: outputs[0]])
@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_encoder_outputs_may_be_a_dict_a_tuple_or_a_tensor(family: str, form: Callable[..., Any]) -> None:
    model, source, labels = EVERY_FAMILY[family](), random_tokens(3, 6), targets(5, 4, 3)
    encoded = form(model.get_encoder()(source))
    expected, outputs = model(input_ids=source, labels=labels), model(encoder_outputs=encoded, labels=labels)
    assert torch.equal(outputs.loss, expected.loss)
    limit: dict[str, Any] = {"max_source_relative_length": 3}
    assert torch.equal(model.generate(encoder_outputs=encoded, **limit), model.generate(source, **limit))
    with pytest.raises(ValueError, match=r"^encoder_outputs: empty batch or sequence; got shape \(0, "):
        model(encoder_outputs=form(BaseModelOutput(model.get_encoder()(source)[0][:0])), labels=labels[:0])
    with pytest.raises(ValueError, match=r"^encoder_outputs: last_hidden_state is missing; got"):
        model.generate(encoder_outputs={"hidden_states": None})


@pytest.mark.parametrize("kept", [slice(None, None, 2), slice(1, None), slice(1)], ids=str)
@pytest.mark.parametrize("num_beams", [1, 3])
def test_decoder_without_some_layers_decodes_with_its_cache_and_prepared(kept: slice, num_beams: int) -> None:
    model, source = tiny_model(decoder_layers=3, tie_word_embeddings=False), random_tokens(3, 6)
    model.model.decoder.layers = model.model.decoder.layers[kept]
    exact = copy.deepcopy(model).double()
    settings: dict[str, Any] = {"num_beams": num_beams, "max_new_tokens": 8}
    expected = exact.generate(source, use_cache=False, **settings)
    assert torch.equal(exact.generate(source, **settings), expected)
    target = {"input_ids": source, "decoder_input_ids": expected}
    torch.testing.assert_close(
        prepare_for_inference(model)(**target).logits.double(), exact(**target).logits, **FLOAT32
    )
