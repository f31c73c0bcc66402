"""The commands of a page's shell blocks, and their programs' own parsers, which read them to the end."""

import argparse
import importlib
import re
import shlex
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.launch import _validate_launch_command, launch_command_parser

from tests import ROOT
from training.recipe import load_recipe

KEPT = sorted((ROOT / "training" / "recipes" / "results").rglob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *KEPT, *sorted((ROOT / "docs").glob("*.md"))]
OURS = {f"vaswani-{room}": room for room in ("convert", "demo")}
OURS |= {"vaswani-parse": "parsing", "vaswani-translate": "translation"}
OTHERS = (
    "cat coverage curl cut docker gh git gzip hf jupyter mkdocs nox pre-commit ruff sacrebleu sed shuf tensorboard ty"
)
SHELL_PROGRAMS = (".", "export", "cd", "cp", "echo", "mkdir")


class ParsedError(Exception):
    """A command's own parser accepted its arguments."""


def parse_with_argparse(module: str, arguments: list[str]) -> None:
    """Run a command's `main` up to the end of its parsing; what this leaves has to be fields of its recipe."""
    parse, fields = argparse.ArgumentParser.parse_known_args, []

    def parse_known_args(parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> None:
        fields.extend(parse(parser, *args, **kwargs)[1])
        raise ParsedError

    main = getattr(importlib.import_module(module), "main", None) or importlib.import_module(f"{module}.__main__").main
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_known_args", parse_known_args)
        patch.setattr(sys, "argv", [module, *arguments])
        with pytest.raises(ParsedError):
            main()
    recipes = [argument for argument in arguments if argument.endswith(".yaml")]
    assert recipes or not fields, fields
    for recipe in recipes:
        load_recipe(ROOT / recipe, fields)


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


def parse_module(arguments: list[str]) -> None:
    """Parse `python -m MODULE`."""
    module, *rest = arguments
    if module == "training.train":
        load_recipe(ROOT / rest[0], rest[1:])
    elif module == "pip":
        parse_pip(rest)
    elif module not in ("pytest", "venv"):
        assert module.startswith(("training.", "bench.", "tests.", "vaswani_transformer.")), module
        parse_with_argparse(module, rest)


def parse(program: str, arguments: list[str]) -> None:
    """Parse a command as its program does; another project's program is only known by name."""
    if program in OURS:
        parse_with_argparse(f"vaswani_transformer.{OURS[program]}.command", arguments)
    elif program == "accelerate":
        parse_launch(arguments[1:])
    elif program == "pip":
        parse_pip(arguments)
    elif program not in ("python", "python3"):
        assert program in OTHERS.split()
    elif arguments[0] == "-m":
        parse_module(arguments[1:])
    else:
        assert arguments == ["lora.py"] or (ROOT / arguments[0]).is_file()  # a script of the page, or of the checkout


def blocks_of(page: Path, language: str) -> list[str]:
    """Return the fenced blocks of one language, without the indent of a list."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(rf"^( *)```{language}\n(.*?)^ *```$", text, flags=re.DOTALL | re.MULTILINE)
    return [re.sub(rf"^{indent}", "", block, flags=re.MULTILINE) for indent, block in blocks]


def commands_of(page: Path) -> list[list[str]]:
    """Return the words of every shell command of a page, without redirections, variables and the activation."""
    commands = []
    for line in "\n".join(blocks_of(page, "bash")).replace("\\\n", " ").splitlines():
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


def anchors_of(text: str) -> set[str]:
    """Return the anchors that GitHub and MkDocs both give a page's headings."""
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
