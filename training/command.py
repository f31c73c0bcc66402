"""The end of a command: what it prints last."""

import contextlib
import io
import os
import sys
from collections.abc import Generator


@contextlib.contextmanager
def last_output() -> Generator[None]:
    """Let nothing that standard output cannot take end a command that has done its work.

    A character that the output's encoding lacks becomes an escape. A reader that closes the pipe, as `head` does, gets
    no more.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        yield
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:  # Python would write the rest again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
