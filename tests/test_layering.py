"""What may depend on what: imports between files and folders, a published model's files, private names of libraries."""

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate.hooks
import pytest
import torch
from datasets import Dataset
from evaluate import Metric
from torch import nn
from transformers import (
    GenerationConfig,
    GenerationMixin,
    Pipeline,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

from tests import ROOT
from tests.models import EVERY_FAMILY, model_of_pairs
from tests.published import PUBLISHED_FILES

PACKAGE, TRAINING = ROOT / "vaswani_transformer", ROOT / "training"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
# The flat files: each imports only from those before it.
FILES = (
    *("settings", "config", "restricted", "layers", "pretrained", "stacks", "loss"),
    *("search", "generation", "tokenizer", "pipeline", "model", "nar_decoder", "nar", "lengths", "nat"),
    *("discrete", "iterative_vae", "flowseq", "cmlm", "slots", "prefix_search", "ctc", "dag"),
)
# The folders that each folder imports from, beyond flat files and support.
ROOMS = {
    "batching": (),
    "convert": ("cpu", "translation"),
    "cpu": (),
    "demo": ("figures", "parsing"),
    "figures": (),
    "parsing": ("translation",),
    "support": ("cpu",),
    "translation": ("cpu",),
}
LIBRARIES = {"huggingface_hub", "tokenizers", "torch", "transformers"} | sys.stdlib_module_names
# The pattern by which Transformers' loader finds imports of sibling files, anywhere in the text.
LOADER_IMPORT = re.compile(r"^\s*(?:from\s+\.(\S+)\s+import|import\s+\.(\S+)\s*$)", re.MULTILINE)

# Private names of libraries that the code uses; Transformers 5.17 to 5.24 define its own.
PRIVATE_NAMES: dict[Any, str] = {
    Pipeline: "_forward _load_tokenizer _pipeline_calls_generate _sanitize_parameters",
    GenerationConfig: "_from_model_config _get_default_generation_params",
    PreTrainedConfig: "_attn_implementation _auto_class _commit_hash _get_generation_parameters",
    PreTrainedModel: (
        "_apply _auto_class _can_compile_fullgraph _can_record_outputs _fsdp_plan _init_weights _input_embed_layer "
        "_hf_peft_config_loaded _keep_in_fp32_modules_strict _keys_to_ignore_on_save _no_split_modules "
        "_skip_keys_device_placement _supports_attention_backend _supports_flash_attn _supports_flex_attn "
        "_supports_sdpa _tied_weights_keys _tp_plan"
    ),
    PreTrainedTokenizerFast: "_auto_class _convert_encoding _tokenizer",
    Trainer: "_determine_best_metric _get_grad_norm _load_callback_state _prepare_input _save_checkpoint",
    TrainingArguments: "_n_gpu",
    GenerationMixin: "_beam_search _prepare_cache_for_generation _sample",
    nn.Module: "_apply _forward_hooks _forward_pre_hooks",
    torch.ops.mkldnn: "_is_mkldnn_bf16_supported _linear_pointwise _reorder_linear_weight",
    torch.ops.mkldnn._linear_pointwise.default: "_op",
    accelerate.hooks.add_hook_to_module: "_hf_hook",
    Dataset: "_fingerprint _indices",
    Metric: "_compute _info",
}
LISTED = [(owner, name) for owner, names in PRIVATE_NAMES.items() for name in names.split()]
# The project's own names, and texts that look like one.
OTHERS = {"_check_pairs", "_core", "_epoch", "_float_tensor", "_orig_mod", "_own_auto_class"}
OTHERS |= {"_positions", "_proj", "_quantized", "_random", "_reddit_", "_repr_html_", "_sha256", "_signature"}


def imports_of(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the level and the parts of each module that a file imports, at any depth."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.level, (node.module or node.names[0].name).split(".")


@pytest.mark.parametrize("number", range(len(FILES)), ids=FILES)
def test_published_file_imports_only_those_above_it_in_the_form_that_the_loader_finds(number: int) -> None:
    """It needs no further package either."""
    path = PACKAGE / f"{FILES[number]}.py"
    siblings = {tuple(parts) for level, parts in imports_of(path) if level}
    assert siblings <= {(name,) for name in FILES[:number]}
    assert all(level <= 1 for level, _ in imports_of(path))
    matches = LOADER_IMPORT.findall(path.read_text(encoding="utf-8"))
    assert {(one or other,) for one, other in matches} == siblings
    assert {parts[0] for level, parts in imports_of(path) if not level} <= LIBRARIES


@pytest.mark.parametrize("room", ROOMS)
def test_folder_imports_only_flat_files_and_the_folders_it_may(room: str) -> None:
    allowed = {*FILES, *ROOMS[room], "support"}
    for path in (PACKAGE / room).glob("*.py"):
        assert {parts[0] for level, parts in imports_of(path) if level == 2} <= allowed, path


def test_order_and_rooms_are_complete() -> None:
    flat = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "registration"}
    assert sorted(FILES) == sorted(flat)
    assert {f"{name}.py" for name in flat} == set().union(*PUBLISHED_FILES.values())
    assert sorted(ROOMS) == sorted({path.parent.name for path in PACKAGE.glob("*/*.py")})
    assert not [*PACKAGE.glob("*/*/*.py"), *TRAINING.glob("*/*.py")]


def test_architecture_names_every_file_and_folder() -> None:
    words = set(re.findall(r"\w+", ARCHITECTURE.read_text(encoding="utf-8")))
    assert {*FILES, *ROOMS, *(path.stem for path in TRAINING.glob("*.py"))} - {"__init__"} <= words


def test_code_imports_no_test_and_the_package_not_training() -> None:
    for path in [*PACKAGE.rglob("*.py"), *TRAINING.glob("*.py"), *(ROOT / "tests").rglob("*.py")]:
        modules = [parts for level, parts in imports_of(path) if not level]
        assert not path.is_relative_to(PACKAGE) or not {parts[0] for parts in modules} & {"training", "tests"}, path
        assert not path.is_relative_to(TRAINING) or ["tests"] not in [parts[:1] for parts in modules], path
        assert not any(part.startswith("test_") for parts in modules if parts[0] == "tests" for part in parts), path


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_published_model_carries_exactly_the_files_of_its_family(family: str, tmp_path: Path) -> None:
    EVERY_FAMILY[family]().with_remote_code().save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.glob("*.py")} == PUBLISHED_FILES[family]


def test_published_tokenizer_carries_its_own_file(tmp_path: Path) -> None:
    model_of_pairs()[1].with_remote_code().save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.glob("*.py")} == {"tokenizer.py"}


def test_every_private_name_is_listed() -> None:
    paths = [*PACKAGE.rglob("*.py"), *TRAINING.glob("*.py")]
    names = {name for path in paths for name in re.findall(r"(?<!\w)_[a-z]\w+", path.read_text(encoding="utf-8"))}
    assert names - OTHERS == {name for _, name in LISTED}


@pytest.mark.parametrize(("owner", "name"), LISTED)
def test_private_name_exists_in_this_version(owner: Any, name: str) -> None:
    assert hasattr(owner, name) or re.search(rf"\b{name}\b", inspect.getsource(owner))
