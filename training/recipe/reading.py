"""Nested dataclasses from YAML and from `--any.field=value` arguments, with every key, type and range checked."""

import contextlib
import dataclasses
import enum
import math
import os
import types
import typing
from collections.abc import Hashable
from operator import attrgetter
from typing import Any, Literal

import yaml

from vaswani_transformer.support.command_line import did_you_mean, not_one_of
from vaswani_transformer.support.errors import UserError, one_line

LARGEST = 2**63 - 1  # as torch counts


class Scope(enum.Enum):
    """How a recipe that resumes or extends a run may differ in a field from the run's own."""

    FIXED = enum.auto()  # not at all
    OPEN = enum.auto()  # not at all; a recipe may leave it open, and the run's own has what was taken
    LIMIT = enum.auto()  # a run may get more
    LOCATION = enum.auto()  # where equal pairs or the same teacher lie: the run has the digests of both
    EXECUTION = enum.auto()  # execution and output only: it does not change what a step computes
    DESCRIPTION = enum.auto()  # for readers


@dataclasses.dataclass(frozen=True)
class Rules:
    """What is known of the values of a recipe's field.

    above, at_least, at_most: limits of a number.
    is_path: whether it names a file, folder or repository; `~` in it is expanded.
    is_needed: whether null is refused, rather than the default.
    needs: the field that is its switch, and the values of that which switch it on; without any, every value but null
        and false does.
    kinds: the kinds of model that have it; all if empty.
    scope: how a recipe that resumes or extends a run may differ in it.
    """

    above: int | None = None
    at_least: int | None = None
    at_most: int | None = None
    is_path: bool = False
    is_needed: bool = False
    needs: tuple[Any, ...] = ()
    kinds: tuple[str, ...] = ()
    scope: Scope = Scope.FIXED


def setting(default: Any, **rules: Any) -> Any:
    """Return a field of a recipe with its default, the value of a field that is left out, and its `Rules`."""
    return dataclasses.field(default=default, metadata={"rules": Rules(**rules)})


@dataclasses.dataclass(frozen=True)
class Setting:
    """A field of a recipe.

    name: with its group, such as training.steps.
    hint: its type.
    default: the value of a field that is left out.
    choices: the texts among which its value is, if it may not be any text.
    allowed: the classes of its other values.
    rules: what `setting` declares of its values.
    """

    name: str
    hint: Any
    default: Any
    choices: tuple[str, ...]
    allowed: tuple[type, ...]
    rules: Rules


def settings(cls: Any, prefix: str = "") -> dict[str, Setting]:
    """Return the fields of a dataclass and of the groups in it, by their names."""
    found: dict[str, Setting] = {}
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        name, hint = f"{prefix}{field.name}", hints[field.name]
        if dataclasses.is_dataclass(hint):
            found |= settings(hint, f"{name}.")
            continue
        is_union = typing.get_origin(hint) in (types.UnionType, typing.Union)
        members = typing.get_args(hint) if is_union else (hint,)
        literals = [member for member in members if typing.get_origin(member) is Literal]
        choices = tuple(text for literal in literals for text in typing.get_args(literal))
        allowed = tuple(typing.get_origin(member) or member for member in members if member not in literals)
        found[name] = Setting(name, hint, field.default, choices, allowed, field.metadata.get("rules", Rules()))
    return found


class RecipeLoader(yaml.SafeLoader):
    """YAML's safe loader, which also rejects a repeated key, as YAML specifies, and aliases.

    A few lines of aliases within aliases are a value of billions of members, or one without end.
    """

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise UserError(f"line {event.start_mark.line + 1}: an alias, *{event.anchor}; write its value there.")
        return super().compose_node(parent, index)

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
    try:
        return yaml.load(text, RecipeLoader)
    except yaml.YAMLError as error:
        raise ValueError(one_line(error, is_complete=True)) from error
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def apply_override(cls: type, tree: dict[str, Any], argument: str) -> None:
    """Set the value of one `--any.field=value` in the `tree` of a dataclass; the value of a text field is no YAML."""
    name, equals, text = argument.removeprefix("--").partition("=")
    if not argument.startswith("--"):
        raise UserError(f"{argument}: not an argument; write --any.field=value, for example --training.steps=1000.")
    if not equals:
        raise UserError(f"{argument}: has no value; write {argument}=VALUE, with an equals sign.")
    *path, last = name.split(".")
    for key in path:
        if tree.get(key) is None:
            tree[key] = {}
        tree = tree[key]
        if not isinstance(tree, dict):
            raise UserError(f"{argument}: {key} is a value, not a group of fields.")
    known = settings(cls).get(name)
    is_text = known is not None and str in known.allowed
    if not (text or is_text):
        raise UserError(f"{argument}: the value is empty; give one, or null for the default.")
    try:
        tree[last] = text if is_text and text != "null" else read_yaml(text)
    except UserError as error:
        raise UserError(f"{argument}: {error}") from error
    except ValueError as error:
        raise UserError(f"{argument[:60]}: {text[:40]!r} is not a value ({one_line(error)}); quote it.") from error


def build(cls: type, tree: Any, prefix: str = "") -> Any:
    """Return an instance of the dataclass `cls` from a mapping, with every key and type checked.

    Null is the value of a field that may have none, and leaves any other field or group at its default.
    """
    if not isinstance(tree, dict):
        raise UserError(f"{prefix.rstrip('.')}: expected a group of fields, got {tree!r}.")
    hints, fields = typing.get_type_hints(cls), settings(cls, prefix)
    values = {}
    for key, value in tree.items():
        if key not in hints:
            group = prefix.rstrip(".") or "a recipe"
            raise UserError(
                f"{prefix}{key}: no such key; {group} has {', '.join(hints)}."
                f"{did_you_mean(f'{prefix}{key}', [*fields, *(f'{prefix}{name}' for name in hints)])}"
            )
        if dataclasses.is_dataclass(hints[key]):
            if value is not None:
                values[key] = build(hints[key], value, f"{prefix}{key}.")
        elif value is not None or types.NoneType in fields[f"{prefix}{key}"].allowed:
            values[key] = coerce(fields[f"{prefix}{key}"], value)
        elif fields[f"{prefix}{key}"].rules.is_needed:
            raise UserError(f"{prefix}{key}: every run needs one; got null, expected a text. Name it, or leave it out.")
    return cls(**values)


def coerce(known: Setting, value: Any) -> Any:
    """Return a value of a field, the `~` of a path expanded, or raise a UserError."""
    name = known.name
    if choices := known.choices:
        if value is not None and value not in choices:
            raise UserError(f"{name}: {not_one_of(value, choices)}")
        return value
    allowed = known.allowed
    if float in allowed or isinstance(value, (dict, list)):
        value = read_exponents(value)
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        kinds = " or ".join("null" if kind is types.NoneType else kind.__name__ for kind in allowed)
        quoting = "; quote a text that YAML takes for something else" if str in allowed else ""
        raise UserError(f"{name}: expected {kinds}, got {value!r}{quoting}.")
    check_numbers(value, name)
    check_limits(known, value)
    return os.path.expanduser(value) if known.rules.is_path and value is not None else value


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


def check_limits(known: Setting, value: Any) -> None:
    """Check that a number is within its field's limits, and that a text whose default is not empty is not either."""
    name, rules = known.name, known.rules
    above, least, most = rules.above, rules.at_least, rules.at_most
    if above is not None and value is not None and value <= above:
        raise UserError(f"{name}: {value} is not positive; give a number above {above}.")
    if least is not None and value < least:
        raise UserError(f"{name}: {value} is {'negative' if least == 0 else 'too small'}; give {least} or more.")
    if most is not None and value > most:
        raise UserError(f"{name}: {value} is too large; give {most} or less.")
    if value == "" != known.default:
        otherwise = "give null for none" if types.NoneType in known.allowed else "leave it out"
        raise UserError(f"{name}: the text is empty; name something, or {otherwise}.")


def check_switches(recipe: Any, ignored: tuple[str, ...] = ()) -> None:
    """Check that every field that is not at its default has an effect: that the field which it needs is so set.

    Fields of the `ignored` groups need none.
    """
    known = settings(type(recipe))
    values = {name: attrgetter(name)(recipe) for name in known}
    idle: dict[tuple[Any, ...], list[str]] = {}
    for name, one in known.items():
        switch, *on = needs = one.rules.needs or (None,)
        if switch is None or name.partition(".")[0] in ignored or values[name] in (None, one.default):
            continue
        if (values[switch] not in on) if on else (values[switch] in (None, False)):
            idle.setdefault(needs, []).append(name)
    for (switch, *on), names in idle.items():
        state = "null" if values[switch] is None else str(values[switch]).lower()
        raise UserError(
            f"{', '.join(names)}: without effect, since {switch} is {state}{f', not {any_of(on)}' if on else ''}; "
            f"{leave_out(names)}, or set {switch}."
        )


def any_of(values: list[Any]) -> str:
    *others, last = (str(value) for value in values)
    return f"{', '.join(others)} or {last}" if others else last


def leave_out(names: list[str]) -> str:
    """Return the advice to leave fields out, with the arguments that do so where a file has them."""
    return f"leave {'it' if len(names) == 1 else 'them'} out ({' '.join(f'--{name}=null' for name in names)})"
