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
from tests.commands import error_line, run_main
from vaswani_transformer.demo import command as command_module
from vaswani_transformer.demo import page as page_module
from vaswani_transformer.demo.command import main

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


def test_missing_gradio_is_one_line_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(page_module, "find_spec", lambda _: None)
    expected = 'The page needs Gradio, which is not installed; run pip install "vaswani-transformer[demo]".'
    assert error_line(run_main(main, ["/nowhere"], capsys)) == f"{expected}\n"


def test_missing_model_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("gradio")
    expected = f"{tmp_path}: cannot be loaded: Unrecognized model"
    assert error_line(run_main(main, [tmp_path], capsys)).startswith(expected)


def test_page_is_served_at_the_host_and_port_or_the_error_names_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launched: list[dict[str, Any]] = []

    class Page:
        def launch(self, **settings: Any) -> None:
            launched.append(settings)
            raise OSError("Cannot find empty port")

    monkeypatch.setattr(command_module, "load_page", lambda **_: Page())
    for arguments, host in ([], "127.0.0.1"), (["--host=0.0.0.0"], "0.0.0.0"):
        expected = f"--host={host} --port=7861: is in use or not permitted; choose a different port or host.\n"
        assert error_line(run_main(main, ["a-model", "--port=7861", *arguments], capsys)) == expected
    assert [settings["server_name"] for settings in launched] == ["127.0.0.1", "0.0.0.0"]
    assert [settings["server_port"] for settings in launched] == [7861, 7861]


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
    pytest.importorskip("gradio")
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
            assert '"analytics_enabled":false' in re.sub(r"\s", "", page)
            if sys.platform == "linux":  # where 127.0.0.2 is a second address of the machine
                assert answers("127.0.0.2", port) == (host == "0.0.0.0")
            process.send_signal(signal.SIGINT)
            output, errors = process.communicate(timeout=60)
            assert (process.returncode, output, errors) == (130, "", "Interrupted.\n")
        finally:
            process.kill()
