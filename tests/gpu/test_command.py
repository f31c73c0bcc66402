"""The complete command runs on a CPU with tiny shapes, so that it works on the next GPU."""

import json
from pathlib import Path

import pytest

from tests.forks import run_forked
from tests.gpu.__main__ import main
from tests.gpu.parts import parts
from tests.helpers import ROOT

NEEDS_AN_ACCELERATOR = ("flash_attention", "flex_attention")
IN_ORDER = [(False, "correct"), (False, "speed"), (True, "correct"), (True, "speed")]
NO_CTRANSLATE2 = ("ctranslate2 is not installed", "ctranslate2 has no bfloat16 on this cpu")


@pytest.mark.slow
def test_every_part_runs_on_a_cpu(tmp_path: Path) -> None:
    output = run_forked("tests.gpu", "--device=cpu", "--minutes=13", f"--out={tmp_path}", folder=ROOT)
    parts_by_name = {part["name"]: part for part in json.loads((tmp_path / "results.json").read_text())["parts"]}
    assert list(parts_by_name) == [part.name for part in parts()]
    for name, part in parts_by_name.items():
        if part["status"] == "skipped":
            assert any(word in name for word in NEEDS_AN_ACCELERATOR) or part["reason"] in NO_CTRANSLATE2, part
        else:
            assert part["status"] == "passed"
            assert part["rows"]
    assert (tmp_path / "results.md").read_text().count("### ") == 6
    assert "failed" not in output


def test_part_names_are_unique_and_correctness_comes_first_and_compiling_last() -> None:
    made = parts()
    assert len({part.name for part in made}) == len(made)
    kinds = [(part.compiles, part.name.split(":")[0]) for part in made]
    assert list(dict.fromkeys(kinds)) == IN_ORDER
    assert kinds == sorted(kinds)


def test_device_that_cannot_be_used_is_an_error_of_one_line(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    for device in ("xpu", "nonsense"):
        assert main([f"--device={device}", f"--out={tmp_path / 'out'}"]) == 2
        message = capsys.readouterr().err
        assert message.startswith(f"--device: '{device}' cannot be used; got: ")
        assert message.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_unknown_part_is_an_error_with_the_list(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    assert main(["--device=cpu", "--only=nothing*", f"--out={tmp_path / 'out'}"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("--only: no part has such a name; got 'nothing*'. The parts are correct: eager, float32")
    assert message.count("\n") == 1
    assert not (tmp_path / "out").exists()
