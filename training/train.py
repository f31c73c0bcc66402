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

import torch
import transformers
import yaml
from accelerate import PartialState
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

from training.average import CHECKPOINTS, WEIGHTS, last_checkpoints, mean_weights, step_of, whole_checkpoints
from training.data import load_pairs, tokenize
from training.metrics import bleu
from training.recipe import Recipe, RecipeError, load_recipe
from training.trainer import TranslationTrainer, accumulation, decoding_config, lengths
from vaswani_transformer import (
    VaswaniTransformerConfig,
    VaswaniTransformerForConditionalGeneration,
    VaswaniTransformerTokenizer,
)

logger = logging.getLogger(__name__)

RESULTS = "results.json"
RECIPE = "recipe.yaml"
TRAINED = "trainer_state.json"
COLUMNS = ("input_ids", "labels")


def prepare_folder(recipe: Recipe) -> Path:
    """The run's folder: new, or with an unfinished run of the same recipe to resume.

    Raises:
        RecipeError: there is no name for it, or it holds something else.
    """
    if recipe.output_dir is None:
        raise RecipeError("output_dir: the run needs a folder of its own; give --output_dir=...")
    folder = Path(recipe.output_dir)
    ancestor = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not ancestor.is_dir() or not os.access(ancestor, os.W_OK | os.X_OK):
        raise RecipeError(f"{folder}: {ancestor} is no folder that can be written to; give another --output_dir.")
    if (folder / RESULTS).exists():
        raise RecipeError(f"{folder}: holds a finished run; give another --output_dir, or remove the folder.")
    if not (folder / RECIPE).exists():
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise RecipeError(f"{folder}: holds something that is no run; give another --output_dir.")
        return folder
    before = yaml.safe_load((folder / RECIPE).read_text(encoding="utf-8"))
    now = as_tree(recipe)
    for name in changed(before, now):
        raise RecipeError(
            f"{folder}: holds an unfinished run of another recipe, {name} differs; give the same command to resume "
            "it, or another --output_dir."
        )
    return folder


def as_tree(recipe: Recipe) -> dict[str, Any]:
    """The recipe as plain values; the folder's own name is no part of it, so that a folder can be moved."""
    tree = dataclasses.asdict(recipe)
    del tree["output_dir"]
    return tree


def changed(before: Any, now: Any, prefix: str = "") -> list[str]:
    """The names of the fields that differ between two recipes."""
    if not (isinstance(before, dict) and isinstance(now, dict)):
        return [] if before == now else [prefix.rstrip(".")]
    names = sorted(before.keys() | now.keys())
    return [name for key in names for name in changed(before.get(key), now.get(key), f"{prefix}{key}.")]


def last_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint."""
    return next(reversed(whole_checkpoints(folder)), None)


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    return cast(PreTrainedTokenizerBase, AutoTokenizer.from_pretrained(path))


def make_tokenizer(recipe: Recipe, pairs: DatasetDict) -> PreTrainedTokenizerBase:
    """The tokenizer that the recipe names, or one trained on the training pairs.

    Raises:
        RecipeError: there is none at the recipe's path, or none that a model can be trained with, or the vocabulary is
            too small to train one.
    """
    if (path := recipe.tokenizer.path) is None:
        batches = pairs["train"].iter(1000)
        texts = (text for batch in batches for side in ("source", "target") for text in cast(Any, batch)[side])
        try:
            return VaswaniTransformerTokenizer.train_from_iterator(
                texts, recipe.tokenizer.vocab_size, recipe.tokenizer.algorithm
            )
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


def begin(recipe: Recipe, folder: Path, pairs: DatasetDict) -> PreTrainedTokenizerBase:
    """Write the recipe and the tokenizer into the run's folder, where they are not there yet; give the tokenizer."""
    if PartialState().is_main_process and not (folder / "tokenizer.json").exists():
        tokenizer = make_tokenizer(recipe, pairs)
        folder.mkdir(parents=True, exist_ok=True)
        write(folder / RECIPE, yaml.safe_dump(as_tree(recipe), allow_unicode=True, sort_keys=False))
        with tempfile.TemporaryDirectory(dir=folder) as partial:
            tokenizer.save_pretrained(partial)
            for path in sorted(Path(partial).iterdir(), reverse=True):  # tokenizer.json last
                path.replace(folder / path.name)
    PartialState().wait_for_everyone()
    return load_tokenizer(folder)


def write(path: Path, text: str) -> None:
    """Write a file so that it is there whole or not at all."""
    partial = path.with_name(f"{path.name}.part")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def refuse_misfits(recipe: Recipe, config: VaswaniTransformerConfig, encoded: DatasetDict) -> None:
    """Refuse, before any training, pairs that the model or a batch cannot hold.

    Raises:
        RecipeError: a training pair alone exceeds a step's tokens, or a text that is trained on, validated with or
            translated is longer than the table of learned positions.
    """
    longest = {(split, column): max(lengths(pairs, column)) for split, pairs in encoded.items() for column in COLUMNS}
    for column, name in zip(COLUMNS, ("source_tokens", "target_tokens"), strict=True):
        if longest["train", column] > getattr(recipe.training, name):
            raise RecipeError(
                f"training.{name}: a pair has {longest['train', column]} tokens on that side, more than the "
                f"{getattr(recipe.training, name)} of a step; raise it or lower data.max_length."
            )
    parts = PartialState().num_processes * accumulation(recipe, PartialState().num_processes)
    if len(encoded["train"]) < parts:
        raise RecipeError(
            f"training.device_tokens: {len(encoded['train'])} training pairs cannot be split over {parts} passes of a "
            "step; raise it, or use fewer processes."
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


def training_arguments(recipe: Recipe, folder: Path) -> Seq2SeqTrainingArguments:
    """The Trainer's arguments; what the paper settles is settled in `TranslationTrainer`."""
    training = recipe.training
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(folder / "tensorboard")
    return Seq2SeqTrainingArguments(
        output_dir=str(folder / CHECKPOINTS),
        max_steps=training.steps,
        gradient_accumulation_steps=accumulation(recipe, PartialState().num_processes),
        max_grad_norm=training.max_grad_norm,
        bf16=training.precision == "bf16",
        use_cpu=not torch.accelerator.is_available(),
        restore_callback_states_from_checkpoint=training.patience is not None,
        torch_compile=training.torch_compile,
        eval_strategy="steps",
        eval_steps=training.evaluation_steps,
        save_strategy="steps",
        save_steps=training.evaluation_steps,
        save_total_limit=training.keep_checkpoints,
        logging_steps=training.log_steps,
        load_best_model_at_end=True,
        metric_for_best_model="bleu",
        greater_is_better=True,
        per_device_eval_batch_size=64,
        report_to=["tensorboard"],
        seed=recipe.seed,
        remove_unused_columns=False,
    )


def train_to_the_end(trainer: TranslationTrainer, recipe: Recipe, folder: Path) -> None:
    """Train, or go on from the last whole checkpoint, and keep the best model or the mean of the last ones.

    What was trained to its end before, and then interrupted, is loaded and not trained on.
    """
    if (folder / TRAINED).exists():
        trainer.state = TrainerState.load_from_json(str(folder / TRAINED))
        trainer.model.load_state_dict(load_file(folder / WEIGHTS), strict=False)  # a tied matrix is stored once
        return
    checkpoint = last_checkpoint(folder)
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    if (last := recipe.training.average_last) is not None:
        checkpoints = last_checkpoints(folder, min(last, len(whole_checkpoints(folder))))
        trainer.model.load_state_dict(mean_weights(checkpoints), strict=False)
        logger.info("Took the mean of steps %s.", ", ".join(str(step_of(path)) for path in checkpoints))
    if trainer.is_world_process_zero():
        trainer.model.save_pretrained(folder)
        partial = folder / f"{TRAINED}.part"
        trainer.state.save_to_json(str(partial))
        partial.replace(folder / TRAINED)
    PartialState().wait_for_everyone()


def test_scores(trainer: TranslationTrainer, recipe: Recipe, pairs: Dataset, encoded: Dataset) -> dict[str, Any]:
    """BLEU on the test set by the recipe's own search, with a few of its sentences to look at."""
    start = time.monotonic()
    trainer.search = decoding_config(trainer.model, recipe)
    output = trainer.predict(encoded)
    texts, references = cast(list[str], output.predictions), pairs["target"][:]
    score = bleu(texts, references, recipe.score.tokenize)
    shown = range(0, len(texts), max(1, len(texts) // max(1, recipe.score.examples)))[: recipe.score.examples]
    sources = pairs["source"][:]
    return {
        "bleu": score["bleu"],
        "signature": score["signature"],
        "loss": cast(dict, output.metrics)["test_loss"],
        "perplexity": cast(dict, output.metrics)["test_perplexity"],
        "sentences": len(texts),
        "seconds": time.monotonic() - start,
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
    except RecipeError:
        if is_new and PartialState().is_main_process:
            shutil.rmtree(folder)
        raise
    return pairs, encoded, tokenizer


def model_config(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> VaswaniTransformerConfig:
    """The recipe's model with the vocabulary and the special tokens of its tokenizer."""
    return recipe.model_config(
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )


def make_trainer(
    recipe: Recipe, folder: Path, encoded: DatasetDict, tokenizer: PreTrainedTokenizerBase
) -> TranslationTrainer:
    """A new model and what trains it."""
    set_seed(recipe.seed)
    model = VaswaniTransformerForConditionalGeneration(model_config(recipe, tokenizer))
    model.generation_config = decoding_config(model, recipe)
    if recipe.training.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    logger.info("%.2fM parameters.", model.num_parameters() / 1e6)
    trainer = TranslationTrainer(
        model, training_arguments(recipe, folder), recipe, tokenizer, encoded["train"], encoded["validation"]
    )
    if recipe.training.patience is not None:
        trainer.add_callback(EarlyStoppingCallback(recipe.training.patience))
    return trainer


def run(recipe: Recipe) -> dict[str, Any]:
    """Train as `recipe` says and return what `results.json` then holds.

    Raises:
        RecipeError: the recipe, its data or its folder cannot be used; no training time was spent then.
    """
    start = time.monotonic()
    folder = prepare_folder(recipe)
    pairs, encoded, tokenizer = prepare(recipe, folder)
    trainer = make_trainer(recipe, folder, encoded, tokenizer)
    train_to_the_end(trainer, recipe, folder)
    results = {
        "name": recipe.name,
        "recipe": as_tree(recipe),
        "parameters": trainer.model.num_parameters(),
        "steps": trainer.state.global_step,
        "best_validation_bleu": trainer.state.best_metric,
        "curve": [entry for entry in trainer.state.log_history if "eval_bleu" in entry],
        "validation": trainer.evaluate(metric_key_prefix="final"),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "processes": PartialState().num_processes,
        "threads": torch.get_num_threads(),
    }
    if "test" in encoded:
        results["test"] = test_scores(trainer, recipe, pairs["test"], encoded["test"])
    results["seconds"] = time.monotonic() - start
    if trainer.is_world_process_zero():
        write(folder / RESULTS, json.dumps(results, indent=2, ensure_ascii=False))
    return results


def report(results: dict[str, Any]) -> None:
    """Print a few translations, and BLEU on the last line."""
    scores = results.get("test")
    if scores is None:
        print(f"BLEU {results['validation']['final_bleu']:.2f} on the validation set")
        return
    for example in scores["examples"]:
        for name in ("source", "translation", "reference"):
            print(f"{name:<12} {example[name]}")
        print()
    print(f"BLEU {scores['bleu']:.2f} on {scores['sentences']} unseen sentences ({scores['signature']})")


USAGE = """usage: python -m training.train RECIPE.yaml [--output_dir=FOLDER] [--any.field=value ...]

The recipes are in training/recipes, and training/recipe.py says what their fields mean."""


def main(arguments: list[str] | None = None) -> None:
    """The command line; a recipe that cannot be used ends it with one line and exit status 2."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, file=sys.stdout if arguments else sys.stderr)
        sys.exit(0 if arguments else 2)
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    for noisy in ("httpx", "absl"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    try:
        results = run(load_recipe(arguments[0], arguments[1:]))
    except RecipeError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    if PartialState().is_main_process:
        report(results)


if __name__ == "__main__":
    main()
