"""Errors that a user causes and can fix, one line each.

A command prints the line and exits with status 2, and after Ctrl-C with 130; every other exception passes through with
its traceback.
"""

import contextlib
import sys
from collections.abc import Generator

INTERRUPTED = 130
"""The exit status that shells give SIGINT."""


class UserError(ValueError):
    """Something that the user gave cannot be used; the message is one line: the subject, the problem and a fix."""


class OutputError(UserError):
    """The system cannot write a file or folder."""


def one_line(error: BaseException) -> str:
    """Return an error's message on one line, in which characters that a terminal could obey are escaped.

    An error of the operating system becomes "file: problem", without its number.
    """
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    line = " ".join(text.split())
    escaped = (letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in line)
    return "".join(escaped) or type(error).__name__


@contextlib.contextmanager
def exit_on_user_error(*more_errors: type[Exception], what_now: str = "") -> Generator[None]:
    """Print the line of a UserError and exit with status 2, or one line after Ctrl-C and exit with status 130.

    `more_errors` end a command like a UserError, and `what_now` ends the line after Ctrl-C.
    """
    try:
        yield
    except (UserError, *more_errors) as error:
        sys.stderr.write(f"{one_line(error)}\n")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.stderr.write(f"Interrupted{what_now}.\n")
        sys.exit(INTERRUPTED)
