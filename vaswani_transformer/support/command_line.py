"""Command lines: a parser whose errors are one line, and types of arguments."""

import argparse
import difflib
import itertools
import math
import os
import re
import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, NoReturn


def did_you_mean(name: str, options: Iterable[str]) -> str:
    """Return the sentence " Did you mean X?" with the option that is most like a misspelt name, "" without one.

    Options may be dotted, as `training.steps`, which is most like `steps`.
    """
    options = list(options)
    members = [option for option in options if option.rpartition(".")[2] == name.removeprefix("--")]
    similar = members or difflib.get_close_matches(name, options, n=1)
    return f" Did you mean {similar[0]}?" if similar else ""


def not_one_of(value: object, options: Iterable[str]) -> str:
    """Return the error of a value that is not one of the options."""
    options = list(options)
    return f"{value!r} is not one of {', '.join(options)}.{did_you_mean(str(value), options)}"


class ArgumentParser(argparse.ArgumentParser):
    """An `argparse.ArgumentParser` without abbreviations; an error ends the command with one line and status 2.

    An option that is given twice is an error, unless it collects its values. The parser expands the `~` of
    `--option=~/file`, which shells leave, in arguments of type `Path`.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, allow_abbrev=False, **settings)
        self.register("type", Path, lambda text: Path(os.path.expanduser(text)))

    def unknown_option(self, argument: str, fields: Collection[str] = ()) -> str:
        """Return the error of an argument that is neither an option of the parser nor a field of a recipe."""
        given = argument.partition("=")[0]
        options = re.findall(r"--[\w-]+", self.format_usage())
        known, more = [*options, *(f"--{field}" for field in fields)], " and a recipe's fields" if fields else ""
        return f"{given}: no such option; there are {', '.join(options)}{more}.{did_you_mean(given, known)}"

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
        """Print the error and how to get help, without the usage of every option; a misspelt name gets a suggestion."""
        if unknown := re.match(r"unrecognized arguments: (-\S+)", message):
            message = self.unknown_option(unknown[1])
        elif choice := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message):
            message += f".{did_you_mean(choice[1], re.findall(r'[^, ]+', choice[2].replace(chr(39), '')))}"
        message = " ".join(message.split()).removesuffix(".")
        self.exit(2, f"{message}{'' if message.endswith('?') else '.'} See {self.prog} --help.\n")


def finite_float(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a finite number such as 0.6")
    return number


def positive_argument(text: str) -> int:
    """Return `text` as an integer from 1 to 2^31 - 1."""
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
    try:
        argument.encode()
    except UnicodeEncodeError as error:
        raise argparse.ArgumentTypeError(f"got {argument!r}, which is not UTF-8") from error
    return argument


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a folder with a model and its tokenizer, or a name on the Hub")


def check_output_file(parser: argparse.ArgumentParser, path: Path) -> None:
    """End a command whose --output names no file, or one in a folder that is missing."""
    if path.is_dir():
        parser.error(f"--output={path}: is a folder; name a file.")
    if not (folder := path.absolute().parent).is_dir():
        parser.error(f"--output={path}: {folder} is not a folder; make it first.")


def silence_stdout() -> None:
    """Discard what standard output could not take, which Python would write again at exit."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
