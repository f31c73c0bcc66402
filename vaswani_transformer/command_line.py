"""Command lines: a parser whose errors are one line, and types of arguments."""

import argparse
import math
import os
import sys
from pathlib import Path
from typing import Any, NoReturn


class ArgumentParser(argparse.ArgumentParser):
    """An `argparse.ArgumentParser` without abbreviations; an error ends the command with one line and status 2.

    It expands the `~` of `--option=~/file`, which shells leave, in arguments of type `Path`.
    """

    def __init__(self, *args: Any, allow_abbrev: bool = False, **settings: Any) -> None:
        super().__init__(*args, allow_abbrev=allow_abbrev, **settings)
        self.register("type", Path, lambda text: Path(os.path.expanduser(text)))

    def error(self, message: str) -> NoReturn:
        """Print the error and how to get help, without the usage of every option."""
        self.exit(2, f"{' '.join(message.split()).removesuffix('.')}. See {self.prog} --help.\n")


def finite_float(text: str) -> float:
    """Return `text` as a finite number.

    Raises:
        argparse.ArgumentTypeError: it is not one.
    """
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a finite number such as 0.6")
    return number


def positive_int(text: str) -> int:
    """Return `text` as an integer from 1 to 2^31 - 1.

    Raises:
        argparse.ArgumentTypeError: it is not one.
    """
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected an integer of at least 1")
    if number >= 2**31:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected an integer below 2^31")
    return number


def utf8_text(argument: str) -> str:
    """Return an argument that is valid text.

    Raises:
        argparse.ArgumentTypeError: its bytes are not UTF-8.
    """
    try:
        argument.encode()
    except UnicodeEncodeError as error:
        raise argparse.ArgumentTypeError(f"got {argument!r}, which is not UTF-8") from error
    return argument


def silence_stdout() -> None:
    """Discard what standard output could not take, which Python would write again at exit."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


__all__ = ["ArgumentParser", "finite_float", "positive_int", "silence_stdout", "utf8_text"]
