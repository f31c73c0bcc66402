"""Average a run's last checkpoints: `python -m training.average RUN --last=5 --output_dir=FOLDER`.

The folder then has what `from_pretrained` loads.
"""

import json
import shutil
from pathlib import Path

from safetensors.torch import save_file

from training.checkpoints import WEIGHTS, complete_checkpoints, mean_weights, step_of
from training.models import DATA, RECIPE
from vaswani_transformer.support.command import CommandParser, UserError, exit_on_user_error, positive_argument
from vaswani_transformer.support.files import atomic_folder, write_errors
from vaswani_transformer.support.loading import TOKENIZER_FILES

SAVED = ("config.json", "generation_config.json", "special_tokens_map.json", "added_tokens.json", *TOKENIZER_FILES)


def average(run: Path, last: int, output: Path) -> list[int]:
    """Write the mean of a run's last checkpoints, with its configuration and tokenizer, and return their steps."""
    checkpoints = complete_checkpoints(run, with_interrupted=False)[-last:]
    if len(checkpoints) < last:
        raise UserError(
            f"{run}: has {len(checkpoints)} complete checkpoints, expected {last}; choose a smaller --last."
        )
    mean = mean_weights(checkpoints)
    with write_errors(output, "make room, or choose a different folder"), atomic_folder(output) as staging:
        for pattern in SAVED:
            for path in checkpoints[-1].glob(pattern):
                shutil.copy(path, staging)
        for name in (RECIPE, DATA):  # which pairs the model has learned from
            if (run / name).is_file():
                shutil.copy(run / name, staging)
        save_file(mean, staging / WEIGHTS, metadata={"format": "pt"})
    return [step_of(checkpoint) for checkpoint in checkpoints]


def main(arguments: list[str] | None = None) -> None:
    parser = CommandParser(prog="python -m training.average", description=__doc__, allow_abbrev=False)
    parser.add_argument("run", type=Path, help="the folder of a run")
    parser.add_argument("--last", type=positive_argument, default=5, help="how many checkpoints (5)")
    parser.add_argument("--output_dir", type=Path, required=True, help="the folder to write")
    options = parser.parse_args(arguments)
    with exit_on_user_error(OSError):
        steps = average(options.run, options.last, options.output_dir)
        print(json.dumps({"averaged_steps": steps, "output_dir": str(options.output_dir)}))


if __name__ == "__main__":
    main()
