"""Watching a run: what its steps did, how fast, and where the time went.

B pairs of a batch, S source and T target tokens, padding counted.
"""

import itertools
import json
import logging
import math
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.utils import gather_object
from torch import Tensor
from transformers import (
    ProgressCallback,
    Seq2SeqTrainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_utils import PredictionOutput

from vaswani_transformer import VaswaniTransformerConfig

logger = logging.getLogger(__name__)

PHASES = ("preparation", "data", "forward", "backward", "optimiser", "evaluation", "saving", "other")
STEPPING = ("data", "forward", "backward", "optimiser", "other")
FILE = "watch.json"

# Dense TFLOP/s of the vendors' data sheets, of matrix products that add up in float32 where the sheet tells them
# apart: float32, TF32, float16, bfloat16. The first name that a device's own name holds counts.
PEAKS: dict[str, tuple[float | None, float | None, float | None, float | None]] = {
    r"MIG": (None, None, None, None),  # a slice of a card
    r"B200": (75, 1100, 2250, 2250),
    r"H[12]00 NVL": (60, 418, 835, 835),
    r"H100 PCIe": (51, 378, 756, 756),
    r"H[12]00": (67, 495, 989, 989),
    r"A100": (19.5, 156, 312, 312),
    r"A40": (37.4, 74.8, 149.7, 149.7),
    r"A30": (10.3, 82, 165, 165),
    r"A10": (31.2, 62.5, 125, 125),
    r"L40S": (91.6, 183, 362, 362),
    r"L40": (90.5, 90.5, 181, 181),
    r"L4": (30.3, 60, 121, 121),
    r"RTX A6000": (38.7, 77.4, 154.8, 154.8),
    r"RTX 4090$": (82.6, 82.6, 165.2, 165.2),
    r"RTX 3090$": (35.6, 35.6, 71, 71),
    r"V100S": (16.4, None, 130, None),
    r"V100-PCIE": (14, None, 112, None),
    r"V100-SXM[23]": (15.7, None, 125, None),
    r"P100-PCIE": (9.3, None, 18.7, None),
    r"P100-SXM2": (10.6, None, 21.2, None),
    r"T4": (8.1, None, 65, None),
    r"MI300X": (163.4, None, 1307.4, 1307.4),
}
PRECISIONS = ("fp32", "tf32", "fp16", "bf16")

# What is shown while a run goes on: the name in the log, the one on the screen, and the format.
SHOWN = (
    ("loss", "loss", ".3f"),
    ("target_tokens_per_second", "tokens/s", ",.0f"),
    ("mfu", "MFU", ".1%"),
    ("eval_bleu", "BLEU", ".2f"),
    ("eval_perplexity", "perplexity", ".4g"),
)


def peak_teraflops(name: str, precision: str) -> float | None:
    """The data sheet's TFLOP/s of a device for matrix products in a precision; None where no sheet of it is known."""
    for pattern, peaks in PEAKS.items():
        if re.search(rf"\b{pattern}\b", name):
            return peaks[PRECISIONS.index(precision)] if precision in PRECISIONS else None
    return None


def pair_lengths(batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The source and the target tokens of each pair, both (B,), of a batch that is still on the host."""
    return batch["attention_mask"].sum(1), batch["labels"].ne(-100).sum(1)


def training_flops(config: VaswaniTransformerConfig, source: Tensor, target: Tensor) -> int:
    """The floating-point operations of the matrix products by which a model learns from pairs, forward and backward.

    Counted as is usual for the utilisation of a device (Chowdhery et al. 2022, appendix B): two for a multiplication
    with its addition, twice the forward pass for the backward one, and attention to later positions, which are masked,
    like that to earlier ones. Padding, and what gradient checkpointing computes again, is no work of the model.

    Args:
        source, target: (B,), the tokens of each pair.
    """
    sources, targets, d_model = int(source.sum()), int(target.sum()), config.d_model
    heads = config.num_heads * (config.head_dim + config.value_head_dim)

    def attention(queries: Tensor, keys: Tensor) -> int:
        """The four projections, and the scores and their sums over the values."""
        return heads * (d_model * int(queries.sum() + keys.sum()) + int((queries * keys).sum()))

    feed_forward = 2 * d_model * config.d_ff
    encoder = config.encoder_layers * (attention(source, source) + feed_forward * sources)
    decoder = config.decoder_layers * (attention(target, target) + attention(target, source) + feed_forward * targets)
    return 6 * (encoder + decoder + config.vocab_size * d_model * targets)


class Stopwatch:
    """How long each phase of a run took. Every moment is in one phase alone, so that the parts sum to the whole.

    Attributes:
        seconds: of each phase up to the last `settle`.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.phases = [PHASES[0]]
        self.marks: list[Any] = [self.mark()]

    def mark(self) -> Any:
        """This moment."""
        return time.perf_counter()

    def between(self, first: Any, second: Any) -> float:
        """Seconds from one moment to another."""
        return second - first

    def enter(self, phase: str) -> None:
        """The phase changes at this moment."""
        self.phases.append(phase)
        self.marks.append(self.mark())

    def settle(self) -> None:
        """Bring `seconds` up to this moment."""
        self.enter(self.phases[-1])
        for phase, (first, second) in zip(self.phases, itertools.pairwise(self.marks), strict=False):
            self.seconds[phase] += self.between(first, second)
        del self.phases[:-1], self.marks[:-1]


class CudaStopwatch(Stopwatch):
    """The same on the device's own clock, since the host runs ahead of it and would wait in whatever phase comes last.

    Moments are events between the kernels, read when they are settled, so that no step waits for them. "data" is then
    the time in which the device stood idle for want of a batch.
    """

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, first: torch.cuda.Event, second: torch.cuda.Event) -> float:
        second.synchronize()
        return first.elapsed_time(second) / 1000


def shares(seconds: dict[str, float]) -> Iterator[tuple[str, int]]:
    """Each phase's share in whole per cent, which sum to 100: what is rounded are the bounds between the phases."""
    total, bounds = sum(seconds.values()) or 1.0, itertools.accumulate(seconds.values(), initial=0.0)
    percents = [round(100 * bound / total) for bound in bounds]
    return zip(seconds, (end - start for start, end in itertools.pairwise(percents)), strict=True)


def time_line(seconds: dict[str, float]) -> str:
    """Where the time of a run went, in a line."""
    parts = " + ".join(f"{phase} {share}%" for phase, share in shares(seconds))
    return f"Time: {sum(seconds.values()):,.1f} s = {parts}"


def trained_seconds(checkpoint: Path) -> float:
    """Seconds of training, over all legs of a run, that led to a checkpoint; 0 where it does not tell."""
    path = checkpoint / FILE
    return json.loads(path.read_text(encoding="utf-8"))["trained"] if path.exists() else 0.0


class Watch(TrainerCallback):
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

    def began(self, moment: float) -> None:
        """The run began at a `moment` of `time.perf_counter`, before this watch was made."""
        self.stopwatch.seconds["preparation"] += self.made - moment

    def time(self) -> dict[str, float]:
        """The seconds of every phase so far."""
        self.stopwatch.settle()
        return dict(self.stopwatch.seconds)

    def save(self, folder: Path) -> None:
        """Leave the time so far beside a checkpoint."""
        (folder / FILE).write_text(json.dumps({"trained": self.trained, "time": self.time()}), encoding="utf-8")

    def carry_on(self, folder: Path) -> None:
        """Add the time of the legs that led to a checkpoint, as far as it tells."""
        if (folder / FILE).exists():
            before = json.loads((folder / FILE).read_text(encoding="utf-8"))
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
        self.cells += batch["input_ids"].numel() + batch["labels"].numel()

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
        self.source_tokens = self.target_tokens = self.cells = 0
        self.flops, self.stepped = flops, self.stepping()

    def stepping(self) -> float:
        """Seconds of training without evaluation and saving."""
        seconds = self.time()
        return sum(seconds[phase] for phase in STEPPING)

    def figures(self, flops: float) -> dict[str, float]:
        """What the steps since the last call did on all processes, which must call together.

        Args:
            flops: those of training so far, on all processes.
        """
        seconds, made = self.stepping() - self.stepped, flops - self.flops
        counts = (self.source_tokens, self.target_tokens, self.cells)
        everyone = gather_object([(float(self.loss), int(self.left_out), *counts)])
        loss, left_out, source_tokens, target_tokens, cells = (sum(own) for own in zip(*everyone, strict=True))
        self.reset(flops)
        found = {
            "loss": loss / (target_tokens - left_out) if target_tokens > left_out else math.nan,
            "target_tokens_per_second": target_tokens / seconds,
            "padding_share": 1 - (source_tokens + target_tokens) / cells,
            "teraflops_per_second": made / seconds / 1e12,
        }
        if self.peak is not None:
            found["mfu"] = made / seconds / 1e12 / (self.peak * len(everyone))
        return found


def shown(logs: dict[str, Any]) -> dict[str, str]:
    """The few figures of a log entry that are shown while a run goes on."""
    return {label: format(logs[name], spec) for name, label, spec in SHOWN if name in logs}


class Bar(ProgressCallback):
    """The Trainer's progress bar with the latest figures behind it instead of a line for every log entry."""

    def __init__(self) -> None:
        super().__init__()
        self.latest: dict[str, str] = {}

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        self.latest |= shown(logs)
        if self.training_bar is not None:  # on the main process, while it trains
            self.training_bar.set_postfix(self.latest)


class Lines(TrainerCallback):
    """The same figures as lines of the log, for output that goes to a file."""

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero and (figures := shown(logs)):
            text = ", ".join(f"{label} {figure}" for label, figure in figures.items())
            logger.info("Step %d of %d: %s", state.global_step, state.max_steps, text)


class WatchedTrainer(Seq2SeqTrainer):
    """A trainer that is watched.

    It logs as `loss` the mean over the target tokens of all processes and all steps since the last entry, and beside
    it, of all processes too, `target_tokens_per_second`, `padding_share` (of the cells of source and target),
    `teraflops_per_second` of the model's matrix products (`training_flops`), and `mfu`, their share of what the data
    sheet promises, where that is known.

    Attributes:
        watch: what was seen.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        precision = self.accelerator.mixed_precision
        if precision == "no":
            precision = "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "fp32"
        self.watch = Watch(self.args.device, precision)
        self.add_callback(self.watch)
        if self.pop_callback(ProgressCallback) is not None:
            self.add_callback(Bar() if sys.stderr.isatty() else Lines())

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device) -> tuple[list, Any]:
        """The batches of a step and its target tokens on all processes."""
        self.watch.stopwatch.enter("data")
        batches = super().get_batch_samples(epoch_iterator, num_batches, device)
        self.watch.stopwatch.enter("other")
        return batches

    def training_step(
        self, model: torch.nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Forward and backward; what follows until the end of the step is the optimiser's."""
        self.watch.count(inputs)
        self.watch.stopwatch.enter("forward")
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.watch.stopwatch.enter("optimiser")
        # The Trainer scales a process's share of the mean by the processes, over which gradients are averaged; a model
        # that one process runs on several devices gets its number of tokens once for each.
        tokens = torch.as_tensor(num_items_in_batch).max()
        own = int(inputs["labels"].ne(-100).sum())
        self.watch.add_loss(loss * tokens / self.accelerator.num_processes, own)
        return loss

    def compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """The loss of a batch, with which its forward pass ends."""
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        self.watch.stopwatch.enter("backward")
        return loss

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """`training_flops` of a batch that is still on the host."""
        return training_flops(cast(Any, self.model).config, *pair_lengths(inputs))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log an entry, with the watch's figures where it is one of training."""
        if "loss" in logs:
            logs |= self.watch.figures(self.state.total_flos)
        super().log(logs, start_time)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate, on the watch."""
        self.watch.stopwatch.enter("evaluation")
        metrics = super().evaluate(*args, **kwargs)
        self.watch.stopwatch.enter("other")
        return metrics

    def predict(self, *args: Any, **kwargs: Any) -> PredictionOutput:
        """Predict, on the watch."""
        self.watch.stopwatch.enter("evaluation")
        output = super().predict(*args, **kwargs)
        self.watch.stopwatch.enter("other")
        return output

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model, and in a checkpoint the time so far; the rest of a checkpoint follows until `on_save`."""
        self.watch.stopwatch.enter("saving")
        super().save_model(output_dir, _internal_call)
        if not _internal_call:
            self.watch.stopwatch.enter("other")
        elif self.args.should_save and output_dir is not None:
            self.watch.save(Path(output_dir))
