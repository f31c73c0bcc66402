"""MkDocs hook: tables of all fields of a recipe and of a configuration, from the code.

A block in a page

    ```fields
    recipe
    ```

becomes a table for each group of a recipe's fields, as `--help` explains them. With the name of a configuration instead
of `recipe` it becomes a table of the fields that this class explains. Importing the code needs torch.
"""

import re
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # `mkdocs` leaves the folder that it runs in out

BLOCK = re.compile(r"^```fields\n(\w+)\n```$", flags=re.MULTILINE)
ENTRY = re.compile(r"^  --([\w.]+)=(.*)\n((?:      .*\n?)+)", flags=re.MULTILINE)
HEADER = "| field | type | default | meaning |\n| --- | --- | --- | --- |\n"
WORDS = {int: "integer", float: "number", str: "text", bool: "true, false", types.NoneType: "null", dict: "mapping"}


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
    return WORDS.get(origin or hint, getattr(hint, "__name__", str(hint)))


def row(name: str, hint: Any, default: str, text: str) -> str:
    """Return a row of a table; bars in it do not end its cells."""
    cells = (f"`{name}`", type_words(hint), f"`{default}`" if default else "empty", re.sub(r"\s+", " ", text).strip())
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"


def hints_of(config_class: type) -> dict[str, Any]:
    """Return the types of a configuration's fields; those of Transformers' own classes may stay text."""
    hints: dict[str, Any] = {}
    for base in reversed(config_class.__mro__):
        hints |= vars(base).get("__annotations__", {})
    return hints


def recipe_types() -> dict[str, Any]:
    """Return the type of every field of a recipe by its full name, the model's included."""
    from training.recipe.families import FAMILIES
    from training.recipe.fields import Recipe
    from training.recipe.reading import settings

    hints = {name: known.hint for name, known in settings(Recipe).items()}
    for family in FAMILIES.values():
        hints |= {f"model.{name}": hint for name, hint in hints_of(family.config_class).items()}
    return hints | {"model.kind": str, "model.paper": str}


def recipe_tables() -> Iterator[str]:
    """Yield the tables of a recipe, group by group, in the order of `--help`."""
    from training.recipe.help import recipe_help

    hints, group = recipe_types(), None
    for name, default, text in ENTRY.findall(recipe_help()):
        head = name.rpartition(".")[0]
        if head != group:
            yield f"\n### {head or 'Recipe'}\n\n{HEADER}"
            group = head
        yield row(name, hints[name], default, text)


def config_table(name: str) -> Iterator[str]:
    """Yield the table of the fields that a configuration's own docstring explains."""
    import vaswani_transformer
    from training.recipe.help import field_descriptions, shown

    config_class = getattr(vaswani_transformer, name)
    hints, base = hints_of(config_class), config_class()
    yield HEADER
    for field, text in field_descriptions(config_class).items():
        if field in hints:
            yield row(field, hints[field], shown(getattr(base, field)), text)


def tables(name: str) -> str:
    """Return the tables that a block asks for."""
    return "".join(recipe_tables() if name == "recipe" else config_table(name))


def on_page_markdown(markdown: str, **context: Any) -> str:
    """Called by MkDocs with the text of each page."""
    return BLOCK.sub(lambda match: tables(match[1]), markdown)
