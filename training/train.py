"""Train a model from a recipe: `python -m training.train RECIPE.yaml [--any.field=value]`, or `accelerate launch -m`.

The folder `output_dir` ends up with the best model, its tokenizer, the recipe, `results.json`, TensorBoard's files and
the checkpoints. The same command resumes a run that was interrupted.
"""

import dataclasses
import json
import logging
import os
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
from transformers import (
    AutoTokenizer,
    EarlyStoppingCallback,
    PreTrainedTokenizerBase,
    Seq2SeqTrainingArguments,
    set_seed,
)

from training.average import CHECKPOINTS, last_checkpoints, mean_weights, step_of, whole_checkpoints
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
COLUMNS = ("input_ids", "labels")


def prepare_folder(recipe: Recipe) -> Path:
    """The run's folder: new, or with an unfinished run of the same recipe to resume.

    Raises:
        RecipeError: there is no name for it, or it holds something else.
    """
    if recipe.output_dir is None:
        raise RecipeError("output_dir: the run needs a folder of its own; give --output_dir=...")
    folder = Path(recipe.output_dir)
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
        RecipeError: there is none at the recipe's path, or its vocabulary is too small to train one.
    """
    try:
        if recipe.tokenizer.path is not None:
            return load_tokenizer(recipe.tokenizer.path)
        batches = pairs["train"].iter(1000)
        texts = (text for batch in batches for side in ("source", "target") for text in cast(Any, batch)[side])
        return VaswaniTransformerTokenizer.train_from_iterator(
            texts, recipe.tokenizer.vocab_size, recipe.tokenizer.algorithm
        )
    except (OSError, ValueError) as error:
        raise RecipeError(f"tokenizer: {' '.join(str(error).split())}") from error


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


def take_average(trainer: TranslationTrainer, folder: Path, last: int) -> dict[str, Any]:
    """Put the mean of the last checkpoints in the place of the best, and validate it."""
    checkpoints = last_checkpoints(folder, min(last, len(whole_checkpoints(folder))))
    trainer.model.load_state_dict(mean_weights(checkpoints), strict=False)  # a tied matrix is stored once
    scores = trainer.evaluate(metric_key_prefix="average")
    return {"averaged_steps": [step_of(checkpoint) for checkpoint in checkpoints]} | {
        name: scores[name] for name in ("average_loss", "average_perplexity", "average_bleu")
    }


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


def run(recipe: Recipe) -> dict[str, Any]:
    """Train as `recipe` says and return what `results.json` then holds.

    Raises:
        RecipeError: the recipe, its data or its folder cannot be used; no training time was spent then.
    """
    start = time.monotonic()
    folder = prepare_folder(recipe)
    with PartialState().local_main_process_first():
        pairs = load_pairs(recipe.data)
    PartialState().wait_for_everyone()  # every process has looked at the folder before one writes into it
    tokenizer = begin(recipe, folder, pairs)
    encoded = tokenize(pairs, tokenizer, recipe.data)
    config = recipe.model_config(
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    refuse_misfits(recipe, config, encoded)

    set_seed(recipe.seed)
    model = VaswaniTransformerForConditionalGeneration(config)
    model.generation_config = decoding_config(model, recipe)
    if recipe.training.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    logger.info("%.2fM parameters.", model.num_parameters() / 1e6)

    arguments = training_arguments(recipe, folder)
    trainer = TranslationTrainer(model, arguments, recipe, tokenizer, encoded["train"], encoded["validation"])
    if recipe.training.patience is not None:
        trainer.add_callback(EarlyStoppingCallback(recipe.training.patience))
    checkpoint = last_checkpoint(folder)
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))

    results = {
        "name": recipe.name,
        "recipe": as_tree(recipe),
        "parameters": model.num_parameters(),
        "steps": trainer.state.global_step,
        "best_validation_bleu": trainer.state.best_metric,
        "curve": [entry for entry in trainer.state.log_history if "eval_bleu" in entry],
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "processes": PartialState().num_processes,
        "threads": torch.get_num_threads(),
    }
    if recipe.training.average_last is not None:
        results |= take_average(trainer, folder, recipe.training.average_last)
    if "test" in encoded:
        results["test"] = test_scores(trainer, recipe, pairs["test"], encoded["test"])
    results["seconds"] = time.monotonic() - start
    if trainer.is_world_process_zero():
        trainer.model.save_pretrained(folder)
        write(folder / RESULTS, json.dumps(results, indent=2, ensure_ascii=False))
    return results


def report(results: dict[str, Any]) -> None:
    """Print a few translations, and BLEU on the last line."""
    scores = results.get("test")
    if scores is None:
        print(f"BLEU {results['best_validation_bleu']:.2f} on the validation set")
        return
    for example in scores["examples"]:
        for name in ("source", "translation", "reference"):
            print(f"{name:<12} {example[name]}")
        print()
    print(f"BLEU {scores['bleu']:.2f} on {scores['sentences']} unseen sentences ({scores['signature']})")


def main(arguments: list[str] | None = None) -> None:
    """The command line; a recipe that cannot be used ends it with one line and exit status 2."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.exit("usage: python -m training.train RECIPE.yaml [--output_dir=FOLDER] [--any.field=value ...]")
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
