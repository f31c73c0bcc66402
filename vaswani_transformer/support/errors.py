"""Errors that a user causes and can fix: one class, one line each.

    UserError           an argument, a file, a recipe or a model cannot be used
    └── OutputError     the system cannot write a file or folder

A command prints the line and exits with status 2, and after Ctrl-C with 130; every other exception passes through with
its traceback.
"""

import contextlib
import os
import sys
from collections.abc import Generator

INTERRUPTED, TERMINATED = 130, 143
"""The exit statuses that shells give SIGINT and SIGTERM."""


class UserError(ValueError):
    """Something that the user gave cannot be used; the message is one line: the subject, the problem and a fix."""


class OutputError(UserError):
    """The system cannot write a file or folder."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, as a scheduler sends it, where a command ends itself after it."""


def printable(text: str) -> str:
    """Return a text in which every character that a terminal could obey, or not show, is written as its escape."""
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


def one_line(error: BaseException, with_file: bool = True, is_complete: bool = False) -> str:
    """Return an error's message on one line: its first line, or all of them if the first one opens a list.

    All lines of a UserError count, which may quote some. A message may quote a file of unknown origin, so it is
    printable. An error of the operating system becomes "file: problem", without its number, and without its file unless
    `with_file`; `is_complete` asks for all lines.
    """
    if isinstance(error, OSError) and error.strerror:
        names_file = with_file and error.filename is not None
        return printable(f"{error.filename}: {error.strerror}" if names_file else error.strerror)
    first, _, other_lines = str(error).strip().partition("\n")
    if is_complete or isinstance(error, UserError) or first.rstrip().endswith((":", ",", "(")):
        first = f"{first} {other_lines}"
    return printable(" ".join(first.split())) or type(error).__name__


@contextlib.contextmanager
def exit_on_user_error(*more_errors: type[Exception], what_now: str = "") -> Generator[None]:
    """Print the line of a UserError and exit with status 2, or one line after Ctrl-C and exit with status 130.

    `more_errors` end a command like a UserError, and `what_now` ends the line after Ctrl-C, which the first process of
    a launch prints.
    """
    try:
        yield
    except (UserError, *more_errors) as error:
        sys.stderr.write(f"{one_line(error)}\n")
        sys.exit(2)
    except KeyboardInterrupt as error:
        if os.environ.get("RANK", "0") == "0":
            sys.stderr.write(f"Interrupted{what_now}.\n")
        sys.exit(TERMINATED if isinstance(error, Terminated) else INTERRUPTED)
