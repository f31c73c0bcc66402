"""The lines that the tests of the commands translate, and a command in this process."""

import io
import sys
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import pytest

from tests.helpers import PAIRS, Run, run_main

SOURCES, TARGETS = list(PAIRS), list(PAIRS.values())


def lines(texts: Iterable[object]) -> str:
    return "".join(f"{text}\n" for text in texts)


def command_runner(main: Callable[[list[str]], None], folder: str, capture: pytest.CaptureFixture[Any]) -> Run:
    """Return a function that runs a command in this process and returns its output, errors and status."""

    def run(*arguments: object, stdin: str | bytes = "", model: object = folder) -> tuple[str, str, str | int | None]:
        content = io.BytesIO(stdin.encode() if isinstance(stdin, str) else stdin)
        with mock.patch.object(sys, "stdin", io.TextIOWrapper(content, encoding="utf-8")):
            return run_main(main, [model, *arguments], capture)

    return run
