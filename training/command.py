"""The end of a command that the user interrupts."""

import sys
from typing import NoReturn

INTERRUPTED = 130  # the exit status that shells give SIGINT


def exit_interrupted(what_now: str = "") -> NoReturn:
    """Exit after Ctrl-C with one line."""
    print(f"Interrupted{what_now}.", file=sys.stderr, flush=True)
    sys.exit(INTERRUPTED)
