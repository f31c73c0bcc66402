"""`nox` runs the fast tests on the oldest and on the newest supported torch, Transformers and Python.

`nox --list` names the other sessions; `lint` and `slow` run in the environment of the project. Arguments after `--` are
those of pytest, in the session `next` a requirement.
"""

import os
import re

import nox

nox.options.sessions = ["oldest", "newest"]

PROJECT = nox.project.load_toml("pyproject.toml")
PYTHONS = nox.project.python_versions(PROJECT)
OLDEST = [
    re.sub(r">=([\d.]+).*", r"==\1.0", requirement)
    for requirement in PROJECT["project"]["dependencies"]
    if requirement.startswith(("torch", "transformers"))
]
NEXT = "transformers @ git+https://github.com/huggingface/transformers"
TESTS = ["python", "-m", "pytest", "-rs"]


def install(session: nox.Session, *requirements: str) -> None:
    """Install the project as README does, with pip, which some tests call."""
    session.install("pip", "-e", ".[dev]", *requirements)


@nox.session(venv_backend="none")
def lint(session: nox.Session) -> None:
    """The checks that run no code of the project."""
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("ty", "check")


@nox.session(venv_backend="none")
def slow(session: nox.Session) -> None:
    """The tests that take more than a second, many of which wait, so that there is a process more than cores."""
    processes = (os.cpu_count() or 1) + 1
    session.run(*TESTS, "-m", "slow", f"--numprocesses={processes}", *session.posargs)


@nox.session(python=PYTHONS[0])
def oldest(session: nox.Session) -> None:
    """The fast tests on the oldest supported versions."""
    install(session, *OLDEST)
    session.run(*TESTS, *session.posargs)


@nox.session(python=PYTHONS[-1])
def newest(session: nox.Session) -> None:
    """The fast tests on the newest versions."""
    install(session)
    session.run(*TESTS, *session.posargs)


@nox.session(python=PYTHONS[-1])
def next(session: nox.Session) -> None:
    """The fast tests on the next Transformers."""
    install(session)
    session.install(*(session.posargs or [NEXT]))
    session.run(*TESTS)
