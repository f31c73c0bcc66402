"""Seq2SeqTrainer with the paper's batches, optimizer and schedule, and with evaluation by tokens and by task."""

import contextlib
import dataclasses
import json
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import PartialState
from datasets import Dataset
from huggingface_hub import HfApi
from torch.utils.data import DataLoader
from transformers import DataCollatorForSeq2Seq, PreTrainedTokenizerBase, Seq2SeqTrainingArguments

from training.data.stream import PairStream
from training.data.tokenizing import NUMBER, make_encode_fn
from training.publish import upload, write_repository
from training.recipe.decoding import evaluation_config
from training.recipe.families import TrainedModel
from training.recipe.fields import Recipe, to_dict
from training.report.licenses import check_license
from training.report.results import commit, hardware, strip_local_paths, versions
from training.run.checkpoints import (
    STATE,
    best_fix,
    changed_file,
    checkpoint_at,
    checkpoints_folder,
    fix_of,
    last_checkpoint,
    read_weights,
    rotate,
    run_write_errors,
    writing,
)
from training.run.distributed import RunError, check_weights, drop_tied_duplicates, load_weights, shard
from training.tasks import make_task, selection_metric
from training.trainer.callbacks import (
    DivergenceModel,
    GlancingCallback,
    KlScaleCallback,
    LogEveryCallback,
    LossTieBreaker,
    PeriodicCheckpointCallback,
    StreamEpochCallback,
    TimeLimitCallback,
)
from training.trainer.divergence import DivergenceGuard, is_finite
from training.trainer.draws import add_glancing_draws, add_latent_draws, add_masks, pair_draws
from training.trainer.evaluation import EvaluatingTrainer
from training.trainer.flow_start import FlowStart
from training.trainer.optimizers import make_optimizer, make_schedule
from vaswani_transformer import (
    VaswaniFlowSeqForConditionalGeneration,
    VaswaniNatForConditionalGeneration,
)
from vaswani_transformer.batching import PairCollator, PairTokens, TokenBudgetBatches, TokenBudgetBatchSampler
from vaswani_transformer.batching.prefetch import PrefetchingLoader
from vaswani_transformer.support.files import read_json

logger = logging.getLogger(__name__)
STREAM_FILE = "stream.json"  # in a checkpoint: its position in the stream


def read_stream(checkpoint: Path) -> dict[str, Any]:
    """Return a checkpoint's position in the stream, and the fingerprints of the pairs up to it.

    Raises:
        UserError: they cannot be read.
    """
    return read_json(checkpoint / STREAM_FILE, fix_of(checkpoint), position=dict, pairs=dict)


def stream_batches(
    pairs: PairStream, recipe: Recipe, args: Seq2SeqTrainingArguments, tokenizer: PreTrainedTokenizerBase
) -> TokenBudgetBatches:
    """Return this rank's batches of a stream, by token budget."""
    return TokenBudgetBatches(
        pairs,
        recipe.training.source_tokens,
        recipe.training.target_tokens,
        num_processes=args.world_size,
        rank=args.process_index,
        accumulation=args.gradient_accumulation_steps,
        seed=recipe.seed,
        buffer_size=recipe.data.buffer,
        max_length=recipe.data.max_length,
        too_long="error" if recipe.data.too_long == "error" else "drop",
        encode=make_encode_fn(tokenizer, recipe.data),
    )


class RecipeTrainer(EvaluatingTrainer):
    """A trainer that follows a recipe.

    Args:
        model: the model; its decoding is set from the recipe.
        args: the Trainer's arguments, from `training.train`.
        recipe: the run's recipe.
        tokenizer: the shared vocabulary.
        train_dataset: `input_ids` and `labels` of the training pairs, or a stream of them as text.
        validation: the same of the validation pairs, with their targets as text in `reference`.
    """

    train_dataset: Dataset | TokenBudgetBatches

    def __init__(
        self,
        model: TrainedModel,
        args: Seq2SeqTrainingArguments,
        recipe: Recipe,
        tokenizer: PreTrainedTokenizerBase,
        train_dataset: Dataset | PairStream,
        validation: Dataset,
    ) -> None:
        self.recipe, self.task = recipe, make_task(to_dict(recipe))
        self.batch_tokens = recipe.training.evaluation_batch_size * recipe.data.max_length
        self.stream = None
        if isinstance(train_dataset, PairStream):
            self.stream_pairs = train_dataset
            self.stream = stream_batches(train_dataset, recipe, args, tokenizer)
        self.search = evaluation_config(model, recipe, tokenizer)
        self.constraint = self.task.constraint(model, tokenizer)
        super().__init__(
            self.task.best_metric,
            recipe.family,
            model=model,
            args=args,
            data_collator=DataCollatorForSeq2Seq(tokenizer, model),
            train_dataset=train_dataset if self.stream is None else self.stream,
            eval_dataset=validation,
            processing_class=tokenizer,
        )
        self.code = commit()
        # Checkpoints have a tied matrix once; the Trainer needs these names to load them.
        model._keys_to_ignore_on_save = set(model.all_tied_weights_keys) or None
        self.flow_start = None
        if isinstance(model, VaswaniFlowSeqForConditionalGeneration):
            self.flow_start = FlowStart(model, recipe.training.decoder_steps, args.device)
        if (plugin := getattr(self.accelerator.state, "fsdp_plugin", None)) is not None:
            shard(model, plugin)
        self.guard = DivergenceGuard(recipe.training, tokenizer, args.device)
        self.add_recipe_callbacks(model)

    def add_recipe_callbacks(self, model: TrainedModel) -> None:
        """Add the callbacks of the log, the limits, the checkpoints, the model's kind, the stream and the guard."""
        training, selection = self.recipe.training, selection_metric(to_dict(self.recipe))
        self.add_callback(LogEveryCallback(training.log_steps))
        if training.minutes is not None:
            self.monitor.time_limit = 60 * training.minutes
            self.add_callback(TimeLimitCallback(training.minutes, self.monitor))
        self.add_callback(PeriodicCheckpointCallback(training.checkpoint_steps, training.checkpoint_minutes))
        if selection.greater_is_better:
            self.add_callback(LossTieBreaker(selection.key))
        if training.glancing is not None and isinstance(model, VaswaniNatForConditionalGeneration):
            steps = training.glancing_steps or training.steps
            self.add_callback(GlancingCallback(model, *training.glancing, steps))
        if isinstance(model, DivergenceModel):
            steps = training.kl_warmup_steps or self.family.defaults["kl_warmup_steps"]
            first = 0 if self.flow_start is None else training.decoder_steps - 1
            self.add_callback(KlScaleCallback(model, training.kl_scale, steps, first))
        if self.stream is not None:
            self.add_callback(StreamEpochCallback(self.stream))
        self.add_callback(self.guard)  # after the callbacks that request an evaluation or a checkpoint

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train; a resumed stream continues at the checkpoint's position."""
        if resume_from_checkpoint is True:
            checkpoint = last_checkpoint(self.folder)
            resume_from_checkpoint = None if checkpoint is None else str(checkpoint)
        if self.stream is not None and resume_from_checkpoint:
            state = read_stream(Path(resume_from_checkpoint))
            self.stream.load_state_dict(state["position"])
            self.stream_pairs.load_state_dict(state["pairs"], skipped=state["position"]["items"])
        return super().train(resume_from_checkpoint, *args, **kwargs)

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return checkpoints_folder(self.args).parent

    def checked_weights(self, folder: Path, fix: str) -> dict[str, torch.Tensor]:
        """Return the weights in a folder of the run: exactly those of its model, all finite; `fix` ends the message.

        Raises:
            UserError: they are others, or cannot be read.
        """
        weights = read_weights(folder, fix)
        check_weights(self.model, weights, str(folder), fix)
        return weights

    def load_best(self) -> None:
        """Load the weights of the best checkpoint, or where no checkpoint has been evaluated of the last one.

        Raises:
            UserError: they cannot be used.
        """
        step = self.state.best_global_step or self.state.global_step
        best, fix = checkpoint_at(self.folder, step), best_fix(self.folder, step)
        if (name := changed_file(best)) is not None:
            raise RunError(f"{best / name}: is not as training wrote it; {fix}")
        load_weights(self.model, self.checked_weights(best, fix))

    def _load_best_model(self) -> None:
        """Load the best weights at the end of training, not from the path in the state: the folder may have moved."""
        self.load_best()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model, and in a checkpoint the position in the stream with the fingerprint of the pairs up to it."""
        super().save_model(output_dir, _internal_call)
        if self.stream is not None and _internal_call and output_dir is not None and self.args.should_save:
            state = {"position": self.stream.state_dict(), "pairs": self.stream_pairs.state_dict()}
            (Path(output_dir) / STREAM_FILE).write_text(json.dumps(state), encoding="utf-8")

    def results(self) -> dict[str, Any]:
        """Return what `results.json` says of training so far; every process must call."""
        return {
            "name": self.recipe.name,
            "recipe": strip_local_paths(to_dict(self.recipe)),
            "commit": self.code,
            "versions": versions(),
            "hardware": hardware(self.args.device),
            "processes": self.args.world_size,
            "parameters": self.model.num_parameters(),
            "steps": self.state.global_step,
            "flops": self.state.total_flos,
            f"best_validation_{selection_metric(to_dict(self.recipe)).key}": self.state.best_metric,
            "curve": [entry for entry in self.state.log_history if "loss" in entry or "eval_loss" in entry],
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
        results = self.results() | self.last_validation()
        if not self.is_world_process_zero():
            return None
        if self.hub_model_id is None:
            self.args.hub_model_id = self.args.hub_model_id or self.recipe.name
            self.init_hf_repo(token=token, private=private)
        api, repository = HfApi(token=token or self.args.hub_token), str(self.hub_model_id)
        folder = tempfile.TemporaryDirectory()
        write_repository(Path(folder.name), self.model, self.processing_class, results, repository, license)
        settings = (repository, private, revision or self.args.hub_revision, commit_message or "End of training")
        commit = api.run_as_future(upload, api, Path(folder.name), *settings)
        commit.add_done_callback(lambda _: folder.cleanup())
        return commit.result() if blocking else commit

    def last_validation(self) -> dict[str, Any]:
        """Return `validation`, as in `results.json`, of the last evaluation in training, if there was one."""
        evaluations = [entry for entry in self.state.log_history if "eval_loss" in entry]
        if not evaluations:
            return {}
        scores = {name: evaluations[-1][f"eval_{name}"] for name in self.metric_names}
        return {"validation": scores | {"signature": self.signature}}

    def get_train_dataloader(self) -> DataLoader:
        """Return this rank's batches by token budget; the epoch comes from the state, also in a resumed run."""
        dataset = self.train_dataset
        if isinstance(dataset, TokenBudgetBatches):
            return self.stream_loader(dataset)
        pairs = PairTokens(dataset)
        sampler = TokenBudgetBatchSampler(
            pairs.source_lengths,
            pairs.target_lengths,
            self.recipe.training.source_tokens,
            self.recipe.training.target_tokens,
            num_processes=self.args.world_size,
            rank=self.args.process_index,
            accumulation=self.args.gradient_accumulation_steps,
            seed=self.recipe.seed,
        )
        steps = len(sampler) // self.args.gradient_accumulation_steps
        sampler.epoch = lambda: self.state.global_step // steps
        logger.info("%d pairs in %d steps an epoch, %.1f%% padding.", len(dataset), steps, 100 * sampler.padding_share)
        return PrefetchingLoader(
            pairs,
            batch_sampler=sampler,
            collate_fn=cast(Any, PairCollator(self.processing_class, self.model)),
            generator=torch.Generator(),  # as in `loader`
            pin_memory=self.args.dataloader_pin_memory and torch.accelerator.is_available(),
        )

    def stream_loader(self, batches: TokenBudgetBatches) -> DataLoader:
        """Return a loader that reads in this process, because the position must be exact at every step."""
        return DataLoader(
            batches,
            batch_size=None,
            collate_fn=self.data_collator,
            generator=torch.Generator(),  # as in `loader`
            pin_memory=self.args.dataloader_pin_memory and torch.accelerator.is_available(),
        )

    def training_step(
        self, model: torch.nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Run forward and backward, and note the pairs for the guard; a loss that is not finite counts as 0."""
        numbers = inputs.pop(NUMBER, None)
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.guard.add(numbers, inputs["input_ids"][0], loss)
        return loss.nan_to_num(0.0, 0.0, 0.0)

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Any = None) -> Any:
        """Return the norm of a step's gradient, after the guard has inspected it."""
        norm = super()._get_grad_norm(model, grad_norm)
        self.guard.inspect(norm)
        return norm

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device) -> tuple[list, Any]:
        """Count a step's tokens to learn on the host where one device has them all: no step waits for their copy."""
        has_all = self.args.world_size == 1 and self.args.n_gpu <= 1
        choices = map(self.add_random_choices, epoch_iterator)  # before the tokens to learn are counted
        batches, items = super().get_batch_samples(choices, num_batches, torch.device("cpu") if has_all else device)
        if self.flow_start is not None:
            self.flow_start(self.state.global_step, batches, self.accelerator.autocast())
        return batches, items

    def add_random_choices(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return a batch with CMLM's masks, or the numbers by which GLAT shows words and FlowSeq draws latents."""
        if self.flow_start is not None:
            return add_latent_draws(batch, self.recipe.seed, self.state.global_step, self.model.config.d_model)
        if not self.family.needs_mask and self.recipe.training.glancing is None:
            return batch
        draws = pair_draws(batch, self.recipe.seed, self.state.global_step)
        if not self.family.needs_mask:
            return add_glancing_draws(batch, draws)
        return add_masks(batch, draws, self.processing_class.mask_token_id, self.processing_class.pad_token_id)

    def _prepare_input(self, data: Any) -> Any:
        """Copy a batch to the device without waiting until the device is idle, as the Trainer does."""
        if isinstance(data, torch.Tensor):
            return data.to(self.args.device, non_blocking=True)
        return super()._prepare_input(data)

    def compute_loss_context_manager(self) -> contextlib.ExitStack:
        """Autocast a sharded model too, whose forward Accelerate does not wrap."""
        stack = super().compute_loss_context_manager()
        if self.is_fsdp_enabled:
            stack.enter_context(self.accelerator.autocast())
        return stack

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """Save a checkpoint, and delete older ones; a failed write becomes one line."""
        checkpoint = checkpoint_at(self.folder, self.state.global_step)
        with run_write_errors(checkpoint), writing(checkpoint):
            super()._save_checkpoint(model, trial)
            if self.args.should_save:  # without the best one's path, since the run's folder may move
                dataclasses.replace(self.state, best_model_checkpoint=None).save_to_json(str(checkpoint / STATE))
        if self.args.should_save:
            rotate(self.folder, self.recipe.training.keep_checkpoints, self.state.best_global_step)
        PartialState().wait_for_everyone()  # all ranks find the same checkpoints from here on

    def _save(self, output_dir: str | None = None, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        """Save the model with a tied matrix once."""
        super()._save(output_dir, None if state_dict is None else drop_tied_duplicates(state_dict, self.model))

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """Return the recipe's optimizer."""
        if self.optimizer is None:
            parameters = (self.model if model is None else model).parameters()
            self.optimizer = make_optimizer(self.recipe.training, parameters)
            self.guard.guard(self.optimizer)
        return self.optimizer

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LambdaLR:
        """Return the learning rate of the recipe's optimizer."""
        if self.lr_scheduler is None:
            optimizer = optimizer or self.create_optimizer()
            self.lr_scheduler = make_schedule(self.recipe.training, optimizer, self.model.config.d_model)
            self._created_lr_scheduler = True
        return self.lr_scheduler
