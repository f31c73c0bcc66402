"""Write the reference pages from the code: `python -m docs.tools.reference` makes docs/api.md and docs/fields.md.

The API page has the signature and the docstring of every public name. The page of fields has a table of each class of a
recipe and of each configuration. A test compares the pages with what this module returns.
"""

import ast
import dataclasses
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import docstring_parser
import yaml

FOLDER = Path(__file__).resolve().parents[1]
WIDTH = 100  # characters of a signature's line
SECTION = re.compile(r"^(Args|Attributes|Returns|Yields|Raises):\n", flags=re.MULTILINE)
ENTRY = re.compile(r"^([*\w.]+(?:, [*\w.]+)*):")

# The names of each section of the API page, each with the members that it shows.
SECTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "Model": {
        "VaswaniTransformerConfig": ("from_paper",),
        "VaswaniTransformerForConditionalGeneration": ("forward", "use_paper_decoding"),
        "VaswaniTransformerModel": (),
        "VaswaniTransformerPreTrainedModel": (),
        "VaswaniTransformerTokenizer": ("train_from_iterator",),
    },
    "Training": {
        "paper_adam": (),
        "paper_schedule": (),
        "TokenBudgetBatchSampler": ("set_epoch",),
        "PairTokens": (),
        "PairCollator": (),
    },
    "Decoding": {
        "prepare_for_inference": (),
        "translate": (),
        "translation.Translation": ("text", "is_unfinished", "details"),
        "translation.Hypothesis": (),
        "translation.Details": ("pharaoh",),
        "rerank": (),
        "score_targets": (),
        "translation.TargetScore": (),
        "to_ctranslate2": (),
        "to_onnx": (),
        "convert.OnnxExport": (),
    },
    "Importing": {"from_fairseq": (), "from_fsmt": (), "from_marian": (), "convert.ImportResult": ()},
    "Parsing": {
        "parse": (),
        "parsing.ParsedSentence": (),
        "parsing.TreeTokens": ("of",),
        "parsing.WellFormedTrees": (),
        "parsing.Tree": ("events", "leaves", "words"),
        "parsing.Leaf": (),
        "parsing.read_trees": (),
        "parsing.evaluation_tree": (),
        "parsing.linearize": (),
        "parsing.delinearize": (),
        "parsing.score_trees": (),
        "parsing.BracketScores": ("precision", "recall", "f1", "exact_match", "tagging_accuracy"),
        "parsing.draw_tree_text": (),
    },
    "Non-autoregressive models": {
        "VaswaniNatConfig": (),
        "VaswaniNatForConditionalGeneration": ("forward", "generate"),
        "VaswaniNatModel": (),
        "VaswaniCtcConfig": (),
        "VaswaniCtcForConditionalGeneration": ("forward",),
        "VaswaniCtcModel": (),
        "VaswaniDagConfig": (),
        "VaswaniDagForConditionalGeneration": ("forward",),
        "VaswaniDagModel": (),
        "VaswaniIterativeVaeConfig": (),
        "VaswaniIterativeVaeForConditionalGeneration": ("forward",),
        "VaswaniIterativeVaeModel": (),
        "VaswaniFlowSeqConfig": (),
        "VaswaniFlowSeqForConditionalGeneration": ("forward", "start_flow"),
        "VaswaniFlowSeqModel": (),
        "VaswaniCmlmConfig": (),
        "VaswaniCmlmForConditionalGeneration": ("forward", "use_mask_predict"),
        "VaswaniCmlmModel": (),
        "MaskingCollator": (),
    },
    "Figures": {
        "attention_maps": (),
        "figures.AttentionMaps": (),
        "attention_page": (),
        "search_page": (),
        "figures.draw_attention": (),
        "figures.draw_heat_maps": (),
    },
}
API = """# API

<!-- made by python -m docs.tools.reference -->

Import these from `vaswani_transformer`, and those with a module before their name from that module: `parsing.Tree` from
`vaswani_transformer.parsing`. Importing the package registers its classes with Transformers' Auto classes.
[Fields](fields.md) has the types and defaults of every configuration. `generate()` has the settings of
[the paper's search](translate.md#the-papers-search), and in
[non-autoregressive models](#settings-of-generate) their own.

In Python, `help()` also lists the errors that a function raises.
"""
FIELDS = """# Fields

<!-- made by python -m docs.tools.reference -->

Every field with its type, its default and its meaning.

## Recipe

A [recipe](training.md) is a YAML file, and an option of the same name overrides a field: `--training.steps=1000`. A
table that names a kind of data, optimizer or model has the fields of that kind alone. `model` has the fields of the
[configuration](#configuration) of its family. `python -m training.train RECIPE.yaml --help` prints the fields too.
"""
CONFIGURATION = """
## Configuration

The fields of `config.json`, without those that all of Transformers' configurations have.
"""
TABLES = FOLDER / "tools" / "api-tables.md"  # written by hand
RESULTS = FOLDER / "tools" / "results-json.md"  # written by hand
CONFIGURATIONS = [name for names in SECTIONS.values() for name in names if name.endswith("Config")]
FURTHER = "These, and those of `VaswaniTransformerConfig`:\n\n"
HEADER = "| field | type | default | meaning |\n| --- | --- | --- | --- |\n"
WORDS = {int: "integer", float: "number", str: "text", bool: "true, false", types.NoneType: "null", dict: "mapping"}

RANGES = {
    "PositiveInt": "integer above 0",
    "NonNegativeInt": "integer of at least 0",
    "Seed": "integer of at least 0 and below 2^32",
    "LanguageCode": "language code",
    "FileName": "text",
    "Delimiter": "character",
    "AddedToken": "text",
    "PositiveFloat": "number above 0",
    "NonNegativeFloat": "number of at least 0",
    "ClosedUnitInterval": "number from 0 to 1",
}


def type_words(hint: Any) -> str:
    """Return a type in words: `integer or null`; of a choice its values."""
    if isinstance(hint, str) or hint is Any:
        return "any"
    if dataclasses.is_dataclass(hint):
        return "table"
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
    """Yield a table of each class of a recipe's fields, with the names of those in the table of a base class."""
    from training import recipe
    from vaswani_transformer.registration import FAMILIES

    groups = {
        "Recipe": [recipe.Recipe],
        "data": [recipe.FileData, recipe.HubData],
        "data.variants": [recipe.Variants],
        "tokenizer": [recipe.TokenizerRecipe],
        "training": [
            recipe.TrainingRecipe,
            *recipe.OPTIMIZERS.values(),
            *(family.recipe.training for family in FAMILIES.values()),
        ],
        "decoding": list(dict.fromkeys(family.recipe.decoding for family in FAMILIES.values())),
        "score": [recipe.ScoreRecipe],
    }
    for group, classes in groups.items():
        yield f"\n### {group}\n"
        prefix = "" if group == "Recipe" else f"{group}."
        for owner in classes:
            yield recipe_table(owner, prefix, inherited_fields(owner, classes))


def inherited_fields(owner: type, classes: Sequence[type]) -> list[str]:
    """Return the fields that a class has from other tables of its group, without the first, which is that of all."""
    bases = [base for base in classes[1:] if issubclass(owner, base) and base is not owner]
    return [name for base in bases for name in described(base)]


def recipe_table(owner: type, prefix: str, inherited: list[str]) -> str:
    """Return the table of a class of a recipe's fields below its purpose; nothing of a class without fields."""
    rows = []
    for name, text in described(owner).items():
        shown = yaml.safe_dump(getattr(owner, name)).splitlines()[0] if hasattr(owner, name) else ""
        rows.append(row(prefix + name, typing.get_type_hints(owner)[name], shown, text))
    if not rows and not inherited:
        return ""

    purpose = (owner.__doc__ or "").splitlines()[0]
    if inherited:
        names = " and ".join(f"`{prefix}{name}`" for name in inherited)
        purpose += f" It {'also has' if rows else 'has'} {names}."
    return f"\n{purpose}\n" + (f"\n{HEADER}{''.join(rows)}" if rows else "")


def config_table(name: str) -> Iterator[str]:
    """Yield the table of a configuration's fields, without those that it has from the paper's model."""
    import vaswani_transformer

    config_class = getattr(vaswani_transformer, name)
    paper_class = vaswani_transformer.VaswaniTransformerConfig
    further = [one for one in config_class.__mro__ if issubclass(one, paper_class) and one is not paper_class]
    hints, base, paper = hints_of(config_class), config_class(), paper_class()
    yield f"{FURTHER if further else ''}{HEADER}"
    texts: dict[str, str] = {}
    for owner in further or [paper_class]:
        texts |= {field: text for field, text in described(owner).items() if field not in texts}
    texts |= {  # inherited, with another default
        field: text
        for field, text in described(paper_class).items()
        if field not in texts and getattr(base, field) != getattr(paper, field)
    }
    for field, text in texts.items():
        yield row(field, hints[field], yaml.safe_dump(getattr(base, field)).splitlines()[0], text)


def written(node: ast.AST | None, before: str) -> str:
    """Return a piece of source with what stands before it, or nothing."""
    return before + ast.unparse(node).replace("'", '"') if node else ""


def arguments_of(function: ast.FunctionDef) -> list[str]:
    """Return the arguments of a function as its source has them, without `self`."""
    given = function.args
    defaults: list[ast.expr | None] = [None] * (len(given.args) - len(given.defaults))
    pairs = list(zip(given.args, defaults + given.defaults, strict=True))
    arguments = [argument(one, default) for one, default in pairs if one.arg not in ("self", "cls")]
    arguments += [f"*{given.vararg.arg}"] if given.vararg else ["*"] if given.kwonlyargs else []
    arguments += [argument(one, default) for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    return arguments + ([f"**{given.kwarg.arg}"] if given.kwarg else [])


def argument(one: ast.arg, default: ast.expr | None) -> str:
    return one.arg + written(one.annotation, ": ") + written(default, " = " if one.annotation else "=")


def signature(name: str, owner: Any) -> str:
    """Return a call in Python, each argument on its line where it is long; nothing where no source has one."""
    is_class = isinstance(owner, type)
    source = owner.__init__ if is_class and not dataclasses.is_dataclass(owner) else owner
    if not getattr(source, "__module__", "").startswith("vaswani_transformer"):
        return ""
    node: Any = ast.parse(textwrap.dedent(inspect.getsource(source))).body[0]
    if isinstance(node, ast.ClassDef):
        fields = [one for one in node.body if isinstance(one, ast.AnnAssign)]
        arguments = [ast.unparse(one.target) + written(one.annotation, ": ") + shown_default(one) for one in fields]
    else:
        arguments = arguments_of(node)
    arrow = "" if is_class else written(node.returns, " -> ")
    line = f"{name}({', '.join(arguments)}){arrow}"
    return line if len(line) <= WIDTH else f"{name}(\n" + "".join(f"    {one},\n" for one in arguments) + f"){arrow}"


def shown_default(one: ast.AnnAssign) -> str:
    return " = ..." if isinstance(one.value, ast.Call) else written(one.value, " = ")


def explained(text: str) -> str:
    """Return a docstring of Google's style as Markdown: arguments become lists, and the errors are left out."""
    first, *rest = SECTION.split(text)
    parts = [as_list(part) if ENTRY.match(part) else part for part in first.strip().split("\n\n")]
    for title, body in zip(rest[::2], rest[1::2], strict=True):
        body = textwrap.dedent(body).strip("\n")
        if title in ("Returns", "Yields"):
            parts.append(f"{title}: {in_a_line(body)}")
        elif title != "Raises":
            parts.append(f"{title}:\n\n{as_list(body)}")
    return re.sub(r"(?<!`)(</?\w+>)", r"`\1`", "\n\n".join(parts))


def as_list(text: str) -> str:
    """Return entries such as `name: what it is`, whose further lines have an indent, as a list."""
    return "\n".join(f"- {ENTRY.sub(as_code, in_a_line(entry))}" for entry in re.split(r"\n(?=\S)", text))


def in_a_line(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


def as_code(match: re.Match[str]) -> str:
    """Return the names that begin an entry as code."""
    return ", ".join(f"`{name}`" for name in match[1].split(", ")) + ":"


def api_entry(level: str, name: str, owner: Any, called: str) -> str:
    """Return the entry of a class, function or method: heading, signature, docstring."""
    line = signature(called, owner) if callable(owner) else ""
    call = f"```py\n{line}\n```\n\n" if line else ""
    return f"\n{level} {name}\n\n{call}{explained(inspect.getdoc(owner) or '')}\n"


def member_entry(title: str, member: Any, shown: dict[Any, str]) -> str:
    """Return the entry of a method or property, or a link to its first entry if several classes inherit it."""
    first = shown.setdefault(member, title)
    if first == title:
        return api_entry("####", title, member, title.rpartition(".")[2])
    return f"\n#### {title}\n\nThe same as [`{first}`](#{first.lower().replace('.', '')}).\n"


def api_page() -> str:
    """Return docs/api.md."""
    page, shown = [API], {}
    for section, names in SECTIONS.items():
        page.append(f"\n## {section}\n")
        for name, members in names.items():
            module, _, called = f"vaswani_transformer.{name}".rpartition(".")
            owner = getattr(import_module(module), called)
            if name.endswith("Config"):
                text = docstring_parser.parse(owner.__doc__ or "").short_description
                page.append(f"\n### {name}\n\n{text} Its [fields](fields.md#{name.lower()}).\n")
            else:
                page.append(api_entry("###", name, owner, called))
            for member in members:
                page.append(member_entry(f"{name}.{member}", getattr(owner, member), shown))
    return "".join([*page, "\n", TABLES.read_text(encoding="utf-8")])


def fields_page() -> str:
    """Return docs/fields.md."""
    configurations = (f"\n### {name}\n\n{''.join(config_table(name))}" for name in CONFIGURATIONS)
    return "".join(
        [FIELDS, *recipe_tables(), CONFIGURATION, *configurations, "\n", RESULTS.read_text(encoding="utf-8")]
    )


def main() -> None:
    """Write both pages."""
    (FOLDER / "api.md").write_text(api_page(), encoding="utf-8")
    (FOLDER / "fields.md").write_text(fields_page(), encoding="utf-8")


if __name__ == "__main__":
    main()
