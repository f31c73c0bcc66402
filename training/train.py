"""Train a model from a recipe: `python -m training.train RECIPE.yaml [--any.field=value]`, or `accelerate launch -m`.

The folder `output_dir` ends up with the best model, its tokenizer, the recipe, `results.json`, TensorBoard's files and
the checkpoints. The same command resumes a run that was interrupted.
"""

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
from accelerate import PartialState
from datasets import Dataset, DatasetDict
from transformers import (
    EarlyStoppingCallback,
    PreTrainedTokenizerBase,
    Seq2SeqTrainingArguments,
    set_seed,
)
from transformers.utils.logging import disable_progress_bar

from training.average import last_checkpoints, mean_weights
from training.data.distilled import check_teacher
from training.data.pairs import load_pairs
from training.data.stream import PairStream, described
from training.data.tokenizing import tokenize
from training.monitor.curves import report_thread
from training.recipe.decoding import decoding_config
from training.recipe.fields import Recipe, load_recipe, to_dict
from training.recipe.help import recipe_help
from training.recipe.machine import trains_slowly_in_bf16, uses_cpu
from training.report.results import RESULTS, to_json_values
from training.report.terminal import opening_line, report, targets_line
from training.run.base_models import check_same_energy, record_models, recorded_models
from training.run.checkpoints import (
    CHECKPOINTS,
    check_same_sharding,
    fix_of,
    has_ended,
    last_checkpoint,
    read_state,
    run_write_errors,
    step_of,
)
from training.run.checks import (
    accumulation,
    attention,
    check_data_fits,
    check_model_trains,
    check_predictable_lengths,
    check_same_steps,
    config_for_tokenizer,
    set_attention,
    warn_of_long_texts,
)
from training.run.command import flush_stdout
from training.run.distributed import (
    drop_tied_duplicates,
    exit_together,
    init_distributed,
    load_weights,
)
from training.run.encoder import check_encoder, check_encoder_tokenizer, load_encoder
from training.run.folder import (
    DATA_FILE,
    TRAINED_STATE,
    changed_fields,
    extend_run,
    initialize_run,
    open_folder,
    read_fingerprints,
    stored_recipe,
)
from training.run.start import check_start, check_start_tokenizer, load_start
from training.tasks import selection_metric
from training.trainer.energy import check_energy, check_energy_tokenizer, load_energy
from training.trainer.energy_trainer import EnergyTrainer
from training.trainer.trainer import RecipeTrainer, read_stream
from vaswani_transformer.flow import FlowError
from vaswani_transformer.support.errors import UserError
from vaswani_transformer.support.files import PARTIAL, write_atomically

logger = logging.getLogger(__name__)


def training_arguments(recipe: Recipe, folder: Path) -> Seq2SeqTrainingArguments:
    """Return the Trainer's arguments; `RecipeTrainer` adds the paper's optimizer, schedule and batches."""
    training = recipe.training
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(folder / "tensorboard")
    return Seq2SeqTrainingArguments(
        output_dir=str(folder / CHECKPOINTS),
        max_steps=training.steps,
        ignore_data_skip=recipe.data.streaming,  # the stream restores its own position
        gradient_accumulation_steps=accumulation(recipe, PartialState().num_processes),
        max_grad_norm=training.max_grad_norm,
        bf16=training.precision == "bf16",
        use_cpu=uses_cpu(),
        ddp_find_unused_parameters=recipe.family.has_idle_weights,
        restore_callback_states_from_checkpoint=training.patience is not None,
        torch_compile=training.torch_compile,
        eval_strategy="steps",
        eval_steps=training.evaluation_steps,
        save_strategy="steps",
        save_steps=training.evaluation_steps,
        logging_strategy="no",  # `LogEveryCallback` logs, since a resumed run may have other steps
        logging_nan_inf_filter=False,  # it hides the value, and waits for the device at every step
        load_best_model_at_end=True,
        metric_for_best_model=selection_metric(to_dict(recipe)).key,
        greater_is_better=selection_metric(to_dict(recipe)).greater_is_better,
        per_device_eval_batch_size=training.evaluation_batch_size,
        report_to=["tensorboard"],
        disable_tqdm=False,  # else TRANSFORMERS_VERBOSITY=error would replace the progress lines
        seed=recipe.seed,
        remove_unused_columns=False,
    )


def train_on(trainer: RecipeTrainer, folder: Path) -> None:
    """Train from the newest complete checkpoint, if there is one; if training had ended there, load the best model."""
    checkpoint = last_checkpoint(folder)
    if checkpoint is None:
        trainer.train()
        return
    trainer.checked_weights(checkpoint, fix_of(checkpoint))  # the Trainer would load others too
    check_same_sharding(checkpoint, trainer.is_fsdp_enabled)
    logger.info("Resuming from step %s of %s.", f"{step_of(checkpoint):,d}", f"{trainer.args.max_steps:,d}")
    trainer.monitor.restore(checkpoint)
    if has_ended(checkpoint, trainer.recipe.training):  # the Trainer would take another step
        trainer.state = read_state(checkpoint, fix_of(checkpoint))
        trainer.load_best()
    else:
        trainer.train(resume_from_checkpoint=str(checkpoint))


def train_or_resume(trainer: RecipeTrainer, recipe: Recipe, folder: Path) -> None:
    """Train or resume, and keep the best model or the mean of the last checkpoints.

    A run that was interrupted after its training is loaded and not trained further.
    """
    if (folder / TRAINED_STATE).exists():
        fix = f"remove {folder / TRAINED_STATE}, and the run takes the weights of its last checkpoint."
        trainer.monitor.restore(folder)
        trainer.state = read_state(folder, fix)
        load_weights(trainer.model, trainer.checked_weights(folder, fix))
        return
    train_on(trainer, folder)
    if (last := recipe.training.average_last) is not None:
        checkpoints = last_checkpoints(folder, last)
        load_weights(trainer.model, mean_weights(checkpoints))
        logger.info("Took the mean of steps %s.", ", ".join(str(step_of(path)) for path in checkpoints))
    weights = trainer.accelerator.get_state_dict(trainer.model)  # all ranks take part
    weights = drop_tied_duplicates(weights, trainer.model)
    if trainer.is_world_process_zero():
        with run_write_errors(folder):
            trainer.model.save_pretrained(folder, state_dict=weights)
            trainer.monitor.save(folder)
            partial = folder / f"{TRAINED_STATE}{PARTIAL}"
            trainer.state.save_to_json(str(partial))
            partial.replace(folder / TRAINED_STATE)
    PartialState().wait_for_everyone()


def validation_scores(trainer: RecipeTrainer) -> dict[str, Any]:
    """Return loss, perplexity and best metric on the validation set, by the search of evaluations in training.

    A model that predicts all words at once has no perplexity.
    """
    trainer.remove_callback(EarlyStoppingCallback)  # it would expect metrics of another name
    metrics, best = trainer.evaluate(metric_key_prefix="eval_final"), trainer.task.best_metric
    scores = {name: metrics[f"eval_final_{name}"] for name in trainer.metric_names}
    return scores | {best.signature_key: trainer.signature}


def test_scores(trainer: RecipeTrainer, recipe: Recipe, pairs: Dataset, encoded: Dataset) -> dict[str, Any]:
    """Return the task's metrics on the test set by the recipe's search, with a few example sentences."""
    start = time.perf_counter()
    trainer.search = decoding_config(trainer.model, recipe, trainer.processing_class)
    output = trainer.predict(encoded)
    texts, references = [str(text) for text in output.predictions], pairs["target"][:]
    scores = trainer.task.test(texts, references)
    shown = range(0, len(texts), max(1, len(texts) // max(1, recipe.score.examples)))[: recipe.score.examples]
    sources = pairs["source"][:]
    return {
        **scores,
        **{name: (output.metrics or {})[f"test_{name}"] for name in trainer.metric_names},
        "sentences": len(texts),
        "seconds": time.perf_counter() - start,
        "examples": [
            {
                "source": sources[index],
                "translation": trainer.task.display(sources[index], texts[index]),
                "reference": trainer.task.display(sources[index], references[index]),
            }
            for index in shown
        ],
    }


def prepare(
    recipe: Recipe, folder: Path, check_more: Callable[[DatasetDict, PreTrainedTokenizerBase], None] | None = None
) -> tuple[DatasetDict, DatasetDict, PreTrainedTokenizerBase]:
    """Return the pairs as text, the pairs as token ids, and the tokenizer; write tokenizer and recipe."""
    with PartialState().local_main_process_first():
        pairs = load_pairs(recipe.data)
    PartialState().wait_for_everyone()  # every process checks the folder before one writes
    tokenizer, written = initialize_run(recipe, folder, pairs)
    try:
        with PartialState().local_main_process_first():
            encoded = tokenize(pairs, tokenizer, recipe.data)
        check_encoder_tokenizer(recipe, folder, tokenizer)
        check_start_tokenizer(recipe, folder, tokenizer)
        check_energy_tokenizer(recipe, tokenizer)
        check_same_energy(recipe, folder)
        config = config_for_tokenizer(recipe, tokenizer)
        check_data_fits(recipe, config, encoded)
        check_predictable_lengths(recipe, config, encoded["train"])
        warn_of_long_texts(recipe, encoded)
        check_same_steps(stored_recipe(folder), recipe, encoded["train"])
        if check_more is not None:
            check_more(encoded, tokenizer)
    except UserError:
        for path in written:
            path.unlink()
        raise
    PartialState().wait_for_everyone()  # every process reads the recipe before one changes it
    if PartialState().is_main_process:
        with run_write_errors(folder):
            if changed_fields(folder, recipe):
                extend_run(recipe, folder)
            record_models(recipe, folder)
    return pairs, encoded, tokenizer


def make_trainer(
    recipe: Recipe, folder: Path, encoded: DatasetDict, tokenizer: PreTrainedTokenizerBase
) -> RecipeTrainer:
    """Return a trainer with a new model."""
    set_seed(recipe.seed)
    model = recipe.family.model_class(config_for_tokenizer(recipe, tokenizer))
    load_encoder(model, recipe, folder)
    load_start(model, recipe, folder)
    model.generation_config = decoding_config(model, recipe, tokenizer)
    set_attention(model, attention(recipe))
    if recipe.training.gradient_checkpointing:  # Transformers is renaming it
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    logger.info("%.2fM parameters.", model.num_parameters() / 1e6)
    train = PairStream(recipe.data, recipe.seed) if recipe.data.streaming else encoded["train"]
    parts = (model, training_arguments(recipe, folder), recipe, tokenizer, train, encoded["validation"])
    if (teacher := recipe.training.energy_from) is None:
        trainer = RecipeTrainer(*parts)
    else:
        trainer = EnergyTrainer(load_energy(recipe, teacher, parts[1].device), *parts)
        set_attention(trainer.energy.teacher, attention(recipe))
    if recipe.training.patience is not None:
        trainer.add_callback(EarlyStoppingCallback(recipe.training.patience))
    return trainer


def check_before_data(recipe: Recipe, folder: Path) -> None:
    """Check what needs no data: the model, and the models that it begins with."""
    check_model_trains(recipe)
    check_encoder(recipe, folder)
    check_start(recipe, folder)
    check_energy(recipe)
    if not (folder / DATA_FILE).exists():  # later the fingerprints in it decide
        check_teacher(recipe)


def warn_of_slow_precision(recipe: Recipe) -> None:
    """Warn if the run computes in bf16 on a CPU that has no instructions for it."""
    if recipe.training.precision == "bf16" and trains_slowly_in_bf16():
        logger.warning(
            "training.precision: this CPU has no instructions for bf16, so fp32 trains more than ten times as fast; "
            "got bf16. Give a new run --training.precision=fp32."
        )


def collect_results(
    trainer: RecipeTrainer, recipe: Recipe, folder: Path, pairs: DatasetDict, encoded: DatasetDict
) -> dict[str, Any]:
    """Return the content of results.json, with the scores of the trained model; every process must call."""
    data = read_fingerprints(folder)
    if recipe.data.streaming and (checkpoint := last_checkpoint(folder)) is not None:
        state = read_stream(checkpoint)
        data["train"]["read"] = described(state["pairs"])
    results: dict[str, Any] = {"name": None, "recipe": None, "data": data}
    if models := recorded_models(folder):
        results["models"] = models
    results |= trainer.results()
    results["validation"] = validation_scores(trainer)
    if "test" in encoded:
        results["test"] = test_scores(trainer, recipe, pairs["test"], encoded["test"])
    results["time"] = trainer.monitor.time()
    results["seconds"] = sum(results["time"].values())
    return results


def write_results(results: dict[str, Any], folder: Path) -> None:
    """Write results.json; its existence says that the run is finished."""
    content = json.dumps(to_json_values(results), indent=2, ensure_ascii=False, allow_nan=False)
    with run_write_errors(folder / RESULTS):
        write_atomically(folder / RESULTS, content)


def run(recipe: Recipe) -> dict[str, Any]:
    """Train by `recipe`, write results.json and return its content.

    Raises:
        UserError: the recipe, its data or its folder cannot be used; this costs no training time.
    """
    start = time.perf_counter()
    init_distributed()
    with open_folder(recipe) as folder:
        check_before_data(recipe, folder)
        warn_of_slow_precision(recipe)
        logger.info("%s\n%s", opening_line(recipe), targets_line(recipe))
        pairs, encoded, tokenizer = prepare(recipe, folder)
        trainer = make_trainer(recipe, folder, encoded, tokenizer)
        trainer.monitor.count_preparation_from(start)
        train_or_resume(trainer, recipe, folder)
        results = collect_results(trainer, recipe, folder, pairs, encoded)
        if trainer.is_world_process_zero():
            write_results(results, folder)
    return results


USAGE = """usage: python -m training.train RECIPE.yaml [--output_dir=FOLDER] [--any.field=value ...]

Train by a recipe, a YAML file; the project's recipes are in training/recipes. An argument can set each field of the
recipe. These are the fields with their defaults:
"""


def main(arguments: list[str] | None = None) -> None:
    """The command line.

    A recipe that cannot be used, or a run that diverges, ends it with one line and exit status 2, Ctrl-C with one
    line and 130.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments:
        print(f"{USAGE.splitlines()[0]}; --help lists the fields.", file=sys.stderr)
        sys.exit(2)
    if {"-h", "--help"} & set(arguments):
        print(USAGE, recipe_help(), sep="\n")
        sys.exit(0)
    is_first = os.environ.get("RANK", "0") == "0"
    logging.basicConfig(format="%(message)s", level=logging.INFO if is_first else logging.WARNING)
    for noisy in ("httpx", "absl"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    disable_progress_bar()  # there is one for every saved file
    threading.excepthook = report_thread
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    with exit_together("; the same command resumes the run from its last checkpoint", FlowError):
        recipe = load_recipe(arguments[0], arguments[1:])
        results = run(recipe)
        if PartialState().is_main_process:
            with flush_stdout(f"the run is finished, and its scores are in {recipe.output_dir}/{RESULTS}"):
                report(results, str(recipe.output_dir))
    PartialState().destroy_process_group()


if __name__ == "__main__":
    main()
