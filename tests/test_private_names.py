"""The private names of Transformers and torch that the package uses are listed here, and a missing one is an error."""

import argparse
import ast
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import nn
from transformers import Pipeline, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.generation import GenerationMixin

from tests.helpers import padded_batch, tiny_config, tiny_model
from vaswani_transformer import VaswaniTransformerForConditionalGeneration, prepare_for_inference
from vaswani_transformer.cpu.decoder import DecoderStep
from vaswani_transformer.cpu.encoder import PreparedEncoder
from vaswani_transformer.cpu.linear import LINEAR_FACTORIES, is_supported, raw_op
from vaswani_transformer.generation import ENTRY_POINTS
from vaswani_transformer.pretrained import PRIVATE_NAMES

PACKAGE = Path(__file__).resolve().parent.parent / "vaswani_transformer"
USED = {
    "attention.py": {"_attn_implementation"},
    "batching/tokens.py": {"_indices"},
    "body.py": {
        "_input_embed_layer",
        "_tied_weights_keys",
        "_tp_plan",
    },
    "cmlm.py": {"_no_split_modules"},
    "support/command_line.py": {"_AppendAction", "_option_string_actions"},
    "cpu/encoder.py": {"_attn_implementation"},
    "cpu/layers.py": {"_modules"},
    "cpu/linear.py": {
        "_linear_pointwise",
        "_op",
        "_reorder_linear_weight",
        "linear_dynamic",
        "linear_prepack",
        "linear_unpack",
    },
    "cpu/model.py": {"_apply", "_attn_implementation"},
    "decoder.py": {"_can_record_outputs", "_fsdp_plan", "_tp_plan"},
    "embeddings.py": {"_forward_hooks", "_forward_pre_hooks", "_hf_hook"},
    "encoder.py": {"_can_record_outputs", "_fsdp_plan", "_tp_plan"},
    "flow.py": {"_apply"},
    "flowseq.py": {"_init_weights", "_no_split_modules", "_supports_flash_attn", "_supports_flex_attn"},
    "generation.py": {"_beam_search", "_sample"},
    "support/interrupts.py": {"_exit"},
    "iterative_vae.py": {
        "_no_split_modules",
        "_supports_flash_attn",
        "_supports_flex_attn",
    },
    "support/modes.py": {"_attn_implementation"},
    "nat.py": {"_no_split_modules", "_supports_flash_attn", "_supports_flex_attn"},
    "nar_decoder.py": {"_can_record_outputs"},
    "nat_decoder.py": {"_attn_implementation", "_supports_flash_attn", "_supports_flex_attn", "_tp_plan"},
    "nar_generation.py": {"_get_default_generation_params"},
    "pipeline.py": {"_forward", "_load_tokenizer", "_pipeline_calls_generate", "_sanitize_parameters"},
    "pretrained.py": {
        "_attn_implementation",
        "_apply",
        "_auto_class",
        "_can_compile_fullgraph",
        "_can_record_outputs",
        "_fsdp_plan",
        "_get_default_generation_params",
        "_init_weights",
        "_input_embed_layer",
        "_no_split_modules",
        "_skip_keys_device_placement",
        "_supports_attention_backend",
        "_supports_flash_attn",
        "_supports_flex_attn",
        "_supports_sdpa",
        "_tied_weights_keys",
        "_tp_plan",
    },
    "tokenizer.py": {"_auto_class"},
    "translation/loading.py": {"_commit_hash"},
    "restricted.py": {"_attn_implementation"},
}
# The owner of each in the tested versions. Accelerate sets `_hf_hook` on a module, the Hub's loader `_commit_hash`.
OWNERS = {
    "_attn_implementation": PreTrainedConfig,
    "_apply": nn.Module,
    "_AppendAction": argparse,
    "_option_string_actions": argparse.ArgumentParser(),
    "_beam_search": GenerationMixin,
    "_sample": GenerationMixin,
    "_forward": Pipeline,
    "_load_tokenizer": Pipeline,
    "_pipeline_calls_generate": Pipeline,
    "_sanitize_parameters": Pipeline,
    "_forward_hooks": nn.Module(),
    "_forward_pre_hooks": nn.Module(),
    "_exit": os,
    "_indices": Dataset.from_dict({}),
    "_modules": nn.Module(),
    "_auto_class": PreTrainedTokenizerFast,
    "_linear_pointwise": torch.ops.mkldnn,
    "_op": torch.ops.mkldnn._linear_pointwise.default,
    "_reorder_linear_weight": torch.ops.mkldnn,
    "linear_dynamic": torch.ops.quantized,
    "linear_prepack": torch.ops.quantized,
    "linear_unpack": torch.ops.quantized,
}


def private_names(path: Path) -> Iterator[str]:
    """Yield the names that a file reads, overrides or writes as a string, and functions of `torch.ops`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            yield node.attr
            owner = node.value
            is_op = isinstance(owner, ast.Attribute) and isinstance(owner.value, ast.Attribute)
            if is_op and owner.value.attr == "ops":
                yield f"op {node.attr}"
        elif isinstance(node, ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            yield node.value


def own_names() -> set[str]:
    """Return the private functions and attributes that the package defines itself, other than overrides."""
    foreign = set().union(*USED.values())
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    functions = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    names = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    stored = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    return (functions | names | stored) - foreign


def test_every_private_name_is_listed_by_its_file() -> None:
    own_private, used = own_names() | {"_", "_proj"}, {}
    for path in PACKAGE.rglob("*.py"):
        names = set(private_names(path))
        private = {name for name in names if name.startswith("_") and not name.startswith("__")} - own_private
        private |= {name.removeprefix("op ") for name in names if name.startswith("op ")}
        if private:
            used[path.relative_to(PACKAGE).as_posix()] = private
    assert used == USED


@pytest.mark.parametrize("name", sorted(OWNERS))
def test_private_name_exists_in_this_version(name: str) -> None:
    assert hasattr(OWNERS[name], name)


def rename(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
    """Delete a name from its owner and from the classes that the owner inherits it from."""
    for each in (owner, *owner.__mro__):
        if name in vars(each):
            monkeypatch.delattr(each, name)


@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_missing_entry_point_is_an_error_that_names_the_versions_that_have_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, (ids, mask) = tiny_model(), padded_batch([3, 2])
    model.use_paper_decoding()
    monkeypatch.delattr(GenerationMixin, name)
    with pytest.raises(RuntimeError, match=rf"GenerationMixin\.{name} of this .*; install Transformers 5\.17 to 5\.23"):
        model.generate(ids, attention_mask=mask)


@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_entry_point_with_other_arguments_is_an_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GenerationMixin, name, lambda self, input_ids, **kwargs: input_ids)
    with pytest.raises(RuntimeError, match=rf"{name} of this Transformers does not take .*generation_config"):
        tiny_model().generate(torch.tensor([[5, 2]]))


@pytest.mark.parametrize(("owner", "name"), [(owner, name) for owner, names in PRIVATE_NAMES.items() for name in names])
def test_missing_private_name_is_an_error_that_names_the_versions_that_have_it(
    owner: type[PreTrainedConfig | PreTrainedModel], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config()
    rename(monkeypatch, owner, name)
    with pytest.raises(RuntimeError, match=rf"has no {owner.__name__}\.{name}, .*install Transformers 5\.17 to 5\.23"):
        VaswaniTransformerForConditionalGeneration(config)


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
    function: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    namespace = torch.ops.mkldnn if function.startswith("_") else torch.ops.quantized

    class Missing:
        def __getattr__(self, name: str) -> Any:
            if name == function:
                raise AttributeError(name)
            return getattr(namespace, name)

    monkeypatch.setattr(torch.ops, "mkldnn" if function.startswith("_") else "quantized", Missing())
    model, (ids, mask) = tiny_model(), padded_batch([3, 2])
    prepared = prepare_for_inference(model, dtype)
    assert {type(module) for module in prepared.modules()} & {nn.Linear}
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 4, "num_beams": 2}
    assert torch.equal(prepared.generate(ids, **options), model.generate(ids, **options))


def test_operator_without_its_compiled_function_is_called_as_it_is() -> None:
    operator = torch.ops.mkldnn._linear_pointwise.default
    assert raw_op(operator) is operator._op is not operator
    renamed = SimpleNamespace(compiled=operator._op)
    assert raw_op(renamed) is renamed


def test_fast_paths_are_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """float32 and int8 are packed on x86 in the tested versions, and encoder and decoder take the fast path."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this build of torch has no oneDNN")
    assert is_supported(LINEAR_FACTORIES["float32"])
    taken = []
    for each, name in ((DecoderStep, "__call__"), (PreparedEncoder, "fast_pass")):
        call = getattr(each, name)
        monkeypatch.setattr(each, name, lambda *args, call=call: taken.append(call) or call(*args))
    ids, mask = padded_batch([3, 2])
    prepare_for_inference(tiny_model()).generate(
        ids, attention_mask=mask, max_new_tokens=3, min_new_tokens=3, num_beams=2
    )
    assert len(taken) == 1 + 3
