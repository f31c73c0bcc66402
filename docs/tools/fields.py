"""MkDocs hook: tables of all fields of a recipe and of a configuration, from the code.

A block in a page

    ```fields
    recipe
    ```

becomes the tables of a recipe's fields, as `--help` explains them. With the name of a configuration instead
of `recipe` it becomes a table of the fields that this class explains. Importing the code needs torch.
"""

import dataclasses
import re
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docstring_parser
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # `mkdocs` leaves the folder that it runs in out

BLOCK = re.compile(r"^```fields\n(\w+)\n```$", flags=re.MULTILINE)
HEADER = "| field | type | default | meaning |\n| --- | --- | --- | --- |\n"
WORDS = {int: "integer", float: "number", str: "text", bool: "true, false", types.NoneType: "null", dict: "mapping"}

RANGES = {
    "PositiveInt": "integer above 0",
    "NonNegativeInt": "integer of at least 0",
    "PositiveFloat": "number above 0",
    "NonNegativeFloat": "number of at least 0",
    "ClosedUnitInterval": "number from 0 to 1",
}


def type_words(hint: Any) -> str:
    """Return a type in words: `integer or null`; of a choice its values."""
    if isinstance(hint, str) or hint is Any:
        return "any"
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return type_words(arguments[0])
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (types.UnionType, typing.Union):
        kinds = dict.fromkeys(type_words(one) for one in arguments)
        if "number" in kinds:
            kinds.pop("integer", None)  # an integer is a number
        return " or ".join(kinds)
    if origin in (list, tuple):
        return f"list ({type_words(arguments[0])})" if arguments else "list"
    name = getattr(hint, "__name__", str(hint))
    return WORDS.get(origin or hint) or RANGES.get(name, name)


def row(name: str, hint: Any, default: str, text: str) -> str:
    """Return a row of a table; bars in it do not end its cells, and tokens such as </s> are no HTML."""
    text = re.sub(r"(?<!`)(</?\w+>)", r"`\1`", text)
    cells = (f"`{name}`", type_words(hint), f"`{default}`" if default else "empty", re.sub(r"\s+", " ", text).strip())
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"


def hints_of(config_class: type) -> dict[str, Any]:
    """Return the types of a configuration's fields; those of Transformers' own classes may stay text."""
    hints: dict[str, Any] = {}
    for base in reversed(config_class.__mro__):
        hints |= vars(base).get("__annotations__", {})
    return hints


def described(owner: type) -> dict[str, str]:
    """Return the descriptions of fields in a class's own docstring."""
    return {one.arg_name: one.description or "" for one in docstring_parser.parse(owner.__doc__ or "").params}


def recipe_tables() -> Iterator[str]:
    """Yield a table of each class of a recipe's fields; those that a class inherits stand in its base's table."""
    from training import recipe

    groups = {
        "Recipe": [recipe.Recipe],
        "data": [recipe.GrammarData, recipe.FileData, recipe.HubData],
        "tokenizer": [recipe.TokenizerRecipe],
        "training": [
            recipe.TrainingRecipe,
            *recipe.OPTIMIZERS.values(),
            *(f.training for f in recipe.FAMILIES.values()),
        ],
        "decoding": list(dict.fromkeys(family.decoding for family in recipe.FAMILIES.values())),
        "score": [recipe.ScoreRecipe],
    }
    for group, classes in groups.items():
        yield f"\n### {group}\n"
        for owner in classes:
            fields, prefix = dataclasses.fields(owner), "" if group == "Recipe" else f"{group}."
            defaults = {field.name: field.default for field in fields}
            yield f"\n{(owner.__doc__ or '').splitlines()[0]}\n\n{HEADER}"
            for name, text in described(owner).items():
                shown = "" if defaults[name] is dataclasses.MISSING else yaml.safe_dump(defaults[name]).splitlines()[0]
                yield row(f"{prefix}{name}", typing.get_type_hints(owner)[name], shown, text)


def config_table(name: str) -> Iterator[str]:
    """Yield the table of the fields that a configuration's own docstring explains."""
    import vaswani_transformer

    config_class = getattr(vaswani_transformer, name)
    hints, base = hints_of(config_class), config_class()
    yield HEADER
    for names, text in described(config_class).items():
        for field in (each.strip() for each in names.split(",")):
            if field in hints:
                yield row(field, hints[field], yaml.safe_dump(getattr(base, field)).splitlines()[0], text)


def tables(name: str) -> str:
    """Return the tables that a block asks for."""
    return "".join(recipe_tables() if name == "recipe" else config_table(name))


def on_page_markdown(markdown: str, **context: Any) -> str:
    """Called by MkDocs with the text of each page."""
    return BLOCK.sub(lambda match: tables(match[1]), markdown)
