"""Seq2SeqTrainer with the paper's batches, optimizer and schedule, and with evaluation by tokens and by task."""

import contextlib
import json
import logging
import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from huggingface_hub import HfApi
from torch.utils.data import DataLoader
from transformers import DataCollatorForSeq2Seq, PreTrainedTokenizerBase, Seq2SeqTrainingArguments
from transformers.trainer_utils import EvalLoopOutput, PredictionOutput, get_last_checkpoint

from training.callbacks import (
    GlancingCallback,
    KlScaleCallback,
    LogEveryCallback,
    LossTieBreaker,
    PeriodicCheckpointCallback,
    StreamEpochCallback,
    TimeLimitCallback,
)
from training.checkpoints import run_write_errors
from training.data.stream import PairStream
from training.data.tokenizing import NUMBER, lengths, make_encode_fn
from training.decoding import evaluation_config
from training.distributed import RunError, drop_tied_duplicates, shard
from training.divergence import DivergenceGuard, is_finite
from training.draws import add_glancing_draws, add_masks, pair_draws
from training.monitor.trainer import MonitoredTrainer
from training.optimizers import make_optimizer, make_schedule
from training.publish import check_license, upload, write_repository
from training.recipe import Recipe, to_dict
from training.report.results import commit, hardware, strip_local_paths, versions
from training.tasks import make_task, selection_metric
from vaswani_transformer.batching import TokenBudgetBatches, TokenBudgetBatchSampler
from vaswani_transformer.body import ProjectedModel

logger = logging.getLogger(__name__)
STREAM_FILE = "stream.json"  # in a checkpoint: its position in the stream


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


class RecipeTrainer(MonitoredTrainer):
    """A trainer that follows a recipe.

    Args:
        model: the model; its decoding is set from the recipe.
        args: the Trainer's arguments, from `training.train`.
        recipe: the run's recipe.
        tokenizer: the shared vocabulary.
        train_dataset: `input_ids` and `labels` of the training pairs, or a stream of them as text.
        validation: the same of the validation pairs, with their targets as text in `reference`.

    Attributes:
        search: how evaluations translate; during training with the recipe's faster settings for it.
        task: the recipe's task, which scores evaluations.
        signature: of the best metric in the last evaluation.
    """

    model: ProjectedModel
    args: Seq2SeqTrainingArguments

    def __init__(
        self,
        model: ProjectedModel,
        args: Seq2SeqTrainingArguments,
        recipe: Recipe,
        tokenizer: PreTrainedTokenizerBase,
        train_dataset: Dataset | PairStream,
        validation: Dataset,
    ) -> None:
        self.recipe, self.task = recipe, make_task(to_dict(recipe))
        self.stream = None
        if isinstance(train_dataset, PairStream):
            self.stream = stream_batches(train_dataset, recipe, args, tokenizer)
        self.search = evaluation_config(model, recipe)
        super().__init__(
            self.task.best_metric,
            recipe.kind,
            model=model,
            args=args,
            data_collator=DataCollatorForSeq2Seq(tokenizer, model),
            train_dataset=cast(Any, train_dataset if self.stream is None else self.stream),
            eval_dataset=cast(Any, validation),
            processing_class=tokenizer,
        )
        self.code = commit()
        # Checkpoints have a tied matrix once; the Trainer must know this to load them.
        model._keys_to_ignore_on_save = set(model.all_tied_weights_keys) or None
        if self.is_fsdp_enabled:
            shard(model, cast(Any, self.accelerator.state.fsdp_plugin))
        self.add_callback(LogEveryCallback(recipe.training.log_steps))
        if recipe.training.minutes is not None:
            self.add_callback(TimeLimitCallback(recipe.training.minutes, self.monitor))
        self.add_callback(
            PeriodicCheckpointCallback(recipe.training.checkpoint_steps, recipe.training.checkpoint_minutes)
        )
        selection = selection_metric(to_dict(recipe))
        if selection.greater_is_better:
            self.add_callback(LossTieBreaker(selection.key))
        if recipe.training.glancing is not None:
            steps = recipe.training.glancing_steps or recipe.training.steps
            self.add_callback(GlancingCallback(cast(Any, model), *recipe.training.glancing, steps))
        if "kl_scale" in recipe.kind.training:
            steps = recipe.training.kl_warmup_steps
            self.add_callback(KlScaleCallback(cast(Any, model), recipe.training.kl_scale, steps))
        if self.stream is not None:
            self.add_callback(StreamEpochCallback(self.stream))
        self.guard = DivergenceGuard(recipe.training, tokenizer, args.device)
        self.add_callback(self.guard)  # after the callbacks that ask for an evaluation or a checkpoint

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train; a resumed stream continues at the checkpoint's position."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = get_last_checkpoint(cast(str, self.args.output_dir))
        if self.stream is not None and resume_from_checkpoint:
            position = (Path(resume_from_checkpoint) / STREAM_FILE).read_text(encoding="utf-8")
            self.stream.load_state_dict(json.loads(position))
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model, and in a checkpoint the position in the stream."""
        super().save_model(output_dir, _internal_call)
        if self.stream is not None and _internal_call and output_dir is not None and self.args.should_save:
            (Path(output_dir) / STREAM_FILE).write_text(json.dumps(self.stream.state_dict()), encoding="utf-8")

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
        api, repository = HfApi(token=token or self.args.hub_token), cast(str, self.hub_model_id)
        folder = tempfile.TemporaryDirectory()
        write_repository(Path(folder.name), self.model, cast(Any, self.processing_class), results, repository, license)
        settings = (repository, private, revision or self.args.hub_revision, commit_message or "End of training")
        commit = api.run_as_future(upload, api, Path(folder.name), *settings)
        commit.add_done_callback(lambda _: folder.cleanup())
        return commit.result() if blocking else commit

    def last_validation(self) -> dict[str, Any]:
        """Return `validation`, as in `results.json`, of the last evaluation in training, if there was one."""
        found = [entry for entry in self.state.log_history if "eval_loss" in entry]
        if not found:
            return {}
        scores = {name: found[-1][f"eval_{name}"] for name in self.metric_names}
        return {"validation": scores | {"signature": self.signature}}

    @property
    def metric_names(self) -> list[str]:
        """The metrics of an evaluation; a likelihood at gold length, position by position, is no perplexity."""
        likelihoods = ["loss"] if self.kind.is_parallel else ["loss", "perplexity"]
        return [*likelihoods, self.task.best_metric.key]

    def get_train_dataloader(self) -> DataLoader:
        """Return this rank's batches by token budget; the epoch comes from the state, also in a resumed run."""
        if self.stream is not None:
            return self.stream_loader(self.stream)
        dataset = cast(Dataset, self.train_dataset)
        sampler = TokenBudgetBatchSampler(
            lengths(dataset, "input_ids"),
            lengths(dataset, "labels"),
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
        return self.loader(dataset, sampler)

    def stream_loader(self, batches: TokenBudgetBatches) -> DataLoader:
        """Return a loader that reads in this process, which must know the position at every step."""
        return DataLoader(
            batches,
            batch_size=None,
            collate_fn=cast(Callable, self.data_collator),
            generator=torch.Generator(),  # as in `loader`
            pin_memory=self.args.dataloader_pin_memory and torch.accelerator.is_available(),
        )

    def loader(self, dataset: Dataset, batches: Any) -> DataLoader:
        """Return a loader of batches of the numeric columns.

        A loader draws a seed when it starts. Its separate generator keeps training's random numbers independent of
        evaluations.
        """
        return DataLoader(
            cast(Any, dataset.remove_columns([name for name in dataset.column_names if name == "reference"])),
            batch_sampler=batches,
            collate_fn=cast(Callable, self.data_collator),
            generator=torch.Generator(),
            num_workers=self.args.dataloader_num_workers,
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
        batches = map(self.add_random_choices, epoch_iterator)  # before the tokens to learn are counted
        return super().get_batch_samples(batches, num_batches, torch.device("cpu") if has_all else device)

    def add_random_choices(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return a batch with CMLM's masks, or with the numbers by which GLAT chooses what it shows."""
        if not self.kind.needs_mask and self.recipe.training.glancing is None:
            return batch
        draws = pair_draws(batch, self.recipe.seed, self.state.global_step)
        if not self.kind.needs_mask:
            return add_glancing_draws(batch, draws)
        tokenizer = cast(Any, self.processing_class)
        return add_masks(batch, draws, tokenizer.mask_token_id, tokenizer.pad_token_id)

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
        """Save a checkpoint; a failed write becomes one line."""
        with run_write_errors(Path(cast(str, self.args.output_dir)) / f"checkpoint-{self.state.global_step}"):
            super()._save_checkpoint(model, trial)

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
            optimizer = cast(torch.optim.Optimizer, optimizer or self.optimizer)
            self.lr_scheduler = make_schedule(self.recipe.training, optimizer, self.model.config.d_model)
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Return this rank's batches by length; all ranks have the same number, so one batch may occur twice."""
        dataset = cast(Dataset, self.eval_dataset if eval_dataset is None else eval_dataset)
        order = sorted(range(len(dataset)), key=lengths(dataset, "input_ids").__getitem__, reverse=True)
        size = self.args.per_device_eval_batch_size
        batches = [order[start : start + size] for start in range(0, len(order), size)]
        rounds = math.ceil(len(batches) / self.args.world_size)
        rank_batches = [self.args.process_index + turn * self.args.world_size for turn in range(rounds)]
        numbered = dataset.add_column("pair", cast(Any, list(range(len(dataset)))))
        return self.loader(numbered, [batches[index % len(batches)] for index in rank_batches])

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        """Return the loader of an evaluation."""
        return self.get_eval_dataloader(test_dataset)

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
        **gen_kwargs: Any,
    ) -> dict[str, float]:
        """Return `metric_names` of a set; see `evaluation_loop`."""
        self.evaluated = cast(Dataset, self.eval_dataset if eval_dataset is None else eval_dataset)
        return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix, **gen_kwargs)

    def predict(
        self,
        test_dataset: Any,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "test",
        **gen_kwargs: Any,
    ) -> PredictionOutput:
        """Return the same, with the hypotheses as text in `predictions`."""
        self.evaluated = cast(Dataset, test_dataset)
        return super().predict(test_dataset, ignore_keys, metric_key_prefix, **gen_kwargs)

    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Return `metric_names`, the first of a target token, over all pairs on all ranks, each once.

        The Trainer's own loop averages over sentences, and counts some sentences twice on several ranks.
        """
        self.model.eval()
        self.callback_handler.eval_dataloader = dataloader
        outputs: dict[int, tuple[float, int, str, dict[str, float]]] = {}
        for batch in dataloader:
            pairs = batch.pop("pair").tolist()
            outputs |= zip(pairs, self.translate(self._prepare_inputs(batch)), strict=True)
            self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
        everything = dict(gather_object(list(outputs.items())))
        losses, tokens, texts, figures = zip(*(everything[pair] for pair in range(len(everything))), strict=True)
        loss = sum(losses) / sum(tokens)
        if self.is_in_train and not math.isfinite(loss):
            run = Path(cast(str, self.args.output_dir)).parent
            self.guard.stop(f"step {self.state.global_step}: the validation loss is {loss}", run)
        score = self.task.evaluate(list(texts), self.evaluated["reference"][:])
        best = self.task.best_metric
        self.signature = score[best.signature_key]
        metrics = {"loss": loss, "perplexity": math.exp(min(loss, 700)), best.key: score[best.key]}
        metrics = {name: metrics[name] for name in self.metric_names}
        metrics |= {name: sum(pair[name] for pair in figures) / sum(tokens) for name in figures[0]}
        return EvalLoopOutput(
            predictions=cast(Any, list(texts)),
            label_ids=None,
            metrics={f"{metric_key_prefix}_{name}": value for name, value in metrics.items()},
            num_samples=len(texts),
        )

    @torch.no_grad()
    def translate(self, inputs: dict[str, torch.Tensor]) -> list[tuple[float, int, str, dict[str, float]]]:
        """Return for each pair of a batch the summed loss of its target, the target's tokens, a hypothesis, figures."""
        labels, model = inputs["labels"], cast(Any, self.model)
        model_inputs = {name: tensor for name, tensor in inputs.items() if name != "labels"}
        if self.kind.is_parallel:
            model_inputs["decoder_attention_mask"] = labels.ne(-100).long()  # the reference's length, and no word of it
        with self.accelerator.autocast():  # without labels, or the loss would be computed twice
            logits = model(**model_inputs, use_cache=False).logits  # (B, T, V)
            figures = {name: values.tolist() for name, values in self.sentence_figures(logits, inputs).items()}
        losses = sentence_losses(logits, labels)
        del logits  # frees memory for the search
        with self.accelerator.autocast():
            if self.is_fsdp_enabled:  # the search calls the embeddings outside the model's forward
                model.unshard()
            translations = model.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                generation_config=self.search,
                synced_gpus=self.is_fsdp_enabled,  # all ranks must call a layer to gather it
            )
        texts = cast(Any, self.processing_class).batch_decode(translations, skip_special_tokens=True)
        by_pair = [{name: values[row] for name, values in figures.items()} for row in range(len(texts))]
        return list(zip(losses.tolist(), labels.ne(-100).sum(1).tolist(), texts, by_pair, strict=True))

    def sentence_figures(self, logits: torch.Tensor, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return what evaluations log besides loss and metric, by name, summed over the tokens of each target (B,)."""
        return {}


def sentence_losses(logits: torch.Tensor, labels: torch.Tensor, rows: int = 8) -> torch.Tensor:
    """Return the summed loss (B,) of targets `labels` (B, T), -100 for none, under `logits` (B, T, V).

    It is computed in float32 for `rows` rows at a time, since all rows at once need several copies of the logits.
    """
    chunks = zip(logits.split(rows), labels.split(rows), strict=True)
    losses = [
        torch.nn.functional.cross_entropy(chunk.float().transpose(1, 2), targets, reduction="none").sum(1)
        for chunk, targets in chunks
    ]
    return torch.cat(losses)
