"""The mean of the last checkpoints, with which the paper decodes (6.1).

`python -m training.average RUN --last=5 --output_dir=FOLDER` averages the last five checkpoints of a run's folder into
a folder that `from_pretrained` loads.
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from training.monitor.monitor import MONITOR_FILE
from training.run.checkpoints import (
    AFTER_DELETED,
    CHECKPOINTS,
    EXTRA,
    MANIFEST,
    STATE,
    STREAM_FILE,
    WEIGHTS,
    all_checkpoints,
    changed_file,
    is_unfinished,
    step_of,
)
from training.run.command import check_empty, flush_stdout
from vaswani_transformer.support.command_line import ArgumentParser, positive_argument
from vaswani_transformer.support.errors import UserError, exit_on_user_error
from vaswani_transformer.support.files import staged_files, write_errors

FIX = "restore it, or move its checkpoint elsewhere to average the others."
OF_TRAINING = (".bin", ".pt", ".pth")  # the suffixes of a checkpoint's files that only training reads
NAMES_OF_TRAINING = {STATE, MANIFEST, MONITOR_FILE, STREAM_FILE, AFTER_DELETED}  # the others of them


def mean_weights(checkpoints: list[Path]) -> dict[str, Tensor]:
    """Return the mean of each weight over checkpoints of one model, summed in float64, in the weight's dtype."""
    sums: dict[str, Tensor] = {}
    dtypes: dict[str, torch.dtype] = {}
    for checkpoint in checkpoints:
        try:
            weights = load_file(checkpoint / WEIGHTS)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{checkpoint / WEIGHTS}: cannot be read ({error}); average other checkpoints.") from error
        if sums and {name: weight.shape for name, weight in weights.items()} != {n: s.shape for n, s in sums.items()}:
            raise UserError(
                f"{checkpoint}: holds other weights than {checkpoints[0]}; average checkpoints of one model."
            )
        for name, weight in weights.items():
            if not weight.isfinite().all():
                raise UserError(f"{checkpoint}: {name} has a value that is not finite; average other checkpoints.")
            dtypes[name] = weight.dtype
            sums[name] = weight.double() if name not in sums else sums[name] + weight
    return {name: (total / len(checkpoints)).to(dtypes[name]) for name, total in sums.items()}


def last_checkpoints(run: Path, last: int) -> list[Path]:
    """Return the last checkpoints of a run, at most `last`; the best counts only where none after it was deleted."""
    written = [path for path in all_checkpoints(run) if not (is_unfinished(path) or (path / EXTRA).exists())]
    starts = [number for number, path in enumerate(written) if (path / AFTER_DELETED).exists()]
    checkpoints = written[max(starts, default=0) :][-last:]
    for checkpoint in checkpoints:
        if (name := changed_file(checkpoint)) is not None:
            raise UserError(f"{checkpoint / name}: is not as training wrote it; {FIX}")
    return checkpoints


def average(run: Path, last: int, output: Path) -> list[int]:
    """Write the mean of a run's last checkpoints, with its configuration and tokenizer, into a new folder.

    It returns the steps of the checkpoints.
    """
    if not (run / CHECKPOINTS).is_dir():
        raise UserError(f"{run}: is not the folder of a run, or does not exist; give the --output_dir of a training.")
    checkpoints = last_checkpoints(run, last)
    if last < 1 or len(checkpoints) < last:
        raise UserError(
            f"{run}: has {len(checkpoints)} complete checkpoints at its end, expected {last}; give a smaller --last, "
            "or keep more with training.keep_checkpoints."
        )
    check_empty(output, "--output_dir")
    weights = mean_weights(checkpoints)
    staged = staged_files(output, last=WEIGHTS)
    with write_errors(output, "give another --output_dir", SafetensorError), staged as staging:
        for path in checkpoints[-1].iterdir():
            is_file = path.is_file() and not path.is_symlink()
            if is_file and path.suffix not in OF_TRAINING and path.name not in {WEIGHTS, *NAMES_OF_TRAINING}:
                shutil.copy(path, staging / path.name)
        save_file(weights, staging / WEIGHTS, metadata={"format": "pt"})
    return [step_of(checkpoint) for checkpoint in checkpoints]


def main(arguments: list[str] | None = None) -> None:
    parser = ArgumentParser(prog="python -m training.average", description="Average a run's last checkpoints.")
    parser.add_argument("run", type=Path, help="the folder of a run")
    parser.add_argument("--last", type=positive_argument, default=5, help="how many checkpoints (5)")
    parser.add_argument("--output_dir", type=Path, required=True, help="the folder to write")
    options = parser.parse_args(arguments)
    with exit_on_user_error(OSError):
        steps = average(options.run, options.last, options.output_dir)
        with flush_stdout(f"the mean is in {options.output_dir}"):
            print(json.dumps({"averaged_steps": steps, "output_dir": str(options.output_dir)}))


if __name__ == "__main__":
    main()
