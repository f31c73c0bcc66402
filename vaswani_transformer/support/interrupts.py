"""Ctrl-C while a command still imports: one line instead of a traceback, from the first import of the package on."""

import os
import signal
import sys
import threading
from pathlib import Path
from typing import NoReturn

INTERRUPTED = 130
"""The exit status that shells give SIGINT."""
TERMINATED = 143
"""The exit status that shells give SIGTERM."""
ROOT = Path(__file__).resolve().parents[2]
"""The folder of the package, and in a clone also of `training/`."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, as a scheduler sends it, where a command ends itself after it."""


def running_command() -> str:
    """Return the command of the package or of `training/` that this process runs, as `training.train`; else "".

    A user's `training.py`, `vaswani-data.py` or package `training` is no such command.
    """
    words = sys.orig_argv
    if "-m" not in words[:-1]:
        name = Path("".join(sys.argv[:1])).name
        return name if name.startswith("vaswani-") and not name.endswith(".py") else ""
    name = words[words.index("-m") + 1]
    package = name.split(".")[0]
    folders = getattr(sys.modules.get(package), "__path__", ())  # Python imports the package before the command
    is_ours = package in ("vaswani_transformer", "training") and ROOT / package in [Path(f).resolve() for f in folders]
    return name if is_ours else ""


def exit_at_once(*_: object) -> NoReturn:
    """End the process, which has nothing to clean up, with one line; an exception could be swallowed by an import."""
    if os.environ.get("RANK", "0") == "0":
        os.write(2, b"Interrupted.\n")
    os._exit(INTERRUPTED)


def exit_on_early_interrupt() -> None:
    """Let Ctrl-C end a command at once until `raise_interrupts`; a process that ignores it still does."""
    is_main = threading.current_thread() is threading.main_thread()
    if running_command() and is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, exit_at_once)


def raise_interrupts() -> None:
    """Let Ctrl-C raise KeyboardInterrupt, for which the command is ready from now on."""
    if signal.getsignal(signal.SIGINT) is exit_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)


exit_on_early_interrupt()
