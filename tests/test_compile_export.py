"""Compiled and exported forward passes are one graph with the same results, and so is a compiled search."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, fx, nn
from transformers import CompileConfig

from tests.exports import torch_exported
from tests.helpers import FLOAT32, assert_equal_at_tokens, masked_batch, random_tokens, source_batch, tiny_model
from vaswani_transformer import VaswaniTransformerForConditionalGeneration
from vaswani_transformer.attention import without_cudnn
from vaswani_transformer.batching.schedule import paper_adam, paper_schedule
from vaswani_transformer.embeddings import Dropout

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")]

POSITION_TYPES = ["sinusoidal", "learned"]
ONE_LAYER = {"encoder_layers": 1, "decoder_layers": 1}  # Inductor compiles each further one too


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch.compiler.reset()


def labeled(sources: list[int], targets: list[int]) -> dict[str, Tensor]:
    batch = masked_batch(sources, targets)
    batch["labels"] = batch.pop("decoder_input_ids").masked_fill(batch.pop("decoder_attention_mask") == 0, -100)
    return batch


@pytest.mark.parametrize("position_type", POSITION_TYPES)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_evaluation_compiles_as_one_graph(attention: str, position_type: str) -> None:
    model = tiny_model(attn_implementation=attention, position_embedding=position_type).requires_grad_(False)
    compiled = torch.compile(model, fullgraph=True, backend="eager", dynamic=True)
    for lengths in ([5, 3], [6, 2]), ([4, 9, 1], [3, 3, 7]):
        batch = masked_batch(*lengths)
        logits = compiled(**batch, use_cache=False).logits
        assert_equal_at_tokens(logits, model(**batch).logits, batch["decoder_attention_mask"])


def step(
    model: VaswaniTransformerForConditionalGeneration, forward: nn.Module, batch: dict[str, Tensor]
) -> list[Tensor]:
    """Return the loss of a training step, its gradients, and the weights after it."""
    optimizer = paper_adam(model.parameters())
    paper_schedule(optimizer, d_model=32, warmup_steps=4)
    outputs = forward(**batch)
    assert outputs.logits is None
    outputs.loss.backward()
    gradients = [cast(Tensor, parameter.grad).clone() for parameter in model.parameters()]
    optimizer.step()
    return [outputs.loss.detach(), *gradients, *(parameter.detach() for parameter in model.parameters())]


def test_training_step_compiles_as_one_graph_without_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of a GPU, which on a CPU changes nothing."""
    gpu = torch.device("cuda")
    batch = labeled([5, 3, 4], [6, 2, 5]) | {"num_items_in_batch": torch.tensor(30)}
    monkeypatch.setattr("vaswani_transformer.attention.without_cudnn", lambda device: without_cudnn(gpu))
    eager, model = (tiny_model(dropout=0.0, attn_implementation="sdpa", **ONE_LAYER).train() for _ in range(2))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for mine, other in zip(step(model, compiled, batch), step(eager, eager, batch), strict=True):
        torch.testing.assert_close(mine, other, **FLOAT32)
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_inductor_compiles_the_model() -> None:
    """The test compiles logits and a training step by Inductor."""
    model, batch = tiny_model(**ONE_LAYER).requires_grad_(False), masked_batch([5, 3], [6, 2])
    logits = torch.compile(model, fullgraph=True)(**batch, use_cache=False).logits
    assert_equal_at_tokens(logits, model(**batch).logits, batch["decoder_attention_mask"])

    batch = labeled([5, 3], [6, 2])
    eager, model = (tiny_model(dropout=0.0, **ONE_LAYER).train() for _ in range(2))
    compiled = torch.compile(model, fullgraph=True)
    for mine, other in zip(step(model, compiled, batch), step(eager, eager, batch), strict=True):
        torch.testing.assert_close(mine, other, **FLOAT32)


def test_compiled_dropout_is_torch_s() -> None:
    batch, losses = labeled([5, 3, 4], [6, 2, 5]), []
    for compile_it in (False, True):
        model = tiny_model(dropout=0.1, attention_dropout=0.1, activation_dropout=0.1).train()
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
    "beams": {"num_beams": 4, "max_new_tokens": 9},
    "the paper's": {
        "num_beams": 4,
        "length_penalty": 0.6,
        "length_penalty_type": "gnmt",
        "max_source_relative_length": 4,
    },
}


def compiled_by(backend: str | Callable[..., Any]) -> CompileConfig:
    """Make `generate()` compile on the CPU what it compiles on an accelerator, as one graph."""
    config = CompileConfig(fullgraph=True, dynamic=False, backend=backend, mode=cast(str, None))
    config._compile_all_devices = True
    return config


def keeping(graphs: list[fx.GraphModule]) -> Callable[..., Any]:
    """Return a backend that compiles nothing and appends its graphs to `graphs`, even if its config is copied."""

    def keep(graph: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    return keep


@pytest.mark.parametrize("position_type", POSITION_TYPES)
def test_generate_compiles_one_graph_for_all_steps_over_a_static_cache(position_type: str) -> None:
    """Transformers does so in sampling and greedy search, not in beam search."""
    model, graphs = tiny_model(position_embedding=position_type).double(), []
    inputs = source_batch([5, 3]) | SEARCHES["greedy"]
    generated = model.generate(**inputs, cache_implementation="static", compile_config=compiled_by(keeping(graphs)))
    assert generated.shape[1] > 5
    assert torch.equal(generated, model.generate(**inputs))
    assert len(graphs) == 1


@pytest.mark.parametrize("position_type", POSITION_TYPES)
@pytest.mark.parametrize("search", SEARCHES)
def test_compiled_model_searches_over_a_static_cache_in_two_graphs(search: str, position_type: str) -> None:
    """One graph is for the first step, which fills the cache of the source, and one for all others."""
    model, graphs = tiny_model(position_embedding=position_type).double(), []
    inputs = source_batch([5, 3]) | SEARCHES[search]
    expected = model.generate(**inputs)
    assert expected.shape[1] > 5
    model.forward = torch.compile(model.forward, fullgraph=True, dynamic=False, backend=keeping(graphs))
    assert torch.equal(model.generate(**inputs, cache_implementation="static"), expected)
    assert len(graphs) == 2


def test_beam_search_keeps_the_addresses_of_a_static_cache() -> None:
    """A CUDA graph reads and writes the addresses that it was recorded with."""
    model, addresses = tiny_model().double(), set()
    plain = model.forward

    @functools.wraps(plain)
    def forward(*args: Any, **inputs: Any) -> Any:
        outputs = plain(*args, **inputs)
        layers = [
            layer
            for cache in (outputs.past_key_values.self_attention_cache, outputs.past_key_values.cross_attention_cache)
            for layer in cache.layers
        ]
        addresses.add(tuple(tensor.data_ptr() for layer in layers for tensor in (layer.keys, layer.values)))
        return outputs

    model.forward = forward
    inputs = source_batch([5, 3]) | SEARCHES["beams"]
    generated = model.generate(**inputs, cache_implementation="static")
    assert generated.shape[1] > 5
    assert len(addresses) == 1
    assert torch.equal(generated, model.generate(**inputs))


def test_inductor_compiles_the_steps_of_both_searches() -> None:
    model = tiny_model(**ONE_LAYER).double()
    inputs = source_batch([5, 3], cache_implementation="static")
    greedy, paper = ({**inputs, **SEARCHES[search]} for search in ("greedy", "the paper's"))
    expected = [model.generate(**inputs, disable_compile=True) for inputs in (greedy, paper)]
    generated = model.generate(**greedy, compile_config=compiled_by("inductor"))
    assert torch.equal(generated, expected[0])
    model.forward = torch.compile(model.forward, fullgraph=True, dynamic=False)
    assert torch.equal(model.generate(**paper), expected[1])


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("position_type", POSITION_TYPES)
def test_exported_model_takes_any_batch_and_any_lengths(position_type: str, strict: bool) -> None:
    model = tiny_model(position_embedding=position_type).requires_grad_(False)
    program = torch_exported(model, masked_batch([5, 3, 4], [6, 2, 5]) | {"use_cache": False}, strict).module()
    for lengths in ([5, 3, 4], [6, 2, 5]), ([4, 9], [3, 7]), ([2, 17, 3, 30], [33, 1, 2, 5]):
        batch = masked_batch(*lengths)
        logits = program(**batch, use_cache=False).logits
        assert_equal_at_tokens(logits, model(**batch).logits, batch["decoder_attention_mask"])
    words = {"input_ids": random_tokens(3, 5), "decoder_input_ids": random_tokens(3, 4), "use_cache": False}
    program = torch_exported(model, words, strict).module()
    words = {"input_ids": random_tokens(2, 19), "decoder_input_ids": random_tokens(2, 7), "use_cache": False}
    torch.testing.assert_close(program(**words).logits, model(**words).logits, **FLOAT32)


def test_encoder_is_exported_with_dynamic_lengths(tmp_path: Path) -> None:
    encoder = tiny_model().get_encoder().requires_grad_(False)
    torch.export.save(torch_exported(encoder, source_batch([5, 3, 4])), tmp_path / "encoder.pt2")
    program, batch = torch.export.load(tmp_path / "encoder.pt2").module(), source_batch([17, 2])
    states = program(**batch).last_hidden_state
    assert_equal_at_tokens(states, encoder(**batch).last_hidden_state, batch["attention_mask"])
