"""A recipe: everything that makes a run, read from a YAML file and from arguments, and checked before any work."""

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args

from transformers import GenerationConfig, PreTrainedTokenizerBase

from training.recipe.families import AUTOREGRESSIVE, FAMILIES, TOKENIZER_SETS, Family
from training.recipe.machine import trains_slowly_in_bf16
from training.recipe.reading import (
    Scope,
    apply_override,
    build,
    check_switches,
    leave_out,
    read_yaml,
    setting,
    settings,
)
from vaswani_transformer import VaswaniTransformerConfig
from vaswani_transformer.config import PAPER_SETTINGS
from vaswani_transformer.support.command_line import did_you_mean, not_one_of
from vaswani_transformer.support.errors import UserError, one_line
from vaswani_transformer.support.saved_settings import LONGEST, MAX_ALPHA

# The fields that switch others on, with the values by which they do.
FILES = ("data.kind", "json", "text", "hub", "trees")
TEXTS = ("data.kind", "grammar", "json", "text", "hub")
PAPER = ("training.optimizer", "paper")
RADAM = ("training.optimizer", "radam")
# The kinds of model that have a field.
LEFT_TO_RIGHT = (AUTOREGRESSIVE,)
AT_ONCE = ("nat", "cmlm", "iterative_vae", "flowseq")
LATENT = ("iterative_vae", "flowseq")
GLANCING, CMLM, FLOW = ("nat", "iterative_vae"), ("cmlm",), ("flowseq",)
SEEDS = 2**32  # NumPy's limit


@dataclass(frozen=True)
class DataRecipe:
    """The sentence pairs, and those of them that a run uses.

    kind: "grammar", the shipped task; "json", JSON Lines with a text of each side, in a group `translation` or not;
        "text", a file a language, line by line; "hub", a data set of the Hugging Face Hub with such rows; "trees",
        bracketed constituency trees, for parsing: the source is a sentence in its language, the target its linear tree.
    path: the folder of the files, or the data set's name on the Hub.
    subset: the configuration of a data set on the Hub.
    source, target: the language codes, or other names of the two sides, such as prompt and reply.
    train, validation, test: file names under `path`, with `{language}` in them for "text", or splits on the Hub; for
        "trees" also patterns such as "22/*.mrg", several of them separated by spaces.
    max_length: the tokens, `</s>` included, that a side of a training pair may have.
    too_long: "drop" a longer training pair, with a count, or end the run with an "error".
    empty: end the run with an "error" on a pair with an empty side, or "drop" it, with a count.
    streaming: whether the training pairs are read and tokenized during training, again in every epoch, for pairs
        that do not fit in memory; a bad line ends the run when it is reached.
    buffer: the streamed pairs that are in memory, and sorted by length, at a time: more pairs, less padding.
    distilled: the folder of `python -m training.distill`, whose translations replace the training targets.
    teacher: the model that must have written `distilled`; None for that of `training.encoder_from`, or for any.
    """

    kind: Literal["grammar", "json", "text", "hub", "trees"] = "json"
    path: str | None = setting(None, is_path=True, needs=FILES, scope=Scope.LOCATION)
    subset: str | None = setting(None, needs=("data.kind", "hub"))
    source: str = "en"
    target: str = "de"
    train: str = setting("train.jsonl.gz", is_path=True, is_needed=True, needs=FILES)
    validation: str = setting("validation.jsonl.gz", is_path=True, is_needed=True, needs=FILES)
    test: str | None = setting("test.jsonl.gz", is_path=True, needs=FILES)
    max_length: int = setting(256, above=0)
    too_long: Literal["drop", "error"] = "drop"
    empty: Literal["error", "drop"] = "error"
    streaming: bool = setting(False, needs=FILES)
    buffer: int = setting(100_000, above=0, needs=("data.streaming",))
    distilled: str | None = setting(None, is_path=True, scope=Scope.LOCATION)
    teacher: str | None = setting(None, is_path=True, needs=("data.distilled",))


@dataclass(frozen=True)
class TokenizerRecipe:
    """The shared vocabulary: trained on the training pairs, or loaded.

    algorithm: "bpe", byte-level byte-pair encoding, or "wordpiece".
    vocab_size: entries of a vocabulary that is trained, special tokens counted.
    path: the folder, or the name on the Hub, of a tokenizer to load; None to train one.
    sample: the pairs that it is trained on, evenly spaced over the training set or the first of a stream; None for all
        of a set and the first million of a stream.
    """

    algorithm: Literal["bpe", "wordpiece"] = "bpe"
    vocab_size: int = setting(37000, above=0)
    path: str | None = setting(None, is_path=True)
    sample: int | None = setting(None, above=0)


Operator = Literal[
    "softmax", "straight_through_softmax", "straight_through_logits", "gumbel_softmax", "straight_through_gumbel"
]


@dataclass(frozen=True)
class TrainingRecipe:
    """The steps of a run.

    steps: optimizer steps.
    minutes: wall-clock minutes of training after which a run ends early, including those before an interruption up
        to the checkpoint that it resumes; None for no limit.
    source_tokens, target_tokens: the tokens of an optimizer step, on all devices together (5.1).
    device_tokens: the most source or target tokens, with padding, of one micro-batch on one device; a step takes
        several micro-batches if a device's share is larger.
    encoder_from: the folder, or the name on the Hub, of an autoregressive model with the same vocabulary, except for
        `<mask>`, and shape, but perhaps fewer encoder layers, whose encoder and embeddings the model starts with; None
        to start from random weights.
    start_from: the folder, or the name on the Hub, of a trained model of the same kind, vocabulary and shape with whose
        weights the model starts; None to start from random ones.
    energy_from: of kind cmlm, for ENGINE: the folder, or the name on the Hub, of an autoregressive teacher with the
        same vocabulary, whose negative log-likelihood of the model's output is the loss; None to learn masked words.
    energy_inputs, energy_outputs: the operators that make, of the model's log-probabilities, what that teacher reads
        and what it scores; None for softmax.
    optimizer: "paper", Adam with equation (3), or "radam", rectified Adam with decoupled weight decay and a learning
        rate that decays exponentially.
    warmup_steps: steps in which the learning rate rises, in equation (3).
    learning_rate_scale: a factor on equation (3); the paper has none.
    learning_rate: of radam, at the first step.
    learning_rate_decay: the factor by which the learning rate of radam falls in `learning_rate_decay_steps` steps.
    learning_rate_decay_steps: the steps of one such fall, which is gradual.
    weight_decay: of radam: the share of each weight, times the learning rate, that a step takes away.
    glancing: of kind nat, for GLAT, and iterative_vae: the share of the first pass's mistakes that the model sees, at
        the first step and after `glancing_steps`, such as [0.5, 0.3], linear between them; None for no glancing.
    glancing_steps: the steps in which that share changes; None for `steps`.
    decoder_steps: of kind flowseq: the first steps, which train posterior and decoder without the prior; the pairs of
        the next step then start the flow's actnorms.
    kl_scale: of kinds iterative_vae and flowseq: the weight of their KL divergences after `kl_warmup_steps`.
    kl_warmup_steps: the steps in which that weight rises linearly from 0, of flowseq after `decoder_steps`; 0 for the
        full weight from the first step; None for 30,000, of flowseq 10,000.
    precision: "fp32", or "bf16" for autocast; "auto" is "fp32" on a machine that trains faster in it, which is a CPU or
        GPU without instructions for bf16, or Intel's CPU without a matrix unit (AMX), and "bf16" elsewhere. The run's
        recipe.yaml has the chosen one.
    gradient_checkpointing: whether the backward pass recomputes activations, for less memory and more time.
    torch_compile: whether torch compiles the model.
    attention: Transformers' name of the attention implementation; "auto" is "eager" on a CPU, which for sentences is
        as fast as torch's fused kernel in fp32 and much faster in bf16, and "sdpa" elsewhere.
    max_grad_norm: the norm at which gradients are clipped; 0, as in the paper, for never.
    on_divergence: the reaction to a loss or gradient that is not finite: "stop" ends the run, "skip" skips that
        step's update. Neither changes the weights.
    skip_limit: the steps in a row that may be skipped; one more ends the run.
    evaluation_steps: steps between evaluations on the validation set, each followed by a checkpoint.
    evaluation_beams: beams of those evaluations' translations, of an autoregressive model.
    evaluation_iterations: passes over each of those translations, of kind cmlm.
    evaluation_batch_size: pairs that an evaluation translates at once on each device; fewer of pairs that are longer
        than data.max_length.
    log_steps: steps between lines of the log.
    patience: evaluations without a better score of the task (of ENGINE: a lower energy), or the same at a lower loss,
        after which a run ends early; None for no limit.
    checkpoint_steps, checkpoint_minutes: steps or minutes between further checkpoints ("written at 10-minute
        intervals", 6.1); None for none.
    keep_checkpoints: checkpoints kept, including the best.
    average_last: the number of last checkpoints whose mean is the final model (6.1), or of all if there are fewer; None
        for the best checkpoint.
    """

    steps: int = setting(100_000, above=0, scope=Scope.LIMIT)
    minutes: float | int | None = setting(None, above=0, scope=Scope.LIMIT)
    source_tokens: int = setting(25_000, above=0)
    target_tokens: int = setting(25_000, above=0)
    device_tokens: int = setting(25_000, above=0, scope=Scope.EXECUTION)
    encoder_from: str | None = setting(None, is_path=True)
    start_from: str | None = setting(None, is_path=True)
    energy_from: str | None = setting(None, is_path=True, kinds=CMLM, scope=Scope.LOCATION)
    energy_inputs: Operator | None = setting(None, needs=("training.energy_from",), kinds=CMLM)
    energy_outputs: Operator | None = setting(None, needs=("training.energy_from",), kinds=CMLM)
    optimizer: Literal["paper", "radam"] = "paper"
    warmup_steps: int = setting(4000, above=0, needs=PAPER)
    learning_rate_scale: float | int = setting(1.0, above=0, needs=PAPER)
    learning_rate: float | int = setting(0.001, above=0, needs=RADAM)
    learning_rate_decay: float | int = setting(0.8, above=0, needs=RADAM)
    learning_rate_decay_steps: int = setting(1000, above=0, needs=RADAM)
    weight_decay: float | int = setting(0.001, at_least=0, needs=RADAM)
    glancing: list | None = setting(None, kinds=GLANCING)
    glancing_steps: int | None = setting(None, above=0, needs=("training.glancing",), kinds=GLANCING, scope=Scope.OPEN)
    decoder_steps: int = setting(30_000, at_least=0, kinds=FLOW)
    kl_scale: float | int = setting(1.0, at_least=0, kinds=LATENT)
    kl_warmup_steps: int | None = setting(None, at_least=0, kinds=LATENT)
    precision: Literal["fp32", "bf16", "auto"] = setting("fp32", scope=Scope.OPEN)
    gradient_checkpointing: bool = setting(False, scope=Scope.EXECUTION)
    torch_compile: bool = False
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"] = "auto"
    max_grad_norm: float | int = setting(0.0, at_least=0)
    on_divergence: Literal["stop", "skip"] = setting("stop", scope=Scope.EXECUTION)
    skip_limit: int = setting(10, at_least=0, needs=("training.on_divergence", "skip"), scope=Scope.EXECUTION)
    evaluation_steps: int = setting(1000, above=0)
    evaluation_beams: int = setting(1, above=0, kinds=LEFT_TO_RIGHT)
    evaluation_iterations: int = setting(4, above=0, kinds=CMLM)
    evaluation_batch_size: int = setting(64, above=0, scope=Scope.EXECUTION)
    log_steps: int = setting(100, above=0, scope=Scope.EXECUTION)
    patience: int | None = setting(None, above=0)
    checkpoint_steps: int | None = setting(None, above=0)
    checkpoint_minutes: float | int | None = setting(None, above=0)
    keep_checkpoints: int = setting(2, above=0)
    average_last: int | None = setting(None, above=0)

    @property
    def max_checkpoints(self) -> float:
        """The checkpoints that the run writes if no limit ends it before `steps`."""
        if self.checkpoint_minutes is not None:
            return math.inf
        periods = {self.evaluation_steps, self.checkpoint_steps or self.steps, self.steps}
        return len({step for period in periods for step in range(period, self.steps + 1, period)} | {self.steps})


@dataclass(frozen=True)
class DecodingRecipe:
    """The search of the trained model (6.1), which its generation_config.json holds too.

    num_beams: beams of the search; 1 for the most likely token at each step.
    length_penalty: alpha, which favors longer translations the larger it is.
    length_penalty_type: "gnmt", the paper's lp(Y), or "power", Transformers' own |Y|^alpha.
    max_source_relative_length: the tokens that a translation may have beyond those of its source.
    num_iterations: passes over each translation, of kind cmlm.
    length_beam_size: lengths that are tried for each translation.
    num_latent_samples: of kind flowseq: latents that are tried for each length, ranked by importance weights.
    latent_temperature: of kind flowseq: the standard deviation of the noise that latents are made from; 0 for its mode.
    """

    num_beams: int = setting(4, above=0, kinds=LEFT_TO_RIGHT)
    length_penalty: float | int = setting(0.6, at_least=-MAX_ALPHA, at_most=MAX_ALPHA, kinds=LEFT_TO_RIGHT)
    length_penalty_type: Literal["gnmt", "power"] = setting("gnmt", kinds=LEFT_TO_RIGHT)
    max_source_relative_length: int = setting(50, at_least=0, at_most=LONGEST, kinds=LEFT_TO_RIGHT)
    num_iterations: int = setting(10, above=0, at_most=LONGEST, kinds=CMLM)
    length_beam_size: int = setting(1, above=0, at_most=LONGEST, kinds=AT_ONCE)
    num_latent_samples: int = setting(1, above=0, at_most=LONGEST, kinds=FLOW)
    latent_temperature: float | int = setting(0.0, at_least=0, kinds=FLOW)


@dataclass(frozen=True)
class ScoreRecipe:
    """The scoring of translations, and the examples that are printed.

    tokenize: sacreBLEU's tokenizer; "none" for files that are tokenized. "auto" is "13a", but where no spaces separate
        words "zh" (Chinese) or "char" (Japanese, Thai, Lao, Khmer, Burmese, Tibetan).
    examples: test sentences that are printed with their translations.
    """

    tokenize: Literal["auto", "13a", "none", "intl", "char", "zh", "ja-mecab", "ko-mecab"] = setting(
        "auto", needs=TEXTS
    )
    examples: int = setting(5, at_least=0)


@dataclass(frozen=True)
class Recipe:
    """One run. `model` holds the `kind` of model, fields of its configuration, and `paper`, the model they change.

    name: the run's name, also in its model card.
    task: what the pairs are, which decides the scores: translations, or prompts with replies. Trees are always parsed.
    output_dir: the run's folder; the same command resumes an interrupted run in it.
    seed: of the weights, the dropout and the order of the pairs.
    expected: the score of such a run and the time it takes, for readers.
    published: a published score on the same test set, which the model card shows with the run's scores.
    note: a remark that accompanies the scores everywhere, such as that a parser made the test trees.
    """

    name: str = "run"
    task: Literal["translation", "dialogue"] = setting("translation", needs=TEXTS)
    expected: str = setting("", scope=Scope.DESCRIPTION)
    published: str = setting("", scope=Scope.DESCRIPTION)
    note: str = setting("", scope=Scope.DESCRIPTION)
    output_dir: str | None = setting(None, is_path=True)
    seed: int = setting(2017, at_least=0)
    data: DataRecipe = field(default_factory=DataRecipe)
    tokenizer: TokenizerRecipe = field(default_factory=TokenizerRecipe)
    model: dict[str, Any] = field(default_factory=dict)
    training: TrainingRecipe = field(default_factory=TrainingRecipe)
    decoding: DecodingRecipe = field(default_factory=DecodingRecipe)
    score: ScoreRecipe = field(default_factory=ScoreRecipe)

    def model_config(self, **token_ids: int | None) -> VaswaniTransformerConfig:
        """Return the model's configuration with the vocabulary size and token ids of its tokenizer."""
        fields: dict[str, Any] = {"paper": "base"} | self.model | token_ids
        fields.pop("kind", None)
        return self.family.config_class.from_paper(**{"name": fields.pop("paper")} | fields)

    @property
    def kind(self) -> str:
        return self.model.get("kind") or AUTOREGRESSIVE

    @property
    def family(self) -> Family:
        """The classes and the work of its kind of model."""
        return FAMILIES[self.kind]

    @property
    def search(self) -> dict[str, Any]:
        """The fields of `decoding` that its kind of model has."""
        return {name: value for name, value in vars(self.decoding).items() if self.kind in kinds_of(f"decoding.{name}")}

    @property
    def evaluation_search(self) -> dict[str, Any]:
        """The same in evaluations during training, which search faster."""
        faster = self.family.evaluation.items()
        return self.search | {
            name: getattr(self.training, value) if isinstance(value, str) else value for name, value in faster
        }

    def generation_config(
        self, config: VaswaniTransformerConfig, tokenizer: PreTrainedTokenizerBase, in_training: bool = False
    ) -> GenerationConfig:
        """Return a new GenerationConfig with the search, or with the faster one of evaluations in training.

        Editing a model's own in place would lose the paper's settings.
        """
        search = self.evaluation_search if in_training else self.search
        if search.get("num_beams") == 1:  # greedy decoding weighs no lengths; this overrides the model's own setting
            search["length_penalty"] = 1.0
        if not self.family.is_autoregressive and tokenizer.unk_token_id is not None:  # a text would lack the word
            search["suppress_tokens"] = [tokenizer.unk_token_id]
        return config.make_generation_config(**search)


SETTINGS = settings(Recipe)
PATHS = [name for name, one in SETTINGS.items() if one.rules.is_path and name != "output_dir"]


def kinds_of(name: str) -> tuple[str, ...]:
    return SETTINGS[name].rules.kinds or tuple(FAMILIES)


def to_dict(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe as a nested dictionary, without fields of other kinds of model.

    It has no `output_dir` either, so that a folder can be moved.
    """
    tree = dataclasses.asdict(recipe)
    del tree["output_dir"]
    for name in SETTINGS:
        group, _, member = name.partition(".")
        if recipe.kind not in kinds_of(name):
            del tree[group][member]
    if recipe.kind == AUTOREGRESSIVE:
        tree["model"].pop("kind", None)
    return tree


def load_recipe(path: str | Path, arguments: list[str], is_trained: bool = True) -> Recipe:
    """Return the recipe of a YAML file, overridden by `--any.field=value` arguments.

    Where a model is trained by it, all fields of `training` need an effect.
    """
    tree, given = read_recipe(Path(path)), set()
    for argument in arguments:
        if (name := argument.partition("=")[0]) in given:
            raise UserError(f"{name}: is given twice, and only the last would count; give it once.")
        given.add(name)
        apply_override(Recipe, tree, argument)
    check_kind(tree)
    recipe = build(Recipe, tree)
    recipe = dataclasses.replace(recipe, model=drop_null_fields(recipe))
    check(recipe, is_trained)
    return with_derived_settings(recipe)


def read_recipe(path: Path) -> dict[str, Any]:
    if not path.is_file():
        known = sorted(recipe.name for recipe in (Path(__file__).parents[1] / "recipes").glob("*.yaml"))
        raise UserError(
            f"{path}: there is no such recipe; those of training/recipes are {', '.join(known)}."
            f"{did_you_mean(path.name, known)}"
        )
    try:
        tree = read_yaml(path.read_text(encoding="utf-8")) or {}
    except UserError as error:
        raise UserError(f"{path}, {error}") from error
    except ValueError as error:
        raise UserError(f"{path}: not YAML: {one_line(error)}.") from error
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read ({one_line(error, with_file=False)}); give a recipe that can be."
        ) from error
    if not isinstance(tree, dict):
        raise UserError(f"{path}: a recipe is a mapping of keys to values, not {type(tree).__name__}.")
    return tree


def check_kind(tree: dict[str, Any]) -> None:
    """Check that a recipe, as a nested dictionary, has a kind of model, and no field of other kinds only."""
    if not isinstance(model := tree.get("model") or {}, dict):
        return  # `build` raises the error
    if (kind := model.get("kind") or AUTOREGRESSIVE) not in list(FAMILIES):  # it may be a list, which has no hash
        raise UserError(f"model.kind: {not_one_of(kind, FAMILIES)}")
    groups = {group: fields for group, fields in tree.items() if isinstance(fields, dict)}
    given = [f"{group}.{name}" for group in groups for name, value in groups[group].items() if value is not None]
    if foreign := [name for name in given if name in SETTINGS and kind not in kinds_of(name)]:
        group = foreign[0].partition(".")[0]
        names = [name for name in foreign if name.startswith(group) and kinds_of(name) == kinds_of(foreign[0])]
        raise UserError(
            f"{', '.join(names)}: a model of kind {kind} has no such field, kind {' or '.join(kinds_of(names[0]))} "
            f"has; {leave_out(names)}, or set model.kind."
        )


def drop_null_fields(recipe: Recipe) -> dict[str, Any]:
    """Return the fields of the model without those whose null is no value: null leaves these at their defaults."""
    hints = recipe.family.model_fields | {"kind": str, "paper": str}
    return {
        name: value
        for name, value in recipe.model.items()
        if value is not None or name not in hints or NoneType in get_args(hints[name])
    }


def with_derived_settings(recipe: Recipe) -> Recipe:
    """Return a recipe with what it leaves open in full, which a run keeps with more steps and on another machine.

    These are the schedules of its kind, ENGINE's operators, and the precision.
    """
    training = recipe.training
    schedules = recipe.family.defaults | ({} if training.glancing is None else {"glancing_steps": training.steps})
    derived: dict[str, Any] = {
        name: value if getattr(training, name) is None else getattr(training, name) for name, value in schedules.items()
    }
    if training.energy_from is not None:
        derived["energy_inputs"] = training.energy_inputs or "softmax"
        derived["energy_outputs"] = training.energy_outputs or "softmax"
    if training.precision == "auto":
        derived["precision"] = "fp32" if trains_slowly_in_bf16() else "bf16"
    return dataclasses.replace(recipe, training=dataclasses.replace(training, **derived))


def check(recipe: Recipe, is_trained: bool = True) -> None:
    """Check that the fields of a recipe go together, and its model."""
    if recipe.seed >= SEEDS:
        raise UserError(f"seed: {recipe.seed} is too large; give one below {SEEDS}.")
    check_switches(recipe, () if is_trained else ("training",))
    check_data(recipe)
    check_training(recipe)
    check_score_tokenizer(recipe.score.tokenize)
    check_model(recipe)
    if recipe.kind in FLOW:
        check_phases(recipe.training, recipe.decoding)


def check_data(recipe: Recipe) -> None:
    data = recipe.data
    if data.source == data.target:
        raise UserError(
            f"data.target: {data.target!r} is also the source, so a model would learn to copy; "
            "set data.source or data.target."
        )
    if data.kind != "grammar" and data.path is None:
        what = "the name of a data set" if data.kind == "hub" else "the folder of its data"
        raise UserError(f"data.path: the recipe {recipe.name!r} needs {what}; give --data.path=...")


def check_training(recipe: Recipe) -> None:
    training = recipe.training
    if (last := training.average_last) is not None and last >= training.keep_checkpoints:
        raise UserError(
            f"training.keep_checkpoints: {training.keep_checkpoints} are too few to average the last {last} and keep "
            f"the best; give {last + 1}."
        )
    if training.encoder_from is not None and training.start_from is not None:
        raise UserError("training.start_from: the model has an encoder; leave training.encoder_from out.")
    if (ratios := training.glancing) is not None and not (
        len(ratios) == 2 and all(type(ratio) in (int, float) and 0 <= ratio <= 1 for ratio in ratios)
    ):
        raise UserError(f"training.glancing: expected two shares from 0 to 1, got {ratios}; give [0.5, 0.3].")


def check_model(recipe: Recipe) -> None:
    """Check that the fields of the model are those of its kind, and make a configuration."""
    known = sorted({"kind", "paper", *recipe.family.model_fields})
    for name in map(str, recipe.model):
        if name in TOKENIZER_SETS:
            raise UserError(f"model.{name}: the tokenizer sets it; see tokenizer.vocab_size and tokenizer.path.")
        if name not in known:
            raise UserError(f"model.{name}: no such key; a model has {', '.join(known)}.{did_you_mean(name, known)}")
    if (paper := recipe.model.get("paper", "base")) not in list(PAPER_SETTINGS):
        raise UserError(f"model.paper: {not_one_of(paper, PAPER_SETTINGS)}")
    try:
        recipe.model_config(vocab_size=recipe.tokenizer.vocab_size)
    except Exception as error:  # the strict configuration has its own classes, each with a sentence
        raise UserError(f"model: {one_line(error)}") from error


def check_phases(training: TrainingRecipe, decoding: DecodingRecipe) -> None:
    """Check that a model with a prior over latents trains it, and draws several latents only if they differ."""
    if training.decoder_steps >= training.steps:
        raise UserError(
            f"training.decoder_steps: no step is left for the prior; got {training.decoder_steps} of "
            f"{training.steps} steps, expected fewer. Set it, or training.steps."
        )
    if training.kl_scale == 0:
        raise UserError("training.kl_scale: at 0 the prior learns nothing; got 0, expected more. Give 1.")
    if decoding.num_latent_samples > 1 and not decoding.latent_temperature:
        raise UserError(
            f"decoding.num_latent_samples: at temperature 0 all latents are the same; got "
            f"{decoding.num_latent_samples}, expected 1. Set decoding.latent_temperature, for example to 0.5."
        )


def check_score_tokenizer(name: str) -> None:
    language, _, dictionary = name.partition("-")
    if not dictionary:
        return
    from sacrebleu.metrics.bleu import BLEU  # here, because its import takes time

    try:
        BLEU(tokenize=name)
    except (ImportError, RuntimeError) as error:
        raise UserError(
            f"score.tokenize: {name!r} needs packages that are not installed; run `pip install "
            f'"sacrebleu[{language}]"`.'
        ) from error
