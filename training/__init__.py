"""Training of the weights: recipes, data, training and scoring, run from a clone."""

import sys
from importlib.util import find_spec

NEEDED = ("datasets", "evaluate", "sacrebleu", "yaml")  # of the extra `train`, by every command


def check_packages(command_line: list[str]) -> None:
    """Exit with one line if `command_line` runs a command of this package without the packages that it imports."""
    command = command_line[command_line.index("-m") + 1] if "-m" in command_line[:-1] else ""
    missing = [name for name in NEEDED if command.startswith(f"{__name__}.") and find_spec(name) is None]
    if missing:
        print(f'{command}: the package {missing[0]} is missing. Run pip install -e ".[train]".', file=sys.stderr)
        sys.exit(2)


check_packages(sys.orig_argv)
import vaswani_transformer  # noqa: E402, F401 - before other imports, so that Ctrl-C in them is one line
