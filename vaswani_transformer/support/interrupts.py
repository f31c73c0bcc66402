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


class Terminated(KeyboardInterrupt):
    """SIGTERM, as a scheduler sends it, where a command ends itself after it."""


def running_command() -> str:
    """Return the command of the package or of `training/` that this process runs, as `training.train`; else ""."""
    words = sys.orig_argv
    name = words[words.index("-m") + 1] if "-m" in words[:-1] else Path("".join(sys.argv[:1])).name
    is_ours = name.split(".")[0] in ("vaswani_transformer", "training") or name.startswith("vaswani-")
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
