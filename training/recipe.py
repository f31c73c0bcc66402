"""Reading of recipes from a YAML file and from `--any.field=value` arguments.

The kinds of data, model and optimizer determine which fields exist.
"""

import argparse
import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import field, make_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, NoReturn, get_args, get_type_hints

import yaml
from jsonargparse import ArgumentParser, Namespace
from transformers import PreTrainedConfig

from training.fields import FileData, HubData, PaperOptimizer, Recipe, RectifiedOptimizer, Variants
from training.machine import trains_slowly_in_bf16
from vaswani_transformer.registration import FAMILIES, Family
from vaswani_transformer.support.command import UserError, did_you_mean, one_line
from vaswani_transformer.support.models import check_settings

RECIPES = Path(__file__).parent / "recipes"
FILE_KINDS = ("json", "csv", "parquet", "text", "trees")
DATA_KINDS = dict.fromkeys(FILE_KINDS, FileData) | {"hub": HubData}
OPTIMIZERS = {"paper": PaperOptimizer, "radam": RectifiedOptimizer}
KINDS = {"data.kind": DATA_KINDS, "model.kind": FAMILIES, "training.optimizer": OPTIMIZERS}  # the first is the default
UNKNOWN_KEY = re.compile(r"Group '|Option '|model: (?P<field>\w+): not a field")  # in errors of a file
OTHER_NAMES = {  # what Transformers, its scripts or other toolkits call a field
    "training.steps": "max_steps num_steps train_steps num_train_epochs num_epochs epochs max_epoch",
    "training.learning_rate": "lr",
    "training.learning_rate_scale": "lr learning_rate",
    "training.warmup_steps": "warmup warmup_ratio warmup_updates",
    "training.optimizer": "optim lr_scheduler lr_scheduler_type adam_beta1 adam_beta2 adam_epsilon",
    "training.precision": "fp16 bf16 tf32 half amp dtype torch_dtype mixed_precision",
    "training.source_tokens": "batch_size train_batch_size max_tokens batch_tokens",
    "training.device_tokens": "per_device_train_batch_size gradient_accumulation_steps update_freq",
    "training.evaluation_batch_size": "per_device_eval_batch_size eval_batch_size",
    "training.evaluation_steps": "eval_steps eval_strategy evaluation_strategy valid_steps eval_interval",
    "training.checkpoint_steps": "save_steps save_strategy save_interval save_checkpoint_steps",
    "training.keep_checkpoints": "save_total_limit keep_last_epochs max_checkpoints",
    "training.log_steps": "logging_steps log_interval logging_strategy report_every",
    "training.patience": "early_stopping early_stopping_patience",
    "training.start_from": "model_name_or_path finetune_from_model init_from",
    "decoding.num_beams": "beam beams beam_size generation_num_beams",
    "model.label_smoothing": "label_smoothing_factor",
    "data.max_length": "max_source_length max_target_length max_seq_length max_len",
    "data.train": "train_file",
    "data.validation": "valid validation_file dev",
    "data.test": "test_file",
    "data.delimiter": "sep separator",
}
TOKENIZER_SETS = {"vocab_size", "bos_token_id", "pad_token_id", "eos_token_id", "mask_token_id"}


class RecipeParser(ArgumentParser):
    """Parser of jsonargparse with one-line errors.

    command_options: names of options of the command itself, which an error may suggest.
    model_fields: names of the fields of the model's configuration.
    """

    command_options: Iterable[str] = ()
    model_fields: Iterable[str] = ()

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise a one-line UserError with the field, the problem and the value."""
        text = re.sub(r"Parser key \"([^\"]*)\":", r"\1:", " ".join(message.split()))
        text = re.sub(r"\w+\(\) argument must be .*'NoneType'", "got null", text)
        union = re.match(r"(\S+) Does not validate .* Errors: - (.*) Given value type: .* Given value: (.*)", text)
        if union is not None:
            problems = [problem for problem in union[2].split(" - ") if "NoneType" not in problem]
            text = f"{union[1]} {'; or '.join(problems)}, got {union[3]}"
            if "FileName" in union[2]:
                text = f"{union[1]} got {union[3]}, expected a number of pairs, such as 1000, or the name of a file"
        if "Expected a <class 'str'>" in text:  # YAML reads no, 007 and 1e3 as other values
            text = f"{text.rstrip('.')}; write a text in quotation marks"
        raise UserError(f"{text.rstrip('.')}{self.hint(text)} --help lists the fields of its kinds.")

    def hint(self, error: str) -> str:
        """Return the end of an error's sentence, with the name closest to the unknown one, if it names one."""
        unknown = re.search(r"unrecognized arguments: (--[\w.-]+)|(?:Group '(\w+)' .*|Option) '([\w.]+)'", error)
        if unknown is None:
            return "."
        option, group, field = unknown.groups()
        return self.suggestion(option or (f"{group}.{field}" if group else field))

    def suggestion(self, name: str) -> str:
        """Return the end of an error's sentence, with the field that an unknown option or field probably means."""
        last = name.lstrip("-").rpartition(".")[2].replace("-", "_")
        known = [*self.get_defaults().keys(), *self.command_options, *self.model_fields]
        same = [field for field in known if field.rpartition(".")[2] == last]
        others = [field for field, names in OTHER_NAMES.items() if last in names.split() and field in known]
        other_kinds = [
            f"{kind}={choice}"
            for kind, choices in KINDS.items()
            for choice, record in choices.items()
            for group in ((record.recipe.training, record.recipe.decoding) if isinstance(record, Family) else (record,))
            if any(field.name == last for field in dataclasses.fields(group))
        ]
        if meant := [*same, *others, *other_kinds]:
            return f"; did you mean {'--' * name.startswith('--')}{meant[0]}?"
        return did_you_mean(name, known)


def kinds_of(tree: Mapping[str, object], arguments: list[str]) -> dict[str, str]:
    """Return the fields that determine which other fields exist, from the arguments, else from the YAML file."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in KINDS:
        parser.add_argument(f"--{name}", dest=name, nargs="?")
    in_arguments = vars(parser.parse_known_args(arguments)[0])
    kinds = {}
    for name, choices in KINDS.items():
        group, _, member = name.partition(".")
        fields = tree.get(group)
        default = next(iter(choices))
        in_file = fields.get(member, default) if isinstance(fields, dict) else default
        kinds[name] = in_arguments[name] or in_file
        if kinds[name] not in list(choices):
            raise UserError(f"{name}: got {kinds[name]!r}, expected one of {', '.join(choices)}.")
    return kinds


def recipe_parser(tree: Mapping[str, object], arguments: list[str]) -> RecipeParser:
    """Return a parser for the fields of a recipe's kinds of data, model and optimizer."""
    kinds = kinds_of(tree, arguments)
    family = FAMILIES[kinds["model.kind"]]
    trained_by = family.recipe
    optimizer = OPTIMIZERS[kinds["training.optimizer"]]
    training = make_dataclass("Training", (), bases=(trained_by.training, optimizer), frozen=True)
    training.__doc__ = trained_by.training.__doc__
    groups = {"data": DATA_KINDS[kinds["data.kind"]], "training": training, "decoding": trained_by.decoding}
    fields = [(name, group, field(default_factory=group)) for name, group in groups.items()]
    recipe = make_dataclass("Recipe", fields, bases=(Recipe,), frozen=True)
    recipe.__doc__ = Recipe.__doc__
    parser = RecipeParser(
        prog="python -m training.train", usage="%(prog)s RECIPE.yaml [--any.field=value ...]", allow_abbrev=False
    )
    parser.add_argument("--recipe", action="config", help=argparse.SUPPRESS)
    parser.add_class_arguments(recipe)
    names = {field.name for field in dataclasses.fields(family.model_class.config_class)}
    names -= {field.name for field in dataclasses.fields(PreTrainedConfig)} | TOKENIZER_SETS
    parser.model_fields = [f"model.{name}" for name in sorted(names)]
    return parser


def read_yaml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        known = ", ".join(sorted(recipe.name for recipe in RECIPES.glob("*.yaml")))
        raise UserError(f"{path}: there is no such recipe; those of training/recipes are {known}.")
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path}: cannot be read as YAML ({one_line(error)}).") from error
    if not isinstance(tree, dict):
        raise UserError(f"{path}: a recipe is a mapping of keys to values; got {type(tree).__name__}.")
    for name, value in tree.items():
        refuse_null(name, value)
    return tree


def refuse_null(name: str, value: object) -> None:
    """Raise UserError for a field without a value, such as a group of which all fields are comments."""
    if value is None:
        raise UserError(f"{name}: got null, expected a value; leave the line out for the default.")


def check_values(group: object, prefix: str = "") -> None:
    """Raise UserError for a null that a field does not allow, which jsonargparse accepts in a file."""
    types = get_type_hints(type(group))
    for name, value in vars(group).items():
        if dataclasses.is_dataclass(value):
            check_values(value, f"{prefix}{name}.")
        elif NoneType not in get_args(types[name]):
            refuse_null(f"{prefix}{name}", value)


class RecipeDumper(yaml.SafeDumper):
    """Puts a text such as 1e3 in quotation marks, since jsonargparse, unlike PyYAML, would read it as a number."""


RecipeDumper.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[\d_]+(\.[\d_]*)?e[-+]?\d+$", re.IGNORECASE), list("-+0123456789")
)


def to_yaml(tree: dict[str, Any]) -> str:
    """Return a recipe as YAML that `load_recipe` reads as it is."""
    return yaml.dump(tree, Dumper=RecipeDumper, allow_unicode=True, sort_keys=False)


def load_recipe(path: str | Path, arguments: list[str], command_options: Iterable[str] = ()) -> Recipe:
    """Load the recipe of a YAML file, with fields overridden by `--any.field=value` arguments.

    `command_options` are the names of the options that a command has in addition to these fields.
    """
    tree = read_yaml(Path(path))
    home = f"={Path.home()}"
    arguments = [re.sub("=~(?=/)", lambda _: home, argument) for argument in arguments]  # no escapes of a template
    parser = recipe_parser(tree, arguments)
    parser.command_options = command_options
    try:
        return checked(parser, parser.parse_args([f"--recipe={path}", *arguments]))
    except UserError as error:
        unknown = UNKNOWN_KEY.match(str(error))
        if unknown is None or f"--model.{unknown['field']}" in " ".join(arguments):
            raise
        raise UserError(f"{path}: {error}") from error


def recipe_of(tree: dict[str, object]) -> Recipe:
    """Return the recipe in a nested dictionary; inverse of `to_dict`."""
    parser = recipe_parser(tree, [])
    return checked(parser, parser.parse_object(tree))


def checked(parser: RecipeParser, values: Namespace) -> Recipe:
    """Return the recipe of parsed values, after checking that its fields are consistent."""
    groups = parser.instantiate(values)
    recipe = Recipe(**{group.name: getattr(groups, group.name) for group in dataclasses.fields(Recipe)})
    check_values(recipe)
    training = recipe.training
    data = recipe.data
    if data.path is None:
        what = "the name of a data set" if data.kind == "hub" else "the folder of its data"
        raise UserError(f"data.path: the recipe {recipe.name!r} needs {what}; give --data.path=...")
    if data.kind != "trees" and data.source == data.target:
        raise UserError(
            f"data.source, data.target: name the same texts, so a model would learn to copy; got {data.source!r} for "
            "both. Set both fields."
        )
    if data.kind == "trees" and (data.variants != Variants() or data.drop):
        name = "drop" if data.drop else "variants"
        raise UserError(f"data.{name}: trees stay as they are; leave it out.")
    if data.weights is not None and len(data.weights) != len(data.corpora):
        problem = f"has a number for each corpus of data.train; got {len(data.weights)}, expected {len(data.corpora)}"
        raise UserError(f"data.weights: {problem}. Correct it.")
    if names := sorted(TOKENIZER_SETS & recipe.model.keys()):
        raise UserError(f"model.{names[0]}: the tokenizer sets it; see tokenizer.vocab_size and tokenizer.path.")

    # The fields of the model and of the search. A loaded vocabulary sets its own size.
    entries = recipe.tokenizer.vocab_size if recipe.tokenizer.path is None else 2**31
    try:
        recipe.model_config(vocab_size=entries)
    except UserError as error:
        problem, _, _ = str(error).partition("; choose one of ")
        unknown = UNKNOWN_KEY.match(problem)
        hint = parser.suggestion(unknown["field"]).replace(" model.", " ") if unknown else "."
        raise error if hint == "." else UserError(f"{problem}{hint}") from error
    check_settings("decoding.", dataclasses.asdict(recipe.decoding), entries, "correct it.")

    # The precision is resolved now, so that a run keeps it on a different machine.
    if training.precision == "auto":
        precision = "fp32" if trains_slowly_in_bf16() else "bf16"
        recipe = dataclasses.replace(recipe, training=dataclasses.replace(training, precision=precision))
    return recipe
