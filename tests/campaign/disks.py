"""Disks: in small jobs each write fails, once and for good, and real disks of every size fill up.

A job must end with one line and leave its last good state intact, or end well without a file that it can spare. The
same command must then end with the bits of an undisturbed job. A checkpoint whose files are torn must never be resumed
from.
"""

import argparse
import errno
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import datasets.config
import torch

from tests.campaign.failing_writes import FailingWrites
from tests.campaign.kills import SECONDS, Job, begin, files_of, finish, make_jobs, wait
from training import average, train
from training.data import cache
from training.run.checkpoints import all_checkpoints, changed_file, complete_checkpoints, intact_checkpoint, settle

STEPS = ["--training.steps=6", "--training.evaluation_steps=3", "--training.checkpoint_steps=2"]
CODES = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT)
PAGE = 4096  # bytes


def train_from_cached_tokens(arguments: list[str]) -> None:
    """Train on pairs and tokens that are on the disk of the run."""
    run = Path(arguments[-1].partition("=")[2])
    datasets.config.HF_DATASETS_CACHE = run.parent / "cache"
    cache.CACHED_BYTES = 1  # ty: ignore[invalid-assignment]
    train.main(arguments)


def disk_jobs(folder: Path) -> list[Job]:
    """Write the inputs of all jobs into a folder, and return the jobs."""
    jobs = {job.name: job for job in make_jobs(folder)}
    run = jobs["mean of checkpoints"]
    run = replace(
        run, name="run", main=train_from_cached_tokens, arguments=[run.arguments[0], *STEPS, run.arguments[-1]]
    )
    whole = folder / "trained" / "run"
    whole.parent.mkdir()
    finish(run, whole, folder / "log")
    mean = Job("average", "training.average", average.main, [str(whole), "--last=2"], "--output_dir", files_of)
    return [run, mean, jobs["translate"], jobs["distill"]]


def begin_on(job: Job, output: Path, log: Path, writes: FailingWrites | None = None) -> int:
    """Run a job to its end, and return its status."""
    (status,) = wait(begin(job, output, log, None if writes is None else writes.install), SECONDS)
    return status


def check_end(status: int, log: Path, has_failed: bool) -> str:
    """Return how a job with failing writes ended: "one line" or "no error".

    Raises:
        AssertionError: it ended with something else.
    """
    text = log.read_text(errors="replace")
    assert status in (0, 2), f"ends with {status}: {text[-1500:]}"
    assert "Traceback" not in text, text[-1500:]
    if status == 0:
        return "no error"
    assert has_failed, f"ends with another error: {text[-1500:]}"
    last = text.rstrip().rpartition("\n")[2]
    reasons = ["too full", "make room", *(os.strerror(code) for code in CODES)]  # torch hides the system's reason
    assert any(reason in last for reason in reasons), f"does not say why: {last}"
    return "one line"


def check_state(job: Job, output: Path, expected: dict[str, Any]) -> None:
    """Check that what a failed job left is intact: complete checkpoints, and the beginning of its results."""
    for checkpoint in complete_checkpoints(output) if job.name == "run" else ():
        assert changed_file(checkpoint) is None, f"{checkpoint} is complete and damaged"
        weights = (checkpoint / "model.safetensors").read_bytes()
        assert weights == expected[checkpoint.name], f"{checkpoint} has other weights"
    if job.name == "average" and output.exists():
        assert not [path for path in output.iterdir() if path.suffix != ".part"], "a part of a mean is left"
    if job.name == "translate" and output.exists():
        assert expected[""].startswith(output.read_bytes()), "other lines are left"


def finish_and_compare(job: Job, output: Path, log: Path, expected: dict[str, Any]) -> None:
    finish(job, output, log)
    found = job.result(output)
    found = {name: content for name, content in found.items() if not name.endswith(".damaged")}  # kept for the user
    differing = [name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)]
    assert not differing, f"differs in {sorted(differing)}"


def fail_write(job: Job, number: int, is_lasting: bool, folder: Path, expected: dict[str, Any], code: int) -> str:
    """Let a write fail; return how the job ended, or "beyond" for a job that writes less often."""
    output, log, failed = folder / "disk" / "out", folder / "log", folder / "failed"
    output.parent.mkdir()
    status = begin_on(job, output, log, FailingWrites(f"{output.parent}/", number, code, is_lasting, failed))
    if not failed.exists():
        assert status == 0, log.read_text()[-1500:]
        return "beyond"
    end = check_end(status, log, has_failed=True)
    if status:
        check_state(job, output, expected)
        finish_and_compare(job, output, log, expected)
    else:
        assert job.result(output) == expected, f"differs after {failed.read_text()}"
    return end


def mount(folder: Path, options: str) -> bool:
    """Mount a disk in memory, or change its options; return False where that is not permitted."""
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def can_mount() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        if not shutil.which("mount") or not mount(Path(folder), "size=16k"):
            return False
        subprocess.run(["umount", folder], check=True)
        return True


def fill_disk(job: Job, limit: str, folder: Path, expected: dict[str, Any]) -> str:
    """Run a job on a disk with a limit on its bytes or files, then with room; return how it ended."""
    disk, log = folder / "disk", folder / "log"
    disk.mkdir()
    assert mount(disk, limit)
    try:
        status = begin_on(job, disk / "out", log)
        end = check_end(status, log, has_failed=True)
        if status:
            check_state(job, disk / "out", expected)
        assert mount(disk, "remount,size=1g,nr_inodes=100k")
        if status:
            finish_and_compare(job, disk / "out", log, expected)
        else:
            assert job.result(disk / "out") == expected, "differs"
        return end
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def tear(run: Path, draw: random.Random, folder: Path) -> str:
    """Cut a file of a checkpoint at a random place; the run must resume from the one before, and keep this one."""
    shutil.copytree(run, folder / "run")
    checkpoints = all_checkpoints(folder / "run")
    number = draw.randrange(1, len(checkpoints))
    for later in checkpoints[number + 1 :]:
        shutil.rmtree(later)
    path = draw.choice(
        sorted(path for path in checkpoints[number].rglob("*") if path.is_file() and path.stat().st_size)
    )
    os.truncate(path, draw.randrange(path.stat().st_size))
    settle(folder / "run", needs_best=False)
    assert intact_checkpoint(folder / "run") == checkpoints[number - 1], f"{path} was not noticed"
    kept = checkpoints[number].with_name(f"{checkpoints[number].name}.damaged")
    assert (kept / path.relative_to(checkpoints[number])).exists(), f"{kept} is not there"
    return "set aside"


def cases_of(job: Job, expected: dict[str, Any], options: argparse.Namespace) -> Any:
    """Yield the name and the function of each case of a job, which returns how it ended."""
    draw = random.Random(f"{options.seed}/{job.name}")
    for number in range(0, sys.maxsize, options.every):
        for is_lasting in (False, True):
            code = draw.choice(CODES)
            name = f"{'all writes from' if is_lasting else 'write'} {number}, {errno.errorcode[code]}"
            yield name, partial(fail_write, job, number, is_lasting, expected=expected, code=code)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Let the writes of all jobs fail, and return the log."""
    torch.set_num_threads(1)
    ends: Counter[str] = Counter()
    failures: list[dict[str, str]] = []
    end = time.monotonic() + 3600 * options.hours

    def attempt(group: str, name: str, case: Callable[[Path], str], top: Path) -> str:
        folder = Path(tempfile.mkdtemp(dir=top))
        try:
            outcome = case(folder)
            if outcome != "beyond":
                ends[f"{group}: {outcome}"] += 1
        except (AssertionError, RuntimeError, OSError, KeyError) as error:
            outcome = "failed"
            ends[f"{group}: failed"] += 1
            failures.append({"case": f"{group}, {name}", "error": str(error)[:1500]})
            print(f"{group}, {name}: {error}", file=sys.stderr)
        shutil.rmtree(folder)
        print(f"{sum(ends.values())} cases, {len(failures)} failed ({group}, {name})", file=sys.stderr, flush=True)
        return outcome

    with tempfile.TemporaryDirectory() as temporary:
        top = Path(temporary)
        jobs = disk_jobs(top)
        for job in [job for job in jobs if options.only in ("", job.name)]:
            whole = top / f"whole {job.name}"
            whole.mkdir()
            finish(job, whole / "out", whole / "log")
            expected = job.result(whole / "out")
            for name, case in cases_of(job, expected, options):
                if time.monotonic() > end or attempt(job.name, name, case, top) == "beyond":
                    break
            if can_mount():
                used = sum(path.stat().st_size + PAGE for path in whole.rglob("*")) // PAGE
                for pages in range(1, used, options.every):
                    if time.monotonic() < end:
                        fill = partial(fill_disk, job, f"size={pages * PAGE}", expected=expected)
                        attempt(f"{job.name} on a small disk", f"{pages} pages", fill, top)
                for files in range(2, len(list(whole.rglob("*"))) + 5, options.every):
                    if time.monotonic() < end:
                        fill = partial(fill_disk, job, f"nr_inodes={files}", expected=expected)
                        attempt(f"{job.name} on a disk for few files", f"{files} files", fill, top)
        for number in range(options.torn) if options.only in ("", "torn") else ():
            case = partial(tear, top / "trained" / "run", random.Random(f"{options.seed}/torn/{number}"))
            attempt("torn", str(number), case, top)
    return {"cases": sum(ends.values()), "ends": dict(ends), "can_mount": can_mount(), "failures": failures}
