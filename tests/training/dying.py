"""`training.train`, killed while it writes a file of a checkpoint.

Usage: python -m tests.training.dying FILE STEP RECIPE.yaml ...; a file that torch writes is truncated.
"""

import io
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerState

from training import train
from training.run import checkpoints

save, save_to_json, write = torch.save, TrainerState.save_to_json, checkpoints.write_atomically


def die_at(path: str | Path, content: bytes) -> None:
    """Write half of a file and kill this process, if the path is the given one."""
    file, step = sys.argv[1:3]
    if (Path(path).name, Path(path).parent.name) == (file, f"checkpoint-{step}"):
        Path(path).write_bytes(content[: len(content) // 2])
        os.kill(os.getpid(), signal.SIGKILL)


def dying_save(content: Any, path: Any, *arguments: Any, **keywords: Any) -> None:
    buffer = io.BytesIO()
    save(content, buffer)
    die_at(path, buffer.getvalue())
    save(content, path, *arguments, **keywords)


def dying_save_to_json(state: TrainerState, path: str) -> None:
    save_to_json(state, path)
    die_at(path, Path(path).read_bytes())


def dying_write(path: Path, text: str) -> None:
    die_at(path, b"")
    write(path, text)


if __name__ == "__main__":
    # These have the name and the place of what they replace, but not all of its parameters
    torch.save = dying_save  # ty: ignore[invalid-assignment]
    TrainerState.save_to_json = dying_save_to_json  # ty: ignore[invalid-assignment]
    checkpoints.write_atomically = dying_write  # ty: ignore[invalid-assignment]
    train.main(sys.argv[3:])
