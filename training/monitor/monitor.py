"""Count the tokens, operations and seconds of a run's steps."""

import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from training.monitor.stopwatch import STEPPING, CudaStopwatch, Stopwatch
from training.recipe.flops import pair_lengths, peak_teraflops
from vaswani_transformer.support.files import read_json

MONITOR_FILE = "watch.json"


def trained_seconds(checkpoint: Path) -> float:
    """Return the seconds of training up to a checkpoint, interruptions left out; 0 for one without a record."""
    return read_times(checkpoint)["trained"] if (checkpoint / MONITOR_FILE).exists() else 0.0


def read_times(folder: Path) -> dict[str, Any]:
    """Return the seconds that a checkpoint or the folder of a run has recorded by `TrainingMonitor.save`."""
    fix = "restore it, or remove it, and the time up to there counts as 0."
    return read_json(folder / MONITOR_FILE, fix, trained=float, time=dict)


class TrainingMonitor(TrainerCallback):
    """Count what the steps of this process do, and time their phases; a resumed run adds to its earlier times.

    Args:
        device: where the model trains.
        precision: of its matrix products, "fp32", "tf32", "fp16" or "bf16"; "no" for that of float32 in torch.

    Attributes:
        peak: the data sheet's TFLOP/s of the device; None if it is not known, as on every CPU.
    """

    def __init__(self, device: torch.device, precision: str) -> None:
        if precision == "no":
            precision = "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "fp32"
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        self.peak = peak_teraflops(name, precision)
        self.stopwatch = CudaStopwatch() if device.type == "cuda" else Stopwatch()
        self.created = time.perf_counter()
        self.trained_before, self.train_start = 0.0, self.created
        self.reset(0.0)

    @property
    def trained(self) -> float:
        """Wall-clock seconds of training, with evaluation and saving, of the complete run."""
        return self.trained_before + time.perf_counter() - self.train_start

    def count_preparation_from(self, moment: float) -> None:
        """Count as preparation the time from a `moment` of `time.perf_counter` to the start of this monitor."""
        self.stopwatch.seconds["preparation"] += self.created - moment

    def time(self) -> dict[str, float]:
        self.stopwatch.flush()
        return dict(self.stopwatch.seconds)

    def save(self, folder: Path) -> None:
        """Write the time so far into the folder of a checkpoint."""
        (folder / MONITOR_FILE).write_text(json.dumps({"trained": self.trained, "time": self.time()}), encoding="utf-8")

    def restore(self, folder: Path) -> None:
        """Add the time that a checkpoint has recorded, if it has."""
        if (folder / MONITOR_FILE).exists():
            before = read_times(folder)
            self.trained_before = before["trained"]
            for phase, seconds in before["time"].items():
                self.stopwatch.seconds[phase] += seconds

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.train_start = time.perf_counter()
        self.stopwatch.enter("other")
        self.reset(state.total_flos)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.stopwatch.enter("other")

    on_save = on_step_end

    def count(self, batch: dict[str, Tensor]) -> None:
        """Count a batch of this process, which is still on the host."""
        source, target = pair_lengths(batch)
        self.source_tokens += int(source.sum())
        self.target_tokens += int(target.sum())
        self.learned_tokens += int(batch["labels"].ne(-100).sum())
        self.positions += batch["input_ids"].numel() + batch["labels"].numel()

    def add_loss(self, loss: Tensor, tokens: Tensor | int) -> None:
        """Add the loss of that batch, summed over the target tokens to learn, without waiting for its value.

        The mean excludes a loss that is not finite, with its tokens. A CMLM learns the masked tokens only.
        """
        self.loss = self.loss + loss.nan_to_num(0.0, 0.0, 0.0)
        self.left_out = self.left_out + loss.isfinite().logical_not() * tokens

    def add_part(self, name: str, total: Tensor, tokens: int) -> None:
        """Add a value of that batch that the log has besides the loss, summed over `tokens` tokens."""
        before, count = self.parts.get(name, (0.0, 0))
        self.parts[name] = before + total.detach().nan_to_num(0.0, 0.0, 0.0), count + tokens

    def reset(self, flops: float) -> None:
        """Restart the counters; the run has used `flops` operations so far."""
        self.loss: Tensor | float = 0.0
        self.parts: dict[str, tuple[Tensor | float, int]] = {}
        self.learned_tokens = 0
        self.left_out: Tensor | int = 0
        self.source_tokens = self.target_tokens = self.positions = 0
        self.flops, self.last_stepping = flops, self.stepping()

    def stepping(self) -> float:
        """Return the seconds of training without evaluation and saving."""
        seconds = self.time()
        return sum(seconds[phase] for phase in STEPPING)

    def part_means(self) -> dict[str, float]:
        """Return the mean of each added part over all processes, which must call together."""
        everyone = gather_object([{name: (float(total), tokens) for name, (total, tokens) in self.parts.items()}])
        means = {}
        for name in self.parts:
            total, tokens = (sum(values) for values in zip(*(sums[name] for sums in everyone), strict=True))
            means[name] = total / tokens if tokens else math.nan
        return means

    def metrics(self, flops: float) -> dict[str, float]:
        """Return the metrics of the steps since the last call, of all processes, which must call together."""
        seconds, new_flops = self.stepping() - self.last_stepping, flops - self.flops
        counts = (self.source_tokens, self.target_tokens, self.learned_tokens, self.positions)
        everyone = gather_object([(float(self.loss), int(self.left_out), *counts)])
        loss, left_out, source_tokens, target_tokens, learned_tokens, positions = (
            sum(values) for values in zip(*everyone, strict=True)
        )
        parts = self.part_means()
        self.reset(flops)
        metrics = {
            "loss": loss / (learned_tokens - left_out) if learned_tokens > left_out else math.nan,
            **parts,
            "target_tokens_per_second": target_tokens / seconds,
            "padding_share": 1 - (source_tokens + target_tokens) / positions,
            "teraflops_per_second": new_flops / seconds / 1e12,
        }
        if self.peak is not None:
            metrics["mfu"] = new_flops / seconds / 1e12 / (self.peak * len(everyone))
        return metrics
