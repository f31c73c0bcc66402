"""The host's part of a training step: what the training thread does besides forward, backward and the optimizer."""

import json
import random
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import yaml
from transformers import Trainer
from transformers.trainer_callback import CallbackHandler

from tests.benchmarks.part_times import PartTimes
from training.monitor.monitor import TrainingMonitor
from training.recipe.fields import load_recipe
from training.train import run
from training.trainer import trainer
from training.trainer.divergence import DivergenceGuard
from training.trainer.trainer import RecipeTrainer

STEPS, WARM = 24, 4  # steps, of which the first are not counted
PAIRS, WORDS = 20_000, 300
FAMILIES = {
    "autoregressive": [],
    "cmlm": ["--model.kind=cmlm"],
    "glat": ["--model.kind=nat", "--training.glancing=[0.5,0.3]"],
    "flowseq": ["--model.kind=flowseq", "--training.decoder_steps=2", "--training.kl_warmup_steps=2"],
}
TINY = {"d_model": 8, "d_ff": 8, "num_heads": 1, "encoder_layers": 1, "decoder_layers": 1, "dropout": 0.0}

PARTS: list[tuple[str, Any, tuple[str, ...]]] = [
    ("model", RecipeTrainer, ("compute_loss",)),
    ("model", torch.Tensor, ("backward",)),
    ("model", trainer, ("draw_latents",)),  # by the device
    ("model", torch.optim.Adam, ("step",)),
    ("draws", trainer, ("add_random_choices",)),
    ("counting", TrainingMonitor, ("count", "add_loss", "add_part", "metrics")),
    ("counting", RecipeTrainer, ("floating_point_ops",)),
    ("guard", DivergenceGuard, ("add", "inspect", "on_step_end")),
    ("callbacks", CallbackHandler, ("call_event",)),
    ("trainer_inputs", Trainer, ("_prepare_inputs",)),
    ("trainer_items", Trainer, ("_get_num_items_in_batch",)),
    ("trainer_log", Trainer, ("_maybe_log_save_evaluate",)),
    ("trainer_clip", Trainer, ("_clip_grad_norm",)),
]
"""What each part of a step is: functions of a class. What remains is the Trainer's loop."""
OWN = ("draws", "counting", "guard", "callbacks")


class Timers(PartTimes):
    """The CPU seconds of this thread in each part.

    steps: the seconds at the beginning of each step.
    """

    def __init__(self) -> None:
        super().__init__(time.thread_time, "trainer_loop")
        self.steps: list[dict[str, float]] = []

    def timed(self, part: str, function: Callable) -> Callable:
        """Return a function whose time counts for a part."""

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                return function(*args, **kwargs)  # in the thread that loads ahead
            self.enter(part)
            try:
                return function(*args, **kwargs)
            finally:
                self.leave()

        return wrapper

    def at_step(self, function: Callable) -> Callable:
        """Return a function that begins a step."""

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self.count()
            self.steps.append(defaultdict(float, self.seconds))
            return function(*args, **kwargs)

        return wrapper


def invent_run(folder: Path, tokens: int) -> list[str]:
    """Write pairs of invented words and a recipe of a model of one tiny layer; return the arguments of the run."""
    words, generator = [f"w{number}" for number in range(WORDS)], random.Random(0)
    for split, count in (("train", PAIRS), ("validation", 20)):
        lengths = [min(200, max(1, round(generator.lognormvariate(3.1, 0.6)))) for _ in range(count)]
        texts = [" ".join(generator.choices(words, k=length)) for length in lengths]
        lines = (json.dumps({"translation": {"en": text, "de": text}}) for text in texts)
        (folder / f"{split}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    data = {"kind": "json", "path": str(folder), "train": "train.jsonl", "validation": "validation.jsonl", "test": None}
    training = {"steps": STEPS, "evaluation_steps": STEPS, "source_tokens": tokens, "target_tokens": tokens}
    recipe = {"name": "pace", "data": data, "model": TINY, "training": training | {"log_steps": STEPS}}
    tokenizer = {"vocab_size": 2 * WORDS}
    (folder / "pace.yaml").write_text(yaml.safe_dump(recipe | {"tokenizer": tokenizer}), encoding="utf-8")
    return [str(folder / "pace.yaml"), f"--output_dir={folder / 'run'}"]


def measure_host_step(family: str, tokens: int = 25_000) -> dict[str, float]:
    """Measure the milliseconds of CPU that a step takes from the training thread, by part, the first steps left out."""
    timers = Timers()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as patches:
        for part, owner, names in PARTS:
            for name in names:
                patches.enter_context(patch.object(owner, name, timers.timed(part, getattr(owner, name))))
        begin = timers.at_step(RecipeTrainer.get_batch_samples)
        patches.enter_context(patch.object(RecipeTrainer, "get_batch_samples", begin))
        recipe, *overrides = invent_run(Path(folder), tokens)
        run(load_recipe(recipe, [*overrides, *FAMILIES[family]]))
    first, last = timers.steps[WARM], timers.steps[-1]
    names = dict.fromkeys(part for part, *_ in PARTS) | {"trainer_loop": None}
    parts = {part: 1000 * (last[part] - first[part]) / (len(timers.steps) - 1 - WARM) for part in names}
    own = sum(parts[part] for part in OWN)
    return parts | {"own": own, "trainer": sum(value for part, value in parts.items() if part.startswith("trainer"))}
