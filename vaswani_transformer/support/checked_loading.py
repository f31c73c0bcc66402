"""Load configurations, models and tokenizers for every command: one line for any fault, and no code of theirs.

Only `load_pretrained` calls `from_pretrained`. A model's own code runs only with `trust_remote_code=True`.
"""

import contextlib
import logging
import math
from collections.abc import Generator
from pathlib import Path
from typing import Any, TypeVar, cast, overload

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from safetensors import safe_open
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from ..config import VaswaniTransformerConfig
from ..tokenizer import check_vocabulary, text_encoder
from .errors import UserError, one_line
from .files import MODEL_MARKER, read_json
from .saved_settings import check_search_settings

logger = transformers_logging.get_logger(__name__)

Model = TypeVar("Model", bound=PreTrainedModel)
TOKENIZER_FILES = ("tokenizer*", "*vocab*", "*.model", "*.spm", "merges.txt")
SOURCE = {"revision", "local_files_only", "trust_remote_code"}  # the settings that say which files are loaded, and how
GENERATION_CONFIG = "generation_config.json"
TOKENIZER_JSON = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
SPARE_NUMBERS = 1 << 24  # that a model may compute and its file leave out, such as a table of positions
FIX_OF_FILE = "restore it, or save the model again."
PACKED = 8  # numbers of four bits in one of 32, as quantized weights store them


def check_model_name(model: str) -> None:
    """Check a model's name before any request to the Hub: no file, no folder without a model, no missing folder."""
    path = Path(model)
    if not model:
        raise UserError("The model has no name; give a folder with a model, or a model on the Hub.")
    if path.is_file():
        raise UserError(f"{model}: is a file; name the folder of a model, or a model on the Hub.")
    if path.is_dir() and not (path / MODEL_MARKER).is_file():
        if (path / "adapter_config.json").is_file():
            raise UserError(
                f"{model}: holds a PEFT adapter, expected a complete model. Load it in Python by "
                "PeftModel.from_pretrained(model, folder), and save the result of its merge_and_unload()."
            )
        raise UserError(f"{model}: has no {MODEL_MARKER}, so it holds no model; name a folder with a model.")
    if model.startswith((".", "/", "~")) and not path.is_dir():
        raise UserError(f"{model}: there is no such folder; name one with a model, or a model on the Hub.")


@contextlib.contextmanager
def load_errors(name: str) -> Generator[None]:
    """Turn any error of the libraries, for a broken folder or the network, into a UserError with the model's name."""
    try:
        yield
    except UserError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # of Rust's libraries
            raise
        if "trust_remote_code=True" in str(error):
            raise UserError(
                f"{name}: cannot be loaded without its own Python code, which is not run; read the code, then give "
                "--trust_remote_code to a command that has this option."
            ) from error
        raise UserError(f"{name}: cannot be loaded: {one_line(error)}") from error


def load_pretrained(owner: Any, name: str, **settings: Any) -> Any:
    """Return `owner.from_pretrained(name)`, which neither asks for permission to run the model's code nor runs it.

    `settings` are arguments of `from_pretrained`, `trust_remote_code=True` among them where the user gave that option.
    """
    return owner.from_pretrained(name, **settings | {"trust_remote_code": settings.get("trust_remote_code") is True})


def find_file(name: str, file: str, revision: str = "main", local_files_only: bool = False, **_: Any) -> Path | None:
    """Return the path of a model's file, downloaded from the Hub if need be; None if the model has no such file."""
    if Path(name).is_dir():
        return path if (path := Path(name, file)).is_file() else None
    try:
        return Path(hf_hub_download(name, file, revision=revision, local_files_only=local_files_only))
    except EntryNotFoundError:
        return None


def own_model_types(config_class: type[VaswaniTransformerConfig] = VaswaniTransformerConfig) -> set[str]:
    """Return the model types of a configuration and of those derived from it: by default all of this package."""
    derived = map(own_model_types, config_class.__subclasses__())
    return {config_class.model_type}.union(*derived)


def load_config(
    name: str, model_type: str | None = None, field: str | None = None, **settings: Any
) -> PreTrainedConfig:
    """Return the configuration of a model, without loading its weights.

    A `model_type` such as "vaswani_transformer" must be the model's, and `field` is the recipe's that names the model.
    """
    check_model_name(name)
    subject = name if Path(name).is_dir() else f"{name}: no folder here, so a name on the Hub"
    with load_errors(subject):
        if (path := find_file(name, MODEL_MARKER, **settings)) is not None:
            read_json(path, FIX_OF_FILE)
        config = cast(PreTrainedConfig, load_pretrained(AutoConfig, name, **settings))
    if model_type is not None and config.model_type != model_type:
        raise UserError(
            f"{name if field is None else f'{field}: {name}'}: is a model of another type; got {config.model_type!r}, "
            f"expected {model_type!r}. Name a model of that type."
        )
    return config


def indexed_files(index: Path) -> set[str]:
    """Return the files of weights that an index names, all of which must be in its folder."""
    files = read_json(index, FIX_OF_FILE, weight_map=dict)["weight_map"].values()
    for file in files:
        if not isinstance(file, str) or Path(file).name != file:
            raise UserError(f"{index}: names no file of its folder; got {file!r}, expected a name; {FIX_OF_FILE}")
    return set(files)


def weight_sizes(name: str, **settings: Any) -> list[int]:
    """Return how many numbers each stored weight has, from the headers of the files; none for another format."""
    found = (find_file(name, file, **settings) for file in WEIGHTS)
    first = next((path for path in found if path is not None), None)
    if first is None:
        return []
    files = {first.name} if first.suffix != ".json" else indexed_files(first)
    sizes: list[int] = []
    for path in (find_file(name, file, **settings) for file in sorted(files)):
        if path is not None and path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as weights:
                sizes += [math.prod(weights.get_slice(key).get_shape()) for key in weights.keys()]  # noqa: SIM118 - not a mapping
        elif path is not None:
            sizes += [weight.numel() for weight in torch.load(path, map_location="meta", weights_only=True).values()]
    return sizes


def describe_model(name: str, model_class: Any, sizes: list[int], **settings: Any) -> PreTrainedModel:
    """Return the model that a configuration describes, without weights.

    It may not be larger than its stored weights, which have these `sizes`.
    """
    config = load_config(name, **settings)
    fix = "Restore the config.json that was saved with the weights, or save the model again."
    for field, layers in config.to_dict().items():
        if field.endswith("layers") and isinstance(layers, int) and layers > len(sizes):
            raise UserError(
                f"{name}: its weights do not fit {field}; got {len(sizes)} weights for {layers:,} layers. {fix}"
            )
    with torch.device("meta"):
        is_auto = hasattr(model_class, "from_config")
        trusts = {"trust_remote_code": settings.get("trust_remote_code") is True}
        model = model_class.from_config(config, **trusts) if is_auto else model_class(config)
    numbers = sum(weight.numel() for weight in (*model.parameters(), *model.buffers()))
    if numbers > PACKED * sum(sizes) + SPARE_NUMBERS:
        raise UserError(
            f"{name}: its weights do not fit its config.json; got {sum(sizes):,} numbers, expected {numbers:,}. {fix}"
        )
    return model


def is_not_load_report(record: logging.LogRecord) -> bool:
    return "LOAD REPORT" not in record.getMessage()


@contextlib.contextmanager
def without_load_report() -> Generator[None]:
    """Silence Transformers' table of missing and unexpected weights: `load_model` raises for each of them."""
    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(is_not_load_report)
    try:
        yield
    finally:
        logger.removeFilter(is_not_load_report)


def list_names(names: list[str]) -> str:
    """Return the first two names, and how many more there are."""
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def check_weights_fit(
    name: str,
    missing: list[str],
    unexpected: list[str],
    misshapen: list[str],
    required_by: str = "its config.json",
    fix: str = "Restore the config.json that was saved with the weights, or save the model again.",
) -> None:
    """Check that a folder has exactly the weights that a model requires.

    The message says what requires them, `required_by`, and ends in `fix`.
    """
    problems = {"missing": missing, "unexpected": unexpected, "of another shape": misshapen}
    if differences := "; ".join(
        f"{problem}: {list_names(sorted(names))}" for problem, names in problems.items() if names
    ):
        raise UserError(f"{name}: its weights do not fit {required_by}; {differences}. {fix}")


def check_finite(
    name: str,
    weights: dict[str, torch.Tensor],
    fix: str = "give a checkpoint from before training diverged, or another copy of the file.",
) -> None:
    """Check that all weights are finite numbers; `fix` ends the message."""
    broken = [
        key
        for key, weight in weights.items()
        if weight.is_floating_point() and not weight.is_meta and not torch.isfinite(weight).all()
    ]
    if broken:
        dtype = str(weights[broken[0]].dtype).removeprefix("torch.")
        raise UserError(f"{name}: NaN or infinite numbers in {list_names(broken)} ({dtype}); {fix}")


def count_tokens(model: PreTrainedModel) -> int:
    """Return the entries of a model's larger vocabulary, of sources or of targets."""
    embeddings = (model.get_input_embeddings(), model.get_output_embeddings())
    return max(len(cast(nn.Embedding, each).weight) for each in embeddings if each is not None)


def find_search(name: str, **settings: Any) -> dict[str, Any] | None:
    """Return the search that a model is saved with; None for a model of others without one.

    Transformers would decode greedily in silence where the file is torn or lost.
    """
    if (path := find_file(name, GENERATION_CONFIG, **settings)) is not None:
        return read_json(path, FIX_OF_FILE)
    config = find_file(name, MODEL_MARKER, **settings)
    if config is not None and read_json(config, FIX_OF_FILE).get("model_type") in own_model_types():
        raise UserError(
            f"{name}: has no {GENERATION_CONFIG}, the search that this package saves with every model; restore it, or "
            "save the model again."
        )
    return None


@overload
def load_model(name: str, model_class: type[Model], **settings: Any) -> Model: ...


@overload
def load_model(name: str, model_class: Any = AutoModelForSeq2SeqLM, **settings: Any) -> PreTrainedModel: ...


def load_model(name: str, model_class: Any = AutoModelForSeq2SeqLM, **settings: Any) -> PreTrainedModel:
    """Return the model of a folder or the Hub, with all weights present, of the right shapes and finite.

    `model_class`, which may be an Auto class, loads it with `settings` as arguments of `from_pretrained`.
    """
    check_model_name(name)
    source = {setting: value for setting, value in settings.items() if setting in SOURCE}
    with load_errors(name), without_load_report():
        search, config = find_search(name, **source), find_file(name, MODEL_MARKER, **source)
        if config is not None and (sizes := weight_sizes(name, **source)):
            described = describe_model(name, model_class, sizes, **source)
            saved = read_json(config, FIX_OF_FILE) if search is None else search
            check_search_settings(name, saved, count_tokens(described))
        model, info = load_pretrained(
            model_class, name, output_loading_info=True, ignore_mismatched_sizes=True, **settings
        )
    misshapen = [
        f"{key} {tuple(shape)}, expected {tuple(expected)}" for key, shape, expected in info["mismatched_keys"]
    ]
    check_weights_fit(name, list(info["missing_keys"]), list(info["unexpected_keys"]), misshapen)
    check_finite(name, model.state_dict())
    if search is None and model.can_generate() and (model.generation_config.num_beams or 1) == 1:
        logger.warning("%s: has no %s, so it decodes greedily.", name, GENERATION_CONFIG)
    return model


def load_tokenizer(name: str, tokenizer_class: Any = AutoTokenizer, **settings: Any) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a folder, which may have no model, or of the Hub; see `load_model`."""
    folder = Path(name)
    has_files = folder.is_dir() and any(path for pattern in TOKENIZER_FILES for path in folder.glob(pattern))
    if not has_files:  # a folder may hold a tokenizer only
        check_model_name(name)
    if folder.is_dir() and not has_files:
        raise UserError(f"{name}: has no tokenizer; save the model's tokenizer there with save_pretrained.")
    with load_errors(f"{name}: its tokenizer"):
        for path in (folder / file for file in TOKENIZER_JSON):
            if path.is_file():
                read_json(path, FIX_OF_FILE)
        tokenizer = cast(PreTrainedTokenizerBase, load_pretrained(tokenizer_class, name, **settings))
        text_encoder(tokenizer)("a")  # some settings are read only now
    return tokenizer


def check_tokenizer_fits(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Check that the model has an embedding for every token, and a CMLM the tokenizer's `<mask>`."""
    entries = len(cast(nn.Embedding, model.get_input_embeddings()).weight)
    try:
        check_vocabulary(tokenizer, entries, getattr(model.config, "mask_token_id", None), name)
    except ValueError as error:
        raise UserError(str(error)) from None
