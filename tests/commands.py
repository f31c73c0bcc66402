"""Commands, run in this process or in a new one, with what they print and the errors that they report."""

import contextlib
import errno
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn
from unittest import mock

import pytest

from tests import ROOT
from vaswani_transformer.support.command import UserError

# Ends a script or an attribute, and means something to a browser and to templates.
HOSTILE_TEXT = '</script><img src=x onerror=alert(1)> "${alert(2)}" {{alert}} <script>alert(3)</script>'


def lines(texts: Iterable[object]) -> str:
    return "".join(f"{text}\n" for text in texts)


def write_pairs(path: Path, pairs: Iterable[tuple[str, str]]) -> None:
    """Write pairs of English and German as JSON Lines, as a recipe of data.kind json reads them."""
    lines = [json.dumps({"translation": {"en": source, "de": target}}) for source, target in pairs]
    path.write_text("\n".join(lines), encoding="utf-8")


class Finished(NamedTuple):
    """What a command that has ended wrote, and its exit status."""

    output: str
    errors: str
    status: str | int | None


Run = Callable[..., Finished]


def run_main(
    main: Callable[[list[str]], None], arguments: Iterable[object], capture: pytest.CaptureFixture[Any]
) -> Finished:
    """Run a command in this process."""
    status: str | int | None = 0
    try:
        main([str(argument) for argument in arguments])
    except SystemExit as end:
        status = end.code
    output, errors = (text if isinstance(text, str) else text.decode() for text in capture.readouterr())
    return Finished(output, errors, status)


def command_runner(main: Callable[[list[str]], None], folder: str, capture: pytest.CaptureFixture[Any]) -> Run:
    """Return a function that runs a command on a model in this process, with a text as standard input."""

    def run(*arguments: object, stdin: str | bytes = "", model: object = folder) -> Finished:
        content = io.BytesIO(stdin.encode() if isinstance(stdin, str) else stdin)
        with mock.patch.object(sys, "stdin", io.TextIOWrapper(content, encoding="utf-8")):
            return run_main(main, [model, *arguments], capture)

    return run


def run_python(code: str, *arguments: str, folder: Path | None = None, **environment: str) -> str:
    """Run `code` in a new Python process, in the checkout or in `folder` without it, and return the output."""
    path = {"PYTHONPATH": str(ROOT) if folder is None else ""}
    variables = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"} | path | environment
    finished = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=folder or ROOT,
        env=variables,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def no_space(*_: Any, **__: Any) -> NoReturn:
    """Fail as a write to a full disk does, in place of a function that writes."""
    raise OSError(errno.ENOSPC, "No space left on device")


@contextlib.contextmanager
def user_error(pattern: str) -> Generator[None]:
    """Expect an error of a user, in one line that has the pattern."""
    with pytest.raises(UserError, match=pattern) as caught:
        yield
    assert "\n" not in str(caught.value)


def error_line(finished: Finished) -> str:
    """Return the line of an error with which a command ended with status 2, without output."""
    assert (finished.output, finished.status) == ("", 2), finished.errors
    (line,) = finished.errors.splitlines(keepends=True)
    return line
