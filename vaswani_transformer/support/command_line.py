"""Arguments that several commands share, and their types."""

import argparse
import contextlib
import re
import sys
from collections.abc import Iterable
from difflib import get_close_matches
from typing import NoReturn

from .search_settings import RANGES

MODEL_HELP = "a folder with a model and its tokenizer, or a name on the Hub"


class CommandParser(argparse.ArgumentParser):
    """Parser of a command, whose errors are one line, as all errors of a command are."""

    def error(self, message: str) -> NoReturn:
        """Print the line, without the usage, and exit with status 2."""
        unknown = re.match(r"unrecognized arguments: (--[\w-]+)", message)
        options = re.findall(r"--([\w-]+)", self.format_usage())
        hint = did_you_mean(unknown[1], options) if unknown else "."
        self.exit(2, f"{self.prog}: {message}{hint} --help lists the options.\n")


def did_you_mean(unknown: str, names: Iterable[str]) -> str:
    """Return the end of an error's sentence, with the name that is closest to an unknown one, if any is close.

    Only the last parts of names, such as `steps` of `training.steps`, are compared.
    """
    option = unknown.lstrip("-")
    candidates = {name.rpartition(".")[2]: name for name in reversed(list(names))}
    close = get_close_matches(option.rpartition(".")[2], candidates, n=1)
    return f"; did you mean {unknown[: -len(option)]}{candidates[close[0]]}?" if close else "."


def positive_argument(text: str) -> int:
    """Parse `text` as an integer from 1 to 2^31 - 1."""
    if not (text.isdecimal() and 1 <= int(text) < 2**31):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected an integer of at least 1 and below 2^31")
    return int(text)


def number_argument(text: str, setting: str) -> float:
    """Parse `text` as the value of a setting of the search."""
    with contextlib.suppress(ValueError):
        if (value := float(text)) in RANGES[setting]:
            return value
    raise argparse.ArgumentTypeError(f"got {text!r}, expected {RANGES[setting]}")


def say(message: str) -> None:
    """Write a line to standard output, unless it is closed."""
    if sys.stdout is not None:
        sys.stdout.write(f"{message}\n")
        sys.stdout.flush()
