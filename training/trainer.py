"""Seq2SeqTrainer with the paper's batches, optimiser and schedule, and with validation counted in tokens and BLEU."""

import logging
import math
import time
from collections.abc import Callable
from typing import Any, cast

import pyarrow.compute as pc
import torch
from accelerate.utils import broadcast_object_list, gather_object
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import (
    DataCollatorForSeq2Seq,
    GenerationConfig,
    PreTrainedTokenizerBase,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_utils import EvalLoopOutput, PredictionOutput

from training.metrics import bleu
from training.recipe import Recipe
from vaswani_transformer import VaswaniTransformerForConditionalGeneration
from vaswani_transformer.optimization import TokenBudgetBatchSampler, paper_adam, paper_schedule

logger = logging.getLogger(__name__)


def elapsed(since: float) -> float:
    """Seconds since a reading of the main process's clock, the same on every rank, which must act together."""
    return broadcast_object_list([time.monotonic() - since])[0]


class StopAfterMinutes(TrainerCallback):
    """Ends a run at the first step after `minutes` of training; a run that is resumed starts the clock anew."""

    def __init__(self, minutes: float) -> None:
        self.seconds = 60 * minutes
        self.start = time.monotonic()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.start = time.monotonic()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if elapsed(self.start) > self.seconds:
            control.should_evaluate = control.should_save = control.should_training_stop = True


class FurtherCheckpoints(TrainerCallback):
    """Has checkpoints written every so many steps or minutes, beside those that follow evaluations."""

    def __init__(self, steps: int | None, minutes: float | None) -> None:
        self.steps = steps
        self.seconds = None if minutes is None else 60 * minutes
        self.last = time.monotonic()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.last = time.monotonic()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        is_due = self.steps is not None and state.global_step % self.steps == 0
        if is_due or (self.seconds is not None and elapsed(self.last) > self.seconds):
            control.should_save = True


def accumulation(recipe: Recipe, num_processes: int) -> int:
    """The forward passes that a rank's share of a step takes, so that each keeps to `device_tokens`."""
    tokens = max(recipe.training.source_tokens, recipe.training.target_tokens)
    return math.ceil(tokens / (num_processes * recipe.training.device_tokens))


class TranslationTrainer(Seq2SeqTrainer):
    """Trains as the recipe says.

    Args:
        model: the model; its decoding is set from the recipe.
        args: the Trainer's arguments, made by `training.train`.
        recipe: the run's recipe.
        tokenizer: the shared vocabulary.
        train_dataset: `input_ids` and `labels` of the training pairs.
        validation: the same of the validation pairs, with their targets as text in `reference`.

    Attributes:
        search: how evaluations translate; during training with the recipe's `evaluation_beams`.
    """

    model: VaswaniTransformerForConditionalGeneration
    args: Seq2SeqTrainingArguments

    def __init__(
        self,
        model: VaswaniTransformerForConditionalGeneration,
        args: Seq2SeqTrainingArguments,
        recipe: Recipe,
        tokenizer: PreTrainedTokenizerBase,
        train_dataset: Dataset,
        validation: Dataset,
    ) -> None:
        self.recipe = recipe
        self.search = decoding_config(model, recipe, recipe.training.evaluation_beams)
        super().__init__(
            model=model,
            args=args,
            data_collator=DataCollatorForSeq2Seq(tokenizer, model),
            train_dataset=cast(Any, train_dataset),
            eval_dataset=cast(Any, validation),
            processing_class=tokenizer,
        )
        if recipe.training.minutes is not None:
            self.add_callback(StopAfterMinutes(recipe.training.minutes))
        self.add_callback(FurtherCheckpoints(recipe.training.checkpoint_steps, recipe.training.checkpoint_minutes))

    def get_train_dataloader(self) -> DataLoader:
        """Batches of this rank alone, by token budget; the epoch is read from the state, also after a resumption."""
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

    def loader(self, dataset: Dataset, batches: Any) -> DataLoader:
        """Batches of the columns that hold numbers."""
        return DataLoader(
            cast(Any, dataset.remove_columns([name for name in dataset.column_names if name == "reference"])),
            batch_sampler=batches,
            collate_fn=cast(Callable, self.data_collator),
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory and torch.accelerator.is_available(),
        )

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """The paper's Adam (5.3)."""
        if self.optimizer is None:
            self.optimizer = paper_adam((self.model if model is None else model).parameters())
        return self.optimizer

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LambdaLR:
        """Equation (3), which no number of steps shortens."""
        if self.lr_scheduler is None:
            training = self.recipe.training
            self.lr_scheduler = paper_schedule(
                cast(torch.optim.Optimizer, optimizer or self.optimizer),
                self.model.config.d_model,
                training.warmup_steps,
                training.learning_rate_scale,
            )
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Batches of this rank alone, by length; every rank has the same number, some perhaps one of them twice."""
        dataset = cast(Dataset, self.eval_dataset if eval_dataset is None else eval_dataset)
        order = sorted(range(len(dataset)), key=lengths(dataset, "input_ids").__getitem__, reverse=True)
        size = self.args.per_device_eval_batch_size
        batches = [order[start : start + size] for start in range(0, len(order), size)]
        rounds = math.ceil(len(batches) / self.args.world_size)
        own = [self.args.process_index + turn * self.args.world_size for turn in range(rounds)]
        numbered = dataset.add_column("pair", cast(Any, list(range(len(dataset)))))
        return self.loader(numbered, [batches[index % len(batches)] for index in own])

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        """As for an evaluation."""
        return self.get_eval_dataloader(test_dataset)

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
        **gen_kwargs: Any,
    ) -> dict[str, float]:
        """Loss, perplexity and BLEU of a set; see `evaluation_loop`."""
        self.evaluated = cast(Dataset, self.eval_dataset if eval_dataset is None else eval_dataset)
        return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix, **gen_kwargs)

    def predict(
        self,
        test_dataset: Any,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "test",
        **gen_kwargs: Any,
    ) -> PredictionOutput:
        """The same with the translations, as text, in `predictions`."""
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
        """Loss and perplexity of a target token, and BLEU, over all pairs on all ranks, each pair counted once.

        The Trainer's own loop averages batches by sentences, and counts some sentences twice on several ranks.
        """
        self.model.eval()
        self.callback_handler.eval_dataloader = dataloader
        found: dict[int, tuple[float, int, str]] = {}
        for batch in dataloader:
            pairs = batch.pop("pair").tolist()
            found |= zip(pairs, self.translate(self._prepare_inputs(batch)), strict=True)
            self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
        everything = dict(gather_object(list(found.items())))
        losses, tokens, texts = zip(*(everything[pair] for pair in range(len(everything))), strict=True)
        loss = sum(losses) / sum(tokens)
        score = bleu(list(texts), self.evaluated["reference"][:], self.recipe.score.tokenize)
        metrics = {"loss": loss, "perplexity": math.exp(min(loss, 700)), "bleu": score["bleu"]}
        return EvalLoopOutput(
            predictions=cast(Any, list(texts)),
            label_ids=None,
            metrics={f"{metric_key_prefix}_{name}": value for name, value in metrics.items()},
            num_samples=len(texts),
        )

    @torch.no_grad()
    def translate(self, inputs: dict[str, torch.Tensor]) -> list[tuple[float, int, str]]:
        """For each pair of a batch the summed loss of its target, the target's tokens, and a translation."""
        labels = inputs["labels"]
        with self.accelerator.autocast():
            logits = self.model(**inputs).logits  # (B, T, V)
            translations = cast(Any, self.model).generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                generation_config=self.search,
            )
        losses = torch.nn.functional.cross_entropy(logits.float().transpose(1, 2), labels, reduction="none").sum(1)
        texts = cast(Any, self.processing_class).batch_decode(translations, skip_special_tokens=True)
        return list(zip(losses.tolist(), labels.ne(-100).sum(1).tolist(), texts, strict=True))


def lengths(dataset: Dataset, column: str) -> list[int]:
    """The tokens of each row of a column."""
    table = dataset.select_columns([column]).with_format("arrow")[:]
    return cast(Any, pc).list_value_length(table.column(column)).to_pylist()


def decoding_config(
    model: VaswaniTransformerForConditionalGeneration, recipe: Recipe, num_beams: int | None = None
) -> GenerationConfig:
    """A fresh GenerationConfig with the recipe's search: one that is edited in place loses the paper's settings."""
    search = vars(recipe.decoding) | ({} if num_beams is None else {"num_beams": num_beams})
    if search["num_beams"] == 1:
        del search["length_penalty"]
    return GenerationConfig(
        bos_token_id=model.config.bos_token_id,
        pad_token_id=model.config.pad_token_id,
        eos_token_id=model.config.eos_token_id,
        decoder_start_token_id=model.config.decoder_start_token_id,
        **search,
    )
