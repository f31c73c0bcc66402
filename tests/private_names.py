"""Every private name of a library that the project uses: its owner there, and the files that use it.

`python -m tests.private_names > FILE` writes what the installed versions have under each name, and
`python -m tests.private_names FILE` prints what is different in other versions.
"""

import argparse
import difflib
import functools
import inspect
import json
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import accelerate.hooks
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

# Files of `training/` have their path, all others that in the package.
PRIVATE_NAMES: dict[Any, dict[str, str]] = {
    GenerationConfig: {"_get_default_generation_params": "generation pretrained"},
    GenerationMixin: {"_beam_search": "generation pretrained", "_sample": "generation pretrained"},
    Pipeline: {
        "_forward": "pipeline",
        "_load_tokenizer": "pipeline",
        "_pipeline_calls_generate": "pipeline",
        "_sanitize_parameters": "pipeline",
    },
    PreTrainedConfig: {
        "_attn_implementation": "attention cpu/encoder cpu/model nat pretrained restricted support/modes",
        "_auto_class": "pretrained",
        "_commit_hash": "translation/options",
        "_get_generation_parameters": "config pretrained",
    },
    PreTrainedModel: {
        "_auto_class": "pretrained",
        "_can_compile_fullgraph": "pretrained",
        "_can_record_outputs": "pretrained stacks",
        "_fsdp_plan": "pretrained stacks",
        "_init_weights": "flowseq pretrained",
        "_input_embed_layer": "model pretrained",
        "_keep_in_fp32_modules_strict": "flowseq pretrained",
        "_keys_to_ignore_on_save": "training/trainer",
        "_no_split_modules": "flowseq iterative_vae nar nat pretrained stacks",
        "_skip_keys_device_placement": "pretrained",
        "_supports_attention_backend": "pretrained",
        "_supports_flash_attn": "flowseq nat pretrained",
        "_supports_flex_attn": "flowseq nat pretrained",
        "_supports_sdpa": "pretrained",
        "_tied_weights_keys": "model pretrained",
        "_tp_plan": "model nat pretrained stacks",
    },
    PreTrainedTokenizerFast: {
        "_auto_class": "tokenizer",
        "_convert_encoding": "tokenizer",
        "_tokenizer": "tokenizer",
    },
    Trainer: {
        "_created_lr_scheduler": "training/trainer",
        "_get_grad_norm": "training/trainer",
        "_prepare_input": "training/trainer",
        "_prepare_inputs": "training/trainer",
        "_save_checkpoint": "training/trainer",
    },
    TrainingArguments: {"_n_gpu": "training/trainer"},
    nn.Module: {
        "_apply": "cpu/model flowseq pretrained",
        "_forward_hooks": "cpu/layers embeddings",
        "_forward_pre_hooks": "embeddings",
    },
    torch.ops.mkldnn: {
        "_is_mkldnn_bf16_supported": "training/machine",
        "_linear_pointwise": "cpu/linear",
        "_reorder_linear_weight": "cpu/linear",
    },
    torch.ops.mkldnn._linear_pointwise.default: {"_op": "cpu/linear"},
    torch.ops.quantized: {
        "linear_dynamic": "cpu/linear",
        "linear_prepack": "cpu/linear",
        "linear_unpack": "cpu/linear",
    },
    accelerate.hooks.add_hook_to_module: {"_hf_hook": "embeddings"},
    Dataset: {"_indices": "batching/tokens"},
    Metric: {"_compute": "training/metrics", "_info": "training/metrics"},
}


@functools.cache
def source(owner: Any) -> str:
    """Return the source of a class and its bases, of a function, or of a module; "" for compiled ones."""
    texts = []
    for one in owner.__mro__ if isinstance(owner, type) else (owner,):
        try:
            texts.append(inspect.getsource(one))
        except (OSError, TypeError):
            continue
    return "\n".join(texts)


def describe(owner: Any, name: str) -> str:
    """Return what the owner has under a private name: source, value, or the lines that use it; "" for nothing."""
    if not hasattr(owner, name):
        return "\n".join(line.strip() for line in source(owner).splitlines() if re.search(rf"\b{name}\b", line))
    value = getattr(owner, name)
    try:
        return textwrap.dedent(inspect.getsource(value.fget if isinstance(value, property) else value))
    except (OSError, TypeError):
        return re.sub(r" at 0x\w+", "", repr(value))


def describe_all() -> dict[str, str]:
    """Return the description of every private name."""
    labels = {owner: getattr(owner, "__qualname__", None) or owner.__name__ for owner in PRIVATE_NAMES}
    return {
        f"{labels[owner]}.{name}": describe(owner, name) for owner, names in PRIVATE_NAMES.items() for name in names
    }


def print_changes(earlier: dict[str, str], present: dict[str, str]) -> None:
    """Print each name that differs, with its lines that do."""
    for name, text in present.items():
        if text != earlier.get(name):
            print(f"{name}: {'changed' if text else 'missing'}")
            lines = earlier.get(name, "").splitlines(), text.splitlines()
            print(*difflib.unified_diff(*lines, lineterm="", n=1), sep="\n")


def main() -> None:
    """Write the descriptions as JSON, or print what is different from an earlier file of them."""
    parser = argparse.ArgumentParser(prog="python -m tests.private_names", description=__doc__)
    parser.add_argument("earlier", type=Path, nargs="?", help="what other versions had")
    path = parser.parse_args().earlier
    if path is None:
        json.dump(describe_all(), sys.stdout, indent=1)
    else:
        print_changes(json.loads(path.read_text(encoding="utf-8")), describe_all())


if __name__ == "__main__":
    main()
