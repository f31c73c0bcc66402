"""The text of `--help` on a recipe's fields: defaults and meanings, read from the dataclasses and docstrings."""

import argparse
import dataclasses
import inspect
import re
import textwrap
import typing
from collections.abc import Iterator
from typing import Any

from training.recipe.families import AUTOREGRESSIVE, FAMILIES
from training.recipe.fields import Recipe
from training.recipe.reading import settings
from vaswani_transformer.support.command_line import ArgumentParser

WIDTH = 100
FIELD = re.compile(r"(\w+(?:, \w+)*): (.*)")


def field_descriptions(cls: type) -> dict[str, str]:
    """Return a docstring's text on each field, from paragraphs of the form `name, other: text`."""
    descriptions: dict[str, str] = {}
    names: list[str] = []
    indent = 0
    for line in inspect.cleandoc(cls.__doc__ or "").splitlines():
        depth = len(line) - len(line.lstrip())
        if names and depth > indent:
            descriptions |= {name: f"{descriptions[name]} {line.strip()}" for name in names}
        elif match := FIELD.fullmatch(line.strip()):
            names, indent = match[1].split(", "), depth
            descriptions |= dict.fromkeys(names, match[2])
        else:
            names = []
    return descriptions


def shown(value: object) -> str:
    """Return a default as YAML."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def entry(name: str, default: object, text: str) -> str:
    return f"  --{name}={shown(default)}\n{textwrap.indent(textwrap.fill(text, WIDTH - 6), 6 * ' ')}"


def entries(cls: Any, prefix: str = "") -> Iterator[str]:
    """Yield the fields of a dataclass, then those of its groups."""
    texts, hints, known = field_descriptions(cls), typing.get_type_hints(cls), settings(cls)
    groups = []
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            groups.append((field.name, hint))
        elif field.name != "model":
            choices = ", ".join(known[field.name].choices)
            text = texts[field.name] + (f" One of {choices}." if choices else "")
            yield entry(f"{prefix}{field.name}", field.default, text)
    for name, hint in groups:
        summary = textwrap.fill(inspect.cleandoc(hint.__doc__ or "").splitlines()[0], WIDTH)
        yield f"\n{name}: {summary}"
        yield from entries(hint, f"{name}.")
        if name == "tokenizer":
            yield "\nmodel: The kind of model and the fields of its configuration."
            yield from model_entries()


def model_entries() -> Iterator[str]:
    """Yield the fields of the model, with the paper's base model as default; then those that only other kinds have."""
    kinds = ", ".join(FAMILIES)
    yield entry("model.kind", AUTOREGRESSIVE, f"the kind of model; other kinds have further fields. One of {kinds}.")
    yield entry(
        "model.paper", "base", "the model of the paper that the other fields change, by its name in from_paper."
    )
    listed: set[str] = set()
    for name, kind in FAMILIES.items():
        base, texts = kind.config_class(), {}
        for cls in reversed(kind.config_class.__mro__):
            texts |= field_descriptions(cls)
        for field in kind.model_fields:
            if field not in listed and field in texts:
                note = "" if name == AUTOREGRESSIVE else f" Of kind {name}."
                yield entry(f"model.{field}", getattr(base, field), texts[field] + note)
                listed.add(field)


def recipe_parser(command: str, description: str, example: str) -> ArgumentParser:
    """Return the parser of a command with a recipe, whose help ends with all fields of a recipe."""
    return ArgumentParser(
        prog=f"python -m training.{command}",
        description=description,
        epilog=f"Any field of the recipe can be set as in training, {example}:\n\n{recipe_help()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def parse_with_recipe(parser: ArgumentParser, arguments: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Return a command's own arguments, and those that set fields of a recipe; any other option ends the command."""
    options, overrides = parser.parse_known_args(arguments)
    groups = {f"--{field.name}" for field in dataclasses.fields(Recipe)}
    for argument in overrides:
        if argument.startswith("--") and re.split(r"[.=]", argument)[0] not in groups:
            parser.error(parser.unknown_option(argument, settings(Recipe)))
    return options, overrides


def recipe_help() -> str:
    return "\n".join(entries(Recipe))
