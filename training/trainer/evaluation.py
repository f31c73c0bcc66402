"""A trainer whose evaluations count tokens instead of sentences, translate, and score by the recipe's task.

B batch, T target, V vocabulary.
"""

import math
from typing import Any, cast

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader
from transformers import GenerationConfig, LogitsProcessor, PreTrainedTokenizerBase, Seq2SeqTrainingArguments
from transformers.trainer_utils import EvalLoopOutput, PredictionOutput

from training.data.tokenizing import TEXTS, lengths
from training.monitor.trainer import MonitoredTrainer
from training.run.checkpoints import checkpoints_folder
from training.tasks import Task
from training.trainer.divergence import DivergenceGuard
from vaswani_transformer.generation_settings import CallSettings
from vaswani_transformer.translation.engine import Constraint


def sentence_losses(logits: torch.Tensor, labels: torch.Tensor, rows: int = 8) -> torch.Tensor:
    """Return the summed loss (B,) of targets `labels` (B, T), -100 for none, under `logits` (B, T, V).

    It is computed in float32 for `rows` rows at a time, because all rows together would need several copies of the
    logits.
    """
    chunks = zip(logits.split(rows), labels.split(rows), strict=True)
    losses = [
        torch.nn.functional.cross_entropy(chunk.float().transpose(1, 2), targets, reduction="none").sum(1)
        for chunk, targets in chunks
    ]
    return torch.cat(losses)


def evaluation_batches(sources: list[int], targets: list[int], size: int, tokens: int) -> list[list[int]]:
    """Return the numbers of pairs in batches, the longest source first.

    A batch has at most `size` pairs, and on each side at most `tokens` positions, padding included. A longer pair is a
    separate batch.
    """
    batches: list[list[int]] = []
    longest = 0
    for pair in sorted(range(len(sources)), key=sources.__getitem__, reverse=True):
        longest = max(longest, sources[pair], targets[pair])
        if not batches or len(batches[-1]) == size or (len(batches[-1]) + 1) * longest > tokens:
            batches.append([])
            longest = max(sources[pair], targets[pair])
        batches[-1].append(pair)
    return batches


class EvaluatingTrainer(MonitoredTrainer):
    """A monitored trainer with evaluation by tokens and by task; a subclass sets the attributes.

    Attributes:
        search: how evaluations translate; during training with the recipe's faster settings for it.
        task: the recipe's task, which scores evaluations.
        constraint: excludes malformed targets from the search; None if nothing does.
        batch_tokens: the positions of a batch of an evaluation, on each side.
        signature: of the best metric in the last evaluation.
        evaluated: the pairs of the present evaluation.
        guard: ends a run whose validation loss is not finite.
    """

    args: Seq2SeqTrainingArguments
    processing_class: PreTrainedTokenizerBase
    eval_dataset: Dataset
    evaluated: Dataset
    search: GenerationConfig
    task: Task
    constraint: Constraint | None
    batch_tokens: int
    signature: str
    guard: DivergenceGuard

    @property
    def metric_names(self) -> list[str]:
        """The metrics of an evaluation; a likelihood at gold length, position by position, is no perplexity."""
        likelihoods = ["loss"] if not self.family.is_autoregressive else ["loss", "perplexity"]
        return [*likelihoods, self.task.best_metric.key]

    def loader(self, dataset: Dataset, batches: Any) -> DataLoader:
        """Return a loader of batches of the numeric columns.

        A loader draws a seed when it starts. Its separate generator keeps training's random numbers independent of
        evaluations.
        """
        return DataLoader(
            dataset.remove_columns([name for name in dataset.column_names if name in TEXTS]),
            batch_sampler=batches,
            collate_fn=self.data_collator,
            generator=torch.Generator(),
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory and torch.accelerator.is_available(),
        )

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Return this rank's batches by length; all ranks have the same number, so one batch may occur twice."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        sides = (lengths(dataset, name).tolist() for name in ("input_ids", "labels"))
        batches = evaluation_batches(*sides, self.args.per_device_eval_batch_size, self.batch_tokens)
        rounds = math.ceil(len(batches) / self.args.world_size)
        rank_batches = [self.args.process_index + turn * self.args.world_size for turn in range(rounds)]
        numbered = dataset.add_column("pair", list(range(len(dataset))))
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
        self.evaluated = self.eval_dataset if eval_dataset is None else eval_dataset
        return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix, **gen_kwargs)

    def predict(
        self,
        test_dataset: Any,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "test",
        **gen_kwargs: Any,
    ) -> PredictionOutput:
        """Return the same, with the hypotheses as text in `predictions`."""
        self.evaluated = test_dataset
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
        sources = self.evaluated["source"][:]
        for batch in dataloader:
            pairs = batch.pop("pair").tolist()
            translations = self.translate(self._prepare_inputs(batch), [sources[pair] for pair in pairs])
            outputs |= zip(pairs, translations, strict=True)
            self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
        everything = dict(gather_object(list(outputs.items())))
        losses, tokens, texts, figures = zip(*(everything[pair] for pair in range(len(everything))), strict=True)
        loss = sum(losses) / sum(tokens)
        if self.is_in_train and not math.isfinite(loss):
            run = checkpoints_folder(self.args).parent
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
    def translate(
        self, inputs: dict[str, torch.Tensor], sources: list[str]
    ) -> list[tuple[float, int, str, dict[str, float]]]:
        """Return for each pair of a batch the summed loss of its target, the target's tokens, a hypothesis, figures."""
        labels, model = inputs["labels"], self.model
        model_inputs = {name: tensor for name, tensor in inputs.items() if name != "labels"}
        if not self.family.is_autoregressive:
            model_inputs["decoder_attention_mask"] = labels.ne(-100).long()  # the reference's length, and no word of it
        with self.accelerator.autocast():  # without labels, or the loss would be computed twice
            logits = model(**model_inputs, use_cache=False).logits  # (B, T, V)
            figures = {name: values.tolist() for name, values in self.sentence_statistics(logits, inputs).items()}
        losses = sentence_losses(logits, labels)
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
        texts = self.processing_class.batch_decode(cast(torch.Tensor, translations), skip_special_tokens=True)
        by_pair = [{name: values[row] for name, values in figures.items()} for row in range(len(texts))]
        return list(zip(losses.tolist(), labels.ne(-100).sum(1).tolist(), texts, by_pair, strict=True))

    def processors(self, mask: torch.Tensor, sources: list[str]) -> list[LogitsProcessor] | None:
        """Return what excludes tokens from the search for sources with this mask (B, S), if the task does."""
        if self.constraint is None:
            return None
        call = CallSettings(self.search, self.model.generation_config, {"attention_mask": mask})
        return [self.constraint(sources, call.target_limits())]

    def sentence_statistics(self, logits: torch.Tensor, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return what evaluations log besides loss and metric, by name, summed over the tokens of each target (B,)."""
        return {}
