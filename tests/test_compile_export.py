"""Compiled and exported forward passes are one graph with the same results, and so is a compiled search."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, fx, nn
from transformers import CompileConfig

from tests.batches import FLOAT32, assert_equal_at_tokens, masked_batch, source_batch, targets
from tests.models import tiny_model
from vaswani_transformer.layers import Dropout, without_cudnn

SHALLOW: dict[str, Any] = {"encoder_layers": 1, "decoder_layers": 1}  # layers are traced one by one
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")]


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch.compiler.reset()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_evaluation_with_learned_positions_compiles_as_one_graph(attention: str) -> None:
    model = tiny_model(**SHALLOW, attn_implementation=attention, position_embedding="learned").requires_grad_(False)
    compiled = torch.compile(model, fullgraph=True, backend="eager", dynamic=True)
    for lengths in ([5, 3], [6, 2]), ([4, 9, 1], [3, 3, 7]):
        batch = masked_batch(*lengths)
        logits = compiled(**batch, use_cache=False).logits
        assert_equal_at_tokens(logits, model(**batch).logits, batch["decoder_attention_mask"])


def test_training_step_compiles_as_one_graph_without_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of a GPU, which on a CPU changes nothing."""
    gpu = torch.device("cuda")
    batch = source_batch([5, 3, 4], labels=targets(6, 2, 5), num_items_in_batch=torch.tensor(30))
    monkeypatch.setattr("vaswani_transformer.layers.without_cudnn", lambda device: without_cudnn(gpu))
    model, results = tiny_model(**SHALLOW, dropout=0.0, attn_implementation="sdpa").train(), []
    for forward in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        outputs = forward(**batch)
        assert outputs.logits is None
        results.append((outputs.loss, *torch.autograd.grad(outputs.loss, list(model.parameters()))))
    torch.testing.assert_close(*results, **FLOAT32)
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_compiled_dropout_is_torch_s() -> None:
    batch, losses = source_batch([5, 3, 4], labels=targets(6, 2, 5)), []
    for compile_it in (False, True):
        model = tiny_model(**SHALLOW, dropout=0.1, attention_dropout=0.1, activation_dropout=0.1).train()
        forward = torch.compile(model, fullgraph=True, backend="aot_eager") if compile_it else model
        for module in model.modules():
            if isinstance(module, Dropout) and not compile_it:
                module.__class__ = nn.Dropout
        torch.manual_seed(2)
        losses.append(forward(**batch).loss)
        losses[-1].backward()
    torch.testing.assert_close(losses[1], losses[0], **FLOAT32)


# Of models in float64, where rounding decides between no tokens.
SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {"max_new_tokens": 9},
    "the paper's": {
        "num_beams": 4,
        "length_penalty": 0.6,
        "length_penalty_type": "gnmt",
        "max_source_relative_length": 4,
    },
}


def test_beam_search_keeps_the_addresses_of_a_static_cache() -> None:
    """A CUDA graph reads and writes the addresses that it was recorded with."""
    model, addresses = tiny_model().double(), set()

    def record(module: nn.Module, inputs: Any, outputs: Any) -> None:
        cache = outputs.past_key_values
        layers = [*cache.self_attention_cache.layers, *cache.cross_attention_cache.layers]
        addresses.add(tuple(tensor.data_ptr() for layer in layers for tensor in (layer.keys, layer.values)))

    model.register_forward_hook(record)
    inputs = source_batch([5, 3]) | SEARCHES["the paper's"]
    generated = model.generate(**inputs, cache_implementation="static")
    assert generated.shape[1] > 5
    assert len(addresses) == 1
    assert torch.equal(generated, model.generate(**inputs))


def keeping(graphs: list[fx.GraphModule]) -> Callable[..., Any]:
    """Return a backend that compiles nothing and appends its graphs to `graphs`, even if its config is copied."""

    def keep(graph: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    return keep


def test_generate_compiles_one_graph_for_all_steps_over_a_static_cache() -> None:
    """Transformers does so in sampling and greedy search, not in beam search."""
    model, graphs = tiny_model().double(), []
    inputs = source_batch([5, 3]) | SEARCHES["greedy"]
    config = CompileConfig(fullgraph=True, dynamic=False, backend=keeping(graphs), mode=cast(str, None))
    config._compile_all_devices = True  # as on an accelerator
    generated = model.generate(**inputs, cache_implementation="static", compile_config=config)
    assert generated.shape[1] > 5
    assert torch.equal(generated, model.generate(**inputs))
    assert len(graphs) == 1


@pytest.mark.parametrize("search", SEARCHES)
def test_compiled_model_searches_over_a_static_cache_in_two_graphs(search: str) -> None:
    """One graph is for the first step, which fills the cache of the source, and one for all others."""
    model, graphs = tiny_model(position_embedding="learned").double(), []
    inputs = source_batch([5, 3]) | SEARCHES[search]
    expected = model.generate(**inputs)
    assert expected.shape[1] > 5
    model.forward = torch.compile(model.forward, fullgraph=True, dynamic=False, backend=keeping(graphs))
    assert torch.equal(model.generate(**inputs, cache_implementation="static"), expected)
    assert len(graphs) == 2
