"""Terminals, pipes and devices: the command answers each line as it arrives, and ends with one line for a fault."""

import io
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import Run
from tests.translation.commands import SOURCES, TARGETS, lines, start
from vaswani_transformer.translation import command


@pytest.mark.parametrize("name", ["input", "output"])
def test_closed_standard_stream_is_an_error_that_names_it(
    folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.setattr(sys, {"input": "stdin", "output": "stdout"}[name], None)
    with pytest.raises(SystemExit, match="2"):
        command.main([folder])
    assert capsys.readouterr().err == f"standard {name} is closed; give --{name}=FILE.\n"


def test_interactive_session_prints_a_line_for_a_line(run: Run) -> None:
    typed = lines([SOURCES[0], "", SOURCES[1]]).encode()
    assert run("--interactive", stdin=typed) == (lines([TARGETS[0], "", TARGETS[1]]), "", 0)
    output, errors, _ = run(
        "--interactive", "--too_long=error", "--max_source_tokens=8", stdin=lines(SOURCES[:3]).encode()
    )
    assert (output, errors) == (lines(TARGETS[:2]), "9 tokens, more than 8; shorten the line.\n")
    output, errors, status = run("--interactive", stdin=b"hello world\n\xff\n")
    assert (output, status) == (lines(TARGETS[:1]), 2)
    assert errors.startswith("standard input, line 2: not UTF-8 (byte 0xff at byte 1 of the line)")


@pytest.mark.parametrize(("is_terminal", "prompt"), [(False, ""), (True, "> ")])
def test_interactive_session_asks_again_after_an_invalid_line(
    folder: str,
    is_terminal: bool,
    prompt: str,
    monkeypatch: pytest.MonkeyPatch,
    capsysbinary: pytest.CaptureFixture[bytes],
) -> None:
    no_text = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")
    typed = iter([SOURCES[0], "\udcff", no_text, SOURCES[1], EOFError()])

    def answer(shown: str) -> str:
        assert shown == prompt
        if isinstance(line := next(typed), Exception):
            raise line
        return line

    terminal = io.TextIOWrapper(io.BytesIO())
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", terminal)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    monkeypatch.setattr("builtins.input", answer)
    command.main([folder, "--interactive"])
    output, errors = capsysbinary.readouterr()
    assert output.decode() == lines(TARGETS[:2])
    assert errors.decode() == 2 * "The line is not UTF-8; type it again.\n"


@pytest.mark.slow
def test_closed_pipe_ends_the_command_quietly(folder: str, tmp_path: Path) -> None:
    (tmp_path / "source").write_text(lines(SOURCES * 50))
    arguments = ("--window=1", "--input", tmp_path / "source")
    process = start(folder, *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline().decode() == lines(TARGETS[:1])
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(60) == 141


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("arguments", [[], ["--interactive"]])
def test_full_output_device_ends_the_command_with_one_line(folder: str, arguments: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        process = start(folder, *arguments, stdin=subprocess.PIPE, stdout=full, stderr=subprocess.PIPE)
    _, errors = process.communicate(b"cat\n")
    assert (errors.decode(), process.returncode) == (
        "standard output: cannot be written: No space left on device; make room, or give another --output.\n",
        2,
    )


@pytest.mark.slow
def test_endless_input_is_translated_as_it_arrives(folder: str) -> None:
    process = start(folder, "--window=2", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    for pair in (0, 1), (2, 3):
        process.stdin.write(lines(SOURCES[index] for index in pair).encode())
        process.stdin.flush()
        assert [process.stdout.readline().decode() for _ in pair] == [f"{TARGETS[index]}\n" for index in pair]
    process.stdin.close()
    assert process.wait(60) == 0
