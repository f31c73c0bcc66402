"""User errors, which a command prints on one line before it exits with status 2, or 130 after Ctrl-C."""

import contextlib
import os
import sys
from collections.abc import Generator
from typing import Literal


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
