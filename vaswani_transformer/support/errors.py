"""User errors, which a command prints on one line before it exits with status 2, or 130 after Ctrl-C."""

import contextlib
import sys
from collections.abc import Generator


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


@contextlib.contextmanager
def exit_on_user_error(*more_errors: type[Exception], what_now: str = "") -> Generator[None]:
    """Print a UserError and exit with status 2; after Ctrl-C print a line and exit with status 130.

    `more_errors` are handled like a UserError, and `what_now` is appended to the line after Ctrl-C.
    """
    try:
        yield
    except (UserError, *more_errors) as error:
        sys.stderr.write(f"{one_line(error)}\n")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.stderr.write(f"Interrupted{what_now}.\n")
        sys.exit(130)  # the status of shells after SIGINT
