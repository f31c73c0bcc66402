"""Seq2SeqTrainer with a recipe's batches, optimizer, schedule, checkpoints, and evaluation by tokens and by task.

Its methods stand in the order in which a run calls them. B batch, S source, T target, V vocabulary.
"""

import contextlib
import dataclasses
import logging
import math
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from datasets import Dataset
from huggingface_hub import HfApi
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader
from transformers import (
    DataCollatorForSeq2Seq,
    LogitsProcessor,
    PreTrainedTokenizerBase,
    ProgressCallback,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)
from transformers.integrations import TensorBoardCallback
from transformers.trainer_utils import EvalLoopOutput

from training.data.tokenizing import NUMBER, TEXTS, lengths
from training.monitor.curves import CurvesCallback
from training.monitor.monitor import TrainingMonitor
from training.monitor.progress import progress_callback
from training.publish import upload, write_repository
from training.recipe.families import RecipeModel
from training.recipe.fields import Recipe
from training.report.licenses import check_license
from training.report.results import commit, hardware, strip_local_paths, versions
from training.run.checkpoints import (
    EXTRA,
    STATE,
    best_fix,
    check_best,
    checked_weights,
    checkpoint_at,
    last_checkpoint,
    rotate,
    run_folder,
    run_write_errors,
    writing,
)
from training.run.distributed import RunError, load_weights, shard
from training.tasks import make_task, selection_metric
from training.trainer.callbacks import StopSignalCallback, StreamCallback, recipe_callbacks
from training.trainer.divergence import DivergenceGuard, is_finite
from training.trainer.draws import STATES, add_random_choices, draw_latents
from training.trainer.evaluation import evaluation_batches, sentence_losses
from training.trainer.flow_start import FlowStart
from training.trainer.optimizers import make_optimizer, make_schedule
from vaswani_transformer import VaswaniFlowSeqForConditionalGeneration, VaswaniTransformerConfig
from vaswani_transformer.batching import PairCollator, PairTokens, TokenBudgetBatches, TokenBudgetBatchSampler
from vaswani_transformer.batching.prefetch import prefetch
from vaswani_transformer.generation_settings import CallSettings

logger = logging.getLogger(__name__)
AHEAD = 2  # batches that a thread prepares


def by_layer(name: str, value: Tensor, config: VaswaniTransformerConfig) -> list[tuple[str, Tensor]]:
    """Return a scalar with its name, or a value of each of the last layers, each with a name that ends in the layer."""
    if not value.dim():
        return [(name, value)]
    first = config.decoder_layers - len(value) + 1
    return [(f"{name}_{first + index}", part) for index, part in enumerate(value.unbind())]


class RecipeTrainer(Seq2SeqTrainer):
    """A trainer that follows a recipe.

    `loss` in the log is the mean over the target tokens of all processes and all steps since the last entry, or since
    the checkpoint of a resumption after it. The log also has, over all processes, `target_tokens_per_second`,
    `padding_share` (of the positions of source and target), `teraflops_per_second` of the model's matrix products,
    `mfu`, their share of the data sheet's peak if that is known, and the parts of the loss that a kind of model names.

    Args:
        model: the model; its decoding is set from the recipe.
        args: the Trainer's arguments, from `training_arguments`.
        recipe: the run's recipe.
        tokenizer: the shared vocabulary.
        train_dataset: `input_ids` and `labels` of the training pairs, or the batches of a `PairStream`.
        validation: the same of the validation pairs, with both sides as text in `source` and `reference`.

    Attributes:
        monitor: counts and times the steps of this process.
        guard: keeps a gradient that is not finite from the weights.
        search: how evaluations translate; during training with the recipe's faster settings for it.
        signature: of the best metric in the last evaluation.
    """

    model: RecipeModel
    args: Seq2SeqTrainingArguments
    processing_class: PreTrainedTokenizerBase
    train_dataset: Dataset | TokenBudgetBatches
    eval_dataset: Dataset
    evaluated: Dataset

    def __init__(
        self,
        model: RecipeModel,
        args: Seq2SeqTrainingArguments,
        recipe: Recipe,
        tokenizer: PreTrainedTokenizerBase,
        train_dataset: Dataset | TokenBudgetBatches,
        validation: Dataset,
    ) -> None:
        self.recipe, self.family, self.task, self.folder = recipe, recipe.family, make_task(recipe), run_folder(args)
        self.stream = StreamCallback(train_dataset) if isinstance(train_dataset, TokenBudgetBatches) else None
        self.loaded = None
        super().__init__(
            model=model,
            args=args,
            data_collator=DataCollatorForSeq2Seq(tokenizer, model),
            train_dataset=cast(Any, train_dataset),
            eval_dataset=cast(Any, validation),
            processing_class=tokenizer,
        )
        self.search = recipe.generation_config(model.config, tokenizer, in_training=True)
        self.constraint = self.task.constraint(model, tokenizer)
        self.code = commit()
        # A tied matrix is saved once, also of shards, which gather it under each name; the Trainer loads by the names.
        model._keys_to_ignore_on_save = set(model.all_tied_weights_keys) or None
        self.flow_start = None
        if isinstance(model, VaswaniFlowSeqForConditionalGeneration):
            self.flow_start = FlowStart(model, recipe.training.decoder_steps, args.device)
        if (plugin := getattr(self.accelerator.state, "fsdp_plugin", None)) is not None:
            shard(model, plugin)
        self.monitor = TrainingMonitor(args.device, self.accelerator.mixed_precision)
        self.guard = DivergenceGuard(recipe.training, tokenizer, args.device)
        self.stopping = StopSignalCallback()
        self.signature: str | None = None  # of the metric, after the first evaluation
        self.add_callbacks()

    def add_callbacks(self) -> None:
        """Add the callbacks of the run, the guard after those that request an evaluation or a checkpoint."""
        self.add_callback(self.monitor)
        if self.pop_callback(TensorBoardCallback) is not None:
            self.add_callback(CurvesCallback())
        if self.pop_callback(ProgressCallback) is not None:
            minutes = self.recipe.training.minutes
            self.add_callback(progress_callback(self.task.best_metric, self.monitor, minutes))
        for callback in recipe_callbacks(self.recipe, self.model, self.monitor):
            self.add_callback(callback)
        for callback in (self.stream, self.stopping, self.guard):
            if callback is not None:
                self.add_callback(callback)

    # Before the steps

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train; a resumed stream continues at the checkpoint's position."""
        if resume_from_checkpoint is True:
            checkpoint = last_checkpoint(self.folder)
            resume_from_checkpoint = None if checkpoint is None else str(checkpoint)
        if self.stream is not None and resume_from_checkpoint:
            self.stream.restore(Path(resume_from_checkpoint))
        try:
            with self.stopping.handlers():
                return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:  # an error's traceback would keep the threads alive
            self.close_batches()
            if self.stream is not None:
                self.stream.batches.close()

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            parameters = (self.model if model is None else model).parameters()
            self.optimizer = make_optimizer(self.recipe.training, parameters)
            self.guard.guard(self.optimizer)
        return self.optimizer

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LambdaLR:
        if self.lr_scheduler is None:
            optimizer = optimizer or self.create_optimizer()
            self.lr_scheduler = make_schedule(self.recipe.training, optimizer, self.model.config.d_model)
            self._created_lr_scheduler = True
        return self.lr_scheduler

    # A step

    def get_train_dataloader(self) -> DataLoader:
        """Return this rank's batches by token budget; the epoch comes from the state, also in a resumed run.

        A stream is read in this process, because its position must be exact at every step.
        """
        dataset, collator = self.train_dataset, PairCollator(self.processing_class, self.model)
        if isinstance(dataset, TokenBudgetBatches):
            return self.make_loader(dataset, collator, batch_size=None)
        pairs = PairTokens(dataset)
        sampler = TokenBudgetBatchSampler(
            pairs.source_lengths,
            pairs.target_lengths,
            self.recipe.training.source_tokens,
            self.recipe.training.target_tokens,
            accumulation=self.args.gradient_accumulation_steps,
            seed=self.recipe.seed,
        )
        steps = len(sampler) // self.args.gradient_accumulation_steps
        sampler.epoch = lambda: self.state.global_step // steps
        logger.info("%d pairs in %d steps an epoch, %.1f%% padding.", len(dataset), steps, 100 * sampler.padding_share)
        return self.make_loader(pairs, collator, batch_sampler=sampler)

    def make_loader(self, dataset: Any, collator: Any, **batches: Any) -> DataLoader:
        """Return a loader, which draws a seed when it starts: not from the generator of training's random numbers."""
        is_pinned = self.args.dataloader_pin_memory and torch.accelerator.is_available()
        return DataLoader(dataset, collate_fn=collator, generator=torch.Generator(), pin_memory=is_pinned, **batches)

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device) -> tuple[list, Any]:
        """Return the batches of a step, and its tokens to learn on all processes.

        The host counts the tokens where one device has them all, so that no step waits for their copy.
        """
        loaded = self.prefetched if self.stream is None else self.with_random_choices
        self.monitor.stopwatch.enter("data")
        device = torch.device("cpu") if self.args.world_size == 1 else device
        batches, items = super().get_batch_samples(loaded(epoch_iterator), num_batches, device)
        self.monitor.stopwatch.enter("other")
        if self.flow_start is not None:
            self.flow_start(self.state.global_step, batches, self.accelerator.autocast())
        return batches, items

    def prefetched(self, batches: Iterator) -> Iterator:
        """Return the batches of an epoch with their random choices, of which a thread prepares the next ones.

        The data loader cannot do this, since Accelerate makes another one for the rest of a resumed epoch.
        """
        if self.loaded is None or self.loaded[0] is not batches:
            self.close_batches()
            self.loaded = batches, prefetch(self.with_random_choices(batches), AHEAD)
        return self.loaded[1]

    def with_random_choices(self, batches: Iterator) -> Iterator:
        """Yield batches, the first of which begins the present step, with their random choices."""
        micro_batches = self.args.gradient_accumulation_steps
        for number, batch in enumerate(batches, start=self.state.global_step * micro_batches):
            yield add_random_choices(batch, self.recipe, self.processing_class, number // micro_batches)

    def close_batches(self) -> None:
        if self.loaded is not None:
            self.loaded[1].close()
        self.loaded = None

    def training_step(
        self, model: torch.nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Run forward and backward; the remainder of the step counts as the optimizer's.

        The guard gets the pairs and the loss. A loss that is not finite counts as 0 in the Trainer's sum.
        """
        numbers = inputs.pop(NUMBER, None)
        self.monitor.count(inputs)
        self.learned_tokens = int(inputs["labels"].ne(-100).sum())  # here, where the batch is on the host
        self.monitor.stopwatch.enter("forward")
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.monitor.stopwatch.enter("optimizer")
        # The Trainer multiplies a process's share of the mean by the number of processes, since it averages gradients.
        tokens = torch.as_tensor(num_items_in_batch)
        self.monitor.add_loss(loss * tokens / self.accelerator.num_processes, self.learned_tokens)
        self.guard.add(numbers, inputs["input_ids"][0], loss)
        return loss.nan_to_num(0.0, 0.0, 0.0)

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Copy a batch to the device, which draws FlowSeq's latents: they are as large as the states of a layer."""
        inputs = super()._prepare_inputs(inputs)
        return draw_latents(inputs, self.model.config.d_model) if STATES in inputs else inputs

    def _prepare_input(self, data: Any) -> Any:
        """Copy a batch to the device without waiting until the device is idle, as the Trainer does."""
        if isinstance(data, Tensor):
            return data.to(self.args.device, non_blocking=True)
        return super()._prepare_input(data)

    def compute_loss_context_manager(self) -> contextlib.ExitStack:
        """Autocast a sharded model too, whose forward Accelerate does not wrap."""
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
        """Return the loss of a batch; the forward pass ends here."""
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        self.monitor.stopwatch.enter("backward")
        for name, log_name in self.family.log_parts.items():
            if (value := outputs.get(name)) is None:
                continue
            # The accuracy is a mean over the batch; the tokens of the complete step divide any other value.
            divisor = self.learned_tokens if name == "accuracy" else torch.as_tensor(num_items_in_batch)
            for full_name, part in by_layer(log_name, value, self.model.config):
                self.monitor.add_part(full_name, part * divisor, self.learned_tokens)
        return (loss, outputs) if return_outputs else loss

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Any = None) -> Any:
        """Return the norm of a step's gradient, after the guard has inspected it."""
        norm = super()._get_grad_norm(model, grad_norm)
        self.guard.inspect(norm)
        return norm

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        return self.family.flops(self.model, inputs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log an entry, with the monitor's metrics if it is one of training."""
        if "loss" in logs:
            logs |= self.monitor.metrics(self.state.total_flos)
        super().log(logs, start_time)

    # An evaluation

    @property
    def metric_names(self) -> list[str]:
        """The metrics of an evaluation; a likelihood at gold length, position by position, is no perplexity."""
        further = {"perplexity": self.family.is_autoregressive, "bound": "bound" in self.family.log_parts}
        return ["loss", *(name for name, is_there in further.items() if is_there), self.task.best_metric.key]

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Return this rank's batches by length; all ranks have the same number, so one batch may occur twice."""
        self.evaluated = dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        sides = (lengths(dataset, name) for name in ("input_ids", "labels"))
        size = self.args.per_device_eval_batch_size
        batches = evaluation_batches(*sides, size, size * self.recipe.data.max_length)
        rounds = math.ceil(len(batches) / self.args.world_size)
        rank_batches = [self.args.process_index + turn * self.args.world_size for turn in range(rounds)]
        numbered = dataset.add_column("pair", list(range(len(dataset))))
        tokens = numbered.remove_columns([name for name in dataset.column_names if name in TEXTS])
        sampler = [batches[index % len(batches)] for index in rank_batches]
        return self.make_loader(tokens, self.data_collator, batch_sampler=sampler)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        return self.get_eval_dataloader(test_dataset)

    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Return `metric_names`, the first of a target token, over all pairs on all ranks, each once, and hypotheses.

        The Trainer's own loop averages over sentences, counts some twice on several ranks, whose batches must have one
        size, and cannot evaluate a sharded model that it has not trained.
        """
        self.monitor.stopwatch.enter("evaluation")
        self.model.eval()
        self.callback_handler.eval_dataloader = dataloader
        outputs: dict[int, tuple[str, dict[str, float]]] = {}
        sources = self.evaluated["source"][:]
        for batch in dataloader:
            pairs = batch.pop("pair").tolist()
            translations = self.translate(self._prepare_inputs(batch), [sources[pair] for pair in pairs])
            outputs |= zip(pairs, translations, strict=True)
            self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
        everything = dict(gather_object(list(outputs.items())))
        texts, sums = zip(*(everything[pair] for pair in range(len(everything))), strict=True)
        totals = {name: sum(each[name] for each in sums) for name in sums[0]}
        tokens = totals.pop("tokens")
        loss = totals.pop("loss") / tokens
        if self.is_in_train and not math.isfinite(loss):
            self.guard.stop(f"step {self.state.global_step}: the validation loss is {loss}", self.folder)
        score, best = self.task.evaluate(list(texts), self.evaluated["reference"][:]), self.task.best_metric
        self.monitor.stopwatch.enter("other")
        self.signature = score[best.signature_key]
        metrics = {"loss": loss, best.key: score[best.key]} | {name: total / tokens for name, total in totals.items()}
        if self.family.is_autoregressive:
            metrics["perplexity"] = math.exp(min(loss, 700))
        return EvalLoopOutput(
            predictions=cast(Any, list(texts)),
            label_ids=None,
            metrics={f"{metric_key_prefix}_{name}": value for name, value in metrics.items()},
            num_samples=len(texts),
        )

    @torch.no_grad()
    def translate(self, inputs: dict[str, Tensor], sources: list[str]) -> list[tuple[str, dict[str, float]]]:
        """Return for each pair of a batch a hypothesis, and `loss`, `tokens` and statistics of its target, summed."""
        labels, model = inputs["labels"], self.model
        model_inputs = {name: tensor for name, tensor in inputs.items() if name != "labels"}
        if not self.family.is_autoregressive:
            model_inputs["decoder_attention_mask"] = labels.ne(-100).long()  # the reference's length, and no word of it
        with self.accelerator.autocast():  # without labels, or the loss would be computed twice
            logits = model(**model_inputs, use_cache=False).logits  # (B, T, V)
            statistics = self.sentence_statistics(logits, inputs)
        sums = {"loss": sentence_losses(logits, labels), "tokens": labels.ne(-100).sum(1)} | statistics
        del logits  # frees memory for the search
        with self.accelerator.autocast():
            if isinstance(model, FSDPModule):  # the search calls the embeddings outside the model's forward
                model.unshard()
            translations = model.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                generation_config=self.search,
                logits_processor=self.processors(inputs["attention_mask"], sources),
                synced_gpus=self.is_fsdp_enabled,  # all ranks must call a layer to gather it
            )
        texts = self.processing_class.batch_decode(cast(Tensor, translations), skip_special_tokens=True)
        rows = zip(*(values.tolist() for values in sums.values()), strict=True)
        return [(text, dict(zip(sums, row, strict=True))) for text, row in zip(texts, rows, strict=True)]

    def processors(self, mask: Tensor, sources: list[str]) -> list[LogitsProcessor] | None:
        """Return what excludes tokens from the search for sources with this mask (B, S), if the task does."""
        if self.constraint is None:
            return None
        call = CallSettings(self.search, self.model, {"attention_mask": mask})
        return [self.constraint(sources, call.target_limits())]

    def sentence_statistics(self, logits: Tensor, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return what evaluations log besides loss and metric, by name, summed over the tokens of each target (B,).

        Of an IterativeVAE it is the bound, by samples that leave the generators of training as they are.
        """
        if "bound" not in self.family.log_parts:
            return {}
        device = self.args.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(self.recipe.seed)
            bound = self.model(**inputs, has_hint=True, skip_logits=True).bound
        return {"bound": bound * inputs["labels"].ne(-100).sum(1)}  # the batch's mean, with each target's tokens

    def scores_of(self, metrics: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        """Return the scores of the last evaluation, whose metrics have a prefix, as `results.json` has them."""
        scores = {name: metrics[f"{prefix}_{name}"] for name in self.metric_names}
        return scores | {self.task.best_metric.signature_key: self.signature, "search": self.recorded_search()}

    def recorded_search(self) -> dict[str, Any]:
        """Return the complete search of evaluations, as `results.json` has it."""
        return CallSettings(self.search, self.model, {}).search()

    # A checkpoint

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """Save a checkpoint with the time so far and the position in a stream, and delete older ones.

        A failed write becomes one line.
        """
        self.monitor.stopwatch.enter("saving")
        checkpoint = checkpoint_at(self.folder, self.state.global_step)
        with run_write_errors(checkpoint), writing(checkpoint):
            super()._save_checkpoint(model, trial)
            if self.args.should_save:
                self.save_position(checkpoint)
        if self.args.should_save:
            with run_write_errors(checkpoint):
                rotate(self.folder, self.recipe.training.keep_checkpoints, self.state.best_global_step)
        PartialState().wait_for_everyone()  # all ranks find the same checkpoints from here on

    def save_position(self, checkpoint: Path) -> None:
        """Write the files of a checkpoint that the Trainer does not write."""
        self.monitor.save(checkpoint)
        # without the best one's path, since the run's folder may move
        dataclasses.replace(self.state, best_model_checkpoint=None).save_to_json(str(checkpoint / STATE))
        if self.stream is not None:
            self.stream.save(checkpoint)
        if self.stopping.is_extra:
            (checkpoint / EXTRA).touch()

    # The end

    def _load_best_model(self) -> None:
        """Load the best weights, or where no checkpoint has been evaluated the last ones; a mean needs neither.

        They come from the run's folder and not from the path in the state, since the folder may have moved.
        """
        if self.recipe.training.average_last is None:
            step = self.state.best_global_step or self.state.global_step
            check_best(self.folder, step)
            best = checkpoint_at(self.folder, step)
            load_weights(self.model, checked_weights(self.model, best, best_fix(self.folder, step)))

    def results(self) -> dict[str, Any]:
        """Return what `results.json` says of training so far; every process must call."""
        history = self.state.log_history
        return {
            "name": self.recipe.name,
            "recipe": strip_local_paths(self.recipe),
            "commit": self.code,
            "versions": versions(),
            "hardware": hardware(self.args.device),
            "processes": self.args.world_size,
            "parameters": self.model.num_parameters(),
            "steps": self.state.global_step,
            "flops": self.state.total_flos,
            f"best_validation_{selection_metric(self.recipe).key}": self.state.best_metric,
            "curve": [entry for entry in history if "loss" in entry or "eval_loss" in entry],
            **{name: entry[name] for entry in history for name in ["averaged_steps"] if name in entry},
        }

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Publish the present model as `training.publish` does: in one commit, with its code and a card.

        The repository is `args.hub_model_id`, or the recipe's name. It gets no checkpoint and no `training_args.bin`.
        Of the other arguments only `license` has an effect; the card describes the run itself.

        Returns:
            The commit, or its future where `blocking` is False; None on all processes but the main one.
        """
        check_license(license := kwargs.get("license") or "apache-2.0")
        if not is_finite(list(self.model.parameters())):
            raise RunError(f"{self.recipe.name}: its weights are not finite; publish an earlier checkpoint.")
        results, weights = self.results() | self.last_validation(), self.accelerator.get_state_dict(self.model)
        if not self.is_world_process_zero():
            return None
        if self.hub_model_id is None:
            self.args.hub_model_id = self.args.hub_model_id or self.recipe.name
            self.init_hf_repo(token=token, private=private)
        api, repository = HfApi(token=token or self.args.hub_token), str(self.hub_model_id)
        folder = tempfile.TemporaryDirectory()
        write_repository(Path(folder.name), self.model, self.processing_class, results, repository, license, weights)
        settings = (repository, private, revision or self.args.hub_revision, commit_message or "End of training")
        commit = api.run_as_future(upload, api, Path(folder.name), *settings)
        commit.add_done_callback(lambda _: folder.cleanup())
        return commit.result() if blocking else commit

    def last_validation(self) -> dict[str, Any]:
        """Return `validation`, as in `results.json`, of the last evaluation in training, if this process had one."""
        evaluations = [entry for entry in self.state.log_history if "eval_loss" in entry]
        has_scores = evaluations and self.signature is not None  # a resumed run has the values alone
        return {"validation": self.scores_of(evaluations[-1], "eval")} if has_scores else {}
