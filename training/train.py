"""Train a model from a recipe: `python -m training.train RECIPE.yaml [--any.field=value]`, or `accelerate launch -m`.

The folder `output_dir` ends up with the best model, its tokenizer, the recipe, `results.json`, TensorBoard's files and
the checkpoints. The same command resumes a run that was interrupted.
"""

import dataclasses
import json
import logging
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, cast

import datasets
import torch
import yaml
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from datasets import Dataset, DatasetDict
from safetensors.torch import load_file
from transformers import (
    AutoTokenizer,
    EarlyStoppingCallback,
    PreTrainedTokenizerBase,
    Seq2SeqTrainingArguments,
    TrainerState,
    set_seed,
)
from transformers.utils.logging import disable_progress_bar

from training.average import last_checkpoints, mean_weights
from training.checkpoints import (
    CHECKPOINTS,
    PARTIAL,
    RECIPE,
    STATE,
    WEIGHTS,
    WholeCheckpoints,
    alone_in,
    checkpoint_at,
    has_ended,
    is_beyond,
    last_checkpoint,
    refuse_other_engine,
    resume_point,
    step_of,
    whole_checkpoints,
    write,
    writing,
)
from training.command import INTERRUPTED, end_interrupted, reason
from training.data import PairStream, is_streamed, load_pairs, sample_texts, tokenize
from training.engines import join_processes, load_weights, uses_cpu, without_ties
from training.metrics import bleu, chrf
from training.recipe import Recipe, RecipeError, RunError, as_tree, load_recipe
from training.recipe_help import recipe_help
from training.results import RESULTS, fingerprint, plain
from training.trainer import TranslationTrainer, accumulation, decoding_config, lengths
from training.watch import time_line, trained_seconds
from vaswani_transformer import (
    VaswaniTransformerConfig,
    VaswaniTransformerForConditionalGeneration,
    VaswaniTransformerTokenizer,
)
from vaswani_transformer.batching import make_steps

logger = logging.getLogger(__name__)

TRAINED = STATE
DATA = "data.json"  # the fingerprints of what a run was begun with
LIMITS = ("training.steps", "training.minutes")  # of a run, which may be raised before it continues
REMARKS = ("expected", "published")  # on a run, which change nothing of it
# How a machine computes a run and what it prints: a step is the same on any of them.
MEANS = (
    "training.device_tokens",
    "training.gradient_checkpointing",
    "training.evaluation_batch_size",
    "training.log_steps",
    "training.on_divergence",
    "training.skip_limit",
)
COLUMNS = ("input_ids", "labels")


def prepare_folder(recipe: Recipe) -> Path:
    """The run's folder: new, or with a run of the same recipe, unfinished or to go on by larger limits.

    Raises:
        RecipeError: there is no name for it, it cannot be written, or it holds something else.
    """
    if recipe.output_dir is None:
        raise RecipeError("output_dir: the run needs a folder of its own; give --output_dir=...")
    folder = Path(recipe.output_dir)
    check_writable(folder)
    if not (folder / RECIPE).exists():
        if folder.exists() and (not folder.is_dir() or any(path.suffix != PARTIAL for path in folder.iterdir())):
            raise RecipeError(f"{folder}: holds something that is no run; give another --output_dir.")
        return folder
    names = differences(folder, recipe)
    checkpoint = last_checkpoint(folder)
    is_longer = names and checkpoint is not None and not has_ended(checkpoint, recipe.training)
    if (folder / RESULTS).exists() and not (is_longer and set(names) <= {*LIMITS, *MEANS}):
        raise RecipeError(
            f"{folder}: holds a finished run; give another --output_dir, remove the folder, or raise training.steps or "
            "training.minutes, whichever ended it, and nothing else, to go on with it."
        )
    for name in names:
        if name not in LIMITS + MEANS:
            raise RecipeError(
                f"{folder}: holds an unfinished run of another recipe, {name} differs; give the same command to resume "
                "it, or another --output_dir."
            )
    if names and checkpoint is not None and is_beyond(checkpoint, recipe.training):
        minutes = trained_seconds(checkpoint) / 60
        raise RecipeError(
            f"{folder}: holds an unfinished run of {step_of(checkpoint)} steps in {minutes:.1f} minutes so far; give "
            "training.steps and training.minutes beyond them, or another --output_dir."
        )
    with alone_in(folder):
        return folder


def check_writable(folder: Path) -> None:
    """Check that the run's folder is there and can be written to, or can be made.

    Raises:
        RecipeError: it cannot.
    """
    ancestor = folder
    try:
        ancestor = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        with tempfile.TemporaryDirectory(dir=ancestor, suffix=PARTIAL):
            pass
    except OSError as error:
        raise RecipeError(
            f"{folder}: {ancestor} is no folder that can be written to ({reason(error)}); give another --output_dir."
        ) from error


def recipe_in(folder: Path) -> dict[str, Any]:
    """The recipe of the run in a folder, as a tree."""
    return yaml.safe_load((folder / RECIPE).read_text(encoding="utf-8"))


def differences(folder: Path, recipe: Recipe) -> list[str]:
    """The names of the fields in which a recipe asks for something else than the run in a folder."""
    return [name for name in changed(recipe_in(folder), as_tree(recipe)) if name not in REMARKS]


def go_on(recipe: Recipe, folder: Path) -> None:
    """Give a run other limits, and one that had finished by its own another end.

    What it had become by then is kept in a folder of its own, named for its steps, with all that loads it.
    """
    if (results := folder / RESULTS).exists():
        kept = folder / f"finished-{json.loads(results.read_text(encoding='utf-8'))['steps']}"
        if not kept.exists():
            partial = kept.with_name(f"{kept.name}{PARTIAL}")
            shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed here
            with writing(kept):
                partial.mkdir()
                for path in [path for path in folder.iterdir() if path.is_file()]:
                    shutil.copy2(path, partial)
                partial.rename(kept)
        results.unlink()
    (folder / TRAINED).unlink(missing_ok=True)
    write_recipe(recipe, folder)


def write_recipe(recipe: Recipe, folder: Path) -> None:
    write(folder / RECIPE, yaml.safe_dump(as_tree(recipe), allow_unicode=True, sort_keys=False))


def changed(before: Any, now: Any, prefix: str = "") -> list[str]:
    """The names of the fields that differ between two recipes."""
    if not (isinstance(before, dict) and isinstance(now, dict)):
        return [] if before == now else [prefix.rstrip(".")]
    names = sorted(before.keys() | now.keys())
    return [name for key in names for name in changed(before.get(key), now.get(key), f"{prefix}{key}.")]


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    return cast(PreTrainedTokenizerBase, AutoTokenizer.from_pretrained(path))


def make_tokenizer(recipe: Recipe, pairs: DatasetDict) -> PreTrainedTokenizerBase:
    """The tokenizer that the recipe names, or one trained on the training pairs.

    Raises:
        RecipeError: there is none at the recipe's path, or none that a model can be trained with, or the vocabulary is
            too small to train one.
    """
    if (path := recipe.tokenizer.path) is None:
        train = PairStream(recipe.data, recipe.seed) if recipe.data.streaming else pairs["train"]
        texts = sample_texts(train, recipe.tokenizer.sample)
        try:
            return VaswaniTransformerTokenizer.train_from_iterator(
                texts, recipe.tokenizer.vocab_size, recipe.tokenizer.algorithm
            )
        except RecipeError:
            raise
        except ValueError as error:
            raise RecipeError(f"tokenizer.vocab_size: {error}") from error
    if path.startswith((".", "/", "~")) and not Path(path).expanduser().is_dir():
        raise RecipeError(f"tokenizer.path: there is no folder {path}; name one with a tokenizer.json, or a Hub name.")
    try:
        tokenizer = load_tokenizer(path)
    except Exception as error:  # whatever a broken file makes the libraries raise
        raise RecipeError(f"tokenizer.path: {path} cannot be loaded: {' '.join(str(error).split())}") from error
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else recipe.model.get("decoder_start_token_id")
    for name, value in (("pad", tokenizer.pad_token_id), ("eos", tokenizer.eos_token_id), ("bos", start)):
        if value is None:
            raise RecipeError(
                f"tokenizer.path: {path} has no {name} token; give it one (for bos, model.decoder_start_token_id does "
                "as well), or train a tokenizer."
            )
    if tokenizer("a")["input_ids"][-1:] != [tokenizer.eos_token_id]:
        raise RecipeError(
            f"tokenizer.path: {path} does not end a text with {tokenizer.eos_token!r}, so that a model never learns "
            "to stop; give it a post-processor that does, or train a tokenizer."
        )
    return tokenizer


def check_data(folder: Path, found: dict[str, dict[str, Any]]) -> None:
    """Check that a run in a folder, where there is one, was begun with the data at hand.

    Args:
        found: the fingerprints of the data at hand.

    Raises:
        RunError: it was not.
    """
    if not ((folder / DATA).exists() and (folder / "tokenizer.json").exists()):
        return
    for split, before in json.loads((folder / DATA).read_text(encoding="utf-8")).items():
        if found.get(split, before) != before:
            raise RunError(
                f"data.{split}: these are not the pairs that the run in {folder} was begun with "
                f"({before['pairs']:,d} then, {found[split]['pairs']:,d} now, of other text); restore them, or give "
                "another --output_dir."
            )


def begin(recipe: Recipe, folder: Path, pairs: DatasetDict) -> PreTrainedTokenizerBase:
    """Write the recipe, the data's fingerprints and the tokenizer into the run's folder; give the tokenizer.

    What is there already stays.

    Raises:
        RecipeError: the tokenizer cannot be made.
        RunError: the run was begun with other data.
    """
    found = fingerprints(recipe, pairs) if PartialState().is_main_process else {}
    check_data(folder, *broadcast_object_list([found]))
    if PartialState().is_main_process and not (folder / "tokenizer.json").exists():
        tokenizer = make_tokenizer(recipe, pairs)
        folder.mkdir(parents=True, exist_ok=True)
        for partial in folder.glob(f"*{PARTIAL}"):  # of a run that was killed here
            shutil.rmtree(partial) if partial.is_dir() else partial.unlink()
        write_recipe(recipe, folder)
        write(folder / DATA, json.dumps(found, indent=2))
        with tempfile.TemporaryDirectory(dir=folder, suffix=PARTIAL) as partial:
            tokenizer.save_pretrained(partial)
            for path in sorted(Path(partial).iterdir(), reverse=True):  # tokenizer.json last
                path.replace(folder / path.name)
    elif PartialState().is_main_process and not (folder / DATA).exists():
        write(folder / DATA, json.dumps(found, indent=2))
    PartialState().wait_for_everyone()
    if not (folder / "tokenizer.json").exists():
        raise RecipeError(
            f"{folder}: this machine does not see what the first process wrote there; name a folder on a disk that all "
            "machines of the launch share."
        )
    return load_tokenizer(folder)


def refuse_misfits(recipe: Recipe, config: VaswaniTransformerConfig, encoded: DatasetDict) -> None:
    """Refuse, before any training, pairs that the model or a batch cannot hold.

    Raises:
        RecipeError: a training pair alone exceeds a step's tokens, or a text that is trained on, validated with or
            translated is longer than the table of learned positions.
    """
    longest = {(split, column): max(lengths(pairs, column)) for split, pairs in encoded.items() for column in COLUMNS}
    if recipe.data.streaming:  # a pair of any length that is not dropped may come
        longest |= {("train", column): recipe.data.max_length for column in COLUMNS}
    for column, name in zip(COLUMNS, ("source_tokens", "target_tokens"), strict=True):
        if longest["train", column] > getattr(recipe.training, name):
            raise RecipeError(
                f"training.{name}: a pair {'may have' if recipe.data.streaming else 'has'} "
                f"{longest['train', column]} tokens on that side, more than the "
                f"{getattr(recipe.training, name)} of a step; raise it or lower data.max_length."
            )
    parts = PartialState().num_processes * accumulation(recipe, PartialState().num_processes)
    if len(encoded["train"]) < parts:
        raise RecipeError(
            f"training.device_tokens: {len(encoded['train'])} training pairs cannot be split over {parts} passes of a "
            "step; raise it, or use fewer processes."
        )
    if recipe.data.streaming and recipe.data.pool < 10 * parts:
        raise RecipeError(
            f"data.pool: {recipe.data.pool} pairs are too few for {parts} passes of a step; give at least {10 * parts}."
        )
    if config.position_embedding != "learned":
        return
    for (split, column), length in longest.items():
        needed = length
        if split != "train" and column == "input_ids":
            needed += recipe.decoding.max_source_relative_length
        if needed > config.max_position_embeddings:
            raise RecipeError(
                f"model.max_position_embeddings: split {split} needs {needed} positions in {column}, translations "
                f"included, and the table has {config.max_position_embeddings}; raise it, shorten the texts, or use "
                "sinusoidal positions."
            )


def refuse_other_steps(before: dict[str, Any], recipe: Recipe, pairs: Dataset) -> None:
    """Refuse to resume with passes so small that the steps would have other pairs than those of the run so far.

    Args:
        before: the recipe, as a tree, that the run was begun with.
        recipe: the recipe to resume with.
        pairs: the training pairs.

    Raises:
        RunError: a step has fewer pairs than passes under one of the two.
    """
    training, processes = recipe.training, PartialState().num_processes
    other = dataclasses.replace(training, device_tokens=before["training"]["device_tokens"])
    parts = [
        processes * accumulation(dataclasses.replace(recipe, training=either), processes)
        for either in (other, training)
    ]
    if parts[0] == parts[1] or recipe.data.streaming:
        return
    sizes = list(zip(*(lengths(pairs, column) for column in COLUMNS), strict=True))
    before_steps, steps = (
        make_steps(sizes, (training.source_tokens, training.target_tokens), number) for number in parts
    )
    if before_steps != steps:
        raise RunError(
            f"training.device_tokens: {training.device_tokens} cut the pairs into other steps than "
            f"{other.device_tokens}, with which the run was begun, for every pass of a step needs a pair; give "
            "more."
        )


def training_arguments(recipe: Recipe, folder: Path) -> Seq2SeqTrainingArguments:
    """The Trainer's arguments; what the paper settles is settled in `TranslationTrainer`."""
    training = recipe.training
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(folder / "tensorboard")
    return Seq2SeqTrainingArguments(
        output_dir=str(folder / CHECKPOINTS),
        max_steps=training.steps,
        ignore_data_skip=recipe.data.streaming,  # the stream itself goes on from where it was
        gradient_accumulation_steps=accumulation(recipe, PartialState().num_processes),
        max_grad_norm=training.max_grad_norm,
        bf16=training.precision == "bf16",
        use_cpu=uses_cpu(),
        ddp_find_unused_parameters=False,
        restore_callback_states_from_checkpoint=training.patience is not None,
        torch_compile=training.torch_compile,
        eval_strategy="steps",
        eval_steps=training.evaluation_steps,
        save_strategy="steps",
        save_steps=training.evaluation_steps,
        logging_strategy="no",  # `LogEntries` has its steps, which may be others after a resumption
        logging_nan_inf_filter=False,  # it hides what went wrong, and waits for the device at every step
        load_best_model_at_end=True,
        metric_for_best_model="bleu",
        greater_is_better=True,
        per_device_eval_batch_size=training.evaluation_batch_size,
        report_to=["tensorboard"],
        seed=recipe.seed,
        remove_unused_columns=False,
    )


def train_on(trainer: TranslationTrainer, folder: Path) -> None:
    """Train, from the newest whole checkpoint where there is one; where training had ended there, load the best model.

    Raises:
        RecipeError: the checkpoint was written by another engine.
    """
    checkpoint = resume_point(folder)
    if checkpoint is None:
        trainer.train()
        return
    refuse_other_engine(checkpoint, trainer.is_fsdp_enabled)
    logger.info("Resuming from step %s of %s.", f"{step_of(checkpoint):,d}", f"{trainer.args.max_steps:,d}")
    trainer.watch.carry_on(checkpoint)
    if has_ended(checkpoint, trainer.recipe.training):  # the Trainer would take a step more
        trainer.state = TrainerState.load_from_json(str(checkpoint / STATE))
        best = checkpoint_at(folder, trainer.state.best_global_step or step_of(checkpoint))
        load_weights(trainer.model, load_file(best / WEIGHTS))
    else:
        trainer.train(resume_from_checkpoint=str(checkpoint))


def train_to_the_end(trainer: TranslationTrainer, recipe: Recipe, folder: Path) -> None:
    """Train, or go on from the last whole checkpoint, and keep the best model or the mean of the last ones.

    What was trained to its end before, and then interrupted, is loaded and not trained on.
    """
    if (folder / TRAINED).exists():
        trainer.watch.carry_on(folder)
        trainer.state = TrainerState.load_from_json(str(folder / TRAINED))
        load_weights(trainer.model, load_file(folder / WEIGHTS))
        return
    train_on(trainer, folder)
    if (last := recipe.training.average_last) is not None:
        checkpoints = last_checkpoints(folder, min(last, len(whole_checkpoints(folder))))
        load_weights(trainer.model, mean_weights(checkpoints))
        logger.info("Took the mean of steps %s.", ", ".join(str(step_of(path)) for path in checkpoints))
    weights = without_ties(trainer.accelerator.get_state_dict(trainer.model), trainer.model)  # of all ranks together
    if trainer.is_world_process_zero():
        with writing(folder):
            trainer.model.save_pretrained(folder, state_dict=weights)
            trainer.watch.save(folder)
            partial = folder / f"{TRAINED}{PARTIAL}"
            trainer.state.save_to_json(str(partial))
            partial.replace(folder / TRAINED)
    PartialState().wait_for_everyone()


def fingerprints(recipe: Recipe, pairs: DatasetDict) -> dict[str, dict[str, Any]]:
    """Of each split; streamed training pairs are told by the first of them."""
    return {
        str(split): fingerprint(texts) | ({"first_of_stream": True} if is_streamed(recipe.data, str(split)) else {})
        for split, texts in pairs.items()
    }


def validation_scores(trainer: TranslationTrainer) -> dict[str, Any]:
    """Loss, perplexity and BLEU on the validation set, by the search of the evaluations during training."""
    trainer.remove_callback(EarlyStoppingCallback)  # training is over, and it would miss the figures of another name
    metrics = trainer.evaluate(metric_key_prefix="eval_final")
    scores = {name: metrics[f"eval_final_{name}"] for name in ("loss", "perplexity", "bleu")}
    return scores | {"signature": trainer.signature}


def test_scores(trainer: TranslationTrainer, recipe: Recipe, pairs: Dataset, encoded: Dataset) -> dict[str, Any]:
    """BLEU and chrF on the test set by the recipe's own search, with a few of its sentences to look at."""
    start = time.perf_counter()
    trainer.search = decoding_config(trainer.model, recipe)
    output = trainer.predict(encoded)
    texts, references = cast(list[str], output.predictions), pairs["target"][:]
    score, other = bleu(texts, references, recipe.score.tokenize), chrf(texts, references)
    shown = range(0, len(texts), max(1, len(texts) // max(1, recipe.score.examples)))[: recipe.score.examples]
    sources = pairs["source"][:]
    return {
        "bleu": score["bleu"],
        "signature": score["signature"],
        "chrf": other["chrf"],
        "chrf_signature": other["signature"],
        "loss": cast(dict, output.metrics)["test_loss"],
        "perplexity": cast(dict, output.metrics)["test_perplexity"],
        "sentences": len(texts),
        "seconds": time.perf_counter() - start,
        "examples": [
            {"source": sources[index], "translation": texts[index], "reference": references[index]} for index in shown
        ],
    }


def prepare(recipe: Recipe, folder: Path) -> tuple[DatasetDict, DatasetDict, PreTrainedTokenizerBase]:
    """The pairs as text and as tokens, and the tokenizer, which is then in the run's folder with the recipe.

    Raises:
        RecipeError: the data or the tokenizer cannot be used; a new run has left nothing in the folder then.
    """
    with PartialState().local_main_process_first():
        pairs = load_pairs(recipe.data)
    is_new = not (folder / RECIPE).exists()
    PartialState().wait_for_everyone()  # every process has looked at the folder before one writes into it
    tokenizer = begin(recipe, folder, pairs)
    try:
        with PartialState().local_main_process_first():
            encoded = tokenize(pairs, tokenizer, recipe.data)
        refuse_misfits(recipe, model_config(recipe, tokenizer), encoded)
        refuse_other_steps(recipe_in(folder), recipe, encoded["train"])
    except RecipeError:
        if is_new and PartialState().is_main_process:
            shutil.rmtree(folder)
        raise
    PartialState().wait_for_everyone()  # every process has read the recipe before it changes
    if PartialState().is_main_process:
        with alone_in(folder):
            if differences(folder, recipe):
                go_on(recipe, folder)
    return pairs, encoded, tokenizer


def model_config(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> VaswaniTransformerConfig:
    """The recipe's model with the vocabulary and the special tokens of its tokenizer."""
    return recipe.model_config(
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )


def check_attention(recipe: Recipe) -> None:
    """Check, before the data is read, that what is to compute equation (1) trains on this machine.

    Raises:
        RecipeError: it does not.
    """
    name = attention(recipe)
    if uses_cpu() and name not in ("eager", "sdpa"):
        raise RecipeError(
            f"training.attention: {name} does not train on a CPU, eager and sdpa do; leave it out, or launch on an "
            "accelerator."
        )
    with torch.device("meta"):
        model = VaswaniTransformerForConditionalGeneration(recipe.model_config(vocab_size=recipe.tokenizer.vocab_size))
    set_attention(model, name)


def set_attention(model: VaswaniTransformerForConditionalGeneration, name: str) -> None:
    """Have a model compute equation (1) by what Transformers knows by a name.

    Raises:
        RecipeError: it is not installed, or not for this model.
    """
    try:
        model.set_attn_implementation(name)
    except (ImportError, ValueError) as error:
        raise RecipeError(f"training.attention: {' '.join(str(error).split())}") from error


def attention(recipe: Recipe) -> str:
    """What computes equation (1) on this machine."""
    if recipe.training.attention != "auto":
        return recipe.training.attention
    return "eager" if uses_cpu() else "sdpa"


def make_trainer(
    recipe: Recipe, folder: Path, encoded: DatasetDict, tokenizer: PreTrainedTokenizerBase
) -> TranslationTrainer:
    """A new model and what trains it."""
    set_seed(recipe.seed)
    model = VaswaniTransformerForConditionalGeneration(model_config(recipe, tokenizer))
    model.generation_config = decoding_config(model, recipe)
    set_attention(model, attention(recipe))
    if recipe.training.gradient_checkpointing:  # Transformers is renaming it
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    logger.info("%.2fM parameters.", model.num_parameters() / 1e6)
    train = PairStream(recipe.data, recipe.seed) if recipe.data.streaming else encoded["train"]
    trainer = TranslationTrainer(
        model, training_arguments(recipe, folder), recipe, tokenizer, train, encoded["validation"]
    )
    trainer.add_callback(WholeCheckpoints(folder, recipe.training.keep_checkpoints))
    if recipe.training.patience is not None:
        trainer.add_callback(EarlyStoppingCallback(recipe.training.patience))
    return trainer


def run(recipe: Recipe) -> dict[str, Any]:
    """Train as `recipe` says and return what `results.json` then holds.

    Raises:
        RecipeError: the recipe, its data or its folder cannot be used; no training time was spent then.
    """
    start = time.perf_counter()
    join_processes()
    check_attention(recipe)
    folder = prepare_folder(recipe)
    pairs, encoded, tokenizer = prepare(recipe, folder)
    trainer = make_trainer(recipe, folder, encoded, tokenizer)
    trainer.watch.began(start)
    with alone_in(folder):
        train_to_the_end(trainer, recipe, folder)
        data = json.loads((folder / DATA).read_text(encoding="utf-8"))
        results: dict[str, Any] = {"name": None, "recipe": None, "data": data}
        results |= trainer.results()
        results["validation"] = validation_scores(trainer)
        if "test" in encoded:
            results["test"] = test_scores(trainer, recipe, pairs["test"], encoded["test"])
        results["time"] = trainer.watch.time()
        results["seconds"] = sum(results["time"].values())
        if trainer.is_world_process_zero():
            with writing(folder / RESULTS):
                write(folder / RESULTS, json.dumps(plain(results), indent=2, ensure_ascii=False, allow_nan=False))
    return results


def report(results: dict[str, Any]) -> None:
    """Print a few translations, where the time went, and BLEU on the last line."""
    scores = results.get("test")
    for example in scores["examples"] if scores else []:
        for name in ("source", "translation", "reference"):
            print(f"{name:<12} {example[name]}")
        print()
    print(time_line(results["time"]))
    if scores is None:
        print(f"BLEU {results['validation']['bleu']:.2f} on the validation set")
        return
    print(f"BLEU {scores['bleu']:.2f} on {scores['sentences']} unseen sentences ({scores['signature']})")


USAGE = """usage: python -m training.train RECIPE.yaml [--output_dir=FOLDER] [--any.field=value ...]

Trains by a recipe, a YAML file; the recipes of the project are in training/recipes. Each field of a recipe can be set
by an argument. These are the fields, with the values of a recipe that does not name them:
"""


def main(arguments: list[str] | None = None) -> None:
    """The command line.

    A recipe that cannot be used, or a run that diverges, ends it with one line and exit status 2, Ctrl-C with one
    line and 130.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] in ("-h", "--help"):
        if not arguments:
            print(f"{USAGE.splitlines()[0]}; --help lists the fields.", file=sys.stderr)
            sys.exit(2)
        print(USAGE, recipe_help(), sep="\n")
        sys.exit(0)
    is_first = os.environ.get("RANK", "0") == "0"
    logging.basicConfig(format="%(message)s", level=logging.INFO if is_first else logging.WARNING)
    for noisy in ("httpx", "absl"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    disable_progress_bar()  # one for every file that is saved
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        results = run(load_recipe(arguments[0], arguments[1:]))
    except RecipeError as error:
        if not isinstance(error, RunError) or PartialState().is_main_process:
            print(error, file=sys.stderr, flush=True)
        if isinstance(error, RunError):
            PartialState().wait_for_everyone()  # a launcher ends the others when the first of them ends
        sys.exit(2)
    except KeyboardInterrupt:
        if not is_first:
            sys.exit(INTERRUPTED)
        end_interrupted("; the same command resumes the run from its last checkpoint")
    if PartialState().is_main_process:
        report(results)
    PartialState().destroy_process_group()


if __name__ == "__main__":
    main()
