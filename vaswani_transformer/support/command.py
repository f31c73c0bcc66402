"""Errors and arguments of the commands."""

import argparse
import contextlib
import os
import re
import sys
from collections.abc import Generator, Iterable
from difflib import get_close_matches
from typing import Literal, NoReturn


class UserError(ValueError):
    """Raised for invalid input of a user; the message is one line with the subject, the problem and a fix."""


class OutputError(UserError):
    """Raised if a file or folder cannot be written."""


def one_line(error: BaseException) -> str:
    """Return an error's message on one line, with control characters escaped.

    An error of the operating system becomes "file: problem".
    """
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    line = " ".join(text.split())
    escaped = (letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in line)
    return "".join(escaped) or type(error).__name__


def check_open(stream: Literal["stdin", "stdout"], instead: str) -> None:
    """Raise UserError if standard input or output is closed, as in a daemon; `instead` ends the message."""
    names = {"stdin": "standard input", "stdout": "standard output"}
    if getattr(sys, stream) is None:
        raise UserError(f"{names[stream]}: is closed; {instead}.")


def reserve_stream_numbers() -> None:
    """Open the null device for each closed standard stream, and make errors writable.

    Otherwise the first file that the command opens gets the number of the closed stream, and whatever a library prints
    ends up in it. `sys.stdin` and `sys.stdout` stay None, by which `check_open` knows that they were closed.
    """
    for number in (0, 1, 2):  # input, output, errors
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - for the rest of the process


@contextlib.contextmanager
def exit_on_user_error(*more_errors: type[Exception], what_now: str = "") -> Generator[None]:
    """Print a UserError and exit with status 2; after Ctrl-C print a line and exit with status 130.

    `more_errors` are handled like a UserError. `what_now`, such as "; the same command resumes it", is appended to the
    line after Ctrl-C.
    """
    reserve_stream_numbers()
    try:
        yield
    except (UserError, *more_errors) as error:
        sys.stderr.write(f"{one_line(error)}\n")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.stderr.write(f"Interrupted{what_now}.\n")
        sys.exit(130)  # the status of shells after SIGINT


MAX_ALPHA = 10  # lp(Y) of 7,000 tokens, and its inverse, are still float32 numbers
MODEL_HELP = "a folder with a model and its tokenizer, or a name on the Hub"


class CommandParser(argparse.ArgumentParser):
    """Parser of a command, whose errors are one line, as all errors of a command are."""

    def error(self, message: str) -> NoReturn:
        """Print the line, without the usage, and exit with status 2."""
        unknown = re.match(r"unrecognized arguments: (--[\w-]+)", message)
        options = re.findall(r"--([\w-]+)", self.format_usage())
        hint = did_you_mean(unknown[1], options) if unknown else "."
        self.exit(2, f"{self.prog}: {message.removesuffix('.')}{hint} --help lists the options.\n")


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


def number_argument(text: str) -> float:
    """Parse `text` as a length penalty or bonus, from -10 to 10."""
    with contextlib.suppress(ValueError):
        if abs(value := float(text)) <= MAX_ALPHA:
            return value
    raise argparse.ArgumentTypeError(f"got {text!r}, expected a number from -{MAX_ALPHA} to {MAX_ALPHA}")


def say(message: str) -> None:
    """Write a line to standard output, unless it is closed."""
    if sys.stdout is not None:
        sys.stdout.write(f"{message}\n")
        sys.stdout.flush()
