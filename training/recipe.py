"""A recipe: everything that makes a run, read from a YAML file and from `--any.field=value` arguments.

A field exists only where it works: the kind of data, of model and of optimizer choose the classes of their groups.
"""

import argparse
import dataclasses
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, make_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NoReturn

import docstring_parser
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
    """The sentence pairs: of kind grammar, those of the shipped English-Spanish task.

    Args:
        kind: grammar, json (JSON Lines), csv (comma-separated, or tab-separated in a .tsv file), parquet, text (a file
            a language, line by line), hub (a data set of the Hugging Face Hub) or trees (constituency trees).
        source: the language code, or another name, of the source side; the name of its column.
        target: the same for the target.
        max_length: the tokens, </s> included, that a side of a training pair may have.
        too_long: drop a longer training pair, with a count, or stop with an error.
        empty: stop with an error at a pair with an empty side, or drop it, with a count.
        distilled: the folder of training.distill, or a JSON Lines file, whose pairs replace the training pairs.
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
    """The sentence pairs, in files or on the Hub.

    The files of json, csv and parquet have the columns `source` and `target` name, or a column `translation` with both.

    Args:
        path: the folder of the files, or the data set's name on the Hub.
        train: the name of a file in `path`, compressed or not, with {language} in it for text; for trees also patterns
            separated by spaces; on the Hub a split.
        validation: the same for the validation set, or a number of training pairs that are held out, drawn by `seed`
            among those whose sentences occur once.
        test: the same for the test set; null for none.
    """

    path: str | None = None
    train: str = "train.jsonl.gz"
    validation: PositiveInt | str = "validation.jsonl.gz"
    test: PositiveInt | str | None = "test.jsonl.gz"


@dataclass(frozen=True)
class HubData(FileData):
    """The sentence pairs of a data set of the Hub.

    Args:
        subset: the data set's configuration.
    """

    subset: str | None = None


@dataclass(frozen=True)
class TokenizerRecipe:
    """The shared vocabulary: learned from the training pairs, or loaded.

    Args:
        algorithm: bpe, byte-level byte-pair encoding, or wordpiece.
        vocab_size: entries of a vocabulary that is learned, special tokens counted.
        path: the folder, or the name on the Hub, of a tokenizer to load; null to learn one.
        sample: the pairs, evenly spaced over the training set, that it is learned from; null for all.
    """

    algorithm: Literal["bpe", "wordpiece"] = "bpe"
    vocab_size: PositiveInt = 37000
    path: str | None = None
    sample: PositiveInt | None = None


@dataclass(frozen=True)
class PaperOptimizer:
    """Adam and the learning rate of the paper (5.3).

    Args:
        optimizer: paper, or radam: rectified Adam with decoupled weight decay and an exponentially decaying rate.
        warmup_steps: the steps in which the learning rate rises.
        learning_rate_scale: a factor on equation (3); the paper has none.
    """

    optimizer: Literal["paper", "radam"] = "paper"
    warmup_steps: PositiveInt = 4000
    learning_rate_scale: PositiveFloat = 1.0


@dataclass(frozen=True)
class RectifiedOptimizer:
    """Rectified Adam (Liu et al. 2020).

    Args:
        optimizer: paper, or radam: rectified Adam with decoupled weight decay and an exponentially decaying rate.
        learning_rate: the rate at the first step.
        learning_rate_decay: the factor by which it falls, gradually, in `learning_rate_decay_steps` steps.
        learning_rate_decay_steps: the steps of one such fall.
        weight_decay: the share of each weight, times the learning rate, that a step takes away.
    """

    optimizer: Literal["paper", "radam"] = "radam"
    learning_rate: PositiveFloat = 0.001
    learning_rate_decay: PositiveFloat = 0.8
    learning_rate_decay_steps: PositiveInt = 1000
    weight_decay: NonNegativeFloat = 0.001


@dataclass(frozen=True)
class TrainingRecipe:
    """The steps of a run.

    Args:
        steps: optimizer steps.
        minutes: minutes of training after which a run ends early; null for no limit.
        source_tokens: the source tokens of an optimizer step, on all devices together (5.1).
        target_tokens: the target tokens of an optimizer step.
        device_tokens: the most source or target tokens of one micro-batch on one device, padding included.
        encoder_from: a trained autoregressive model of the same vocabulary and shape, perhaps with fewer encoder
            layers, whose encoder and embeddings the model starts with.
        start_from: a trained model of the same kind and shape whose weights the model starts with.
        precision: fp32; bf16, mixed precision; or auto, bf16 where the hardware trains faster with it.
        gradient_checkpointing: recompute activations in the backward pass, for less memory and more time.
        torch_compile: compile the model.
        attention: Transformers' name of the attention implementation; auto is eager on a CPU and sdpa elsewhere.
        max_grad_norm: the norm at which gradients are clipped; 0, as in the paper, for never.
        evaluation_steps: steps between evaluations on the validation set, each followed by a checkpoint.
        evaluation_batch_size: pairs that an evaluation translates at once on each device.
        log_steps: steps between lines of the log.
        patience: evaluations without a better score after which a run ends early; null for no limit.
        checkpoint_steps: steps between further checkpoints; null for none.
        checkpoint_minutes: minutes between further checkpoints (10 in 6.1); null for none.
        keep_checkpoints: checkpoints kept, the best included.
        average_last: the number of last checkpoints whose mean is the final model (6.1); null for the best one.
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
    """The training of the paper's model.

    Args:
        evaluation_beams: beams of the translations in evaluations.
    """

    evaluation_beams: PositiveInt = 1


@dataclass(frozen=True)
class GlancingTraining(TrainingRecipe):
    """The training of NAT, and of GLAT (Qian et al. 2021).

    Args:
        glancing: the share of the first pass's mistakes that the model is shown, at the first step and at the last,
            such as [0.5, 0.3]; null for none.
        glancing_steps: the steps over which that share changes; null for `steps`.
    """

    glancing: tuple[ClosedUnitInterval, ClosedUnitInterval] | None = None
    glancing_steps: PositiveInt | None = None


Operator = Literal[
    "softmax", "straight_through_softmax", "straight_through_logits", "gumbel_softmax", "straight_through_gumbel"
]


@dataclass(frozen=True)
class CmlmTraining(TrainingRecipe):
    """The training of CMLM, and of ENGINE (Tu et al. 2020).

    Args:
        evaluation_iterations: passes over each translation in evaluations.
        energy_from: an autoregressive teacher of the same vocabulary whose negative log-likelihood of the model's
            output is the loss; null to learn masked words.
        energy_inputs: the operator that makes, of the model's log-probabilities, what the teacher reads.
        energy_outputs: the operator that makes what it scores.
    """

    evaluation_iterations: PositiveInt = 4
    energy_from: str | None = None
    energy_inputs: Operator = "softmax"
    energy_outputs: Operator = "softmax"


@dataclass(frozen=True)
class LatentTraining(GlancingTraining):
    """The training of IterativeVAE.

    Args:
        kl_scale: the weight of the KL divergences.
        kl_warmup_steps: the steps over which that weight rises linearly from 0; 0 for the full weight from the start.
    """

    kl_scale: NonNegativeFloat = 1.0
    kl_warmup_steps: NonNegativeInt = 30_000


@dataclass(frozen=True)
class FlowTraining(TrainingRecipe):
    """The training of FlowSeq (Ma et al. 2019).

    Args:
        decoder_steps: the first steps, which train posterior and decoder without the prior.
        kl_scale: the weight of the KL divergence.
        kl_warmup_steps: the steps after them over which that weight rises linearly from 0.
    """

    decoder_steps: NonNegativeInt = 30_000
    kl_scale: PositiveFloat = 1.0
    kl_warmup_steps: NonNegativeInt = 10_000


@dataclass(frozen=True)
class BeamSearch:
    """The search of the trained model (6.1).

    Args:
        num_beams: beams; 1 for the most likely token at each step.
        length_penalty: alpha, which favors longer translations the larger it is.
        length_penalty_type: gnmt, the paper's lp(Y), or power, Transformers' own |Y|^alpha.
        max_source_relative_length: the tokens that a translation may have beyond those of its source.
    """

    num_beams: PositiveInt = 4
    length_penalty: float = 0.6
    length_penalty_type: Literal["gnmt", "power"] = "gnmt"
    max_source_relative_length: NonNegativeInt = 50


@dataclass(frozen=True)
class LengthBeam:
    """The search of a non-autoregressive model.

    Args:
        length_beam_size: lengths that are tried for each translation.
    """

    length_beam_size: PositiveInt = 1


@dataclass(frozen=True)
class MaskPredict(LengthBeam):
    """Mask-Predict (Ghazvininejad et al. 2019).

    Args:
        num_iterations: passes over each translation.
    """

    num_iterations: PositiveInt = 10


@dataclass(frozen=True)
class LatentSearch(LengthBeam):
    """The search of FlowSeq.

    Args:
        num_latent_samples: latents that are tried for each length.
        latent_temperature: the standard deviation of the noise that latents are made from; 0 for the mode.
    """

    num_latent_samples: PositiveInt = 1
    latent_temperature: NonNegativeFloat = 0.0


@dataclass(frozen=True)
class ScoreRecipe:
    """The scoring of translations.

    Args:
        tokenize: sacreBLEU's tokenizer; none for files that are tokenized. auto is 13a, but where no spaces separate
            words zh (Chinese) or char (Japanese, Thai, Lao, Khmer, Burmese, Tibetan).
        examples: test sentences that are printed with their translations.
    """

    tokenize: Literal["auto", "13a", "none", "intl", "char", "zh", "ja-mecab", "ko-mecab"] = "auto"
    examples: NonNegativeInt = 5


@dataclass(frozen=True)
class Family:
    """A kind of model: its class and the groups of its recipes."""

    model_class: type[Any]
    training: type[TrainingRecipe]
    decoding: type[Any]

    @property
    def config_class(self) -> type[VaswaniTransformerConfig]:
        return self.model_class.config_class

    @property
    def is_autoregressive(self) -> bool:
        return self.model_class.is_autoregressive

    @property
    def needs_mask(self) -> bool:
        return "mask_token_id" in self.config_class.__dataclass_fields__


FAMILIES = {
    "autoregressive": Family(VaswaniTransformerForConditionalGeneration, BeamTraining, BeamSearch),
    "nat": Family(VaswaniNatForConditionalGeneration, GlancingTraining, LengthBeam),
    "cmlm": Family(VaswaniCmlmForConditionalGeneration, CmlmTraining, MaskPredict),
    "iterative_vae": Family(VaswaniIterativeVaeForConditionalGeneration, LatentTraining, LengthBeam),
    "flowseq": Family(VaswaniFlowSeqForConditionalGeneration, FlowTraining, LatentSearch),
}
DATA = {"grammar": GrammarData, "hub": HubData} | dict.fromkeys(("json", "csv", "parquet", "text", "trees"), FileData)
OPTIMIZERS = {"paper": PaperOptimizer, "radam": RectifiedOptimizer}
TOKENIZER_SETS = {"vocab_size", "bos_token_id", "pad_token_id", "eos_token_id", "mask_token_id"}


@dataclass(frozen=True)
class Recipe:
    """One run.

    Args:
        name: the run's name, also in its model card.
        task: what the pairs are, which decides the scores: translations, or prompts with replies. Trees are parsed.
        expected: the score of such a run and the time it takes, for readers.
        published: a published score on the same test set.
        note: a remark that accompanies the scores everywhere.
        output_dir: the run's folder; the same command resumes an interrupted run in it.
        seed: of the weights, the dropout and the order of the pairs.
        model: the kind of model, the paper's model that it changes (paper), and fields of its configuration.
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
    def kind(self) -> str:
        return self.model.get("kind", "autoregressive")

    @property
    def family(self) -> Family:
        return FAMILIES[self.kind]

    @property
    def energy_from(self) -> str | None:
        return getattr(self.training, "energy_from", None)

    def model_config(self, **ids: Any) -> VaswaniTransformerConfig:
        """Return the model's configuration with the vocabulary size and token ids of its tokenizer."""
        fields = {name: value for name, value in self.model.items() if name not in ("kind", "paper")}
        try:
            return self.family.config_class.from_paper(self.model.get("paper", "base"), **fields | ids)
        except Exception as error:  # the strict configuration has its own classes, each with a sentence
            raise UserError(f"model: {one_line(error)}") from error

    def generation_config(
        self, config: VaswaniTransformerConfig, tokenizer: PreTrainedTokenizerBase, in_evaluations: bool = False
    ) -> GenerationConfig:
        """Return a new GenerationConfig with the search, or with the faster one of evaluations."""
        search = dataclasses.asdict(self.decoding)
        if in_evaluations:
            faster = {"length_beam_size": 1, "num_latent_samples": 1, "latent_temperature": 0.0}
            faster["num_beams"] = getattr(self.training, "evaluation_beams", 1)
            faster["num_iterations"] = getattr(self.training, "evaluation_iterations", 1)
            search |= {name: value for name, value in faster.items() if name in search}
        if search.get("num_beams") == 1:  # greedy decoding weighs no lengths
            search["length_penalty"] = 1.0
        if not self.family.is_autoregressive and tokenizer.unk_token_id is not None:  # a text would lack the word
            search["suppress_tokens"] = [tokenizer.unk_token_id]
        return config.make_generation_config(**search)


class RecipeParser(ArgumentParser):
    """jsonargparse's parser, whose errors are one line each."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise a UserError of one line: the field, what is wrong, what it got."""
        text = re.sub(r"Parser key \"([^\"]*)\":", r"\1:", " ".join(message.split()))
        union = re.match(r"(\S+) Does not validate .* Errors: - (.*) Given value type: .* Given value: (.*)", text)
        if union is not None:
            problems = [one for one in union[2].split(" - ") if "NoneType" not in one]
            text = f"{union[1]} {'; or '.join(problems)}, got {union[3]}"
        raise UserError(f"{text.rstrip('.')}. --help lists the fields of its kinds.")


def choice_of(name: str, tree: dict[str, Any], arguments: list[str], choices: Iterable[str], default: str) -> str:
    """Return the value of a field that decides which other fields there are."""
    pairs = [text.partition("=") for text in arguments] + [(option, "", value) for option, value in pairwise(arguments)]
    given = [value for option, _, value in pairs if option == f"--{name}" and value]
    group, _, member = name.partition(".")
    fields = tree.get(group)
    value = given[-1] if given else (fields.get(member) if isinstance(fields, dict) else None) or default
    if value not in list(choices):
        raise UserError(f"{name}: got {value!r}, expected one of {', '.join(choices)}.")
    return value


def recipe_parser(tree: dict[str, Any], arguments: list[str]) -> RecipeParser:
    """Return a parser of exactly the fields that a recipe's kinds of data, model and optimizer have."""
    data = choice_of("data.kind", tree, arguments, DATA, "json")
    family = FAMILIES[choice_of("model.kind", tree, arguments, FAMILIES, "autoregressive")]
    optimizer = choice_of("training.optimizer", tree, arguments, OPTIMIZERS, "paper")
    training = make_dataclass("Training", (), bases=(family.training, OPTIMIZERS[optimizer]), frozen=True)
    training.__doc__ = family.training.__doc__
    texts = {one.arg_name: one.description for one in docstring_parser.parse(str(Recipe.__doc__)).params}
    types = {"data": DATA[data], "training": training, "decoding": family.decoding}
    parser = RecipeParser(
        prog="python -m training.train", usage="%(prog)s RECIPE.yaml [--any.field=value ...]", allow_abbrev=False
    )
    parser.add_argument("--recipe", action="config", help=argparse.SUPPRESS)
    for each in dataclasses.fields(Recipe):
        default = None if each.default is dataclasses.MISSING else each.default
        if each.name == "model":
            parser.add_argument("--model", type=dict[str, Any], default={}, help=texts["model"])
        elif each.name in types or each.name in ("tokenizer", "score"):
            parser.add_argument(f"--{each.name}", type=types.get(each.name, each.type))
        else:
            parser.add_argument(f"--{each.name}", type=each.type, default=default, help=texts[each.name])
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
    """Return the recipe of a YAML file, overridden by `--any.field=value` arguments."""
    tree = read_yaml(Path(path))
    arguments = [re.sub("=~(?=/)", f"={Path.home()}", argument) for argument in arguments]
    parser = recipe_parser(tree, arguments)
    return checked(parser, parser.parse_args([f"--recipe={path}", *arguments]))


def recipe_of(tree: dict[str, Any]) -> Recipe:
    """Return the recipe in a nested dictionary, as `to_dict` makes it."""
    parser = recipe_parser(tree, [])
    return checked(parser, parser.parse_object(tree))


def to_dict(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe as nested plain values, without `output_dir`, so that a folder can be moved."""
    tree = json.loads(json.dumps(dataclasses.asdict(recipe)))  # jsonargparse's numbers become plain ones
    del tree["output_dir"]
    return tree


def checked(parser: RecipeParser, values: Any) -> Recipe:
    """Return the recipe of parsed values, whose fields go together."""
    values = parser.instantiate(values)
    recipe = Recipe(**{each.name: getattr(values, each.name) for each in dataclasses.fields(Recipe)})
    training, data = recipe.training, recipe.data
    if data.kind != "grammar" and data.path is None:
        what = "the name of a data set" if data.kind == "hub" else "the folder of its data"
        raise UserError(f"data.path: the recipe {recipe.name!r} needs {what}; give --data.path=...")
    if (last := training.average_last) is not None and last >= training.keep_checkpoints:
        raise UserError(
            f"training.keep_checkpoints: {training.keep_checkpoints} are too few to average the last {last} and keep "
            f"the best; give {last + 1}."
        )
    if training.encoder_from is not None and training.start_from is not None:
        raise UserError("training.start_from: the model has an encoder; leave training.encoder_from out.")
    if names := sorted(TOKENIZER_SETS & recipe.model.keys()):
        raise UserError(f"model.{names[0]}: the tokenizer sets it; see tokenizer.vocab_size and tokenizer.path.")
    # a loaded vocabulary has its own size
    entries = recipe.tokenizer.vocab_size if recipe.tokenizer.path is None else 2**31
    recipe.model_config(vocab_size=entries)
    if training.precision == "auto":  # in full, so that a run keeps it on another machine
        precision = "fp32" if trains_slowly_in_bf16() else "bf16"
        recipe = dataclasses.replace(recipe, training=dataclasses.replace(training, precision=precision))
    return recipe
