"""Models of commands: their loading, checked and with one-line errors, and temporary modes.

A model's own code runs only with `trust_remote_code=True`, and pickles are read only as plain weights. All weights must
be present, of the right shapes and finite.
"""

import argparse
import contextlib
import hashlib
import os
import re
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Never, Self, TypeGuard

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from safetensors import safe_open
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from ..config import VaswaniTransformerConfig
from ..cpu.model import prepare_for_inference
from ..nar import NarHead
from ..settings import check_setting
from ..tokenizer import check_vocabulary
from .command import UserError, one_line
from .files import POINTER, WEB_PAGE, read_json

logger = logging.get_logger(__name__)

MODEL_FILES = (
    "*.bin", "*.index.json", "*.model", "*.py", "*.safetensors", "*.spm", "*config.json", "*vocab*",
    "added_tokens.json", "merges.txt", "special_tokens_map.json", "tokenizer.json",
)  # fmt: skip
"""Files of a saved model: weights, settings, code and tokenizer."""
GENERATION_CONFIG = "generation_config.json"
JSON_FILES = ("*config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.json", "vocab.json")
TOKENIZER_FILES = ("tokenizer*", "*vocab*", "*.model", "*.spm", "merges.txt")
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
SOURCE = {"revision", "local_files_only", "trust_remote_code"}  # settings that select files
SPARE_NUMBERS = 1 << 24  # weights that a file may omit, such as a table of positions
MOST_NUMBERS = 2  # in a byte: weights of four bits
LEAST_BYTES = 1000  # of a layer, with the names of its weights
KERNELS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64"}  # largest number of cached kernels
FIX_OF_CONFIG = "Restore the config.json that was saved with the weights, or save the model again."


def limit_kernel_caches() -> None:
    """Limit oneDNN's and PyTorch's caches of kernels, before the first one.

    With the many shapes of batches on a CPU, each would grow to nearly 1 GiB.
    """
    for name, capacity in KERNELS.items():
        os.environ.setdefault(name, capacity)


@contextlib.contextmanager
def load_errors(name: str) -> Generator[None]:
    """Convert errors of the libraries, such as of files or the network, to a UserError with the model's name."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{name}: cannot be loaded: {one_line(error)}") from error


def find_file(name: str, file: str, revision: str = "main", local_files_only: bool = False, **_: Any) -> Path | None:
    """Return the path of a model's file, downloaded if necessary; None if the model does not have it."""
    folder = Path(name)
    if folder.is_dir():
        path = folder / file
        return path if path.is_file() else None
    try:
        return Path(hf_hub_download(name, file, revision=revision, local_files_only=local_files_only))
    except EntryNotFoundError:
        return None


def check_content(path: Path, what: str) -> None:
    """Check that a file to load is not empty, a pointer or a web page; `what` is its expected content."""
    with path.open("rb") as file:
        start = file.read(100)
    got = "an empty file" if not start else ""
    if re.match(POINTER, start):
        got = "a pointer of Git LFS"
    elif re.match(WEB_PAGE, start):
        got = "a web page"
    if got:
        raise UserError(f"{path}: contains no {what}; got {got}. Run `git lfs pull` there, or download it again.")


def check_json_files(name: str) -> None:
    """Check that files of a model's folder, which the libraries parse, are no pointers or web pages."""
    for path in (path for pattern in JSON_FILES for path in sorted(Path(name).glob(pattern))):
        check_content(path, "JSON")


def check_registered(name: str, fields: dict[str, Any]) -> None:
    """Check that the family of a configuration's fields is registered, or comes with its code."""
    model_type = fields.get("model_type")
    if model_type is None or model_type in CONFIG_MAPPING or "auto_map" in fields:
        return
    defined = " and ".join(fields.get("architectures") or ["its class"])
    problem = f"its family is not registered; got model_type {model_type!r}"
    fix = f"First import the file that defines {defined} and calls register_family, or upgrade Transformers"
    raise UserError(f"{name}: {problem}, expected a known one. {fix}.")


def load_config(name: str, trust_remote_code: bool = False, **settings: Any) -> PreTrainedConfig:
    """Return the configuration of a model, without loading its weights."""
    with load_errors(name if Path(name).is_dir() else f"{name}: no folder here, so a name on the Hub"):
        check_json_files(name)
        try:
            return AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code, **settings)
        except ValueError:
            check_registered(name, PreTrainedConfig.get_config_dict(name, **settings)[0])
            raise


def size_of_weights(path: Path) -> int:
    """Return the size of a file of weights; one that contains something else is an error."""
    check_content(path, "weights")
    if path.suffix == ".safetensors":
        with safe_open(path, "pt"):  # raises for a damaged header, or if the file is too short
            pass
    return path.stat().st_size


def stored_bytes(name: str, **settings: Any) -> int | None:
    """Return the size of a model's weights; None if they are in none of the files `WEIGHTS`."""
    for file in WEIGHTS:
        path = find_file(name, file, **settings)
        if path is None:
            continue
        if path.suffix != ".json":
            return size_of_weights(path)
        shards = set(read_json(path, FIX_OF_CONFIG)["weight_map"].values())
        for shard in shards:
            if Path(shard).is_absolute() or ".." in re.split(r"[/\\]", shard):
                raise UserError(f"{path}: names a file outside of its folder; got {shard!r}. Save the model again.")
        shard_paths = [find_file(name, shard, **settings) for shard in shards]
        return sum(size_of_weights(shard) for shard in shard_paths if shard is not None)
    return None


def check_size(name: str, model_class: Any, config: PreTrainedConfig, **settings: Any) -> None:
    """Check before allocation that a configuration does not describe a larger model than the stored weights."""
    size = stored_bytes(name, **settings)
    if size is None:  # a different format
        return

    # An absurd number of layers would take long to build even without memory.
    for field, layers in config.to_dict().items():
        if field.endswith("layers") and isinstance(layers, int) and layers * LEAST_BYTES > size:
            raise UserError(
                f"{name}: its weights do not fit {field}; got {size:,} bytes for {layers:,} layers. {FIX_OF_CONFIG}"
            )

    # On the device "meta" a model has shapes but no memory.
    with torch.device("meta"):
        if hasattr(model_class, "from_config"):  # an Auto class
            model = model_class.from_config(config, trust_remote_code=settings.get("trust_remote_code", False))
        else:
            model = model_class(config)
    numbers = sum(weight.numel() for weight in (*model.parameters(), *model.buffers()))
    if numbers > MOST_NUMBERS * size + SPARE_NUMBERS:
        raise UserError(
            f"{name}: its weights do not fit its config.json; got {size:,} bytes for {numbers:,} numbers. "
            f"{FIX_OF_CONFIG}"
        )


def list_names(names: list[str]) -> str:
    """Return the first two names and the number of others."""
    text = ", ".join(names[:2])
    return f"{text} and {len(names) - 2} more" if len(names) > 2 else text


def check_finite(name: str, weights: Mapping[str, Tensor]) -> None:
    """Check that all weights are finite numbers."""
    broken = []
    for key, weight in weights.items():
        is_stored = weight.is_floating_point() and not weight.is_meta
        if is_stored and not torch.isfinite(weight).all():
            broken.append(key)
    if broken:
        dtype = str(weights[broken[0]].dtype).removeprefix("torch.")
        fix = "use a checkpoint from before training diverged, or a different copy of the file."
        raise UserError(f"{name}: NaN or infinite numbers in {list_names(broken)} ({dtype}); {fix}")


MAX_IDS = 2**31  # of a model whose configuration does not have the size of its vocabulary
ID_LISTS: dict[str, int] = {
    **dict.fromkeys(("bos_token_id", "pad_token_id", "forced_bos_token_id"), 0),
    **dict.fromkeys(("decoder_start_token_id", "eos_token_id", "forced_eos_token_id"), 1),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens"), 1),
    "bad_words_ids": 2,
}
"""Settings with token ids, and the depth to which these may be in lists."""


def are_ids(value: object, depth: int, vocab_size: int) -> bool:
    """Return whether a value is a token id, or a list of ids with up to `depth` levels."""
    if isinstance(value, list):
        return depth > 0 and all(are_ids(item, depth - 1, vocab_size) for item in value)
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < vocab_size


def check_settings(prefix: str, settings: Mapping[str, Any], vocab_size: int, fix: str) -> None:
    """Check this package's settings of `generate()`, and those with token ids; None is always valid.

    An error begins with `prefix` and the setting's name, and ends with `fix`.
    """

    def refuse(name: str, problem: str, value: object, expected: str) -> Never:
        raise UserError(f"{prefix}{name}: {problem}; got {value!r}, expected {expected}; {fix}")

    for name, value in settings.items():
        if value is None:
            continue
        check_setting(name, value, refuse)
        if name in ID_LISTS and not are_ids(value, ID_LISTS[name], vocab_size):
            refuse(name, "out of range", value, f"ids of the vocabulary, from 0 to {vocab_size - 1}")


def check_search(name: str, config: PreTrainedConfig, **source: Any) -> bool:
    """Check the saved search of a model; return False if it is missing, as in models of other packages."""
    path = find_file(name, GENERATION_CONFIG, **source)
    fix = "restore it, or save the model again."
    if path is None:
        if isinstance(config, VaswaniTransformerConfig):
            problem = f"{GENERATION_CONFIG} is missing, which this package saves with every model"
            raise UserError(f"{name}: {problem}; {fix}")
        return False
    values = config.get_text_config(decoder=True).to_dict()
    sizes = []
    for field, size in values.items():
        if field.endswith("vocab_size") and isinstance(size, int):
            sizes.append(size)
    # Transformers ignores a malformed file
    check_settings(f"{path}: ", read_json(path, fix), max(sizes, default=MAX_IDS), fix)
    return True


def load_model(name: str, model_class: Any = AutoModelForSeq2SeqLM, **settings: Any) -> Any:
    """Load a model of a class or Auto class from a folder or the Hub, and check its weights and search.

    `settings` are arguments of `from_pretrained`.
    """
    settings.setdefault("trust_remote_code", False)
    source = {setting: value for setting, value in settings.items() if setting in SOURCE}
    if "config" not in settings:
        settings["config"] = load_config(name, **source)
    with load_errors(name):
        # The checks come before memory is allocated for the model.
        check_size(name, model_class, settings["config"], **source)
        has_search = check_search(name, settings["config"], **source)
        model, info = model_class.from_pretrained(
            name, output_loading_info=True, ignore_mismatched_sizes=True, **settings
        )

        # Missing or mismatched weights would be random numbers.
        shapes = []
        for key, got, expected in info["mismatched_keys"]:
            shapes.append(f"{key} {tuple(got)}, expected {tuple(expected)}")
        problems = {
            "missing": info["missing_keys"],
            "unexpected": info["unexpected_keys"],
            "of a different shape": shapes,
        }
        differences = [f"{problem}: {list_names(sorted(keys))}" for problem, keys in problems.items() if keys]
        if differences:
            found = "; ".join(differences)
            raise UserError(f"{name}: its weights do not fit its config.json; {found}. {FIX_OF_CONFIG}")
        check_finite(name, model.state_dict())
        if not has_search and model.can_generate() and (model.generation_config.num_beams or 1) == 1:
            logger.warning("%s: %s is missing, so the model decodes greedily.", name, GENERATION_CONFIG)
    return model


def load_tokenizer(name: str, tokenizer_class: Any = AutoTokenizer, **settings: Any) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a folder, which may have no model, or the Hub; see `load_model`."""
    folder = Path(name)
    if folder.is_dir() and not any(path for pattern in TOKENIZER_FILES for path in folder.glob(pattern)):
        raise UserError(f"{name}: does not contain a tokenizer; save the model's tokenizer there with save_pretrained.")
    settings.setdefault("trust_remote_code", False)
    with load_errors(f"{name}: its tokenizer"):
        check_json_files(name)
        return tokenizer_class.from_pretrained(name, **settings)


@dataclass(frozen=True)
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
        return cls(**{field.name: getattr(options, field.name) for field in fields(cls)})

    def digest(self) -> str:
        """Return the model's identity in a record.

        On the Hub it is the name and the commit, and for a folder the SHA-256 of the names, sizes and contents of its
        `MODEL_FILES`.
        """
        folder = Path(self.model)
        if not folder.is_dir():
            config = load_config(self.model, self.trust_remote_code, revision=self.revision)
            return f"{self.model}@{getattr(config, '_commit_hash', None)}"
        sha256 = hashlib.sha256()
        files = {path for pattern in MODEL_FILES for path in folder.glob(pattern) if path.is_file()}
        for path in sorted(files):
            sha256.update(f"{path.name}\0{path.stat().st_size}\0".encode())
            with path.open("rb") as file:
                hashlib.file_digest(file, lambda: sha256)  # adds the content to the hash
        return sha256.hexdigest()


def add_load_options(group: Any) -> None:
    """Add the options of `LoadOptions`, except for the model."""
    dtypes = ("auto", "float32", "bfloat16", "float16", "int8")
    dtype_help = "precision of matrix products; int8 only on a CPU (float32 on a CPU, as saved on other devices)"
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
    limit_kernel_caches()
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    with load_errors(f"--device={options.device}"):
        device = torch.zeros(1, device=options.device or accelerator or "cpu").device
    if device.type == "meta":
        raise UserError("--device=meta: contains shapes without numbers; use --device=cpu or an accelerator.")

    # A model of this package is packed for the CPU, from its float32 weights.
    name = options.model
    dtype = options.dtype
    is_on_cpu = device.type == "cpu"
    settings: dict[str, Any] = {"revision": options.revision, "trust_remote_code": options.trust_remote_code}
    config = load_config(name, **settings)
    is_prepared = isinstance(config, VaswaniTransformerConfig) and is_on_cpu and dtype != "float16"
    if dtype == "int8" and not is_prepared:
        fix = "choose a different --dtype, or --device=cpu"
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


def is_non_autoregressive(model: object) -> TypeGuard[NarHead]:
    """Return whether a model is non-autoregressive."""
    return not getattr(model, "is_autoregressive", True)


def has_likelihood(model: object) -> bool:
    """Return whether a model's loss is the negative log-likelihood of a target, so that it has a perplexity."""
    return getattr(model, "has_likelihood", not is_non_autoregressive(model))


Mode = Callable[[PreTrainedModel], Callable[[], None]]
"""Function that switches a model to a mode, and returns the function that restores it."""
LOCK = threading.Lock()
USERS: dict[tuple[int, Mode], tuple[int, Callable[[], None]]] = {}
"""Number of contexts, of all threads, that use a model in a mode, and the function that restores it after the last."""


@contextmanager
def temporary_mode(model: PreTrainedModel, switch: Mode) -> Generator[None]:
    """Switch a model to a mode inside the context; the last of several threads restores the state before the first."""
    key = (id(model), switch)
    with LOCK:
        count, restore = USERS.get(key) or (0, switch(model))
        USERS[key] = count + 1, restore
    try:
        yield
    finally:
        with LOCK:
            count, restore = USERS.pop(key)
            if count > 1:
                USERS[key] = count - 1, restore
            else:
                restore()


def switch_to_evaluation(model: PreTrainedModel) -> Callable[[], None]:
    trained = [module for module in model.modules() if module.training]
    for module in trained:
        module.training = False

    def restore() -> None:
        for module in trained:
            module.training = True

    return restore


def eval_mode(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Switch a model to evaluation mode inside the context, and restore every module's mode after it."""
    if getattr(model, "stays_in_evaluation", False):  # prepared for inference
        return nullcontext()
    return temporary_mode(model, switch_to_evaluation)


def switch_to_eager(model: PreTrainedModel) -> Callable[[], None]:
    configs: list[Any] = [module.config for module in model.modules() if hasattr(module, "config")]
    before = [(config, config._attn_implementation) for config in configs]
    for config in configs:
        config._attn_implementation = "eager"

    def restore() -> None:
        for config, implementation in before:
            config._attn_implementation = implementation

    return restore


def eager_attention(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Use "eager" attention, which returns weights, inside the context, and restore the configurations after it."""
    return temporary_mode(model, switch_to_eager)
