"""The trainer of a run that is prepared, with a new model."""

import logging
import os
from pathlib import Path

from accelerate import PartialState
from transformers import EarlyStoppingCallback, Seq2SeqTrainingArguments, set_seed

from training.data.stream import PairStream
from training.recipe.fields import Recipe
from training.recipe.machine import uses_cpu
from training.run.checkpoints import CHECKPOINTS, run_write_errors
from training.run.checks import accumulation, attention, config_for_tokenizer, set_attention
from training.run.initial_weights import copy_weights
from training.run.preparation import Prepared
from training.tasks import selection_metric
from training.trainer.energy import Energy, EnergyTrainer
from training.trainer.trainer import RecipeTrainer

logger = logging.getLogger(__name__)


def training_arguments(recipe: Recipe, folder: Path) -> Seq2SeqTrainingArguments:
    """Return the Trainer's arguments; `RecipeTrainer` adds the paper's optimizer, schedule and batches."""
    training, selection = recipe.training, selection_metric(recipe)
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
        metric_for_best_model=selection.key,
        greater_is_better=selection.greater_is_better,
        per_device_eval_batch_size=training.evaluation_batch_size,
        report_to=["tensorboard"],
        disable_tqdm=False,  # else TRANSFORMERS_VERBOSITY=error would replace the progress lines
        seed=recipe.seed,
        remove_unused_columns=False,
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
    train = encoded["train"]
    if recipe.data.streaming:
        train = PairStream(recipe.data, recipe.seed, prepared.inputs.distillation)
    arguments = training_arguments(recipe, prepared.folder)
    with run_write_errors(prepared.folder):
        (prepared.folder / CHECKPOINTS).mkdir(exist_ok=True)  # where it fails, the Trainer would print a traceback
    parts = (model, arguments, recipe, tokenizer, train, encoded["validation"])
    if (teacher := models.get("energy_from")) is None:
        trainer = RecipeTrainer(*parts)
    else:
        operators = (recipe.training.energy_inputs or "softmax", recipe.training.energy_outputs or "softmax")
        trainer = EnergyTrainer(Energy(teacher.model.to(arguments.device), *operators), *parts)
        set_attention(teacher.model, attention(recipe))
    if recipe.training.patience is not None:
        trainer.add_callback(EarlyStoppingCallback(recipe.training.patience))
    return trainer
