"""The training of a prepared run: its trainer, its steps from the start or the last checkpoint, and its scores."""

import json
import logging
import os
import time
from pathlib import Path
from typing import Any, cast

from accelerate import PartialState
from transformers import EarlyStoppingCallback, PreTrainedTokenizerBase, Seq2SeqTrainingArguments, set_seed

from training.average import last_checkpoints, mean_weights
from training.data.stream import PairStream, described
from training.data.tokenizing import make_encode_fn
from training.recipe.fields import Recipe
from training.recipe.machine import uses_cpu
from training.report.results import RESULTS, to_json_values
from training.run.checkpoints import (
    CHECKPOINTS,
    STATE,
    check_same_sharding,
    checked_weights,
    fix_of,
    has_ended,
    last_checkpoint,
    read_state,
    run_write_errors,
    step_of,
)
from training.run.checks import accumulation, attention, config_for_tokenizer, set_attention
from training.run.distributed import load_weights, open_store
from training.run.initial_weights import copy_weights, recorded_models
from training.run.preparation import Prepared, read_fingerprints
from training.tasks import selection_metric
from training.trainer.callbacks import read_stream
from training.trainer.energy import Energy, EnergyTrainer
from training.trainer.trainer import RecipeTrainer
from vaswani_transformer.batching import TokenBudgetBatches
from vaswani_transformer.support.files import PARTIAL, staged_files, write_atomically

logger = logging.getLogger(__name__)


def training_arguments(recipe: Recipe, folder: Path) -> Seq2SeqTrainingArguments:
    """Return the Trainer's arguments; `RecipeTrainer` adds the paper's optimizer, schedule and batches.

    A process has one device: the Trainer would split each batch over all of them by DataParallel, without the counts of
    its tokens.
    """
    training, selection = recipe.training, selection_metric(recipe)
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(folder / "tensorboard")
    arguments = Seq2SeqTrainingArguments(
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
        logging_strategy="no",  # `RecipeFlowCallback` logs, since a resumed run may have other steps
        logging_nan_inf_filter=False,  # it hides the value, and waits for the device at every step
        load_best_model_at_end=True,
        metric_for_best_model=selection.key,
        greater_is_better=selection.greater_is_better,
        per_device_eval_batch_size=training.evaluation_batch_size,
        report_to=["tensorboard"],
        disable_tqdm=False,  # else TRANSFORMERS_VERBOSITY=error would replace the progress lines
        seed=recipe.seed,
        remove_unused_columns=False,
    )
    if arguments.n_gpu > 1:
        logger.info(
            "%d GPUs are here, and this run takes one; `accelerate launch -m` in place of `python -m` takes all.",
            arguments.n_gpu,
        )
        arguments._n_gpu = 1
    return arguments


def stream_batches(
    pairs: PairStream, recipe: Recipe, args: Seq2SeqTrainingArguments, tokenizer: PreTrainedTokenizerBase
) -> TokenBudgetBatches:
    """Return this rank's batches of a stream, by token budget; all processes must call together."""
    return TokenBudgetBatches(
        pairs,
        recipe.training.source_tokens,
        recipe.training.target_tokens,
        accumulation=args.gradient_accumulation_steps,
        seed=recipe.seed,
        buffer_size=recipe.data.buffer,
        max_length=recipe.data.max_length,
        too_long="error" if recipe.data.too_long == "error" else "drop",
        encode=make_encode_fn(tokenizer, recipe.data),
        store=open_store(),
    )


def make_trainer(recipe: Recipe, prepared: Prepared) -> RecipeTrainer:
    """Return a trainer with a new model, which has the weights of others that the recipe names."""
    tokenizer, encoded, models = prepared.tokenizer, prepared.encoded, prepared.inputs.models
    set_seed(recipe.seed)
    model = recipe.family.model_class(config_for_tokenizer(recipe, tokenizer))
    copy_weights(models, model)
    model.generation_config = recipe.generation_config(model.config, tokenizer)
    set_attention(model, attention(recipe))
    if recipe.training.gradient_checkpointing:  # Transformers is renaming it
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    logger.info("%.2fM parameters.", model.num_parameters() / 1e6)
    arguments, train = training_arguments(recipe, prepared.folder), encoded["train"]
    if recipe.data.streaming:
        stream = PairStream(recipe.data, recipe.seed, prepared.inputs.distillation)
        train = stream_batches(stream, recipe, arguments, tokenizer)
    with run_write_errors(prepared.folder):
        (prepared.folder / CHECKPOINTS).mkdir(exist_ok=True)  # where it fails, the Trainer would print a traceback
    parts = (model, arguments, recipe, tokenizer, train, encoded["validation"])
    if (teacher := models.get("energy_from")) is None:
        return RecipeTrainer(*parts)
    set_attention(teacher.model, attention(recipe))
    operators = (recipe.training.energy_inputs or "softmax", recipe.training.energy_outputs or "softmax")
    return EnergyTrainer(Energy(teacher.model.to(arguments.device), *operators), *parts)


def train_or_resume(trainer: RecipeTrainer) -> None:
    """Train or resume, and keep the best model or the mean of the last checkpoints.

    A run that was interrupted after its training is loaded and not trained further.
    """
    folder = trainer.folder
    if (folder / STATE).exists():
        fix = f"remove {folder / STATE}, and the run takes the weights of its last checkpoint."
        trainer.monitor.restore(folder)
        trainer.state = read_state(folder, fix)
        load_weights(trainer.model, checked_weights(trainer.model, folder, fix))
        return
    train_from_last_checkpoint(trainer)
    if (last := trainer.recipe.training.average_last) is not None:
        checkpoints = last_checkpoints(folder, last)
        load_weights(trainer.model, mean_weights(checkpoints))
        steps = [step_of(path) for path in checkpoints]
        cast(Any, trainer.state.log_history).append({"averaged_steps": steps, "step": trainer.state.global_step})
        level = logging.INFO if len(steps) == last else logging.WARNING
        logger.log(
            level,
            "The model is the mean of the last %d checkpoints, and training.average_last is %d: steps %s.",
            *(len(steps), last, ", ".join(map(str, steps))),
        )
    save_trained(trainer)


def train_from_last_checkpoint(trainer: RecipeTrainer) -> None:
    """Train from the newest complete checkpoint, if there is one; load the best model if training had ended."""
    if (checkpoint := last_checkpoint(trainer.folder)) is None:
        trainer.train()
        return
    checked_weights(trainer.model, checkpoint, fix_of(checkpoint))  # the Trainer would load others too
    check_same_sharding(checkpoint, trainer.is_fsdp_enabled)
    logger.info("Resuming from step %s of %s.", f"{step_of(checkpoint):,d}", f"{trainer.args.max_steps:,d}")
    trainer.monitor.restore(checkpoint)
    if has_ended(checkpoint, trainer.recipe.training):  # the Trainer would take another step
        trainer.state = read_state(checkpoint, fix_of(checkpoint))
        trainer._load_best_model()
    else:
        trainer.train(resume_from_checkpoint=str(checkpoint))


def save_trained(trainer: RecipeTrainer) -> None:
    """Save the trained model, the time and the Trainer's state, which says that training has ended."""
    folder, weights = trainer.folder, trainer.accelerator.get_state_dict(trainer.model)  # every process must call
    if trainer.is_world_process_zero():
        with run_write_errors(folder):
            with staged_files(folder) as staging:
                trainer.model.save_pretrained(staging, state_dict=weights)
            trainer.monitor.save(folder)
            partial = folder / f"{STATE}{PARTIAL}"
            trainer.state.save_to_json(str(partial))
            partial.replace(folder / STATE)
    PartialState().wait_for_everyone()


def test_scores(trainer: RecipeTrainer, prepared: Prepared) -> dict[str, Any]:
    """Return the task's metrics on the test set by the recipe's search, with a few example sentences."""
    start, task, pairs = time.perf_counter(), trainer.task, prepared.pairs["test"]
    trainer.search = trainer.recipe.generation_config(trainer.model.config, trainer.processing_class)
    set_seed(trainer.recipe.seed)  # of FlowSeq's latents, also where a run was killed before its scores
    output = trainer.predict(cast(Any, prepared.encoded["test"]))
    texts, sources, references = [str(text) for text in output.predictions], pairs["source"][:], pairs["target"][:]
    scores, shown = task.test(texts, references), trainer.recipe.score.examples
    indices = range(0, len(texts), max(1, len(texts) // max(1, shown)))[:shown]
    return {
        **scores,
        **{name: (output.metrics or {})[f"test_{name}"] for name in trainer.metric_names},
        "search": trainer.recorded_search(),
        "sentences": len(texts),
        "seconds": time.perf_counter() - start,
        "examples": [
            {
                "source": sources[index],
                "translation": task.display(sources[index], texts[index]),
                "reference": task.display(sources[index], references[index]),
            }
            for index in indices
        ],
    }


def write_results(trainer: RecipeTrainer, prepared: Prepared) -> dict[str, Any]:
    """Return the content of results.json; every process must call, and the main one writes it.

    The existence of the file says that the run is finished.
    """
    folder = prepared.folder
    results: dict[str, Any] = {"name": None, "recipe": None, "data": read_fingerprints(folder)}
    results["tokens"] = prepared.tokens
    if trainer.stream is not None and (checkpoint := last_checkpoint(folder)) is not None:
        results["data"]["train"]["read"] = described(read_stream(checkpoint)["pairs"])
    if prepared.inputs.source is not None:
        results["source"] = prepared.inputs.source
    if models := recorded_models(folder):
        results["models"] = models
    results |= trainer.results()
    trainer.remove_callback(EarlyStoppingCallback)  # it would expect metrics of another name
    validation = trainer.evaluate(metric_key_prefix="eval_final")  # by the search of evaluations in training
    results["validation"] = trainer.scores_of(validation, "eval_final")
    if "test" in prepared.encoded:
        results["test"] = test_scores(trainer, prepared)
    results["time"] = trainer.monitor.time()
    results["seconds"] = sum(results["time"].values())
    if trainer.is_world_process_zero():
        content = json.dumps(to_json_values(results), indent=2, ensure_ascii=False, allow_nan=False)
        with run_write_errors(folder / RESULTS):
            write_atomically(folder / RESULTS, content)
    return results
