"""Nested dataclasses from YAML and from `--any.field=value` arguments, with every key, type and range checked."""

import contextlib
import dataclasses
import math
import os
import types
import typing
from collections.abc import Hashable
from typing import Any, Literal

import yaml

from vaswani_transformer.errors import UserError

LARGEST = 2**63 - 1  # as torch counts
PATHS = {
    "data": ("path", "train", "validation", "test", "distilled", "teacher"),
    "tokenizer": ("path",),
    "training": ("encoder_from", "start_from", "energy_from"),
}
PATH_FIELDS = {"output_dir"} | {f"{group}.{name}" for group, names in PATHS.items() for name in names}
TEXT_FIELDS = PATH_FIELDS | {"name", "data.subset", "data.source", "data.target"}
NOT_NEGATIVE = {
    "weight_decay",
    "kl_scale",
    "decoder_steps",
    "latent_temperature",
    "max_grad_norm",
    "max_source_relative_length",
    "examples",
    "seed",
    "skip_limit",
}
POSITIVE = {
    "steps", "minutes", "source_tokens", "target_tokens", "device_tokens", "warmup_steps", "learning_rate_scale",
    "evaluation_steps", "evaluation_beams", "evaluation_batch_size", "log_steps", "patience", "keep_checkpoints",
    "num_beams", "vocab_size", "max_length", "buffer", "sample", "checkpoint_steps", "checkpoint_minutes",
    "average_last", "evaluation_iterations", "num_iterations", "length_beam_size", "learning_rate",
    "learning_rate_decay", "learning_rate_decay_steps", "glancing_steps", "kl_warmup_steps", "num_latent_samples",
}  # fmt: skip


class RecipeLoader(yaml.SafeLoader):
    """YAML's safe loader, which also rejects a repeated key, as YAML specifies."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[Any, int] = {}
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key, line = self.construct_object(key_node, deep=True), key_node.start_mark.line + 1
            if not isinstance(key, Hashable):
                continue  # the safe loader raises its own error
            if key in lines:
                raise UserError(f"line {line}: {key!r} is already in line {lines[key]}; keep one of the two.")
            lines[key] = line
        return super().construct_mapping(node, deep)


def read_yaml(text: str) -> Any:
    """Return the value of a YAML text.

    Raises:
        UserError: a key occurs twice in a mapping; the message begins with its line.
        yaml.YAMLError: the text is not YAML.
    """
    return yaml.load(text, RecipeLoader)


def apply_override(tree: dict[str, Any], argument: str) -> None:
    """Set the value of one `--any.field=value` in `tree`; the value of a text field is no YAML."""
    name, equals, text = argument.removeprefix("--").partition("=")
    if not argument.startswith("--") or not equals:
        raise UserError(f"{argument}: not an argument; write --any.field=value, for example --training.steps=1000.")
    *path, last = name.split(".")
    for key in path:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise UserError(f"{argument}: {key} is a value, not a group of fields.")
    try:
        tree[last] = text if name in TEXT_FIELDS and text != "null" else read_yaml(text)
    except UserError as error:
        raise UserError(f"{argument}: {error}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{argument}: {text[:40]!r} is not a value; quote it.") from error


def build(cls: type, tree: Any, prefix: str) -> Any:
    """Return an instance of the dataclass `cls` from a mapping, with every key and type checked."""
    if not isinstance(tree, dict):
        raise UserError(f"{prefix.rstrip('.')}: expected a group of fields, got {tree!r}.")
    hints = typing.get_type_hints(cls)
    values = {}
    for key, value in tree.items():
        if key not in hints:
            raise UserError(f"{prefix}{key}: no such key; {prefix.rstrip('.') or 'a recipe'} has {', '.join(hints)}.")
        values[key] = coerce(hints[key], value, f"{prefix}{key}")
    return cls(**values)


def coerce(hint: Any, value: Any, name: str) -> Any:
    """Return `value` as the type `hint`, the `~` of a path expanded, or raise a UserError."""
    if dataclasses.is_dataclass(hint):
        return build(hint, value, f"{name}.")
    if typing.get_origin(hint) is Literal:
        choices = typing.get_args(hint)
        if value not in choices:
            raise UserError(f"{name}: {value!r} is not one of {', '.join(choices)}.")
        return value
    allowed = typing.get_args(hint) if isinstance(hint, types.UnionType) else (typing.get_origin(hint) or hint,)
    if float in allowed or isinstance(value, (dict, list)):
        value = read_exponents(value)
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        kinds = " or ".join("null" if kind is types.NoneType else kind.__name__ for kind in allowed)
        quoting = "; quote a text that YAML takes for something else" if str in allowed else ""
        raise UserError(f"{name}: expected {kinds}, got {value!r}{quoting}.")
    check_numbers(value, name)
    return os.path.expanduser(value) if name in PATH_FIELDS and value is not None else value


def read_exponents(value: Any) -> Any:
    """Return a value, or the members of a group or a list, with a number such as 1e-4, which YAML reads as a word."""
    if isinstance(value, dict):
        return {key: read_exponents(member) for key, member in value.items()}
    if isinstance(value, list):
        return [read_exponents(member) for member in value]
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return float(value)
    return value


def check_numbers(value: Any, name: str) -> None:
    """Check that a number, or each number of a group or a list, is finite and fits into 64 bits."""
    if isinstance(value, list):
        for member in value:
            check_numbers(member, name)
    if isinstance(value, dict):
        for key, member in value.items():
            check_numbers(member, f"{name}.{key}")
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{name}: expected a finite number, got {value}; give one.")
    if isinstance(value, int) and abs(value) > LARGEST:
        raise UserError(f"{name}: a number of {len(str(abs(value)))} digits is too large; give a smaller one.")


def check_range(prefix: str, name: str, value: Any) -> None:
    """Check that the value of a field, whose group is `prefix`, is positive, not negative or not empty if required."""
    if name in POSITIVE and value is not None and value <= 0:
        raise UserError(f"{prefix}{name}: {value} is not positive; give a number above 0.")
    if name in NOT_NEGATIVE and value < 0:
        raise UserError(f"{prefix}{name}: {value} is negative; give 0 or more.")
    if f"{prefix}{name}" in TEXT_FIELDS and value == "":
        raise UserError(f"{prefix}{name}: the text is empty; name something, or give null for none.")
