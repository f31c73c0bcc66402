"""A Seq2SeqTrainer that is monitored."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import ProgressCallback, Seq2SeqTrainer
from transformers.integrations import TensorBoardCallback
from transformers.trainer_utils import PredictionOutput

from training.monitor.curves import CurvesCallback
from training.monitor.monitor import TrainingMonitor
from training.monitor.progress import LogLineCallback, MetricFormat, ProgressBarCallback
from training.recipe.families import Family, TrainedModel
from training.tasks import Metric
from vaswani_transformer import VaswaniTransformerConfig


def by_layer(name: str, value: Tensor, config: VaswaniTransformerConfig) -> list[tuple[str, Tensor]]:
    """Return a scalar with its name, or a value of each of the last layers, each with a name that ends in the layer."""
    if not value.dim():
        return [(name, value)]
    first = config.decoder_layers - len(value) + 1
    return [(f"{name}_{first + index}", part) for index, part in enumerate(value.unbind())]


class MonitoredTrainer(Seq2SeqTrainer):
    """A trainer that measures its speed and its phases.

    `loss` is the mean over the target tokens of all processes and all steps since the last entry. The log also has,
    over all processes, `target_tokens_per_second`, `padding_share` (of the positions of source and target),
    `teraflops_per_second` of the model's matrix products, and `mfu`, their share of the data sheet's peak if that is
    known. A model that predicts lengths also logs their loss, divided as `loss` is. Glancing adds the share of target
    tokens that the first pass predicts, and IterativeVAE the losses, divergences and weights of its layers.

    Attributes:
        monitor: counts and times the steps of this process.
    """

    model: TrainedModel

    def __init__(self, best_metric: Metric, kind: Family, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.family = kind
        precision = self.accelerator.mixed_precision
        if precision == "no":
            precision = "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "fp32"
        self.monitor = TrainingMonitor(self.args.device, precision)
        self.add_callback(self.monitor)
        if self.pop_callback(TensorBoardCallback) is not None:
            self.add_callback(CurvesCallback())
        if self.pop_callback(ProgressCallback) is not None:
            metrics = MetricFormat(best_metric)
            is_terminal = sys.stderr.isatty()
            self.add_callback(ProgressBarCallback(metrics) if is_terminal else LogLineCallback(metrics, self.monitor))

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device) -> tuple[list, Any]:
        """Return the batches of a step and its target tokens on all processes."""
        self.monitor.stopwatch.enter("data")
        batches = super().get_batch_samples(epoch_iterator, num_batches, device)
        self.monitor.stopwatch.enter("other")
        return batches

    def training_step(
        self, model: torch.nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Run forward and backward; the remainder of the step counts as the optimizer's."""
        self.monitor.count(inputs)
        self.learned_tokens = int(inputs["labels"].ne(-100).sum())  # here, where the batch is on the host
        self.monitor.stopwatch.enter("forward")
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.monitor.stopwatch.enter("optimizer")
        # The Trainer multiplies a process's share of the mean by the number of processes, since it averages gradients
        # over them; a model on several devices of one process gets the number of tokens once a device.
        tokens = torch.as_tensor(num_items_in_batch).max()
        self.monitor.add_loss(loss * tokens / self.accelerator.num_processes, self.learned_tokens)
        return loss

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
            divisor = self.learned_tokens if name == "accuracy" else torch.as_tensor(num_items_in_batch).max()
            for full_name, part in by_layer(log_name, value, self.model.config):
                self.monitor.add_part(full_name, part * divisor, self.learned_tokens)
        return (loss, outputs) if return_outputs else loss

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Return the operations of training on a batch."""
        return self.family.flops(self.model, inputs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log an entry, with the monitor's metrics if it is one of training."""
        if "loss" in logs:
            logs |= self.monitor.metrics(self.state.total_flos)
        super().log(logs, start_time)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate, and count the time."""
        self.monitor.stopwatch.enter("evaluation")
        metrics = super().evaluate(*args, **kwargs)
        self.monitor.stopwatch.enter("other")
        return metrics

    def predict(self, *args: Any, **kwargs: Any) -> PredictionOutput:
        """Predict, and count the time."""
        self.monitor.stopwatch.enter("evaluation")
        output = super().predict(*args, **kwargs)
        self.monitor.stopwatch.enter("other")
        return output

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model, and in a checkpoint the time so far; other files follow until `on_save`."""
        self.monitor.stopwatch.enter("saving")
        super().save_model(output_dir, _internal_call)
        if not _internal_call:
            self.monitor.stopwatch.enter("other")
        elif self.args.should_save and output_dir is not None:
            self.monitor.save(Path(output_dir))
