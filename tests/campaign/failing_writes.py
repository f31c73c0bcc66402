"""Writes that fail: in this process the n-th write of a folder does, or it and all that follow.

A write is a file or folder that is begun or renamed, or some bytes that Python, torch or safetensors gives the system.
Python does not see the writes of other libraries.
"""

import builtins
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError


def begins_write(event: str, arguments: tuple[Any, ...]) -> bool:
    return event in ("os.rename", "os.mkdir") or (event == "open" and bool(arguments[2] & (os.O_WRONLY | os.O_RDWR)))


class FailingWrites:
    """The writes of a folder, of which some fail.

    Args:
        folder: the folder.
        first: how many writes succeed.
        code: the error's number.
        is_lasting: whether all later writes fail too.
        log: a file outside of the folder that names each failed write.
    """

    def __init__(self, folder: str, first: int, code: int, is_lasting: bool, log: Path | None = None) -> None:
        self.folder, self.left, self.code, self.is_lasting = folder, first, code, is_lasting
        self.log = log

    def check(self, path: Any) -> None:
        """Raise the error if the next write of a path fails."""
        if not (isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(self.folder)):
            return
        self.left -= 1
        if self.left == -1 or (self.left < 0 and self.is_lasting):
            if self.log is not None:
                with self.log.open("a") as log:
                    log.write(f"{os.fspath(path)}\n")
            raise OSError(self.code, os.strerror(self.code), os.fspath(path))

    def install(self) -> None:
        """Let the writes of this process fail."""

        def audit(event: str, arguments: tuple[Any, ...]) -> None:
            if begins_write(event, arguments):
                self.check(arguments[0])

        sys.addaudithook(audit)
        io.open = builtins.open = self._opening(io.open)  # ty: ignore[invalid-assignment]
        torch.save = self._tearing(  # ty: ignore[invalid-assignment]
            torch.save, lambda problem: RuntimeError(f"PytorchStreamWriter failed writing file: {problem}")
        )
        safetensors.torch.serialize_file = self._tearing(  # ty: ignore[invalid-assignment]
            safetensors.torch.serialize_file,
            lambda problem: SafetensorError(f"I/O error: {problem} (os error {self.code})"),
        )

    def _opening(self, opened: Callable[..., Any]) -> Callable[..., Any]:
        """Return `open` whose files check each write of the system."""
        check = self.check

        class File(io.FileIO):
            def write(self, content: Any) -> int:
                check(self.name)
                return super().write(content)

        def open_file(
            file: Any,
            mode: str = "r",
            buffering: int = -1,
            encoding: str | None = None,
            errors: str | None = None,
            newline: str | None = None,
            **more: Any,
        ) -> Any:
            is_watched = isinstance(file, (str, os.PathLike)) and os.fspath(file).startswith(self.folder)
            if not is_watched or not set(mode) & set("wax") or "+" in mode or more:
                return opened(file, mode, buffering, encoding, errors, newline, **more)
            buffered = io.BufferedWriter(File(os.fspath(file), mode.replace("b", "").replace("t", "")))
            return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding, errors, newline)

        return open_file

    def _tearing(self, save: Callable[..., Any], make_error: Callable[[str], Exception]) -> Callable[..., Any]:
        """Return a function that saves a file, in which the beginning or the middle of the file can fail."""

        def save_file(content: Any, path: Any, *more: Any, **settings: Any) -> None:
            is_begun = False
            try:
                self.check(path)
                save(content, path, *more, **settings)
                is_begun = True
                self.check(path)
            except OSError as error:
                if is_begun:
                    os.truncate(path, os.path.getsize(path) // 2)
                raise make_error(os.strerror(self.code)) from error

        return save_file
