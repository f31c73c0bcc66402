"""Command lines: a parser whose errors are one line, and types of arguments."""

import argparse
import itertools
import math
import os
import sys
from pathlib import Path
from typing import Any, NoReturn


class ArgumentParser(argparse.ArgumentParser):
    """An `argparse.ArgumentParser` without abbreviations; an error ends the command with one line and status 2.

    An option that is given twice is an error, unless it collects its values. The parser expands the `~` of
    `--option=~/file`, which shells leave, in arguments of type `Path`.
    """

    def __init__(self, *args: Any, allow_abbrev: bool = False, **settings: Any) -> None:
        super().__init__(*args, allow_abbrev=allow_abbrev, **settings)
        self.register("type", Path, lambda text: Path(os.path.expanduser(text)))

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse as the base class does, for `parse_args` and for a sub-command's parser too."""
        arguments = list(sys.argv[1:] if args is None else args)
        given = []
        for argument in itertools.takewhile(lambda argument: argument != "--", arguments):
            name = argument.partition("=")[0]  # no value begins with "--"
            option = self._option_string_actions.get(name)
            if option in given:
                self.error(f"{name}: is given twice, and only the last would count; give it once")
            if option is not None and not isinstance(option, argparse._AppendAction):
                given.append(option)
        return super().parse_known_args(arguments, namespace)

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


__all__ = ["ArgumentParser", "finite_float", "positive_int", "utf8_text"]
