"""Train a model from a recipe: `python -m training.train RECIPE.yaml [--any.field=value]`, or `accelerate launch -m`.

The folder `output_dir` ends up with the best model, its tokenizer, the recipe, `results.json`, TensorBoard's files and
the checkpoints. The same command resumes a run that was interrupted.
"""

import dataclasses
import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any, cast

import torch
import transformers
import yaml
from accelerate import PartialState
from datasets import DatasetDict
from transformers import (
    AutoTokenizer,
    EarlyStoppingCallback,
    PreTrainedTokenizerBase,
    Seq2SeqTrainingArguments,
    set_seed,
)

from training.data import load_pairs, tokenize
from training.metrics import bleu
from training.recipe import Recipe, RecipeError, load_recipe
from training.trainer import TranslationTrainer, accumulation, decoding_config
from vaswani_transformer import VaswaniTransformerForConditionalGeneration, VaswaniTransformerTokenizer

logger = logging.getLogger(__name__)

RESULTS = "results.json"
RECIPE = "recipe.yaml"
CHECKPOINTS = "checkpoints"


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
    """The newest whole checkpoint; the Trainer writes its state last."""
    whole = [path.parent for path in (folder / CHECKPOINTS).glob("checkpoint-*/trainer_state.json")]
    return max(whole, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


def make_tokenizer(recipe: Recipe, folder: Path, pairs: DatasetDict) -> PreTrainedTokenizerBase:
    """The run's tokenizer: the one in its folder, the one the recipe names, or one trained on the training pairs."""
    if (folder / "tokenizer.json").exists():
        return AutoTokenizer.from_pretrained(folder)
    if recipe.tokenizer.path is not None:
        return AutoTokenizer.from_pretrained(recipe.tokenizer.path)
    train = pairs["train"]
    texts = (
        text for side in ("source", "target") for batch in train.select_columns(side).iter(1000) for text in batch[side]
    )
    return VaswaniTransformerTokenizer.train_from_iterator(
        texts, recipe.tokenizer.vocab_size, recipe.tokenizer.algorithm
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
        gradient_checkpointing=training.gradient_checkpointing,
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


def test_scores(
    trainer: TranslationTrainer, recipe: Recipe, pairs: DatasetDict, encoded: DatasetDict
) -> dict[str, Any]:
    """BLEU on the test set by the recipe's own search, with a few of its sentences to look at."""
    start = time.monotonic()
    trainer.references = pairs["test"]["target"]
    trainer.evaluation_decoding = lambda: trainer.model.generation_config  # ty: ignore[invalid-assignment]
    output = trainer.evaluation_loop(trainer.get_eval_dataloader(encoded["test"]), "Test", metric_key_prefix="test")
    texts = cast(list[str], output.predictions)
    score = bleu(texts, trainer.references, recipe.score.tokenize)
    shown = range(0, len(texts), max(1, len(texts) // max(1, recipe.score.examples)))[: recipe.score.examples]
    examples = [
        {"source": pairs["test"][index]["source"], "translation": texts[index], "reference": trainer.references[index]}
        for index in shown
    ]
    return output.metrics | {
        "bleu": score["bleu"],
        "signature": score["signature"],
        "sentences": len(texts),
        "seconds": time.monotonic() - start,
        "examples": examples,
    }


def run(recipe: Recipe) -> dict[str, Any]:
    """Train as `recipe` says and return what `results.json` then holds.

    Raises:
        RecipeError: the recipe, its data or its folder cannot be used; nothing was written then.
    """
    start = time.monotonic()
    folder = prepare_folder(recipe)
    set_seed(recipe.seed)

    with PartialState().local_main_process_first():
        pairs = load_pairs(recipe.data)
        tokenizer = make_tokenizer(recipe, folder, pairs)
        encoded = tokenize(pairs, tokenizer, recipe.data)
    if PartialState().is_main_process:
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer.save_pretrained(folder)
        (folder / RECIPE).write_text(yaml.safe_dump(as_tree(recipe), allow_unicode=True), encoding="utf-8")
    PartialState().wait_for_everyone()

    config = recipe.model_config(
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    set_seed(recipe.seed)
    model = VaswaniTransformerForConditionalGeneration(config)
    model.generation_config = decoding_config(model, recipe)
    logger.info("%.2fM parameters.", model.num_parameters() / 1e6)

    arguments = training_arguments(recipe, folder)
    validation = pairs["validation"]
    trainer = TranslationTrainer(
        model, arguments, recipe, tokenizer, encoded["train"], encoded["validation"], validation["target"]
    )
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
        "threads": torch.get_num_threads(),
    }
    if "test" in encoded:
        results["test"] = test_scores(trainer, recipe, pairs, encoded)
    results["seconds"] = time.monotonic() - start
    if trainer.is_world_process_zero():
        trainer.model.save_pretrained(folder)
        partial = folder / f"{RESULTS}.part"
        partial.write_text(json.dumps(results, indent=2, ensure_ascii=False), encoding="utf-8")
        partial.replace(folder / RESULTS)
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
