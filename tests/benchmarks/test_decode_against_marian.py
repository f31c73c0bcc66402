"""The benchmark of decoding runs on tiny models, and its ratios are to Marian whichever arms it is given."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers.utils import logging

from tests.benchmarks.decode_against_marian import main

Command = Callable[..., dict[str, Any]]  # returns the report of a run with these options


@pytest.fixture
def run_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Command]:
    """Return a function that runs the command, with two sources and greedy search, and returns its report."""
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)  # the tests have one
    verbosity = logging.get_verbosity()

    def run_command(*options: str) -> dict[str, Any]:
        main(["--tiny", "--beams=1", *options])
        return json.loads(capsys.readouterr().out)

    yield run_command
    logging.set_verbosity(verbosity)


@pytest.mark.parametrize("arms", [["float32", "int8"], ["marian", "ours"], ["marian"]], ids=" ".join)
def test_every_run_measures_marian_and_the_ratios_to_it(run_command: Command, arms: list[str]) -> None:
    report = run_command("--arms", *arms)
    (searched,) = report["measured"]
    assert set(report["options"]["arms"]) == searched["tokens_per_second"].keys() == {*arms, "marian"}
    assert searched["ratios_to_marian"].keys() == {*arms} - {"marian"}
    assert all(number > 0 for name in ("tokens_per_second", "ratios_to_marian") for number in searched[name].values())


def test_arms_that_cannot_write_each_targets_length_are_left_out(run_command: Command) -> None:
    (searched,) = run_command("--lengths=mixed", "--arms", "ours", "ct2_int8")["measured"]
    assert searched["tokens_per_second"].keys() == {"ours", "marian"}
