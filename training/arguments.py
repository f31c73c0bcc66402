"""The recipe's settings as Transformers' trainer takes them: its arguments, the optimizer and the schedule."""

import logging
import math
import os
from pathlib import Path
from typing import cast

import torch
from accelerate import PartialState
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel, Seq2SeqTrainingArguments
from transformers.integrations import get_available_reporting_integrations

from training.checkpoints import CHECKPOINTS
from training.fields import PaperOptimizer, Recipe, RectifiedOptimizer
from training.machine import uses_cpu
from training.tasks import Metric
from vaswani_transformer.batching.optimization import paper_adam, paper_schedule
from vaswani_transformer.support.command import UserError

logger = logging.getLogger(__name__)


def training_arguments(recipe: Recipe, run: Path, selection: Metric, use_cache: bool) -> Seq2SeqTrainingArguments:
    """Return the trainer's arguments for a run in a folder; `selection` selects the best checkpoint."""
    training = recipe.training
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(run / "tensorboard")

    # The fewest micro-batches whose share of a step fits on a device.
    step_tokens = max(training.source_tokens, training.target_tokens)
    accumulation = math.ceil(step_tokens / (PartialState().num_processes * training.device_tokens))
    arguments = Seq2SeqTrainingArguments(
        str(run / CHECKPOINTS),
        max_steps=training.steps,
        gradient_accumulation_steps=accumulation,
        max_grad_norm=training.max_grad_norm,
        bf16=training.precision == "bf16",
        use_cpu=uses_cpu(),
        ddp_find_unused_parameters=recipe.family.recipe.has_phases,
        restore_callback_states_from_checkpoint=training.patience is not None,
        torch_compile=training.torch_compile,
        eval_strategy="steps",
        eval_steps=training.evaluation_steps,
        save_strategy="steps",
        save_steps=training.evaluation_steps,
        logging_steps=training.log_steps,
        logging_nan_inf_filter=False,  # would synchronize at every step
        metric_for_best_model=selection.key,
        greater_is_better=selection.greater_is_better,
        report_to=reporting(training.report_to),
        run_name=recipe.name,
        disable_tqdm=True,
        seed=recipe.seed,
        remove_unused_columns=False,
        use_cache=use_cache,  # the Trainer copies it into the model's configuration
    )
    arguments._n_gpu = min(arguments.n_gpu, 1)  # no DataParallel
    return arguments


def reporting(report_to: str | list[str]) -> list[str]:
    """Return the names of the tools to which a run reports its curves.

    Raises:
        UserError: one of them is unknown or not installed.
    """
    names = [report_to] if isinstance(report_to, str) else report_to
    installed = get_available_reporting_integrations()
    for name in names:
        if name not in (*installed, "none", "all"):
            raise UserError(
                f"training.report_to: {name} is not installed or unknown; got {report_to!r}, expected names among "
                f"{', '.join(installed)}. Install it, or set training.report_to=none."
            )
    return names


def make_optimizer(recipe: Recipe, model: PreTrainedModel) -> tuple[Optimizer, LambdaLR]:
    """Return Adam with the schedule of equation (3) (5.3), or rectified Adam with exponential decay."""
    # The group `training` also has the fields of the optimizer that it names.
    fields = cast(PaperOptimizer | RectifiedOptimizer, recipe.training)
    if isinstance(fields, PaperOptimizer):
        if fields.warmup_steps > recipe.training.steps:
            logger.warning(
                "training.warmup_steps: the warm-up of %s steps is longer than the run of %s; the learning rate stays "
                "below its peak. Lower training.warmup_steps or raise training.steps.",
                *(f"{steps:,}" for steps in (fields.warmup_steps, recipe.training.steps)),
            )
        optimizer = paper_adam(model.parameters())
        scale = fields.learning_rate_scale
        return optimizer, paper_schedule(optimizer, model.config.d_model, fields.warmup_steps, scale)
    optimizer = torch.optim.RAdam(
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        lr=fields.learning_rate,
        betas=(0.9, 0.98),
        eps=1e-8,
        weight_decay=fields.weight_decay,
        decoupled_weight_decay=True,
    )
    decay = fields.learning_rate_decay
    steps = fields.learning_rate_decay_steps
    return optimizer, LambdaLR(optimizer, lambda done: decay ** (done / steps))
