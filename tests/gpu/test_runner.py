"""Parts that raise, hang, crash or lack a package keep their rows and change no other part."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.runner import (
    FAILED,
    LOG,
    NO_TIME,
    NOT_RUN,
    PASSED,
    RESULTS,
    SKIPPED,
    TABLES,
    TOO_SLOW,
    Part,
    Report,
    Result,
    Setting,
    perform,
    render,
    run_parts,
    spell,
    summary,
)
from tests.gpu.sample_parts import parts
from tests.helpers import no_space
from vaswani_transformer.support.files import PARTIAL

SAMPLES = {part.name: part for part in parts()}
ABOUT = {"device": "cpu (a processor)", "commit": "0123abc"}
COMMAND = ["python", "-m", "tests.gpu"]


@pytest.mark.parametrize(
    ("name", "rows", "status", "reason"),
    [
        ("good", 2, PASSED, None),
        ("far", 2, FAILED, "sums is off by 0.5; products is off by nan"),
        ("raising", 1, FAILED, "RuntimeError: CUDA error: an illegal memory access was encountered"),
        ("skipping", 0, SKIPPED, "there is no such kernel"),
        ("lacking", 0, SKIPPED, "cpu is not enough"),
        ("exhausting", 1, SKIPPED, "out of memory: CUDA out of memory. Tried to allocate 20 GiB"),
        ("importing", 0, SKIPPED, "No module named 'no_such_package'"),
        ("importing ours", 0, FAILED, "ModuleNotFoundError: No module named 'vaswani_transformer.gone'"),
    ],
)
def test_part_ends_with_a_status_and_one_line_of_reason(
    name: str, rows: int, status: str, reason: str | None, tmp_path: Path
) -> None:
    results: list[dict[str, Any]] = []
    setting = Setting(torch.device("cpu"), True, tmp_path)
    assert perform(SAMPLES[name], setting, results.append) == (status, reason)
    assert len(results) == rows


class FakeWorker:
    """Performs parts in this process, and counts its instances."""

    made = 0
    starts = True

    def __init__(self, catalog: str, device: str, log: Path, start_limit: float) -> None:
        type(self).made += 1
        self.is_ready = self.starts
        if not self.starts and start_limit < 1:
            time.sleep(start_limit)

    def run(self, part: Part, limit: float, send: Any) -> tuple[str, str | None]:
        if part.name == "crashing":
            sys.exit(143)  # as SIGTERM ends the command
        if part.name == "hanging":
            send({"ms": 1.5})
            return TOO_SLOW, f"not done after {limit:.0f} s"
        return perform(part, Setting(torch.device("cpu"), True, Path()), send)

    def close(self) -> None:
        pass


@pytest.fixture
def fake_worker(monkeypatch: pytest.MonkeyPatch) -> type[FakeWorker]:
    monkeypatch.setattr("tests.gpu.runner.Worker", FakeWorker)
    monkeypatch.setattr(FakeWorker, "made", 0)
    monkeypatch.setattr(FakeWorker, "starts", True)
    return FakeWorker


def test_run_continues_after_parts_that_do_not_pass(
    fake_worker: type[FakeWorker], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    names = ["far", "raising", "hanging", "exhausting", "good"]
    report = Report(tmp_path, ABOUT, COMMAND)
    assert not run_parts([SAMPLES[name] for name in names], "", "cpu", report, minutes=1)
    assert [one.status for one in report.results.values()] == [FAILED, FAILED, TOO_SLOW, SKIPPED, PASSED]
    assert fake_worker.made == 4  # a new process replaces one whose part did not pass
    assert capsys.readouterr().out.splitlines()[-1].startswith("passed   good (")
    written = json.loads((tmp_path / RESULTS).read_text())
    assert written["about"] == ABOUT
    assert [len(part["rows"]) for part in written["parts"]] == [2, 1, 1, 1, 2]
    assert summary(report.results.values()).splitlines() == [
        "1 passed, 1 skipped, 2 failed, 1 too slow",
        "failed: far: sums is off by 0.5; products is off by nan",
        "failed: raising: RuntimeError: CUDA error: an illegal memory access was encountered",
        "too slow: hanging: not done after 10 s",
    ]


def test_results_are_written_row_by_row(tmp_path: Path, fake_worker: type[FakeWorker]) -> None:
    seen = []

    def looking(setting: Setting) -> Any:
        for number in range(2):
            yield {"ms": float(number)}
            seen.append([part["rows"] for part in json.loads((tmp_path / RESULTS).read_text())["parts"]])

    run_parts([Part("looking", "Speed", looking)], "", "cpu", Report(tmp_path, ABOUT, COMMAND), minutes=1)
    assert seen == [[[{"ms": 0.0}]], [[{"ms": 0.0}, {"ms": 1.0}]]]
    assert not list(tmp_path.glob(f"*{PARTIAL}"))


def test_second_call_runs_only_what_the_first_had_no_time_for(tmp_path: Path, fake_worker: type[FakeWorker]) -> None:
    chosen = [SAMPLES[name] for name in ("good", "raising")]
    assert run_parts(chosen, "", "cpu", Report(tmp_path, ABOUT, COMMAND), minutes=0)
    assert [part["status"] for part in json.loads((tmp_path / RESULTS).read_text())["parts"]] == [NOT_RUN, NOT_RUN]
    assert fake_worker.made == 0
    assert run_parts(chosen[:1], "", "cpu", Report(tmp_path, ABOUT, COMMAND), minutes=1)
    report = Report(tmp_path, ABOUT, COMMAND)
    assert not run_parts(chosen, "", "cpu", report, minutes=1)
    assert {name: one.status for name, one in report.results.items()} == {"good": PASSED, "raising": FAILED}
    assert fake_worker.made == 2


def test_part_whose_process_does_not_start_fails_and_the_next_gets_another(
    fake_worker: type[FakeWorker], tmp_path: Path
) -> None:
    fake_worker.starts = False
    report = Report(tmp_path, ABOUT, COMMAND)
    assert not run_parts([SAMPLES["good"], SAMPLES["writing"]], "", "cpu", report, minutes=1)
    assert fake_worker.made == 2
    assert {(one.status, one.reason) for one in report.results.values()} == {
        (FAILED, f"its process did not start; {tmp_path / LOG} says why")
    }


def test_part_whose_process_the_minutes_cut_off_runs_again(
    fake_worker: type[FakeWorker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.gpu.runner.LEAST_TIME", 0.0)
    fake_worker.starts = False
    assert run_parts([SAMPLES["good"]], "", "cpu", Report(tmp_path, ABOUT, COMMAND), minutes=0.001)
    fake_worker.starts = True
    report = Report(tmp_path, ABOUT, COMMAND)
    assert (report.results["good"].status, report.results["good"].reason) == (NOT_RUN, NO_TIME)
    assert run_parts([SAMPLES["good"]], "", "cpu", report, minutes=1)
    assert report.results["good"].status == PASSED


def test_rows_of_a_part_that_the_minutes_cut_off_are_kept_and_the_part_runs_again(
    fake_worker: type[FakeWorker], tmp_path: Path
) -> None:
    assert run_parts([SAMPLES["hanging"]], "", "cpu", Report(tmp_path, ABOUT, COMMAND), minutes=0.05)
    report = Report(tmp_path, ABOUT, COMMAND)
    assert (report.results["hanging"].status, report.results["hanging"].rows) == (NOT_RUN, [{"ms": 1.5}])
    assert not run_parts([SAMPLES["hanging"]], "", "cpu", report, minutes=1)
    assert (report.results["hanging"].status, report.results["hanging"].rows) == (TOO_SLOW, [{"ms": 1.5}])


def test_part_that_a_signal_interrupts_runs_again(fake_worker: type[FakeWorker], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        run_parts([SAMPLES["crashing"]], "", "cpu", Report(tmp_path, ABOUT, COMMAND), minutes=1)
    assert not Report(tmp_path, ABOUT, COMMAND).is_settled(SAMPLES["crashing"])


def test_folder_that_takes_no_results_is_an_error_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"^--out: .*file takes no results; got File exists, expected a folder that"):
        Report(tmp_path / "file", ABOUT, COMMAND)
    with pytest.raises(ValueError, match=r"^--out: .* takes no results; got Not a directory, expected a folder that"):
        Report(tmp_path / "file" / "below", ABOUT, COMMAND)
    (tmp_path / RESULTS).write_text("[1]")
    with pytest.raises(ValueError, match=r"^--out: .*results.json is no file of this command; .* Name an empty folder"):
        Report(tmp_path, ABOUT, COMMAND)


def test_run_continues_where_the_disk_fails(
    fake_worker: type[FakeWorker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = Report(tmp_path, ABOUT, COMMAND)

    monkeypatch.setattr("tests.gpu.runner.write_atomically", no_space)
    assert run_parts([SAMPLES["good"], SAMPLES["skipping"]], "", "cpu", report, minutes=1) is True
    assert not report.is_written
    assert "| good | sums | 0.001 | 0.01 |" in report.tables().replace("|  |", "|")


def test_results_of_another_device_or_commit_are_not_continued(tmp_path: Path) -> None:
    Report(tmp_path, ABOUT, COMMAND).write()
    with pytest.raises(
        ValueError, match=r"^--out: .* with another commit; got '0123abc', expected 'fff'\. Name an"
    ) as caught:
        Report(tmp_path, ABOUT | {"commit": "fff"}, COMMAND)
    assert "\n" not in str(caught.value)


def test_tables_have_the_columns_of_all_their_rows() -> None:
    results = [
        Result("train", "Training", PASSED, None, 1.0, [{"model": "base", "ms a step": 41.25, "MFU": "38.1%"}]),
        Result("train big", "Training", PASSED, None, 1.0, [{"model": "big", "peak GiB": 12.5, "tokens/s": 123456.7}]),
        Result("flash", "Correctness", SKIPPED, "no kernel | here"),
    ]
    assert render(ABOUT, "python -m tests.gpu", results).splitlines() == [
        "`python -m tests.gpu`",
        "",
        "device cpu (a processor), commit 0123abc",
        "",
        "### Training",
        "",
        "| part | model | ms a step | MFU | peak GiB | tokens/s |",
        "| --- | --- | --- | --- | --- | --- |",
        "| train | base | 41.2 | 38.1% |  |  |",
        "| train big | big |  |  | 12.5 | 123,457 |",
        "",
        "### Not passed",
        "",
        "| part | status | reason |",
        "| --- | --- | --- |",
        "| flash | skipped | no kernel \\| here |",
    ]


@pytest.mark.parametrize(
    ("value", "cell"),
    [(None, ""), (True, "yes"), (12345, "12,345"), (1234.5, "1,234"), (0.00012345, "0.000123"), (float("nan"), "nan")],
)
def test_table_cell_is_short(value: Any, cell: str) -> None:
    assert spell(value) == cell


@pytest.mark.slow
def test_processes_that_hang_or_crash_are_replaced(tmp_path: Path) -> None:
    chosen = [SAMPLES[name] for name in ("hanging", "crashing", "writing", "good")]
    report = Report(tmp_path, ABOUT, COMMAND)
    assert not run_parts(chosen, "tests.gpu.sample_parts", "cpu", report, minutes=5)
    results = {name: (one.status, one.reason, len(one.rows)) for name, one in report.results.items()}
    assert results == {
        "hanging": (TOO_SLOW, f"not done after 10 s; {tmp_path / LOG} shows where", 1),
        "crashing": (FAILED, "the process ended with status 7", 0),
        "writing": (PASSED, None, 1),
        "good": (PASSED, None, 2),
    }
    assert "what a library prints" in (tmp_path / LOG).read_text()
    assert "sample_parts.py" in (tmp_path / LOG).read_text()  # the line of the part that hung
    assert "| good | products | 0 | 0.01 |" in (tmp_path / TABLES).read_text().replace("|  |  |", "|")
