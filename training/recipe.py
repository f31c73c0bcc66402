"""Recipes: their fields in groups, read from a YAML file and from `--any.field=value` arguments.

The kinds of data, model and optimizer determine which fields exist; `training.families` has those of each family.
"""

import argparse
import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, make_dataclass
from functools import lru_cache
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NoReturn, get_args, get_type_hints

import yaml
from jsonargparse import ArgumentParser, Namespace
from jsonargparse.typing import (
    ClosedUnitInterval,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    restricted_number_type,
    restricted_string_type,
)
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.models.nllb.tokenization_nllb import FAIRSEQ_LANGUAGE_CODES
from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

from training.machine import trains_slowly_in_bf16
from vaswani_transformer import VaswaniTransformerConfig
from vaswani_transformer.registration import FAMILIES, Family
from vaswani_transformer.support.command import UserError, did_you_mean, one_line
from vaswani_transformer.support.loading import check_settings

Seed = restricted_number_type("Seed", int, [(">=", 0), ("<", 2**32)])  # what NumPy accepts
LanguageCode = restricted_string_type("LanguageCode", "^[a-z]{2,3}([-_][A-Za-z0-9]+)*$")
FileName = restricted_string_type("FileName", r"^(?![-+\d.,_e]+\s*%?$)")  # no number, and no share
AddedToken = restricted_string_type("AddedToken", r"^(?!(</?s>|<pad>|<unk>|<mask>)$)\S+$")
Delimiter = restricted_string_type("Delimiter", r'^([^"\r\n]|\\t)$')
# What may precede a language in the name of a column, as in target_ja; and a code such as de, pt-br or zh_Hans.
ROLE = re.compile("^(source|target|src|tgt|trg|text|sentence|translation|reference|ref)[-_. ]")
CODE = re.compile("([A-Za-z]{2,3})([-_]([A-Za-z]{2}|[A-Z][a-z]{3}|hans|hant|[0-9]{3}))*")
LONG_CODES = {code[:3] for code in FAIRSEQ_LANGUAGE_CODES} | {"cmn"}  # others of three letters may be words
OTHER_CODES = {"jp": "ja", "cn": "zh", "kr": "ko"}  # codes of countries that are used for languages
# BLEU's tokenizers for languages without spaces between words.
UNSPACED = {
    **dict.fromkeys(("zh", "zho", "cmn", "yue"), "zh"),
    **dict.fromkeys(("ja", "jpn", "th", "tha", "lo", "lao", "km", "khm", "my", "mya", "bo", "bod"), "char"),
}


@dataclass(frozen=True)
class Variants:
    """Copies of training pairs in other letters, as shares of the pairs.

    Args:
        upper: share of the pairs that are copied in capitals.
        title: share of the pairs that are copied with a capital at the beginning of each word.
        lower: share of the pairs that are copied in small letters.
    """

    upper: ClosedUnitInterval = 0.0
    title: ClosedUnitInterval = 0.0
    lower: ClosedUnitInterval = 0.0


@dataclass(frozen=True)
class FileData:
    """Sentence pairs in files or on the Hub.

    Files of kind json, csv and parquet have the columns that `source` and `target` name, or a column `translation` with
    both.

    Args:
        kind: json (JSON Lines), csv (with a header; see `delimiter`), parquet, text (one file per language, line by
            line), hub (a data set of the Hugging Face Hub) or trees (constituency trees).
        source: name of the source's column, or of its language in the names of files.
        target: name of the target's column, or of its language in the names of files.
        source_language: code of the source's language, such as en or zh-Hans; null if `source` is its two-letter code,
            or if the language is unknown.
        target_language: the same for the target; BLEU's tokenizer depends on it.
        max_length: largest number of tokens of the source or target of a training pair, including </s>. Validation and
            test pairs may be up to 16 times as long.
        too_long: drop longer training pairs and count them, or stop with an error.
        delimiter: character between the cells of kind csv, \\t for a tab; null for a tab in a .tsv or .tab file, and
            otherwise for the semicolon or tab of a header that has no comma, or a comma.
        quoting: cells if quotation marks enclose cells of kind csv, text if they are a part of the text; null for text
            between tabs, and cells otherwise.
        empty: stop with an error at a pair with an empty source or target, or drop such pairs and count them.
        distilled: folder of training.distill, or a JSON Lines file, whose pairs replace the training pairs.
        path: folder of the files, in the current folder or else in the clone; or name of the data set on the Hub.
        train: name of a file in `path`, possibly compressed, with {language} in the name for text; for trees also
            patterns separated by spaces; on the Hub the name of a split. A list names several corpora.
        weights: how many times an epoch has each pair of each corpus of `train`; null for once.
        drop: kinds of training pairs to leave out and count: markup, HTML entities, placeholders such as n/a, capitals
            only, copies of the source, duplicates of an earlier pair, or ratios of lengths that are not a third to
            three times the usual one.
        validation: the same for the validation set, or a number of training pairs to hold out, drawn among those within
            `max_length` whose sentences occur once.
        test: the same for the test set; null for none.
        split_seed: seed that draws the held-out pairs, and those to copy; null for that of the run.
        variants: copies of training pairs in other letters, which the model then also translates.
    """

    kind: Literal["json", "csv", "parquet", "text", "hub", "trees"] = "json"
    source: str = "en"
    target: str = "de"
    source_language: LanguageCode | None = None
    target_language: LanguageCode | None = None
    max_length: PositiveInt = 256
    too_long: Literal["drop", "error"] = "drop"
    delimiter: Delimiter | None = None
    quoting: Literal["cells", "text"] | None = None
    empty: Literal["error", "drop"] = "error"
    distilled: str | None = None
    path: str | None = None
    train: list[str] | str = "train.jsonl.gz"
    weights: list[PositiveInt] | None = None
    drop: list[Literal["markup", "entities", "placeholders", "capitals", "copies", "duplicates", "ratios"]] = field(
        default_factory=list
    )
    validation: PositiveInt | FileName = "validation.jsonl.gz"
    test: PositiveInt | FileName | None = "test.jsonl.gz"
    split_seed: Seed | None = None
    variants: Variants = field(default_factory=Variants)

    @property
    def corpora(self) -> list[str]:
        """Return the names of all corpora of the training pairs."""
        return [self.train] if isinstance(self.train, str) else self.train

    @property
    def columns(self) -> tuple[str, str]:
        """Return the names of the columns of source and target."""
        return self.source, self.target

    @property
    def languages(self) -> tuple[str | None, str | None]:
        """Return the codes of the languages of source and target, without region or script; None if unknown."""
        target = None if self.kind == "trees" else language_code(self.target_language, self.target)
        return language_code(self.source_language, self.source), target


def language_code(language: str | None, column: str) -> str | None:
    """Return the code of a language without region or script, or of a column that is named by one; or None.

    A column may also have a language's English name, such as "Japanese".
    """
    if language is not None:
        code = re.split("[-_]", language)[0]
        return OTHER_CODES.get(code, code)
    name = ROLE.sub("", column)
    if name.lower() in TO_LANGUAGE_CODE:
        return TO_LANGUAGE_CODE[name.lower()]
    match = CODE.fullmatch(name)
    code = match[1].lower() if match else ""
    return OTHER_CODES.get(code, code) if len(code) == 2 or code in LONG_CODES else None


def bleu_tokenizer(name: str, language: str | None) -> str:
    """Return sacreBLEU's tokenizer that `score.tokenize` names; auto is that of the target language's code."""
    return UNSPACED.get(language or "", "13a") if name == "auto" else name


@dataclass(frozen=True)
class HubData(FileData):
    """Sentence pairs of a data set on the Hub.

    Args:
        subset: configuration of the data set.
    """

    subset: str | None = None


@dataclass(frozen=True)
class TokenizerRecipe:
    """Shared vocabulary, learned from the training pairs or loaded.

    Args:
        algorithm: bpe (byte-level byte-pair encoding) or wordpiece.
        vocab_size: size of a learned vocabulary, including special tokens.
        path: folder, or name on the Hub, of a tokenizer to load; null to learn one.
        sample: number of training pairs, evenly spaced over the training set, to learn from; null for all.
        special_tokens: texts such as <2de>, without spaces, that are always one token; they count in `vocab_size`.
    """

    algorithm: Literal["bpe", "wordpiece"] = "bpe"
    vocab_size: PositiveInt = 37000
    path: str | None = None
    sample: PositiveInt | None = None
    special_tokens: list[AddedToken] = field(default_factory=list)


@dataclass(frozen=True)
class PaperOptimizer:
    """Adam with the paper's learning rate schedule (5.3).

    Args:
        optimizer: paper, or radam (rectified Adam with weight decay and an exponentially decaying learning rate).
        warmup_steps: number of steps in which the learning rate rises.
        learning_rate_scale: factor of equation (3); 1 in the paper.
    """

    optimizer: Literal["paper", "radam"] = "paper"
    warmup_steps: PositiveInt = 4000
    learning_rate_scale: PositiveFloat = 1.0


@dataclass(frozen=True)
class RectifiedOptimizer:
    """Rectified Adam (Liu et al. 2020).

    Args:
        optimizer: paper, or radam.
        learning_rate: learning rate at the first step.
        learning_rate_decay: factor of the exponential decay over `learning_rate_decay_steps` steps.
        learning_rate_decay_steps: number of steps in which the learning rate falls by that factor.
        weight_decay: coefficient of decoupled weight decay; each step subtracts it times learning rate times weight.
    """

    optimizer: Literal["paper", "radam"] = "radam"
    learning_rate: PositiveFloat = 0.001
    learning_rate_decay: PositiveFloat = 0.8
    learning_rate_decay_steps: PositiveInt = 1000
    weight_decay: NonNegativeFloat = 0.001


@dataclass(frozen=True)
class TrainingRecipe:
    """Training settings.

    Args:
        steps: number of optimizer steps.
        minutes: minutes of training after which a run ends early; null for no limit.
        source_tokens: source tokens per optimizer step, over all devices (5.1).
        target_tokens: target tokens per optimizer step, over all devices.
        device_tokens: largest number of source or target tokens in a micro-batch on one device, including padding.
        encoder_from: trained autoregressive model with the same vocabulary and shape, possibly with fewer encoder
            layers, that initializes the encoder and the embeddings.
        start_from: trained model of the same kind and shape that initializes all weights.
        new_vocabulary: let the vocabulary differ from that of the model to start from; a token that is not in that one
            starts as the mean of the tokens that write its text there.
        precision: fp32; bf16 for mixed precision; or auto for bf16 if the hardware trains faster with it.
        gradient_checkpointing: recompute activations in the backward pass, to save memory at the cost of time.
        torch_compile: compile the model.
        attention: Transformers' name of the attention implementation; auto for eager on a CPU and sdpa otherwise.
        max_grad_norm: norm at which gradients are clipped; 0 for no clipping, as in the paper.
        evaluation_steps: steps between evaluations on the validation set, each followed by a checkpoint.
        evaluation_batch_size: number of pairs per device that an evaluation translates at a time.
        log_steps: steps between log entries.
        report_to: Transformers' name of the tool that shows the curves, such as wandb, or a list of names; none for no
            tool.
        patience: number of evaluations without improvement after which a run ends early; null for no limit.
        checkpoint_steps: steps between additional checkpoints; null for none.
        checkpoint_minutes: minutes between additional checkpoints (10 in 6.1); null for none.
        keep_checkpoints: number of checkpoints to keep, including the best; more if `average_last` needs them.
        average_last: number of last checkpoints to average for the final model (6.1), unless the best one is better on
            the validation set; null for the best checkpoint.
    """

    steps: PositiveInt = 100_000
    minutes: PositiveFloat | None = None
    source_tokens: PositiveInt = 25_000
    target_tokens: PositiveInt = 25_000
    device_tokens: PositiveInt = 25_000
    encoder_from: str | None = None
    start_from: str | None = None
    new_vocabulary: bool = False
    precision: Literal["fp32", "bf16", "auto"] = "fp32"
    gradient_checkpointing: bool = False
    torch_compile: bool = False
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"] = "auto"
    max_grad_norm: NonNegativeFloat = 0.0
    evaluation_steps: PositiveInt = 1000
    evaluation_batch_size: PositiveInt = 64
    log_steps: PositiveInt = 100
    report_to: list[str] | str = "tensorboard"
    patience: PositiveInt | None = None
    checkpoint_steps: PositiveInt | None = None
    checkpoint_minutes: PositiveFloat | None = None
    keep_checkpoints: PositiveInt = 2
    average_last: PositiveInt | None = None

    @property
    def evaluation_search(self) -> dict[str, float]:
        """Return the settings of `generate()` that differ from `decoding` in evaluations."""
        return {}

    @property
    def selects_by_energy(self) -> bool:
        """Return whether a teacher's energy, and not the task's metric, selects the best checkpoint."""
        return False


@dataclass(frozen=True)
class BeamTraining(TrainingRecipe):
    """Training of the paper's model.

    Args:
        evaluation_beams: beam size in evaluations.
    """

    evaluation_beams: PositiveInt = 1

    @property
    def evaluation_search(self) -> dict[str, float]:
        return {"num_beams": self.evaluation_beams}


@dataclass(frozen=True)
class SearchRecipe:
    """Search with the trained model; the fields are settings of its `generate()`."""


@dataclass(frozen=True)
class BeamSearch(SearchRecipe):
    """Search with the trained model (6.1).

    Args:
        num_beams: beam size; 1 for greedy search.
        length_penalty: alpha; larger values favor longer translations.
        length_penalty_type: gnmt (the paper's lp(Y)) or power (Transformers' |Y|^alpha).
        max_source_relative_length: largest number of tokens that a translation may have beyond those of its source.
    """

    num_beams: PositiveInt = 4
    length_penalty: float = 0.6
    length_penalty_type: Literal["gnmt", "power"] = "gnmt"
    max_source_relative_length: NonNegativeInt = 50


@dataclass(frozen=True)
class ScoreRecipe:
    """Scoring of translations.

    Args:
        tokenize: sacreBLEU's tokenizer; none for tokenized files. auto is 13a, except for languages without spaces
            between words: zh for Chinese, and char for Japanese, Thai, Lao, Khmer, Burmese and Tibetan.
        examples: number of test sentences to print with their translations.
    """

    tokenize: Literal["auto", "13a", "none", "intl", "char", "zh", "ja-mecab", "ko-mecab"] = "auto"
    examples: NonNegativeInt = 5


@dataclass(frozen=True)
class Recipe:
    """Recipe of a training run.

    Args:
        name: name of the run, also used in its model card.
        task: task of the pairs, which determines the metrics: translation or dialogue; trees are always parsed.
        expected: expected score and duration with the recipe's data, as information for readers.
        published: a published score on the same test set.
        note: a remark shown with the scores.
        output_dir: folder of the run; the same command resumes an interrupted run in it.
        seed: seed of the weights, the dropout and the order of the pairs.
        model: the kind of model (kind), the paper's model to start from (paper), and fields of its configuration.
    """

    name: str = "run"
    task: Literal["translation", "dialogue"] = "translation"
    expected: str = ""
    published: str = ""
    note: str = ""
    output_dir: str = ""
    seed: Seed = 2017
    data: FileData = field(default_factory=FileData)
    tokenizer: TokenizerRecipe = field(default_factory=TokenizerRecipe)
    model: dict[str, Any] = field(default_factory=dict)
    training: TrainingRecipe = field(default_factory=BeamTraining)
    decoding: SearchRecipe = field(default_factory=BeamSearch)
    score: ScoreRecipe = field(default_factory=ScoreRecipe)

    @property
    def kind(self) -> str:
        """Return the family's name in `registration.FAMILIES`."""
        return self.model.get("kind", "autoregressive")

    @property
    def family(self) -> Family:
        """Return the record of the model's family."""
        return FAMILIES[self.kind]

    def model_config(self, **ids: int | None) -> VaswaniTransformerConfig:
        """Return the model's configuration; `ids` are the vocabulary size and token ids."""
        fields = {name: value for name, value in self.model.items() if name not in ("kind", "paper")}
        try:
            return self.family.model_class.config_class.from_paper(self.model.get("paper", "base"), **fields | ids)
        except Exception as error:  # the strict configuration's own classes
            raise UserError(f"model: {one_line(error)}") from error

    def generation_config(
        self, config: VaswaniTransformerConfig, tokenizer: PreTrainedTokenizerBase, in_evaluations: bool = False
    ) -> GenerationConfig:
        """Return a GenerationConfig with the recipe's search, or the faster one of evaluations."""
        search = dataclasses.asdict(self.decoding)
        if in_evaluations:
            search.update(self.training.evaluation_search)
        if search.get("num_beams") == 1 and "length_penalty" in search:  # none in greedy search
            search["length_penalty"] = 1.0
        if not self.family.model_class.is_autoregressive and tokenizer.unk_token_id is not None:
            search["suppress_tokens"] = [tokenizer.unk_token_id]
        return config.make_generation_config(**search)


def to_dict(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe as nested plain values, without `output_dir`, since a folder may move."""
    tree = json.loads(json.dumps(dataclasses.asdict(recipe)))  # convert jsonargparse's number types
    del tree["output_dir"]
    return tree


# Reading

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
    "training.max_grad_norm": "clip_norm gradient_clipping grad_clip clip_grad_norm gradient_clip_val",
    "training.device_tokens": (
        "per_device_train_batch_size gradient_accumulation gradient_accumulation_steps update_freq"
    ),
    "training.evaluation_batch_size": "per_device_eval_batch_size eval_batch_size",
    "training.evaluation_steps": "eval_steps eval_strategy evaluation_strategy valid_steps eval_interval",
    "training.checkpoint_steps": "save_steps save_strategy save_interval save_checkpoint_steps",
    "training.keep_checkpoints": "save_total_limit keep_last_epochs max_checkpoints",
    "training.log_steps": "logging_steps log_interval logging_strategy report_every",
    "training.patience": "early_stopping early_stopping_patience",
    "training.start_from": "model_name_or_path finetune_from_model init_from",
    "decoding.num_beams": "beam beams beam_size generation_num_beams",
    "decoding.max_source_relative_length": "max_length max_new_tokens max_len max_len_b",
    "model.dropout": "dropout_rate dropout_prob",
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
        group, _, last = name.lstrip("-").replace("-", "_").rpartition(".")
        known = [*self.get_defaults().keys(), *self.command_options, *self.model_fields]
        same = [field for field in known if field.rpartition(".")[2] == last]
        others = [field for field, names in OTHER_NAMES.items() if last in names.split() and field in known]
        other_kinds = []
        for kind, choices in KINDS.items():
            for choice, record in choices.items():
                types = (record.recipe.training, record.recipe.decoding) if isinstance(record, Family) else (record,)
                if any(field.name == last for one in types for field in dataclasses.fields(one)):
                    other_kinds.append(f"{kind}={choice}")
        in_group = [field for field in known if group and field.startswith(f"{group}.")]
        others_in_group = [field for field in others if field in in_group]
        if meant := [*others_in_group, *same, *others, *other_kinds]:
            return f"; did you mean {'--' * name.startswith('--')}{meant[0]}?"
        return did_you_mean(name, in_group or known)


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
        kinds[name] = in_file if in_arguments[name] is None else in_arguments[name]
        if kinds[name] not in list(choices):
            raise UserError(f"{name}: got {kinds[name]!r}, expected one of {', '.join(choices)}.")
    return kinds


def recipe_parser(tree: Mapping[str, object], arguments: list[str]) -> RecipeParser:
    """Return a parser for the fields of a recipe's kinds of data, model and optimizer."""
    kinds = kinds_of(tree, arguments)
    return parser_of(
        DATA_KINDS[kinds["data.kind"]], FAMILIES[kinds["model.kind"]], OPTIMIZERS[kinds["training.optimizer"]]
    )


@lru_cache
def parser_of(data: type, family: Family, optimizer: type) -> RecipeParser:
    """Return the parser for the fields of a kind of data, a family of models and an optimizer."""
    trained_by = family.recipe
    training = make_dataclass("Training", (), bases=(trained_by.training, optimizer), frozen=True)
    training.__doc__ = trained_by.training.__doc__
    groups = {"data": data, "training": training, "decoding": trained_by.decoding}
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
    parser.command_options = ()
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
    if data.train == []:
        raise UserError("data.train: names no file; got []. Name at least one.")
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
