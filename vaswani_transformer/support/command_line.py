"""Types of arguments, and arguments that several commands have."""

import argparse
import os
import sys
from pathlib import Path


def positive_argument(text: str) -> int:
    """Return `text` as an integer from 1 to 2^31 - 1."""
    if not (text.isdecimal() and 1 <= int(text) < 2**31):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected an integer of at least 1 and below 2^31")
    return int(text)


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a folder with a model and its tokenizer, or a name on the Hub")


def check_output_file(parser: argparse.ArgumentParser, path: Path) -> None:
    """End a command whose --output names no file, or one in a folder that is missing."""
    if path.is_dir():
        parser.error(f"--output={path}: is a folder; name a file.")
    if not (folder := path.absolute().parent).is_dir():
        parser.error(f"--output={path}: {folder} is not a folder; make it first.")


def silence_stdout() -> None:
    """Discard what standard output could not take, which Python would write again at exit."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
