"""User-facing errors are one line, and commands end with status 2 after it."""

import subprocess
import sys
from pathlib import Path

import pytest

from vaswani_transformer.support import command as support_command
from vaswani_transformer.support.command import OutputError, UserError, exit_on_user_error, one_line


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("problems:\n  one\n\ttwo"), "problems: one two"),
        (KeyError(), "KeyError"),
        (FileNotFoundError(2, "No such file or directory", "a.txt"), "a.txt: No such file or directory"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (UserError("got the fields \x1b[2J\x9b1m, \u202ea"), r"got the fields \x1b[2J\x9b1m, \u202ea"),
        (FileNotFoundError(2, "No such file", "\x1b]0;a.txt\udc80"), r"\x1b]0;a.txt\udc80: No such file"),
    ],
)
def test_message_is_one_line(error: Exception, line: str) -> None:
    assert one_line(error) == line


@pytest.mark.parametrize("error", [UserError, OutputError, KeyError])
def test_command_ends_with_one_line_and_status_2(error: type[Exception], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"), exit_on_user_error(KeyError):
        raise error("a: problem; fix.\nmore")
    output, errors = capsys.readouterr()
    assert (output, errors.count("\n")) == ("", 1)
    assert "a: problem; fix." in errors


def test_interrupted_command_ends_with_one_line_and_status_130(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="130"), exit_on_user_error(what_now="; the same command resumes it"):
        raise KeyboardInterrupt
    assert capsys.readouterr() == ("", "Interrupted; the same command resumes it.\n")


@pytest.mark.skipif(sys.platform == "win32", reason="the shell closes the streams")
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_command_with_closed_streams_writes_its_error_into_none_of_its_files(tmp_path: Path, closed: str) -> None:
    """A file that is opened while a stream is closed would get the number of the stream."""
    code = """
import runpy, sys
errors = runpy.run_path(sys.argv[1])
with errors["exit_on_user_error"]():
    file = open(sys.argv[2], "w")
    assert file.fileno() > 2
    raise errors["UserError"]("a: problem; fix.")
"""
    command = ["sh", "-c", f'exec "$0" "$@" {closed}', sys.executable, "-c", code]
    ended = subprocess.run([*command, str(support_command.__file__), str(tmp_path / "file")], stderr=subprocess.PIPE)
    assert (ended.returncode, (tmp_path / "file").read_text()) == (2, "")
    assert ended.stderr == (b"" if "2>&-" in closed else b"a: problem; fix.\n")


def test_other_errors_pass_through_a_command() -> None:
    with pytest.raises(RuntimeError, match="bug"), exit_on_user_error(KeyError):
        raise RuntimeError("bug")
