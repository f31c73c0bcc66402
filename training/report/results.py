"""The facts in `results.json` besides the scores: data, code and machine, without names of users, hosts or paths."""

import hashlib
import math
import os
import platform
import re
import subprocess
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate.utils import gather_object
from datasets import Dataset, DatasetDict

import vaswani_transformer
from training.data.distilled import Distillation
from training.data.pairs import is_streamed
from training.recipe.fields import PATHS, SETTINGS, DataRecipe, Recipe, to_dict
from training.recipe.reading import build
from vaswani_transformer.support.errors import UserError, one_line
from vaswani_transformer.support.files import read_json

RESULTS = "results.json"
RESULTS_FIX = "restore it, or give the training command again without it."
NEEDED = {"name", "recipe", "commit", "versions", "hardware", "processes", "parameters", "steps", "flops", "curve"}
LIBRARIES = ("torch", "transformers", "accelerate", "datasets", "tokenizers", "sacrebleu")


def fingerprint(pairs: Dataset) -> dict[str, int | str]:
    """Return the number of pairs, and the SHA-256 of their texts in order, each in UTF-8 followed by a zero byte.

    So the bytes are source, zero, target, zero, pair after pair.
    """
    digest = hashlib.sha256()
    for batch in pairs.select_columns(["source", "target"]).iter(1000):
        texts = zip(batch["source"], batch["target"], strict=True)
        digest.update("".join(f"{source}\0{target}\0" for source, target in texts).encode())
    return {"pairs": len(pairs), "sha256": digest.hexdigest()}


def git(*arguments: str) -> str:
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()


def commit() -> dict[str, str | bool] | None:
    """Return the checkout's commit and whether tracked files differ from it; None if git does not track this code."""
    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)
        is_dirty = bool(git("status", "--porcelain", "--untracked-files=no"))
        return {"hash": git("rev-parse", "HEAD"), "dirty": is_dirty}
    except (OSError, subprocess.SubprocessError):
        return None


def versions() -> dict[str, str]:
    """Return the versions of Python, this package and the libraries that a run computes with."""
    own_versions = {"python": platform.python_version(), "vaswani_transformer": vaswani_transformer.__version__}
    build = str(torch.__version__)  # "2.13.0+cpu": its metadata may leave the build out
    return own_versions | {name: version(name) for name in LIBRARIES} | {"torch": build}


def cpu_name() -> str:
    """Return the processor's model, as far as the system names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())


def hardware(device: torch.device) -> dict[str, Any]:
    """Return the machine of the main process and the accelerators of all processes, which must call together.

    `cores` are those this process may use, `memory` is in GiB, and `accelerators` counts those in use by name.
    """
    accelerator_names = [] if device.type == "cpu" else [device.type]
    if device.type == "cuda":
        accelerator_names = [torch.cuda.get_device_name(device)]
    process = psutil.Process()
    cores = process.cpu_affinity() if hasattr(process, "cpu_affinity") else range(psutil.cpu_count() or 1)
    return {
        "cpu": cpu_name(),
        "cores": len(cores or []),
        "threads": torch.get_num_threads(),
        "memory": round(psutil.virtual_memory().total / 2**30, 1),
        "accelerators": dict(Counter(gather_object(accelerator_names))),
    }


def is_local(path: str) -> bool:
    """Return whether a recipe's path names a local file, not one on the Hub or in the folder of the data."""
    return path.startswith((".", "~")) or Path(path).is_absolute() or os.path.exists(path)


def without_folders(path: str) -> str:
    """Return a recipe's path, or for that of a local file its name."""
    return Path(path).resolve().name if is_local(path) else path


def strip_local_paths(recipe: Recipe) -> dict[str, Any]:
    """Return a recipe as a dictionary, with the names of local folders and files instead of their paths."""
    tree = to_dict(recipe)
    for name in PATHS:
        group, _, member = name.partition(".")
        if (path := tree[group].get(member)) is not None:  # one path, or patterns separated by spaces
            tree[group][member] = re.sub(r"\S+", lambda part: without_folders(part[0]), without_folders(path))
    return tree


def read_results(path: Path) -> dict[str, Any]:
    results = read_json(path, RESULTS_FIX)
    if missing := sorted(NEEDED - set(results)):
        raise UserError(f"{path}: lacks {', '.join(missing)}; train again with this version to publish.")
    return results


@contextmanager
def results_errors(name: str | os.PathLike[str]) -> Generator[None]:
    """Turn an error about a value of a `results.json` that is missing or of another type into a UserError."""
    try:
        yield
    except UserError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(f"{name}: is damaged ({type(error).__name__}: {one_line(error)}); {RESULTS_FIX}") from error


def recipe_of(results: dict[str, Any]) -> Recipe:
    """Return the recipe in the content of a `results.json`, without fields that this version does not have."""
    tree = {
        group: {name: value for name, value in fields.items() if f"{group}.{name}" in SETTINGS or group == "model"}
        if isinstance(fields, dict)
        else fields
        for group, fields in results["recipe"].items()
    }
    return build(Recipe, {group: value for group, value in tree.items() if group in Recipe.__dataclass_fields__})


def to_json_values(tree: Any) -> Any:
    """Return nested values for JSON, with None for numbers that are not finite."""
    if isinstance(tree, dict):
        return {key: to_json_values(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [to_json_values(value) for value in tree]
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree


def fingerprints(
    recipe: DataRecipe, pairs: DatasetDict, distillation: Distillation | None = None
) -> dict[str, dict[str, Any]]:
    """Return the fingerprint of each split; of streamed training pairs, that of the first ones.

    The fingerprint of distilled training pairs also holds that of their distillation.
    """
    prints: dict[str, dict[str, Any]] = {
        str(split): fingerprint(texts) | ({"first_of_stream": True} if is_streamed(recipe, str(split)) else {})
        for split, texts in pairs.items()
    }
    if distillation is not None:
        prints["train"]["distilled"] = distillation.fingerprint()
    return prints
