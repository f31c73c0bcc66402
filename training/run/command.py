"""The end of a command: what it prints last."""

import contextlib
import io
import sys
from collections.abc import Generator

from vaswani_transformer.support.command_line import silence_stdout
from vaswani_transformer.support.errors import OutputError
from vaswani_transformer.support.files import write_errors


@contextlib.contextmanager
def flush_stdout(fix: str) -> Generator[None]:
    """Let nothing that standard output cannot take end a command that has done its work with a traceback.

    A character that the output's encoding lacks becomes an escape. A reader that closes the pipe, as `head` does, gets
    no more.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with write_errors("standard output", fix):
            yield
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        silence_stdout()
    except OutputError:
        silence_stdout()
        raise
