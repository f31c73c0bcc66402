"""What the commands of this package share: a parser whose errors are one line, and an end for an interruption."""

import argparse
import sys
from typing import NoReturn

INTERRUPTED = 130  # as a shell says of SIGINT


class OneLineParser(argparse.ArgumentParser):
    """A parser that says what is wrong with an argument, without the usage of all the others."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; --help lists the arguments.\n")


def reason(error: OSError) -> str:
    """What the system says, without the number and the name that Python puts around it."""
    return error.strerror or " ".join(str(error).split()) or type(error).__name__


def exit_interrupted(what_now: str = "") -> NoReturn:
    """End the process as Ctrl-C asks for, with one line."""
    print(f"Interrupted{what_now}.", file=sys.stderr, flush=True)
    sys.exit(INTERRUPTED)
