"""The private names of libraries that the project uses are listed, and a missing one is an error."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers import ROOT, source_batch, tiny_config, tiny_model
from tests.private_names import PRIVATE_NAMES, describe, describe_all, print_changes
from vaswani_transformer import VaswaniTransformerForConditionalGeneration, prepare_for_inference
from vaswani_transformer.cpu.decoder import DecoderStep
from vaswani_transformer.cpu.encoder import PreparedEncoder
from vaswani_transformer.cpu.linear import LAYOUTS, PreparedLinear, TransposedLinear, is_supported, raw_op
from vaswani_transformer.pretrained import PRIVATE_NAMES as MODEL_NAMES

PACKAGE = ROOT / "vaswani_transformer"
FILES = {
    path.relative_to(PACKAGE if path.is_relative_to(PACKAGE) else ROOT).with_suffix("").as_posix(): path
    for folder in (PACKAGE, ROOT / "training")
    for path in folder.rglob("*.py")
}
# Names and texts of the project that some library has too.
COINCIDENCES = {"_buffers", "_decode", "_proj", "_reddit_"}


def nodes(path: Path) -> Iterator[ast.AST]:
    """Yield the nodes of a file, without the fragments of its f-strings."""
    waiting: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while waiting:
        yield (node := waiting.pop())
        is_text = isinstance(node, ast.JoinedStr)
        waiting += [each for each in ast.iter_child_nodes(node) if not (is_text and isinstance(each, ast.Constant))]


def private_names(path: Path) -> Iterator[str]:
    """Yield the names that a file imports, reads, overrides or writes as a string, and functions of `torch.ops`."""
    for node in nodes(path):
        if isinstance(node, ast.Attribute):
            yield node.attr
            owner = node.value
            is_op = isinstance(owner, ast.Attribute) and isinstance(owner.value, ast.Attribute)
            if is_op and owner.value.attr == "ops":
                yield f"op {node.attr}"
        elif isinstance(node, ast.ImportFrom):
            yield from (*(node.module or "").split("."), *(each.name for each in node.names))
        elif isinstance(node, ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            yield node.value


def own_names() -> set[str]:
    """Return the private names that the project defines itself, and that no listed class of a library has too."""
    own: set[str] = set()
    for node in (node for path in FILES.values() for node in nodes(path)):
        if isinstance(node, ast.FunctionDef):
            own.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            own.add(node.id if isinstance(node, ast.Name) else node.attr)
    classes = [owner for owner in PRIVATE_NAMES if isinstance(owner, type)]
    private = {name for name in own if re.match("_[A-Za-z]", name)}
    return COINCIDENCES | {name for name in private if not any(describe(owner, name) for owner in classes)}


def test_every_private_name_is_listed_with_the_files_that_use_it() -> None:
    own, used, listed = own_names(), set(), set()
    for file, path in FILES.items():
        names = set(private_names(path))
        private = {name for name in names if re.match("_[A-Za-z]", name)} - own
        used |= {(file, name) for name in private | {name[3:] for name in names if name.startswith("op ")}}
    for names in PRIVATE_NAMES.values():
        listed |= {(file, name) for name, files in names.items() for file in files.split()}
    assert used == listed


@pytest.mark.parametrize(("owner", "name"), [(owner, name) for owner, names in PRIVATE_NAMES.items() for name in names])
def test_private_name_exists_in_this_version(owner: Any, name: str) -> None:
    assert describe(owner, name)


def test_changed_and_missing_names_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    present = describe_all()
    name = "GenerationMixin._sample"
    earlier = present | {name: present[name].replace("def _sample(", "def _sample(seed, ")}
    print_changes(earlier, present | {"Trainer._save_checkpoint": ""})
    printed = capsys.readouterr().out
    assert re.findall(r"^\S+: \w+$", printed, re.MULTILINE) == [f"{name}: changed", "Trainer._save_checkpoint: missing"]
    assert "-def _sample(seed, " in printed


@pytest.mark.parametrize(("owner", "name"), [(owner, name) for owner, names in MODEL_NAMES.items() for name in names])
def test_missing_private_name_is_an_error_that_names_the_versions_that_have_it(
    owner: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config()
    for each in owner.__mro__:
        if name in vars(each):
            monkeypatch.delattr(each, name)
    with pytest.raises(RuntimeError, match=rf"has no {owner.__name__}\.{name}, .*install Transformers 5\.17 to 5\.24"):
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
    model, call = tiny_model(), source_batch([3, 2], max_new_tokens=4, num_beams=2)
    prepared = prepare_for_inference(model, dtype)
    layers = [module for module in prepared.modules() if isinstance(module, nn.Linear | PreparedLinear)]
    assert {type(layer) for layer in layers} == {TransposedLinear if dtype == "float32" else nn.Linear}
    assert torch.equal(prepared.generate(**call), model.generate(**call))


def test_operator_without_its_compiled_function_is_called_as_it_is() -> None:
    operator = torch.ops.mkldnn._linear_pointwise.default
    assert raw_op(operator) is operator._op is not operator
    renamed = SimpleNamespace(compiled=operator._op)
    assert raw_op(renamed) is renamed


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
