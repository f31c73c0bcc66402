"""What commands share: their log, the checks of what they are going to write, and the end of what they print."""

import contextlib
import io
import logging
import os
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from vaswani_transformer.support.command_line import silence_stdout
from vaswani_transformer.support.errors import OutputError, UserError, one_line
from vaswani_transformer.support.files import PARTIAL, holds_files, write_errors


def start_log() -> None:
    """Log the messages of a command of one or several processes: all of the first one, the others' warnings."""
    is_first = os.environ.get("RANK", "0") == "0"
    logging.basicConfig(format="%(message)s", level=logging.INFO if is_first else logging.WARNING)
    for noisy in ("httpx", "absl"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    disable_progress_bar()  # there is one for every saved file


def check_writable(folder: Path) -> None:
    """Check that the folder of --output_dir can be written or made."""
    ancestor = folder
    try:
        ancestor = next(path for path in (folder, *folder.absolute().parents) if path.exists() or path.is_symlink())
        with tempfile.TemporaryDirectory(dir=ancestor, suffix=PARTIAL):
            pass
    except OSError as error:
        raise UserError(
            f"{folder}: {ancestor} is not a writable folder ({one_line(error, with_file=False)}); give another "
            "--output_dir."
        ) from error


def check_empty(folder: Path, option: str) -> None:
    """Check that the folder of an option is new or empty."""
    if holds_files(folder):
        raise UserError(f"{folder}: is not empty; give another {option}.")


def check_new_file(path: Path) -> None:
    """Check that --output is a new file that can be written."""
    folder = path.absolute().parent
    if path.exists() or not folder.is_dir():
        what = "exists already" if path.exists() else "its folder does not exist"
        raise UserError(f"--output={path}: {what}; give a new file in an existing folder.")
    with write_errors(f"--output={path}", "give a file in a folder that can be written"):
        tempfile.TemporaryFile(dir=folder).close()


@contextlib.contextmanager
def flush_stdout(fix: str) -> Generator[None]:
    """Let nothing that standard output cannot take end a command that has done its work with a traceback.

    A character that the output's encoding lacks becomes an escape. A reader that closes the pipe, as `head` does, gets
    no more. On a full disk the line ends in `fix`: where the results are too, or how to get them.
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
