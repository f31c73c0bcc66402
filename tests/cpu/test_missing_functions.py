"""A prepared model where torch lacks a private function has plain layers and the same result."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers import source_batch, tiny_model
from vaswani_transformer import prepare_for_inference
from vaswani_transformer.cpu import model as cpu_model
from vaswani_transformer.cpu.decoder import DecoderStep
from vaswani_transformer.cpu.encoder import PreparedEncoder
from vaswani_transformer.cpu.linear import LAYOUTS, PreparedLinear, chosen_layouts, is_supported, pack


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
    model, call = tiny_model(), source_batch([3, 2], max_new_tokens=4, num_beams=2)
    prepared = prepare_for_inference(model, dtype)
    assert ("cannot pack layers in int8 here; the copy has plain ones" in caplog.text) == (dtype == "int8")
    layers = [module for module in prepared.modules() if isinstance(module, nn.Linear | PreparedLinear)]
    assert {type(layer) for layer in layers} == {PreparedLinear if dtype == "float32" else nn.Linear}
    assert not chosen_layouts  # there is no choice
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
