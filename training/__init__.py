"""Training from recipes, evaluation and publishing, run from a clone of the repository."""

import sys
from importlib.util import find_spec
from itertools import pairwise

NEEDED = ("datasets", "evaluate", "jsonargparse", "sacrebleu")  # of the extra `train`, by every command


def check_packages(command: str) -> None:
    """Exit with one line if a command of this package lacks a package that it imports."""
    missing = [name for name in NEEDED if command.startswith(f"{__name__}.") and find_spec(name) is None]
    if missing:
        print(f'{command}: the package {missing[0]} is missing. Run pip install -e ".[train]".', file=sys.stderr)
        sys.exit(2)


check_packages(next((word for option, word in pairwise(sys.orig_argv) if option == "-m"), ""))
