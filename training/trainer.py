"""The trainer of a run. Transformers' loop calls the methods of `PaperTrainer` in this order:

1. `train_or_resume` checks that every evaluation can work, and starts the Trainer's `train`; `resume` does, from a
   checkpoint. `hide_later_curves` hides in TensorBoard what a crashed run has logged since.
2. `get_train_dataloader` puts pairs of similar length into batches by tokens (5.1). To resume, `_load_callback_state`
   restores what patience has counted; the Trainer loads weights, optimizer, schedule and random states, and skips the
   batches of the epoch that are done.
3. For a step, `get_batch_samples` gives its micro-batches the random choices of their pairs and counts target tokens.
4. For a micro-batch, `training_step` calls `_prepare_input`, which copies it to the device, and `compute_loss`, whose
   loss is divided by the tokens of the whole step; then it runs the backward pass.
5. `_get_grad_norm` notes whether the gradient is finite. Optimizer and schedule, those of `make_optimizer`, do a step.
6. `Progress.on_step_end` in callbacks.py says whether this step is also evaluated and saved, or the last one.
7. `log` writes the means since its last entry, `evaluate` translates the validation set, `_determine_best_metric`
   remembers the best evaluation, and `_save_checkpoint` writes all that a resumed run needs.
8. After the last step `save_final_model` saves the mean of the last checkpoints, or the best one.

B batch, S source, T target, V vocabulary.
"""

import contextlib
import hashlib
import itertools
import json
import logging
import math
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerState,
)
from transformers.integrations import TensorBoardCallback, get_available_reporting_integrations

from training.callbacks import Patience, Progress, ProgressBar, evaluation_at, is_best_evaluation, rank
from training.checkpoints import (
    CHECKPOINTS,
    EPOCH_STEPS,
    INTERRUPTED,
    SECONDS,
    STATE,
    begin_checkpoint,
    complete_checkpoints,
    damage,
    finish_checkpoint,
    load_mean,
    step_of,
)
from training.data import Data
from training.evaluation import Evaluator, SplitResults, TokenizedPair, mean_sums
from training.machine import shard, uses_cpu
from training.recipe import PaperOptimizer, Recipe, RectifiedOptimizer
from training.tasks import Metric, make_task
from vaswani_transformer.batching import PairCollator, PairTokens, TokenBudgetBatchSampler
from vaswani_transformer.batching.optimization import paper_adam, paper_schedule
from vaswani_transformer.batching.pairs import ArrowRows
from vaswani_transformer.batching.sampler import batches_in_order
from vaswani_transformer.model import LMOutput, ProjectedModel
from vaswani_transformer.nar import NarHead
from vaswani_transformer.settings import CallSettings
from vaswani_transformer.support.command import UserError
from vaswani_transformer.support.files import read_json, staged_files, write_errors

logger = logging.getLogger(__name__)
CURVES = "tensorboard"  # folder of a run


def training_arguments(recipe: Recipe, run: Path, selection: Metric, use_cache: bool) -> Seq2SeqTrainingArguments:
    """Return the trainer's arguments for a run in a folder; `selection` selects the best checkpoint."""
    training = recipe.training
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(run / CURVES)

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


StepBatches = tuple[list[dict[str, Tensor]], Tensor | int | None]
"""Micro-batches of a step, and the number of its tokens with a loss on all processes."""


class PaperTrainer(Seq2SeqTrainer):
    """Trainer that follows a recipe.

    `loss` and other logged values are means since the last entry over the target tokens with a loss, of all processes;
    `target_tokens_per_second` counts all target tokens.

    Args:
        recipe: recipe of the run.
        model: model with a generation config.
        data: pairs and tokenizer of the run.
        run: folder of the run.
    """

    log_parts: dict[str, str] = {}
    """Logged values of the model's output besides the loss: name in the output, and name in the log."""

    sentence_statistics: Any = None
    """The family's method for further `Statistics` of evaluations."""

    training: Any  # the family's fields of the recipe's group `training`
    model: Any  # the family's model
    processing_class: PreTrainedTokenizerBase

    def __init__(self, recipe: Recipe, model: ProjectedModel, data: Data, run: Path) -> None:
        self.recipe = recipe
        self.training = recipe.training
        self.data = data
        self.run = run
        self.task = make_task(recipe)
        self.search = recipe.generation_config(model.config, data.tokenizer, in_evaluations=True)
        self.constraint = self.task.constraint(model, data.tokenizer)
        tokens: Any = data.tokens
        super().__init__(
            model=model,
            args=training_arguments(recipe, run, self.task.selection, model.config.use_cache),
            train_dataset=tokens["train"],
            eval_dataset=tokens["validation"],
            processing_class=data.tokenizer,
        )

        # A tied matrix is saved once, although shards gather it under each name.
        model._keys_to_ignore_on_save = set(model.all_tied_weights_keys) or None
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        if plugin is not None:
            shard(model, plugin)
        self.optimizer, self.lr_scheduler = make_optimizer(recipe, model)
        self.progress = Progress(recipe)
        self.remove_callback(PrinterCallback)
        self.add_callback(self.progress)
        self.bar = ProgressBar()
        self.add_callback(self.bar)
        if recipe.training.patience is not None:
            self.add_callback(Patience(recipe.training.patience))
        self.resumed: Path | None = None
        self.epoch_steps: dict[str, object] = {}
        self.restart_log()

    # Before the steps

    def train_or_resume(self, checkpoint: Path | None) -> None:
        """Train, from a checkpoint if given."""
        self.check_evaluations()
        with self.bar.above():
            if checkpoint is None:
                self.hide_later_curves(0)
                self.train()
            else:
                self.resume(checkpoint)

    def resume(self, checkpoint: Path) -> None:
        """Train from a checkpoint, unless training has already ended there.

        The Trainer restores weights, optimizer and random states, and skips the batches of the epoch that are done.
        """
        self.resumed = checkpoint
        state: Any = TrainerState.load_from_json(str(checkpoint / STATE))
        self.progress.seconds = float((checkpoint / SECONDS).read_text())
        logger.info("Resuming from step %d of %d.", step_of(checkpoint), self.args.max_steps)

        # Training that patience or a time limit ended continues only with more steps than before.
        has_stopped = state.stateful_callbacks["TrainerControl"]["args"]["should_training_stop"]
        is_extended = self.args.max_steps > state.max_steps
        if state.global_step >= self.args.max_steps or (has_stopped and not is_extended):
            self.state = state
        else:
            if has_stopped:
                self.progress.check_time_left()
            self.hide_later_curves(step_of(checkpoint))
            self.train(resume_from_checkpoint=str(checkpoint))

    def hide_later_curves(self, step: int) -> None:
        """Let TensorBoard hide what an interrupted run has logged after a step, since it will be logged again."""
        folder = self.run / CURVES
        shows_curves = any(isinstance(callback, TensorBoardCallback) for callback in self.callback_handler.callbacks)
        if folder.exists() and shows_curves and self.is_world_process_zero():
            from torch.utils.tensorboard import SummaryWriter

            SummaryWriter(str(folder), purge_step=step + 1).close()

    def check_evaluations(self) -> None:
        """Score one reference and read the settings of both searches, so that neither fails after hours of training."""
        task = self.task
        references = self.data.pairs["validation"]["target"][:1]
        task.scores(references, references, task.best_metric, *task.metrics, *task.more_metrics)
        for search in (self.search, self.recipe.generation_config(self.model.config, self.processing_class)):
            try:
                if isinstance(self.model, NarHead):
                    self.model.read_settings(search, {})
                else:
                    CallSettings(search, self.model, {}).check()
            except ValueError as error:
                raise UserError(f"decoding.{error}") from error

    def get_train_dataloader(self) -> DataLoader:
        """Return this rank's batches by token budget (5.1); the trainer state determines the epoch."""
        pairs = PairTokens(self.train_dataset)
        collator: Any = PairCollator(self.processing_class, self.model)
        training = self.recipe.training
        try:
            sampler = TokenBudgetBatchSampler(
                pairs.source_lengths,
                pairs.target_lengths,
                training.source_tokens,
                training.target_tokens,
                num_processes=self.args.world_size,
                rank=self.args.process_index,
                accumulation=self.args.gradient_accumulation_steps,
                seed=self.recipe.seed,
            )
        except ValueError as error:
            fields = "training.source_tokens, training.target_tokens, training.device_tokens"
            raise UserError(f"{fields}: {error}") from error
        steps = len(sampler) // self.args.gradient_accumulation_steps
        sampler.epoch = lambda: self.state.global_step // steps  # `set_epoch` does not reach it after a resume
        self.check_epoch_steps(sampler)
        self.log_beginning(steps, sampler.padding_share)
        return DataLoader(
            pairs,
            batch_sampler=sampler,
            collate_fn=collator,
            generator=torch.Generator(),  # the loader draws a seed, which must not change the generator of training
            pin_memory=torch.accelerator.is_available(),
        )

    def check_epoch_steps(self, sampler: TokenBudgetBatchSampler) -> None:
        """Check that a resumed run divides its pairs into the same steps, so that its epoch has each pair once."""
        divided = {"device_tokens": self.training.device_tokens, "processes": self.args.world_size}
        self.epoch_steps = {**divided, "sha256": hashlib.sha256(sampler.bounds.tobytes()).hexdigest()}
        if self.resumed is None or not (self.resumed / EPOCH_STEPS).exists():
            return
        before = read_json(self.resumed / EPOCH_STEPS, "restore it.")
        if before["sha256"] != self.epoch_steps["sha256"]:
            got, expected = (f"{one['device_tokens']} (processes: {one['processes']})" for one in (divided, before))
            raise UserError(
                f"training.device_tokens: changes which pairs share a step; got {got}, expected {expected}. "
                f"Set training.device_tokens={before['device_tokens']}, or choose a different --output_dir."
            )

    def log_beginning(self, epoch_steps: int, padding_share: float) -> None:
        """Log what this run is about to do, and on what."""
        training = self.training
        pairs = len(self.data.tokens["train"])
        limits = f"{training.steps:,} steps ({training.steps / epoch_steps:,.1f} epochs)"
        if training.minutes is not None:
            limits += f" or {training.minutes:g} minutes, whichever comes first"
        block = {
            "folder": str(self.run),
            "device": f"{self.args.device}, {training.precision}",
            "processes": str(self.args.world_size),
            "threads": f"{torch.get_num_threads()} in each process",
            "parameters": f"{self.model.num_parameters():,}",
            "data": f"{pairs:,} training pairs, {epoch_steps:,} steps an epoch, {100 * padding_share:.1f}% padding",
            "limits": limits,
        }
        logger.info("Training %s", self.recipe.name)
        for name, value in block.items():
            logger.info("  %-12s%s", name, value)

    def _load_callback_state(self) -> None:
        """Continue a resumed run as if a raised limit had been there from the start.

        The evaluation at the earlier end counts neither for the best checkpoint nor for patience, and the checkpoint
        for no mean, unless they were due at that step.
        """
        super()._load_callback_state()
        step = self.state.global_step
        history: list[Any] = self.state.log_history
        extra = {entry["step"] for entry in history if "eval_loss" in entry and not self.is_due(entry["step"])}
        if not extra:
            return
        due_steps = self.training.checkpoint_steps
        for checkpoint in complete_checkpoints(self.run) if self.is_world_process_zero() else []:
            if step_of(checkpoint) in extra and (due_steps is None or step_of(checkpoint) % due_steps):
                (checkpoint / INTERRUPTED).touch()

        # Repeat what `evaluate` did with the other evaluations.
        patience = [one for one in self.callback_handler.callbacks if isinstance(one, Patience)]
        for callback in patience:
            callback.early_stopping_patience_counter = 0
        self.state.best_metric = self.state.best_global_step = None
        self.state.log_history = []
        for entry in history:
            if "eval_loss" not in entry or entry["step"] not in extra:
                self.state.log_history.append(entry)
            if "eval_loss" in entry and entry["step"] not in extra:
                self.state.global_step = entry["step"]
                for callback in patience:
                    callback.check_metric_value(self.args, self.state, self.control, entry["eval_loss"])
                self._determine_best_metric(entry, None)
        self.state.global_step = step

    def is_due(self, step: int) -> bool:
        """Return whether a run evaluates and saves at a step wherever it ends."""
        return step % self.training.evaluation_steps == 0

    # A step

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device) -> StepBatches:
        """Return the batches of a step.

        The random choices of a pair depend on the run's seed, the step and the pair's index in the step. So they do not
        depend on the number of processes and micro-batches, and are the same in a resumed run.
        """
        step = self.state.global_step
        world = self.args.world_size
        rank = self.args.process_index
        for name, value in self.step_attributes(step).items():
            setattr(self.model, name, value)

        # Row r of this rank's micro-batch m is pair rank + world (m + num_batches r) of the step.
        first_seed = int(np.random.SeedSequence([self.recipe.seed, step]).generate_state(1)[0])
        batches = []
        for index, batch in enumerate(itertools.islice(epoch_iterator, num_batches)):
            self.target_tokens += int(batch["labels"].ne(-100).sum())
            pairs = [rank + world * (index + num_batches * row) for row in range(len(batch["labels"]))]
            batches.append(self.add_draws(batch, [first_seed + pair for pair in pairs]))

        # In one process the number of tokens stays on the CPU, so nothing waits for the device.
        device = torch.device("cpu") if world == 1 else device
        batches, tokens = super().get_batch_samples(iter(batches), num_batches, device)
        self.learned_tokens += 0 if tokens is None else tokens
        return batches, tokens

    def step_attributes(self, step: int) -> dict[str, float]:
        """Return the scheduled attributes of the model at a step, such as `kl_scale`."""
        return {}

    def add_draws(self, batch: dict[str, Tensor], seeds: list[int]) -> dict[str, Tensor]:
        """Add a family's random choices to a batch, such as masks, by a seed for each pair; labels may change."""
        return batch

    def training_step(
        self, model: torch.nn.Module, inputs: dict[str, Tensor], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)
        # The Trainer multiplies the loss by the number of processes, since gradients are averaged.
        self.totals["loss"] += loss * torch.as_tensor(num_items_in_batch) / self.args.world_size
        return loss

    def _prepare_input(self, data: object) -> object:
        """Copy a batch to the device asynchronously."""
        if isinstance(data, Tensor):
            return data.to(self.args.device, non_blocking=True)
        return super()._prepare_input(data)

    def compute_loss_context_manager(self) -> contextlib.ExitStack:
        """Autocast a sharded model too, since Accelerate does not wrap its `forward`."""
        stack = super().compute_loss_context_manager()
        if self.is_fsdp_enabled:
            stack.enter_context(self.accelerator.autocast())
        return stack

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        loss, outputs = cast(tuple[Tensor, LMOutput], super().compute_loss(model, inputs, True, num_items_in_batch))
        for name, log_name in self.log_parts.items():
            value = outputs.get(name)
            if value is None:
                continue
            # The accuracy is a mean over the batch; other values are divided by the tokens of the complete step.
            tokens = torch.as_tensor(num_items_in_batch)
            if name == "accuracy":
                tokens = inputs["labels"].ne(-100).sum()
            # Values for several layers are logged by the layer's number; the last one is that of the last layer.
            first_layer = self.model.config.decoder_layers - value.numel() + 1
            for layer, part in enumerate(value.detach().reshape(-1), start=first_layer):
                key = f"{log_name}_{layer}" if value.dim() else log_name
                self.totals[key] += part * tokens
        return (loss, outputs) if return_outputs else loss

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Tensor | None = None) -> Tensor | float:
        norm = super()._get_grad_norm(model, grad_norm)
        full = norm.full_tensor() if hasattr(norm, "full_tensor") else torch.as_tensor(norm)
        self.is_finite &= full.isfinite().to(self.is_finite.device)
        return norm

    # The log

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log an entry, in training with the means since the last one."""
        if "loss" in logs:
            self.check_finite()
            logs.update(self.means())
            self.restart_log()
        super().log(logs, start_time)
        shown = {
            "loss": "loss {:.3f}",
            "target_tokens_per_second": "tokens/s {:,.0f}",
            f"eval_{self.task.selection.key}": f"{self.task.selection.title} {{:.2f}}",
            "eval_loss": "validation loss {:.3f}",
        }
        if text := ", ".join(form.format(logs[name]) for name, form in shown.items() if name in logs):
            values = f"{text}; {self.progress.minutes_left(self.state):.0f} min left"
            logger.info("Step %d of %d: %s", self.state.global_step, self.state.max_steps, values)
            self.bar.show(values)

    def means(self) -> dict[str, float]:
        """Return the logged means of all processes since the last entry, and the tokens per second."""
        totals = {name: float(total) for name, total in self.totals.items()}
        totals["tokens"] = self.target_tokens
        totals_by_rank = gather_object([totals])
        sums = {name: sum(rank_totals.get(name, 0.0) for rank_totals in totals_by_rank) for name in totals}
        tokens_per_second = sums.pop("tokens") / (time.perf_counter() - self.log_time)
        means = {name: total / float(self.learned_tokens) for name, total in sums.items()}
        return {"target_tokens_per_second": tokens_per_second, **means}

    def restart_log(self) -> None:
        self.totals: dict[str, Tensor | float] = defaultdict(float)
        self.learned_tokens: Tensor | float = 0.0
        self.target_tokens = 0
        self.log_time = time.perf_counter()
        self.is_finite = torch.ones((), dtype=torch.bool, device=self.args.device)

    def check_finite(self) -> None:
        """Stop after a non-finite loss or gradient, before weights are evaluated or saved."""
        if not self.is_finite.item():
            raise UserError(
                f"training: the loss or its gradient is not finite, at or before step {self.state.global_step}; "
                "the last checkpoint is kept. Start over with a smaller learning rate."
            )

    # An evaluation

    def evaluate(self, *_: object, metric_key_prefix: str = "eval", **__: object) -> dict[str, float]:
        """Log and return the loss per target token and the task's metric on the validation set."""
        start = time.perf_counter()
        self.check_finite()
        scores = self.translate_split("validation", self.search).scores
        metrics = {}
        for name, value in scores.items():
            if isinstance(value, float):
                metrics[f"{metric_key_prefix}_{name}"] = value
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        self.log_time += time.perf_counter() - start  # exclude evaluation from the training time
        return metrics

    def translate_split(self, split: str, search: GenerationConfig, log_probabilities: bool = False) -> SplitResults:
        """Return the results of a split, and `loss`, `perplexity` and the best metric with its signature.

        `log_probabilities` adds those of the translations. Unlike the Trainer's loop, it averages over tokens, counts
        every pair once, and supports any sharded model.
        """
        tokens = self.data.tokens[split]
        texts = self.data.pairs[split]
        pairs = list(map(TokenizedPair, tokens["input_ids"][:], tokens["labels"][:], texts["source"][:]))
        batches = self.evaluation_batches(split)
        evaluator = Evaluator(
            self.model,
            self.processing_class,
            constraint=self.constraint,
            statistics=self.sentence_statistics,
            autocast=self.accelerator.autocast,
            scores=log_probabilities,
            generation_config=search,
            too_long="keep",
        )
        results = evaluator.evaluate(pairs, batches)
        translations = [result.hypothesis.text for result in results]
        scores: dict[str, Any] = {**mean_sums(results, self.model.has_likelihood)}
        scores.update(self.task.scores(translations, texts["target"][:], self.task.best_metric))
        scores["search"] = evaluator.translator.settings.search()
        return SplitResults(results, scores)

    def evaluation_batches(self, split: str) -> list[list[int]]:
        """Return the rows of each batch of a split, the longest sources first; a very long pair is a separate batch."""
        tokens = self.data.tokens[split]
        sources = ArrowRows(tokens, "input_ids").lengths
        longest = np.maximum(sources, ArrowRows(tokens, "labels").lengths)
        order = np.argsort(-sources, kind="stable").tolist()
        size = self.training.evaluation_batch_size
        budgets = (size * self.recipe.data.max_length, size)
        return batches_in_order(order, longest, np.ones_like(longest), budgets)

    def _determine_best_metric(self, metrics: dict[str, float], trial: object) -> bool:
        """Remember the step of the best evaluation, whose checkpoint is kept."""
        is_best = is_best_evaluation(self.state, self.args)
        if is_best:
            self.state.best_metric = metrics[f"eval_{self.task.selection.key}"]
            self.state.best_global_step = self.state.global_step
        return is_best

    # A checkpoint and the end

    def _save_checkpoint(self, model: torch.nn.Module, trial: object) -> None:
        self.check_finite()
        start = time.perf_counter()
        step = self.state.global_step
        training = self.recipe.training
        keep: float = max(training.keep_checkpoints, 1 + (training.average_last or 0))
        if not self.is_due(step) and self.control.should_training_stop:
            keep = math.inf  # a run that is extended leaves this one out

        checkpoint = self.run / CHECKPOINTS / f"checkpoint-{step}"
        begin_checkpoint(checkpoint)
        with write_errors(checkpoint, "make room, and the same command resumes the run"):
            super()._save_checkpoint(model, trial)
            if self.args.should_save:
                (checkpoint / SECONDS).write_text(str(self.progress.seconds_trained()))
                (checkpoint / EPOCH_STEPS).write_text(json.dumps(self.epoch_steps))
            finish_checkpoint(checkpoint, keep, self.state.best_global_step, self.progress.is_interrupted)
        self.log_time += time.perf_counter() - start

    def save_final_model(self) -> list[int]:
        """Save the mean of the last checkpoints or the best one, whichever is better, and return their steps.

        Without `training.average_last` it is the best one.
        """
        last = self.recipe.training.average_last
        best = self.state.best_global_step or self.state.global_step
        checkpoints = best_only = [self.run / CHECKPOINTS / f"checkpoint-{best}"]
        if last is not None:
            saved = complete_checkpoints(self.run, with_interrupted=False, last_step=self.state.global_step)[-last:]
            checkpoints = [checkpoint for checkpoint in saved if self.can_be_averaged(step_of(checkpoint))]
        checkpoints = load_mean(self.model, checkpoints)

        steps = [step_of(checkpoint) for checkpoint in checkpoints]
        if last is None:
            logger.info("Restored the best checkpoint, of step %d.", best)
        else:
            level = logging.INFO if len(steps) == last else logging.WARNING
            logger.log(level, "Averaged the checkpoints of steps %s.", ", ".join(map(str, steps)))
            if checkpoints != best_only and self.is_mean_worse(*best_only):
                load_mean(self.model, best_only)
                steps = [best]

        weights = self.accelerator.get_state_dict(self.model)  # every process must call
        if self.is_world_process_zero():
            advice = "make room, and the same command resumes the run"
            with write_errors(self.run, advice), staged_files(self.run) as staging:
                self.model.save_pretrained(staging, state_dict=weights)
        PartialState().wait_for_everyone()
        return steps

    def can_be_averaged(self, step: int) -> bool:
        """Return whether the weights of a step may be averaged with the last ones."""
        return True

    def is_mean_worse(self, best: Path) -> bool:
        """Return whether the best checkpoint, by its evaluation, is better than the mean that the model now is."""
        evaluation = evaluation_at(self.state, step_of(best))
        if evaluation is None:
            return False
        if problem := damage(best):
            logger.warning("Skipping %s, the best checkpoint: %s.", best, problem)
            return False
        scores = self.translate_split("validation", self.search).scores
        mean = {f"eval_{name}": value for name, value in scores.items()}
        is_worse = not rank(mean, self.args) >= rank(evaluation, self.args)
        logger.info(
            "Validation %s: %.2f with the mean, %.2f with the best checkpoint, of step %d; the %s becomes the model.",
            self.task.selection.title,
            scores[self.task.selection.key],
            evaluation[f"eval_{self.task.selection.key}"],
            step_of(best),
            "best checkpoint" if is_worse else "mean",
        )
        return is_worse
