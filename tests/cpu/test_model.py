"""A model prepared for the CPU decodes as the original, leaves it unchanged, and raises for everything else.

Where torch lacks a private function the copy has plain layers and the same result.
"""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from peft import LoraConfig, get_peft_model
from torch import nn

from tests.batches import FLOAT32, random_batch, random_tokens, source_batch
from tests.cpu.packed import KINDS, decided_call, needs
from tests.models import EVERY_FAMILY, PAIRS, model_of_pairs, random_model, tiny_model
from vaswani_transformer import VaswaniTransformerModel, prepare_for_inference
from vaswani_transformer.cpu import model as cpu_model
from vaswani_transformer.cpu.decoder import DecoderStep
from vaswani_transformer.cpu.encoder import PreparedEncoder
from vaswani_transformer.cpu.linear import LAYOUTS, PreparedLinear, is_supported, pack
from vaswani_transformer.layers import Dropout

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"num_beams": 1},
    "beam": {"num_beams": 3},
    "many": {"num_beams": 4, "num_return_sequences": 2},
}


EVERY_DTYPE = [needs(dtype) for dtype in LAYOUTS]


@pytest.mark.parametrize("layout", LAYOUTS["float32"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_float32_copy_finds_the_same_tokens_and_scores(
    kind: str, way: str, layout: str, choose_layout: Callable[[str], None]
) -> None:
    choose_layout(layout)
    model = random_model(**KINDS[kind])
    model.use_paper_decoding()
    call = decided_call(model, [5, 3, 6], max_new_tokens=8, **WAYS[way])
    outputs: dict[str, Any] = {"return_dict_in_generate": True, "output_scores": True}
    true = model.generate(**call, **outputs)
    prepared: Any = prepare_for_inference(model)
    assert {*prepared.layouts.values()} == {layout}
    generated = prepared.generate(**call, **outputs)
    assert torch.equal(generated.sequences, true.sequences)
    if "sequences_scores" in true:
        torch.testing.assert_close(generated.sequences_scores, true.sequences_scores, **FLOAT32)
    assert torch.equal(prepared.generate(**call), true.sequences)


@pytest.mark.parametrize("dtype", EVERY_DTYPE)
def test_confident_model_decodes_the_same_in_every_dtype(dtype: str) -> None:
    model, tokenizer = model_of_pairs()
    prepared = prepare_for_inference(model, dtype)
    batch = tokenizer(list(PAIRS), padding=True, return_tensors="pt")
    for way in WAYS.values():
        generated = prepared.generate(**batch, max_new_tokens=20, **way)[:: way.get("num_return_sequences", 1)]
        assert tokenizer.batch_decode(generated, skip_special_tokens=True) == list(PAIRS.values())
    inputs: dict[str, Any] = {
        **batch,
        "labels": tokenizer(list(PAIRS.values()), padding=True, return_tensors="pt")["input_ids"],
    }
    true, generated = model(**inputs), prepared(**inputs)
    # Every layer has a relative error of about 2^-9, or half of 1/127. Norms bring each output back to size 1, and the
    # independent errors of about twenty products add up like their root.
    largest = {"float32": 1e-5, "bfloat16": 20**0.5 * 2**-8, "int8": 20**0.5 / 127}[dtype]
    error = (generated.logits - true.logits).square().mean().sqrt() / true.logits.square().mean().sqrt()
    assert error < largest
    assert generated.loss == pytest.approx(float(true.loss), abs=0.05)


@pytest.mark.parametrize("dtype", EVERY_DTYPE)
@pytest.mark.parametrize("kind", ["plain", "own projection"])
def test_preparing_leaves_the_original_unchanged_and_the_copy_independent(kind: str, dtype: str) -> None:
    model = random_model(**KINDS[kind]).train()
    model.model.encoder.layers[0].self_attn.q_proj.weight.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    needs_gradients = [weight.requires_grad for weight in model.parameters()]
    attention, random_state = model.config._attn_implementation, torch.get_rng_state()
    prepared = prepare_for_inference(model, dtype)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert model.training
    assert not any(module.training for module in prepared.modules())
    assert model.config._attn_implementation == attention
    assert [weight.requires_grad for weight in model.parameters()] == needs_gradients
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    addresses = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    assert not addresses & {weight.untyped_storage().data_ptr() for weight in prepared.parameters()}
    inputs = random_batch()
    logits = prepared(**inputs).logits
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(**inputs, labels=inputs["decoder_input_ids"]).loss.backward()
    optimizer.step()
    assert not torch.equal(model.model.shared.weight, before["model.shared.weight"])
    assert torch.equal(prepared(**inputs).logits, logits)


@pytest.mark.parametrize("dtype", EVERY_DTYPE)
def test_prepared_model_cannot_be_trained_saved_copied_or_moved(dtype: str, tmp_path: Path) -> None:
    prepared = prepare_for_inference(tiny_model(), dtype)
    assert prepared.eval() is prepared
    assert prepared.train(False) is prepared
    with pytest.raises(RuntimeError, match="cannot be trained; train the original model"):
        prepared.train()
    for save in (prepared.save_pretrained, prepared.push_to_hub, prepared.with_remote_code, prepared.state_dict):
        with pytest.raises(RuntimeError, match="cannot be saved; save the original model"):
            save(tmp_path / "model")
    assert not (tmp_path / "model").exists()
    for copying in (copy.copy, copy.deepcopy, pickle.dumps, lambda model: torch.save(model, tmp_path / "model.pt")):
        with pytest.raises(RuntimeError, match="cannot be copied or pickled; prepare the original model again"):
            copying(prepared)
    for move in (prepared.half, prepared.double, lambda: prepared.to(torch.bfloat16), lambda: prepared.to("meta")):
        with pytest.raises(RuntimeError, match=r"cannot become torch\.\w+ on \w+; move the original model"):
            move()
    assert prepared.to("cpu") is prepared
    assert prepared.float() is prepared
    with pytest.raises(ValueError, match=r"already prepared for inference\. Pass the original model"):
        prepare_for_inference(prepared, dtype)
    assert prepared.generate(torch.tensor([[5, 6, 2]]), max_new_tokens=3).shape[0] == 1


@pytest.mark.parametrize("dtype", EVERY_DTYPE)
def test_inputs_that_require_gradients_are_an_error_unless_gradients_are_off(dtype: str) -> None:
    """In each mode without gradients the copy gives the same."""
    prepared = prepare_for_inference(random_model(), dtype)
    embeds, tokens = torch.randn(2, 3, 32), torch.zeros(2, 1).long()
    logits = prepared(inputs_embeds=embeds, decoder_input_ids=tokens).logits
    embeds.requires_grad_()
    with pytest.raises(RuntimeError, match=r"does not compute gradients; call it under torch\.no_grad"):
        prepared(inputs_embeds=embeds, decoder_input_ids=tokens)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            again = prepared(inputs_embeds=embeds, decoder_input_ids=tokens).logits
            assert not again.requires_grad
            assert torch.equal(again, logits)


@pytest.mark.parametrize(
    ("change", "dtype", "message"),
    [
        (lambda model: model, "float16", r"dtype is 'float16'; choose one of float32, bfloat16, int8"),
        (
            lambda model: model.bfloat16(),
            "bfloat16",
            r"weights of torch\.bfloat16 on cpu, expected torch\.float32 on cpu\. Move it with",
        ),
        (torch.compile, "float32", r"model: is wrapped.*got a OptimizedModule, .*Pass merge_and_unload\(\) of a PEFT"),
        (lambda _: nn.Linear(2, 2), "float32", r"model: is wrapped, or is not a Transformers model; got a Linear"),
    ],
)
def test_object_that_cannot_be_prepared_is_an_error(
    change: Callable[[nn.Module], Any], dtype: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        prepare_for_inference(change(tiny_model()), dtype)


def hook(model: Any) -> None:
    model.model.decoder.layers[0].feed_forward.register_forward_hook(lambda module, inputs, output: output + 1)


def quantize_outside(model: Any) -> None:
    """Make a layer one of a subclass, as Quanto does."""
    model.model.encoder.layers[0].feed_forward.fc1.__class__ = type("QLinear", (nn.Linear,), {})


CHANGES: dict[str, Callable[[Any], Any]] = {
    "an adapter": lambda model: get_peft_model(model, LoraConfig(target_modules=["v_proj"])),
    "a trained copy": lambda model: get_peft_model(
        model, LoraConfig(target_modules=["fc1"], modules_to_save=["lm_head"])
    ),
    "a table's adapter": lambda model: get_peft_model(model, LoraConfig(target_modules=["embed_tokens"])),
    "a hook": hook,
    "a quantized layer": quantize_outside,
    "offloading": lambda model: cpu_offload(model, torch.device("cpu")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_layer_that_is_not_plain_is_an_error(change: str) -> None:
    model = tiny_model()
    CHANGES[change](model)
    with pytest.raises(ValueError, match=r"is a \w+ that is wrapped, or whose weight is not loaded; merge adapters"):
        prepare_for_inference(model)


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_memory_footprint_counts_packed_weights(family: str) -> None:
    model = EVERY_FAMILY[family]()
    model(input_ids=random_tokens(2, 5), labels=random_tokens(2, 3), output_attentions=True)  # Transformers adds hooks
    prepared = prepare_for_inference(model)
    assert model.get_memory_footprint() <= prepared.get_memory_footprint() < 3 * model.get_memory_footprint()


@pytest.mark.parametrize("dtype", EVERY_DTYPE)
def test_prepared_model_is_of_its_class_and_has_a_dtype_and_a_device(dtype: str) -> None:
    model = tiny_model()
    prepared = prepare_for_inference(model, dtype)
    assert isinstance(prepared, type(model))
    assert (prepared.dtype, prepared.device) == (torch.float32, torch.device("cpu"))
    kinds = [type(module) for module in prepared.modules()]
    assert nn.Linear not in kinds
    assert Dropout not in kinds
    assert kinds.count(PreparedLinear) == 25
    assert prepared.get_input_embeddings() is prepared.model.shared
    assert prepared.model.encoder.embed_tokens.weight is prepared.model.shared.weight
    assert prepared.generation_config.to_dict() == model.generation_config.to_dict()


def test_body_and_a_single_stack_can_be_prepared() -> None:
    model, inputs = VaswaniTransformerModel(tiny_model().config).eval(), random_batch()
    torch.testing.assert_close(
        prepare_for_inference(model)(**inputs).last_hidden_state, model(**inputs).last_hidden_state, **FLOAT32
    )
    states = prepare_for_inference(model.encoder)(inputs["input_ids"]).last_hidden_state
    torch.testing.assert_close(states, model.encoder(inputs["input_ids"]).last_hidden_state, **FLOAT32)


@pytest.mark.parametrize("part", ["", "model.encoder", "model.decoder"])
@pytest.mark.parametrize("wanted", ["output_hidden_states", "output_attentions"])
def test_prepared_modules_return_the_outputs_that_they_can_record(part: str, wanted: str) -> None:
    complete = random_model()
    complete.set_attn_implementation("eager")
    model: Any = complete.get_submodule(part).eval()
    inputs = random_batch()
    if part == "model.encoder":
        inputs = {"input_ids": inputs["input_ids"]}
    if part == "model.decoder":
        inputs = {"input_ids": inputs["decoder_input_ids"], "encoder_hidden_states": torch.randn(3, 7, 32)}
    prepared_output, true = (
        each(**inputs, use_cache=False, **{wanted: True}) for each in (prepare_for_inference(model), model)
    )
    assert len(true) > 1
    assert list(prepared_output) == list(true)
    for name, output in true.items():
        torch.testing.assert_close(prepared_output[name], output, **FLOAT32)


@pytest.mark.parametrize(
    ("function", "dtype"),
    [
        ("_linear_pointwise", "float32"),
        ("_reorder_linear_weight", "float32"),
        ("linear_dynamic", "int8"),
        ("linear_prepack", "int8"),
        ("linear_unpack", "int8"),
    ],
)
def test_prepared_model_without_a_function_of_torch_has_plain_layers_and_the_same_result(
    function: str, dtype: str, no_layouts: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    namespace = torch.ops.mkldnn if function.startswith("_") else torch.ops.quantized

    class Missing:
        def __getattr__(self, name: str) -> Any:
            if name == function:
                raise AttributeError(name)
            return getattr(namespace, name)

    monkeypatch.setattr(torch.ops, "mkldnn" if function.startswith("_") else "quantized", Missing())
    monkeypatch.setattr(cpu_model.logger, "propagate", True)
    model = random_model()
    call = decided_call(model, [3, 2], max_new_tokens=4, num_beams=2)
    prepared = prepare_for_inference(model, dtype)
    assert ("cannot pack layers in int8 here; the copy has plain ones" in caplog.text) == (dtype == "int8")
    layers = [module for module in prepared.modules() if isinstance(module, nn.Linear | PreparedLinear)]
    assert {type(layer) for layer in layers} == {PreparedLinear if dtype == "float32" else nn.Linear}
    assert not prepared.layouts  # there is no choice
    assert torch.equal(prepared.generate(**call), model.generate(**call))


def test_operator_without_its_compiled_function_is_called_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, rows, mkldnn = torch.randn(4, 3), torch.randn(2, 3), torch.ops.mkldnn
    renamed = SimpleNamespace(default=lambda *args: mkldnn._linear_pointwise.default(*args))
    expected = pack(weight, None).product(rows)
    functions = {"_linear_pointwise": renamed, "_reorder_linear_weight": mkldnn._reorder_linear_weight}
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace(**functions))
    assert torch.equal(pack(weight, None).product(rows), expected)


def test_fast_paths_are_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """float32 is packed on x86 in the tested versions, and encoder and decoder take the fast path."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this build of torch has no oneDNN")
    assert is_supported(LAYOUTS["float32"]["onednn"])
    taken = []
    for each, name in ((DecoderStep, "__call__"), (PreparedEncoder, "fast_pass")):
        call = getattr(each, name)
        monkeypatch.setattr(each, name, lambda *args, call=call: taken.append(call) or call(*args))
    call = source_batch([3, 2], max_new_tokens=3, min_new_tokens=3, num_beams=2)
    prepare_for_inference(tiny_model()).generate(**call)
    assert len(taken) == 1 + 3


@pytest.mark.parametrize("dtype", EVERY_DTYPE)
@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_copy_shares_no_memory_with_its_model(family: str, dtype: str) -> None:
    """A single length class has a projection of one row, whose transpose is contiguous."""
    classes = {} if family in ("autoregressive", "cmlm") else {"min_length_difference": 0, "max_length_difference": 0}
    model, source = EVERY_FAMILY[family](tie_word_embeddings=False, attention_bias=True, **classes), random_tokens(3, 6)
    prepared = prepare_for_inference(model, dtype)
    expected = prepared(input_ids=source, labels=random_tokens(3, 4).fill_(5))
    for weight in model.parameters():
        weight.data.fill_(0.5)
    assert torch.equal(prepared(input_ids=source, labels=random_tokens(3, 4).fill_(5)).logits, expected.logits)
    assert torch.equal(prepared(input_ids=source, labels=random_tokens(3, 4).fill_(5)).loss, expected.loss)
    with pytest.raises(RuntimeError, match="cannot be resized; resize the original model"):
        prepared.resize_token_embeddings(120)
