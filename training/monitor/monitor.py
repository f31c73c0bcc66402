"""Count what the steps of a run do, how fast, and where the time goes."""

import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from training.monitor.flops import pair_lengths, peak_teraflops
from training.monitor.stopwatch import STEPPING, CudaStopwatch, Stopwatch

MONITOR_FILE = "watch.json"


def trained_seconds(checkpoint: Path) -> float:
    """Seconds of training, over all legs of a run, that led to a checkpoint; 0 where it does not tell."""
    path = checkpoint / MONITOR_FILE
    return json.loads(path.read_text(encoding="utf-8"))["trained"] if path.exists() else 0.0


class TrainingMonitor(TrainerCallback):
    """Counts what the steps of this process do, and times their phases, over all legs of a run that is resumed.

    Args:
        device: where the model trains.
        precision: of its matrix products, "fp32", "tf32", "fp16" or "bf16".

    Attributes:
        peak: the data sheet's TFLOP/s of the device; None where it is not known, as on every CPU.
    """

    def __init__(self, device: torch.device, precision: str) -> None:
        self.device = device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        self.peak = peak_teraflops(name, precision)
        self.stopwatch = CudaStopwatch() if device.type == "cuda" else Stopwatch()
        self.made = time.perf_counter()
        self.trained_before, self.train_began = 0.0, self.made
        self.reset(0.0)

    @property
    def trained(self) -> float:
        """Seconds of training by the clock on the wall, with evaluation and saving, over all legs."""
        return self.trained_before + time.perf_counter() - self.train_began

    def count_preparation_from(self, moment: float) -> None:
        """The run began at a `moment` of `time.perf_counter`, before this watch was made."""
        self.stopwatch.seconds["preparation"] += self.made - moment

    def time(self) -> dict[str, float]:
        """The seconds of every phase so far."""
        self.stopwatch.flush()
        return dict(self.stopwatch.seconds)

    def save(self, folder: Path) -> None:
        """Leave the time so far beside a checkpoint."""
        (folder / MONITOR_FILE).write_text(json.dumps({"trained": self.trained, "time": self.time()}), encoding="utf-8")

    def restore(self, folder: Path) -> None:
        """Add the time of the legs that led to a checkpoint, as far as it tells."""
        if (folder / MONITOR_FILE).exists():
            before = json.loads((folder / MONITOR_FILE).read_text(encoding="utf-8"))
            self.trained_before = before["trained"]
            for phase, seconds in before["time"].items():
                self.stopwatch.seconds[phase] += seconds

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.train_began = time.perf_counter()
        self.stopwatch.enter("other")
        self.reset(state.total_flos)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.stopwatch.enter("other")

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.stopwatch.enter("other")

    def count(self, batch: dict[str, Tensor]) -> None:
        """A batch of this process, still on the host, is about to be trained on."""
        source, target = pair_lengths(batch)
        self.source_tokens += int(source.sum())
        self.target_tokens += int(target.sum())
        self.positions += batch["input_ids"].numel() + batch["labels"].numel()

    def add_loss(self, loss: Tensor, tokens: Tensor | int) -> None:
        """The loss of that batch, summed over its target tokens; nothing waits for its value before it is logged.

        One that is not finite is left out of the mean, with its tokens.
        """
        self.loss = self.loss + loss.nan_to_num(0.0, 0.0, 0.0)
        self.left_out = self.left_out + loss.isfinite().logical_not() * tokens

    def reset(self, flops: float) -> None:
        """Count from this step on; `flops` were made before it."""
        self.loss: Tensor | float = 0.0
        self.left_out: Tensor | int = 0
        self.source_tokens = self.target_tokens = self.positions = 0
        self.flops, self.stepped = flops, self.stepping()

    def stepping(self) -> float:
        """Seconds of training without evaluation and saving."""
        seconds = self.time()
        return sum(seconds[phase] for phase in STEPPING)

    def metrics(self, flops: float) -> dict[str, float]:
        """What the steps since the last call did on all processes, which must call together.

        Args:
            flops: those of training so far, on all processes.
        """
        seconds, made = self.stepping() - self.stepped, flops - self.flops
        counts = (self.source_tokens, self.target_tokens, self.positions)
        everyone = gather_object([(float(self.loss), int(self.left_out), *counts)])
        loss, left_out, source_tokens, target_tokens, positions = (sum(own) for own in zip(*everyone, strict=True))
        self.reset(flops)
        found = {
            "loss": loss / (target_tokens - left_out) if target_tokens > left_out else math.nan,
            "target_tokens_per_second": target_tokens / seconds,
            "padding_share": 1 - (source_tokens + target_tokens) / positions,
            "teraflops_per_second": made / seconds / 1e12,
        }
        if self.peak is not None:
            found["mfu"] = made / seconds / 1e12 / (self.peak * len(everyone))
        return found
