"""Recipes of training runs, read from a YAML file and from `--any.field=value` arguments.

The kinds of data, model and optimizer determine which fields exist.
"""

import argparse
import dataclasses
import json
import re
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

import yaml
from jsonargparse import ArgumentParser
from jsonargparse.typing import ClosedUnitInterval, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from transformers import GenerationConfig, PreTrainedTokenizerBase

from training.machine import trains_slowly_in_bf16
from vaswani_transformer import (
    VaswaniCmlmForConditionalGeneration,
    VaswaniFlowSeqForConditionalGeneration,
    VaswaniIterativeVaeForConditionalGeneration,
    VaswaniNatForConditionalGeneration,
    VaswaniTransformerConfig,
    VaswaniTransformerForConditionalGeneration,
)
from vaswani_transformer.support.errors import UserError, one_line

RECIPES = Path(__file__).parent / "recipes"


@dataclass(frozen=True)
class GrammarData:
    """Sentence pairs; of kind grammar, those of the included English-Spanish task.

    Args:
        kind: grammar, json (JSON Lines), csv (comma-separated, or tab-separated in a .tsv file), parquet, text (one
            file per language, line by line), hub (a data set of the Hugging Face Hub) or trees (constituency trees).
        source: language code, or another name, of the source; also the name of its column.
        target: language code, or another name, of the target; also the name of its column.
        max_length: largest number of tokens of the source or target of a training pair, including </s>.
        too_long: drop longer training pairs and count them, or stop with an error.
        empty: stop with an error at a pair with an empty source or target, or drop such pairs and count them.
        distilled: folder of training.distill, or a JSON Lines file, whose pairs replace the training pairs.
    """

    kind: Literal["grammar", "json", "csv", "parquet", "text", "hub", "trees"] = "json"
    source: str = "en"
    target: str = "de"
    max_length: PositiveInt = 256
    too_long: Literal["drop", "error"] = "drop"
    empty: Literal["error", "drop"] = "error"
    distilled: str | None = None


@dataclass(frozen=True)
class FileData(GrammarData):
    """Sentence pairs in files or on the Hub.

    Files of kind json, csv and parquet have the columns that `source` and `target` name, or a column `translation` with
    both.

    Args:
        path: folder of the files, or name of the data set on the Hub.
        train: name of a file in `path`, possibly compressed, with {language} in the name for text; for trees also
            patterns separated by spaces; on the Hub the name of a split.
        validation: the same for the validation set, or a number of training pairs to hold out, drawn by `seed` among
            those whose sentences occur once.
        test: the same for the test set; null for none.
    """

    path: str | None = None
    train: str = "train.jsonl.gz"
    validation: PositiveInt | str = "validation.jsonl.gz"
    test: PositiveInt | str | None = "test.jsonl.gz"


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
    """

    algorithm: Literal["bpe", "wordpiece"] = "bpe"
    vocab_size: PositiveInt = 37000
    path: str | None = None
    sample: PositiveInt | None = None


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
        precision: fp32; bf16 for mixed precision; or auto for bf16 if the hardware trains faster with it.
        gradient_checkpointing: recompute activations in the backward pass, to save memory at the cost of time.
        torch_compile: compile the model.
        attention: Transformers' name of the attention implementation; auto for eager on a CPU and sdpa otherwise.
        max_grad_norm: norm at which gradients are clipped; 0 for no clipping, as in the paper.
        evaluation_steps: steps between evaluations on the validation set, each followed by a checkpoint.
        evaluation_batch_size: number of pairs per device that an evaluation translates at a time.
        log_steps: steps between log entries.
        patience: number of evaluations without improvement after which a run ends early; null for no limit.
        checkpoint_steps: steps between additional checkpoints; null for none.
        checkpoint_minutes: minutes between additional checkpoints (10 in 6.1); null for none.
        keep_checkpoints: number of checkpoints to keep, including the best; more if `average_last` needs them.
        average_last: number of last checkpoints to average for the final model (6.1); null for the best checkpoint.
    """

    steps: PositiveInt = 100_000
    minutes: PositiveFloat | None = None
    source_tokens: PositiveInt = 25_000
    target_tokens: PositiveInt = 25_000
    device_tokens: PositiveInt = 25_000
    encoder_from: str | None = None
    start_from: str | None = None
    precision: Literal["fp32", "bf16", "auto"] = "fp32"
    gradient_checkpointing: bool = False
    torch_compile: bool = False
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"] = "auto"
    max_grad_norm: NonNegativeFloat = 0.0
    evaluation_steps: PositiveInt = 1000
    evaluation_batch_size: PositiveInt = 64
    log_steps: PositiveInt = 100
    patience: PositiveInt | None = None
    checkpoint_steps: PositiveInt | None = None
    checkpoint_minutes: PositiveFloat | None = None
    keep_checkpoints: PositiveInt = 2
    average_last: PositiveInt | None = None


@dataclass(frozen=True)
class BeamTraining(TrainingRecipe):
    """Training of the paper's model.

    Args:
        evaluation_beams: beam size in evaluations.
    """

    evaluation_beams: PositiveInt = 1


@dataclass(frozen=True)
class GlancingTraining(TrainingRecipe):
    """Training of NAT and GLAT (Qian et al. 2021).

    Args:
        glancing: number of reference words shown per mistake of the first pass, at the first and the last step, such as
            [0.5, 0.3]; null for none.
        glancing_steps: number of steps over which it changes; null for `steps`.
    """

    glancing: tuple[ClosedUnitInterval, ClosedUnitInterval] | None = None
    glancing_steps: PositiveInt | None = None


Operator = Literal[
    "softmax", "straight_through_softmax", "straight_through_logits", "gumbel_softmax", "straight_through_gumbel"
]


@dataclass(frozen=True)
class CmlmTraining(TrainingRecipe):
    """Training of CMLM and ENGINE (Tu et al. 2020).

    Args:
        evaluation_iterations: iterations of Mask-Predict in evaluations.
        energy_from: autoregressive teacher with the same vocabulary, whose negative log-likelihood of the model's
            output is the loss; null to train on masked words.
        energy_inputs: operator that converts the model's log-probabilities to the teacher's input.
        energy_outputs: operator that converts the model's log-probabilities to the output that the teacher scores.
    """

    evaluation_iterations: PositiveInt = 4
    energy_from: str | None = None
    energy_inputs: Operator = "softmax"
    energy_outputs: Operator = "softmax"


@dataclass(frozen=True)
class LatentTraining(GlancingTraining):
    """Training of IterativeVAE.

    With revealed latents `glancing` is the number of words that they reveal per mistake of the first layer.

    Args:
        kl_scale: weight of a discrete latent's KL divergences.
        kl_warmup_steps: number of steps in which the weight rises linearly from 0; 0 for the full weight from the
            start.
    """

    kl_scale: NonNegativeFloat = 1.0
    kl_warmup_steps: NonNegativeInt = 30_000


@dataclass(frozen=True)
class FlowTraining(TrainingRecipe):
    """Training of FlowSeq (Ma et al. 2019).

    Args:
        decoder_steps: number of initial steps, which train posterior and decoder without the prior.
        kl_scale: weight of the KL divergence.
        kl_warmup_steps: number of steps after these in which the weight rises linearly from 0.
    """

    decoder_steps: NonNegativeInt = 30_000
    kl_scale: PositiveFloat = 1.0
    kl_warmup_steps: NonNegativeInt = 10_000


@dataclass(frozen=True)
class BeamSearch:
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
class LengthBeam:
    """Search with a non-autoregressive model.

    Args:
        length_beam_size: number of candidate lengths for each translation.
    """

    length_beam_size: PositiveInt = 1


@dataclass(frozen=True)
class MaskPredict(LengthBeam):
    """Mask-Predict (Ghazvininejad et al. 2019).

    Args:
        num_iterations: number of decoder passes over each translation.
    """

    num_iterations: PositiveInt = 10


@dataclass(frozen=True)
class LatentSearch(LengthBeam):
    """Search with FlowSeq.

    Args:
        num_latent_samples: number of latent samples for each length.
        latent_temperature: standard deviation of the prior's noise; 0 for the mode.
    """

    num_latent_samples: PositiveInt = 1
    latent_temperature: NonNegativeFloat = 0.0


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
class Family:
    """Kind of a family, its model class, the classes of its recipe groups, and whether its vocabulary has `<mask>`."""

    kind: str
    model_class: type[Any]
    training: type[TrainingRecipe]
    decoding: type[Any]
    needs_mask: bool = False


FAMILIES = {
    family.kind: family
    for family in (
        Family("autoregressive", VaswaniTransformerForConditionalGeneration, BeamTraining, BeamSearch),
        Family("nat", VaswaniNatForConditionalGeneration, GlancingTraining, LengthBeam),
        Family("cmlm", VaswaniCmlmForConditionalGeneration, CmlmTraining, MaskPredict, needs_mask=True),
        Family("iterative_vae", VaswaniIterativeVaeForConditionalGeneration, LatentTraining, LengthBeam),
        Family("flowseq", VaswaniFlowSeqForConditionalGeneration, FlowTraining, LatentSearch),
    )
}
FILE_KINDS = ("json", "csv", "parquet", "text", "trees")
DATA_KINDS = dict.fromkeys(FILE_KINDS, FileData) | {"grammar": GrammarData, "hub": HubData}
OPTIMIZERS = {"paper": PaperOptimizer, "radam": RectifiedOptimizer}
KINDS = {"data.kind": DATA_KINDS, "model.kind": FAMILIES, "training.optimizer": OPTIMIZERS}  # the first is the default
TOKENIZER_SETS = {"vocab_size", "bos_token_id", "pad_token_id", "eos_token_id", "mask_token_id"}


@dataclass(frozen=True)
class Recipe:
    """Recipe of a training run.

    Args:
        name: name of the run, also used in its model card.
        task: task of the pairs, which determines the metrics: translation or dialogue; trees are always parsed.
        expected: expected score and duration, as information for readers.
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
    seed: NonNegativeInt = 2017
    data: Any = field(default_factory=FileData)
    tokenizer: TokenizerRecipe = field(default_factory=TokenizerRecipe)
    model: dict[str, Any] = field(default_factory=dict)
    training: Any = field(default_factory=BeamTraining)
    decoding: Any = field(default_factory=BeamSearch)
    score: ScoreRecipe = field(default_factory=ScoreRecipe)

    @property
    def family(self) -> Family:
        return FAMILIES[self.model.get("kind", "autoregressive")]

    def model_config(self, **ids: Any) -> VaswaniTransformerConfig:
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
            faster = {"length_beam_size": 1, "num_latent_samples": 1, "latent_temperature": 0.0}
            faster["num_beams"] = getattr(self.training, "evaluation_beams", 1)
            faster["num_iterations"] = getattr(self.training, "evaluation_iterations", 1)
            search |= {name: value for name, value in faster.items() if name in search}
        if search.get("num_beams") == 1:  # no length penalty in greedy search
            search["length_penalty"] = 1.0
        if not self.family.model_class.is_autoregressive and tokenizer.unk_token_id is not None:
            search["suppress_tokens"] = [tokenizer.unk_token_id]
        return config.make_generation_config(**search)


class RecipeParser(ArgumentParser):
    """Parser of jsonargparse with one-line errors."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise a one-line UserError with the field, the problem and the value."""
        text = re.sub(r"Parser key \"([^\"]*)\":", r"\1:", " ".join(message.split()))
        text = re.sub(r"\w+\(\) argument must be .*'NoneType'", "got null", text)
        union = re.match(r"(\S+) Does not validate .* Errors: - (.*) Given value type: .* Given value: (.*)", text)
        if union is not None:
            problems = [one for one in union[2].split(" - ") if "NoneType" not in one]
            text = f"{union[1]} {'; or '.join(problems)}, got {union[3]}"
        raise UserError(f"{text.rstrip('.')}. --help lists the fields of its kinds.")


def kinds_of(tree: dict[str, Any], arguments: list[str]) -> dict[str, str]:
    """Return the fields that determine which other fields exist, from the arguments, else from the YAML file."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in KINDS:
        parser.add_argument(f"--{name}", dest=name, nargs="?")
    given, kinds = vars(parser.parse_known_args(arguments)[0]), {}
    for name, choices in KINDS.items():
        group, _, member = name.partition(".")
        fields = tree.get(group)
        in_file = fields.get(member) if isinstance(fields, dict) else None
        kinds[name] = given[name] or in_file or next(iter(choices))
        if kinds[name] not in list(choices):
            raise UserError(f"{name}: got {kinds[name]!r}, expected one of {', '.join(choices)}.")
    return kinds


def recipe_parser(tree: dict[str, Any], arguments: list[str]) -> RecipeParser:
    """Return a parser for the fields of a recipe's kinds of data, model and optimizer."""
    kinds = kinds_of(tree, arguments)
    family = FAMILIES[kinds["model.kind"]]
    optimizer = OPTIMIZERS[kinds["training.optimizer"]]
    training = make_dataclass("Training", (), bases=(family.training, optimizer), frozen=True)
    training.__doc__ = family.training.__doc__
    groups = {"data": DATA_KINDS[kinds["data.kind"]], "training": training, "decoding": family.decoding}
    fields = [(name, group, field(default_factory=group)) for name, group in groups.items()]
    recipe = make_dataclass("Recipe", fields, bases=(Recipe,), frozen=True)
    recipe.__doc__ = Recipe.__doc__
    parser = RecipeParser(
        prog="python -m training.train", usage="%(prog)s RECIPE.yaml [--any.field=value ...]", allow_abbrev=False
    )
    parser.add_argument("--recipe", action="config", help=argparse.SUPPRESS)
    parser.add_class_arguments(recipe)
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
    return tree


def load_recipe(path: str | Path, arguments: list[str]) -> Recipe:
    """Load the recipe of a YAML file, with fields overridden by `--any.field=value` arguments."""
    tree = read_yaml(Path(path))
    arguments = [re.sub("=~(?=/)", f"={Path.home()}", argument) for argument in arguments]
    parser = recipe_parser(tree, arguments)
    return checked(parser, parser.parse_args([f"--recipe={path}", *arguments]))


def recipe_of(tree: dict[str, Any]) -> Recipe:
    """Return the recipe in a nested dictionary; inverse of `to_dict`."""
    parser = recipe_parser(tree, [])
    return checked(parser, parser.parse_object(tree))


def to_dict(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe as nested plain values, without `output_dir`, since a folder may move."""
    tree = json.loads(json.dumps(dataclasses.asdict(recipe)))  # convert jsonargparse's number types
    del tree["output_dir"]
    return tree


def checked(parser: RecipeParser, values: Any) -> Recipe:
    """Return the recipe of parsed values, after checking that its fields are consistent."""
    values = parser.instantiate(values)
    recipe = Recipe(**{each.name: getattr(values, each.name) for each in dataclasses.fields(Recipe)})
    training, data = recipe.training, recipe.data
    if data.kind != "grammar" and data.path is None:
        what = "the name of a data set" if data.kind == "hub" else "the folder of its data"
        raise UserError(f"data.path: the recipe {recipe.name!r} needs {what}; give --data.path=...")
    if names := sorted(TOKENIZER_SETS & recipe.model.keys()):
        raise UserError(f"model.{names[0]}: the tokenizer sets it; see tokenizer.vocab_size and tokenizer.path.")
    # validate the model's fields; a loaded vocabulary has its own size
    entries = recipe.tokenizer.vocab_size if recipe.tokenizer.path is None else 2**31
    recipe.model_config(vocab_size=entries)
    if training.precision == "auto":  # resolved, so that a run keeps it on another machine
        precision = "fp32" if trains_slowly_in_bf16() else "bf16"
        recipe = dataclasses.replace(recipe, training=dataclasses.replace(training, precision=precision))
    return recipe
