"""The lines that the tests of the commands translate, and the commands in this process and in another one."""

import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest

from tests.helpers import PAIRS, ROOT, run_main

SOURCES, TARGETS = list(PAIRS), list(PAIRS.values())


def lines(texts: Iterable[object]) -> str:
    return "".join(f"{text}\n" for text in texts)


def run_on(
    stdin: bytes, main: Callable[[list[str]], None], arguments: Iterable[object], capture: pytest.CaptureFixture[Any]
) -> tuple[str, str, str | int | None]:
    """Run a command in this process on a standard input; return its output, its errors and its status."""
    with mock.patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8")):
        return run_main(main, arguments, capture)


def start(folder: str, *arguments: str | Path, **pipes: Any) -> subprocess.Popen[bytes]:
    """Start the command in another process."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    module = [sys.executable, "-m", "vaswani_transformer.translation", folder]
    process = subprocess.Popen([*module, *map(str, arguments)], cwd=ROOT, env=environment, **pipes)
    return cast("subprocess.Popen[bytes]", process)
