"""The command: its address, its end by Ctrl-C, errors of one line, and no name of another machine looked up."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from accelerate.utils.launch import get_free_port

from tests import ROOT
from tests.commands import error_line, run_main, user_error
from vaswani_transformer.demo.command import main, start_server

# The command itself, with a line on standard error for each host that it looks up besides this machine. If a shell runs
# the tests in the background, they ignore Ctrl-C, and so would the command.
COMMAND = """
import signal, socket, sys

signal.signal(signal.SIGINT, signal.default_int_handler)
look_up = socket.getaddrinfo

def log_host(host, *arguments, **settings):
    if host not in (None, "127.0.0.1", b"127.0.0.1", "localhost", "0.0.0.0"):
        sys.stderr.write(f"looked up {host}\\n")
    return look_up(host, *arguments, **settings)

socket.getaddrinfo = log_host

from vaswani_transformer.demo.command import main

main(sys.argv[1:])
"""


def test_missing_model_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = f"{tmp_path}: does not contain a tokenizer"
    assert error_line(run_main(main, [tmp_path], capsys)).startswith(expected)


def test_address_in_use_is_an_error_that_names_it(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        expected = f"--host=127.0.0.1 --port={port}: is in use or not permitted; choose a different port or host."
        with user_error(re.escape(expected)):
            start_server(saved, "127.0.0.1", port)


def test_folder_or_file_is_written_and_its_path_printed(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, file = tmp_path / "site", tmp_path / "page.html"
    assert run_main(main, [saved, "--output", folder], capsys).output == f"{folder}\n"
    assert (folder / "index.html").is_file()
    assert run_main(main, [saved, "--single", file, "--dtype=float32"], capsys).output == f"{file}\n"
    assert file.read_text(encoding="utf-8").startswith("<!doctype html>")
    error = error_line(run_main(main, [saved, "--output", folder], capsys))
    assert f"{folder}: exists and is not an empty folder; choose a different --output." in error
    error = error_line(run_main(main, [saved, "--single", file], capsys))
    assert f"{file}: the file exists; choose a different --single, or replace it with --force." in error
    error = error_line(run_main(main, [saved, "--single", tmp_path / "none" / "page.html"], capsys))
    assert "page.html: cannot be written: No such file or directory" in error


def test_browser_that_leaves_before_its_answer_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def errors_after(error: Exception) -> str:
        try:
            raise error
        except Exception:
            server.handle_error(None, ("127.0.0.1", 1))
        return capsys.readouterr().err

    with start_server(tmp_path, "127.0.0.1", get_free_port()) as server:
        assert errors_after(ConnectionResetError()) == ""
        assert errors_after(BrokenPipeError()) == ""
        assert "RuntimeError" in errors_after(RuntimeError())


def answers(host: str, port: str) -> bool:
    """Return whether a server answers at an address."""
    try:
        with socket.create_connection((host, int(port)), timeout=60):
            return True
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize(("host", "name"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "localhost")])
def test_page_is_served_without_a_network_until_ctrl_c(saved: Path, host: str, name: str) -> None:
    port = str(get_free_port())
    command = [sys.executable, "-c", COMMAND, str(saved), f"--port={port}"]
    command += [] if host == "127.0.0.1" else [f"--host={host}"]
    settings: dict[str, Any] = {"cwd": ROOT, "env": os.environ | {"PYTHONPATH": str(ROOT)}, "text": True}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **settings) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == f"http://{name}:{port}/\n"
            if host == "0.0.0.0":
                assert f"http://ADDRESS:{port}, with this machine's address" in process.stdout.readline()
            with urlopen(f"http://127.0.0.1:{port}/", timeout=60) as answer:
                page = answer.read().decode()
            assert '<script type="module" src="js/main.js">' in page
            with urlopen(f"http://127.0.0.1:{port}/js/main.js", timeout=60) as answer:
                assert answer.headers.get_content_type() == "text/javascript"
            if sys.platform == "linux":  # where 127.0.0.2 is a second address of the machine
                assert answers("127.0.0.2", port) == (host == "0.0.0.0")
            process.send_signal(signal.SIGINT)
            output, errors = process.communicate(timeout=60)
            assert (process.returncode, output, errors) == (130, "", "Interrupted.\n")
        finally:
            process.kill()
