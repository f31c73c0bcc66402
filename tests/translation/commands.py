"""The lines that the tests of the commands translate, and a command in this process."""

import io
import sys
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import pytest

from tests.helpers import PAIRS, run_main

SOURCES, TARGETS = list(PAIRS), list(PAIRS.values())


def lines(texts: Iterable[object]) -> str:
    return "".join(f"{text}\n" for text in texts)


def run_on(
    stdin: bytes, main: Callable[[list[str]], None], arguments: Iterable[object], capture: pytest.CaptureFixture[Any]
) -> tuple[str, str, str | int | None]:
    """Run a command in this process on a standard input; return its output, its errors and its status."""
    with mock.patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8")):
        return run_main(main, arguments, capture)
