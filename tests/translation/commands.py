"""The lines that the tests of the command translate, and the command in another process."""

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from tests.helpers import PAIRS, ROOT

SOURCES, TARGETS = list(PAIRS), list(PAIRS.values())


def lines(texts: Iterable[str]) -> str:
    return "".join(f"{text}\n" for text in texts)


def start(folder: str, *arguments: str | Path, **pipes: Any) -> subprocess.Popen[bytes]:
    """Start the command in another process."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    module = [sys.executable, "-m", "vaswani_transformer.translation", folder]
    process = subprocess.Popen([*module, *map(str, arguments)], cwd=ROOT, env=environment, **pipes)
    return cast("subprocess.Popen[bytes]", process)
