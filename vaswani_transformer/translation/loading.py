"""What commands share to load a model: options, the model's digest, its device and dtype."""

import argparse
import dataclasses
import hashlib
from pathlib import Path
from typing import Any, Self

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..config import VaswaniTransformerConfig
from ..cpu.model import prepare_for_inference
from ..support.checked_loading import load_config, load_errors, load_model, load_tokenizer
from ..support.errors import UserError
from ..tokenizer import check_vocabulary

MODEL_FILES = (
    "*.bin", "*.index.json", "*.model", "*.py", "*.safetensors", "*.spm", "*config.json", "*vocab*",
    "added_tokens.json", "merges.txt", "special_tokens_map.json", "tokenizer.json",
)  # fmt: skip
"""Files of a saved model: weights, settings, code and tokenizer."""


@dataclasses.dataclass(frozen=True)
class LoadOptions:
    """Options for loading a model."""

    model: str  # a folder, or a name on the Hub
    device: str | None = None  # None for an accelerator if available, else the CPU
    dtype: str = "auto"  # of products with weights
    revision: str = "main"  # branch, tag or commit of a model on the Hub
    trust_remote_code: bool = False  # whether to run the model's own code

    @classmethod
    def of(cls, options: argparse.Namespace) -> Self:
        """Return the fields of this class among a command's options."""
        return cls(**{field.name: getattr(options, field.name) for field in dataclasses.fields(cls)})

    def digest(self) -> str:
        """Return the model's identity in a record.

        On the Hub it is the name and the commit, and for a folder the SHA-256 of the names, sizes and contents of its
        `MODEL_FILES`.
        """
        if not (folder := Path(self.model)).is_dir():
            config = load_config(self.model, self.trust_remote_code, revision=self.revision)
            return f"{self.model}@{getattr(config, '_commit_hash', None)}"
        sha256 = hashlib.sha256()
        for path in sorted({path for pattern in MODEL_FILES for path in folder.glob(pattern) if path.is_file()}):
            sha256.update(f"{path.name}\0{path.stat().st_size}\0".encode())
            with path.open("rb") as file:
                hashlib.file_digest(file, lambda: sha256)  # updates it
        return sha256.hexdigest()


def add_load_options(group: Any) -> None:
    """Add the options of `LoadOptions`, except for the model."""
    dtypes = ("auto", "float32", "bfloat16", "float16", "int8")
    dtype_help = "of products with weights; int8 only on a CPU (float32 on a CPU, as saved on other devices)"
    group.add_argument("--device", help="where to run (the accelerator if there is one, else the CPU)")
    group.add_argument("--dtype", choices=dtypes, default="auto", help=dtype_help)
    group.add_argument("--revision", default="main", help="branch, tag or commit of a model on the Hub (main)")
    group.add_argument("--trust_remote_code", action="store_true", help="run the code that comes with the model")


def load_model_and_tokenizer(
    options: LoadOptions, layouts: dict[str, str] | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the model on its device, and its tokenizer.

    On a CPU a model of this package is prepared with `prepare_for_inference`, except in float16. `layouts` are its
    recorded layouts.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    with load_errors(f"--device={options.device}"):
        device = torch.zeros(1, device=options.device or accelerator or "cpu").device
    if device.type == "meta":
        raise UserError("--device=meta: holds shapes without numbers; give --device=cpu or an accelerator.")
    name, dtype, is_on_cpu = options.model, options.dtype, device.type == "cpu"
    settings: dict[str, Any] = {"revision": options.revision, "trust_remote_code": options.trust_remote_code}
    config = load_config(name, **settings)
    is_prepared = isinstance(config, VaswaniTransformerConfig) and is_on_cpu and dtype != "float16"
    if dtype == "int8" and not is_prepared:
        fix = "give another --dtype, or --device=cpu"
        raise UserError(f"--dtype=int8: is for models of this package on a CPU, not for {name} on {device}; {fix}.")
    tokenizer = load_tokenizer(name, config=config, **settings)
    loads_float32 = is_prepared or (dtype == "auto" and is_on_cpu)
    model = load_model(name, dtype="float32" if loads_float32 else dtype, config=config, **settings)
    with load_errors(name):
        model.to(device)
    check_vocabulary(model, tokenizer)
    if is_prepared:
        model = prepare_for_inference(model, "float32" if dtype == "auto" else dtype, layouts)
    return model, tokenizer
