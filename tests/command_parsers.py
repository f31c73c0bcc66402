"""The commands of a page's shell blocks, and the parser of each program that reads them to the end."""

import argparse
import importlib
import re
import shlex
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.launch import _validate_launch_command, launch_command_parser

from tests.helpers import ROOT
from training.recipe import load_recipe

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


class ParsedError(Exception):
    """A command's own parser accepted its arguments."""


def parse_with_argparse(module: str, arguments: list[str]) -> None:
    """Run a command's `main` up to the end of its parsing."""
    original = argparse.ArgumentParser.parse_args
    original_known = argparse.ArgumentParser.parse_known_args

    def parse_args(parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> None:
        original(parser, *args, **kwargs)
        raise ParsedError

    def parse_known_args(parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        parsed = original_known(parser, *args, **kwargs)
        if sys._getframe(1).f_code.co_name != "parse_args":
            raise ParsedError
        return parsed

    main = getattr(importlib.import_module(module), "main", None) or importlib.import_module(f"{module}.__main__").main
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
        # they read a recipe from the arguments that their parsers leave
        if module in ("training.score", "training.distill", "bench.table3"):
            patch.setattr(argparse.ArgumentParser, "parse_known_args", parse_known_args)
        patch.setattr(sys, "argv", [module, *arguments])
        with pytest.raises(ParsedError):
            main()


def parse_recipe_fields(arguments: list[str]) -> None:
    recipe, fields = arguments[0], arguments[1:]
    load_recipe(ROOT / recipe, fields)


def parse_with_recipe(module: str, arguments: list[str]) -> None:
    parse_with_argparse(module, arguments)
    fields = [argument for argument in arguments if re.match(r"--\w+\.\w+=", argument)]
    parse_recipe_fields([arguments[1], *fields])


def parse_launch(arguments: list[str]) -> None:
    """Parse with the launcher's checks, then parse the module that it starts; a script of the page parses nothing."""
    parsed = launch_command_parser().parse_args(arguments)
    if parsed.config_file:
        parsed.config_file = str(ROOT / parsed.config_file)
    _validate_launch_command(parsed)
    if parsed.module:
        parse_module([parsed.training_script, *parsed.training_script_args])
    else:
        assert [parsed.training_script, *parsed.training_script_args] == ["train.py"]


def parse_pip(arguments: list[str]) -> None:
    """Check that the extras that a command names exist."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for names in re.findall(r"\[([\w,]+)\]", " ".join(arguments)):
        assert set(names.split(",")) <= extras.keys()


def leave_unparsed(_: list[str]) -> None:
    """Leave the arguments of another project's program to it."""


def parse_module(arguments: list[str]) -> None:
    """Parse `python -m MODULE`."""
    module, *rest = arguments
    parsers = {
        "pip": parse_pip,
        "pytest": leave_unparsed,
        "training.train": parse_recipe_fields,
        "training.score": lambda given: parse_with_recipe("training.score", given),
        "training.distill": lambda given: parse_with_recipe("training.distill", given),
        "venv": leave_unparsed,
    }
    if module in parsers:
        parsers[module](rest)
    else:
        assert module.startswith(("training.", "bench.", "tests.", "vaswani_transformer.")), module
        parse_with_argparse(module, rest)


def parse_python(arguments: list[str]) -> None:
    if arguments[0] == "-m":
        parse_module(arguments[1:])
    else:
        assert (ROOT / arguments[0]).is_file()


PROGRAMS: dict[str, Callable[[list[str]], None]] = {
    "accelerate": lambda arguments: parse_launch(arguments[1:]),
    "pip": parse_pip,
    "python": parse_python,
    "python3": parse_python,
    "vaswani-convert": lambda arguments: parse_with_argparse("vaswani_transformer.convert.command", arguments),
    "vaswani-demo": lambda arguments: parse_with_argparse("vaswani_transformer.demo.command", arguments),
    "vaswani-parse": lambda arguments: parse_with_argparse("vaswani_transformer.parsing.command", arguments),
    "vaswani-translate": lambda arguments: parse_with_argparse("vaswani_transformer.translation.command", arguments),
}
OTHERS = "coverage curl cut docker gh git hf jupyter mkdocs nox pre-commit ruff sacrebleu sed tensorboard ty uvicorn"
PROGRAMS |= dict.fromkeys(OTHERS.split(), leave_unparsed)
SHELL_PROGRAMS = (".", "export", "cd", "cp", "echo", "mkdir")


def blocks_of(page: Path, language: str) -> list[str]:
    """Return the fenced blocks of one language, without the indent of a list."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(rf"^( *)```{language}\n(.*?)^ *```$", text, flags=re.DOTALL | re.MULTILINE)
    return [re.sub(rf"^{indent}", "", block, flags=re.MULTILINE) for indent, block in blocks]


def commands_of(block: str) -> list[list[str]]:
    """Return the words of every command of a shell block, without redirections, variables and the activation."""
    commands = []
    for line in block.replace("\\\n", " ").splitlines():
        words: list[str] = []
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|<>")
        lexer.whitespace_split = True
        for word in [*lexer, "&&"]:
            if set(word) <= set(";&|"):
                commands.append(words)
                words = []
            else:
                words.append(word)
    for words in commands:
        for sign in ("<", ">"):
            if sign in words:
                del words[words.index(sign) : words.index(sign) + 2]
        while words and re.fullmatch(r"\w+=\S*", words[0]):
            del words[0]
    return [words for words in commands if words and words[0] not in SHELL_PROGRAMS]
