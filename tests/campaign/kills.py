"""Kills: small jobs are killed at random moments and started again by the same command, until they are finished.

An undisturbed job and a killed one must leave the same bits: all checkpoints and final weights of a run, the files of a
translation, a parsed text and a distillation. Jobs are forked from a process that has imported everything, and about
every tenth one is started as users start it.
"""

import argparse
import errno
import faulthandler
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from tests.campaign.failing_writes import FailingWrites
from tests.campaign.inputs import saved_model
from tests.forks import launch_environment
from tests.helpers import PAIRS, ROOT
from tests.training.runs import LANGUAGE, TWO_PROCESSES, kill, make_arguments, start
from training import distill, train
from training.run.checkpoints import all_checkpoints, complete_checkpoints
from vaswani_transformer.parsing import command as parse
from vaswani_transformer.translation import command as translate

STEPS = ["--training.steps=14", "--training.evaluation_steps=4", "--training.checkpoint_steps=3"]
RUNS = {
    "files": [],
    "stream": ["--data.streaming=true", "--data.buffer=20", "--data.max_length=40"],
    "mean of checkpoints": ["--training.average_last=2"],
    "cmlm": ["--model.kind=cmlm", "--decoding.num_iterations=3", "--training.evaluation_iterations=2"],
    "iterative_vae": ["--model.kind=iterative_vae"],
}
PHASES = {  # of the functions on the stack of a killed process, the innermost first
    "average": "mean_weights|last_checkpoints",
    "checkpoint": "_save_checkpoint|mark_complete|rotate|settle|intact_checkpoint",
    "evaluation": "evaluate|predict|evaluation_loop",
    "batches": "get_batch_samples|get_train_dataloader|__next__",
    "step": "training_step|_inner_training_loop",
    "tokens and data": "tokenize|load_pairs|initialize_run",
    "results": "collect_results|write_results|save_pretrained",
    "translations": "write_parts|translate_lines|parse_lines",
    "preparation": "main",
}
SECONDS = 1200.0  # after which a job hangs, also on a machine with other work
OUTLIVED = 240.0  # by which the processes of a launch may outlive one that is killed; they need seconds of CPU time
STATUS = {signal.SIGINT: 130, signal.SIGTERM: 143}


@dataclass
class Job:
    """A command with its arguments without the output, and what its result is."""

    name: str
    module: str
    main: Callable[[list[str]], None]
    arguments: list[str]
    output: str
    result: Callable[[Path], dict[str, Any]]
    processes: int = 1


@dataclass
class Undisturbed:
    """A job's result without a kill, and the seconds that it takes; fewer where the machine has less other work."""

    seconds: float
    result: dict[str, Any]


def result_of_run(folder: Path) -> dict[str, Any]:
    """Return the bytes of the weights of a finished run and of its checkpoints, and its scores."""
    results = json.loads((folder / "results.json").read_text())
    assert complete_checkpoints(folder) == all_checkpoints(folder)
    weights = {path.parent.name: path.read_bytes() for path in (folder / "checkpoints").glob("*/model.safetensors")}
    scores = {split: results[split]["bleu"] for split in ("validation", "test")}
    return weights | {"run": (folder / "model.safetensors").read_bytes(), "scores": scores, "steps": results["steps"]}


def files_of(path: Path) -> dict[str, Any]:
    """Return the bytes of a file and its record, or of all files of a folder."""
    paths = path.parent.glob(f"{path.name}*") if path.is_file() else path.iterdir()
    return {each.name.removeprefix(path.name): each.read_bytes() for each in paths if each.suffix != ".lock"}


def make_jobs(folder: Path) -> list[Job]:
    """Write the inputs of all jobs into a folder, and return the jobs."""
    (folder / "runs").mkdir()
    recipe, *_ = make_arguments(folder / "runs", train=5 * LANGUAGE)
    runs = [
        Job(name, "training.train", train.main, [recipe, *STEPS, *more], "--output_dir", result_of_run)
        for name, more in RUNS.items()
    ]
    for name, kind in (("two processes", "files"), ("stream in two processes", "stream")):
        arguments = [recipe, *STEPS, *RUNS[kind]]
        runs.append(Job(name, "training.train", train.main, arguments, "--output_dir", result_of_run, processes=2))
    for name, family in (("model", "autoregressive"), ("parser", "parser")):
        (folder / name).mkdir()
        for file, content in saved_model(family).items():
            (folder / name / file).write_bytes(content)
    (text := folder / "text").write_text("".join(f"{source}\n" for source in 12 * list(PAIRS)))
    lines = [f"--input={text}", "--window=6", "--batch_tokens=40", "--beams=2"]
    package, (model, parser) = "vaswani_transformer", (str(folder / name) for name in ("model", "parser"))
    distilling = [model, recipe, "--window=8", "--beams=2", "--max_length_difference=200"]
    return [
        *runs,
        Job("translate", f"{package}.translation", translate.main, [model, *lines], "--output", files_of),
        Job("parse", f"{package}.parsing", parse.main, [parser, *lines], "--output", files_of),
        Job("distill", "training.distill", distill.main, distilling, "--output_dir", files_of),
    ]


def run_forked(
    job: Job, arguments: list[str], log: Path, variables: dict[str, str], prepare: Callable[[], None] | None
) -> NoReturn:
    """Run a command in this forked process, and end it."""
    os.setpgid(0, 0)
    with log.open("a") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=False)
    os.environ.update(variables)
    if prepare is not None:
        prepare()
    sys.orig_argv[:] = [sys.executable, "-m", job.module]
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
    try:
        job.main(arguments)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stderr.flush()
    os._exit(status)


def begin(job: Job, output: Path, log: Path, prepare: Callable[[], None] | None = None) -> list[int]:
    """Start a job by forking, in whose processes `prepare` is called first, and return its processes."""
    arguments, pids = [*job.arguments, f"{job.output}={output}"], []
    variables = launch_environment(TWO_PROCESSES[1:]) if job.processes > 1 else {}
    for rank in range(job.processes):
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if job.processes > 1 else {}
        if not (pid := os.fork()):
            run_forked(job, arguments, log, variables | ranks, prepare)
        pids.append(pid)
    return pids


def wait(pids: list[int], seconds: float) -> list[int]:
    """Return the exit statuses of processes that end in time; those that do not are killed and count as -9."""
    end, statuses = time.monotonic() + seconds, {}
    while len(statuses) < len(pids):
        for pid in [pid for pid in pids if pid not in statuses]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                statuses[pid] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > end:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    return [statuses[pid] for pid in pids]


def has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def finish(job: Job, output: Path, log: Path) -> float:
    """Run a job to its end, and return the seconds that it took.

    Raises:
        RuntimeError: it fails.
    """
    started = time.monotonic()
    statuses = wait(begin(job, output, log), SECONDS)
    if any(statuses):
        raise RuntimeError(f"{job.name} ends with {statuses}: {log.read_text()[-600:]}")
    return time.monotonic() - started


def phase_of(log: Path) -> str:
    """Return where a process was when it was killed, by the stack that it wrote."""
    stack = log.read_text(errors="replace").rpartition("most recent call first")[2]
    frames = re.findall(r"in (\w+)$", stack, re.MULTILINE)
    return next((phase for frame in frames for phase, names in PHASES.items() if re.fullmatch(names, frame)), "start")


def disturb(job: Job, output: Path, log: Path, seconds: float, draw: random.Random) -> str:
    """Start a job, and kill or interrupt it after some seconds; return where it was, or "finished".

    Raises:
        RuntimeError: it ends by itself with an error, or by a signal with another status than schedulers expect.
    """
    sent = draw.choices((signal.SIGKILL, signal.SIGTERM, signal.SIGINT), (6, 1, 1))[0]
    if job.module != "training.train" or job.processes > 1:
        sent = signal.SIGKILL
    pids, end = begin(job, output, log), time.monotonic() + seconds
    victims = draw.choice((pids, pids[:1], pids[-1:]))
    while not (is_over := has_ended(pids[0])) and time.monotonic() < end:
        time.sleep(0.01)
    for pid in () if is_over else victims:
        os.kill(pid, signal.SIGUSR1)
    time.sleep(0.02)
    for pid in () if is_over else victims:
        os.kill(pid, sent)
    statuses = wait(pids, SECONDS if is_over or sent != signal.SIGKILL else OUTLIVED)
    if is_over:
        if any(statuses):
            raise RuntimeError(f"{job.name} ends with {statuses}: {log.read_text()[-600:]}")
        return "finished"
    if sent != signal.SIGKILL and statuses[0] not in (0, STATUS[sent], -sent):
        raise RuntimeError(f"{job.name} ends with {statuses[0]} by {sent.name}: {log.read_text()[-600:]}")
    if len(victims) < len(pids) and -9 in [s for pid, s in zip(pids, statuses, strict=True) if pid not in victims]:
        raise RuntimeError(f"{job.name}: a process outlives the other one by {OUTLIVED:.0f} seconds")
    return f"{sent.name} in {phase_of(log)}"


def fill(job: Job, output: Path, log: Path, draw: random.Random) -> str:
    """Start a job whose disk is full after some writes; return that, or "finished".

    Raises:
        RuntimeError: it ends with something else than one line and status 2.
    """
    log.unlink(missing_ok=True)
    writes = FailingWrites(str(output), draw.choice((draw.randrange(8), draw.randrange(80))), errno.ENOSPC, True)
    statuses = wait(begin(job, output, log, writes.install), SECONDS)
    text = log.read_text(errors="replace")
    if set(statuses) - {0, 2} or "Traceback" in text or (any(statuses) and "No space left on device" not in text):
        raise RuntimeError(f"{job.name} ends with {statuses} on a full disk: {text[-1200:]}")
    return "full disk" if any(statuses) else "finished"


def start_and_kill(job: Job, output: Path, draw: random.Random) -> str:
    """Start a job as users do, in a new process, and kill it after some seconds; return that, or "finished".

    Raises:
        RuntimeError: it ends by itself with an error.
    """
    if job.module == "training.train":
        process = start(job.arguments, output, launcher=TWO_PROCESSES if job.processes > 1 else (), is_fork=False)
    else:
        command = [sys.executable, "-m", job.module, *job.arguments, f"{job.output}={output}"]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    time.sleep(draw.uniform(0, 25))
    if process.poll() is None:
        kill(process)
        return "SIGKILL of a real start"
    _, errors = process.communicate()
    if process.returncode:
        raise RuntimeError(f"{job.name} ends with {process.returncode}: {errors[-600:]}")
    return "finished"


def run_case(job: Job, number: int, seed: int, folder: Path, expected: Undisturbed) -> list[str]:
    """Disturb a job two to five times, finish it, and compare the result; return where it was each time.

    Raises:
        RuntimeError: a start fails.
        AssertionError: the result differs.
    """
    draw, started = random.Random(f"{seed}/{job.name}/{number}"), time.monotonic()
    output, log, moments, is_finished = folder / "out", folder / "log", [], False
    is_real = draw.random() < 0.1
    for _ in range(draw.choice((2, 3, 4, 5))):
        if is_real:
            moments.append(start_and_kill(job, output, draw))
        elif job.processes == 1 and draw.random() < 0.1:
            moments.append(fill(job, output, log, draw))
        else:
            moments.append(disturb(job, output, log, draw.uniform(0.02, 1.1) * expected.seconds, draw))
            if moments == ["finished"]:
                expected.seconds = min(expected.seconds, time.monotonic() - started)
        # A kill may come between the last file of a run and its exit; the run would not start again.
        is_finished = moments[-1] == "finished" or (output / "results.json").exists()
        if is_finished:
            break
    if not is_finished:
        finish(job, output, log)
    found, result = job.result(output), expected.result
    differing = [name for name in result.keys() | found.keys() if result.get(name) != found.get(name)]
    assert not differing, f"{job.name} differs after {moments} in {sorted(differing)}"
    return moments


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Kill jobs for the hours, or as often as the options say, and return the log."""
    torch.set_num_threads(1)
    moments: Counter[str] = Counter()
    jobs_done: Counter[str] = Counter()
    kills: Counter[str] = Counter()  # of each job; full disks and interruptions are among the moments only
    failures, number, end = [], 0, time.monotonic() + 3600 * options.hours
    with tempfile.TemporaryDirectory() as top:
        jobs = [job for job in make_jobs(Path(top)) if options.only in ("", job.name)]
        expected: dict[str, Undisturbed] = {}
        while time.monotonic() < end and kills.total() < options.kills:
            job = jobs[number % len(jobs)]
            folder = Path(top) / f"case-{number}"
            folder.mkdir()
            try:
                if job.name not in expected:
                    whole = Path(top) / f"whole {job.name}"
                    whole.mkdir()
                    seconds = finish(job, whole / "out", whole / "log")
                    expected[job.name] = Undisturbed(seconds, job.result(whole / "out"))
                found = run_case(job, number, options.seed, folder, expected[job.name])
                moments.update(moment for moment in found if moment != "finished")
                kills[job.name] += sum(moment.startswith("SIGKILL") for moment in found)
            except (AssertionError, RuntimeError, OSError, KeyError) as error:
                print(f"{job.name}/{number}: {error}", file=sys.stderr)
                failures.append({"case": f"{job.name}/{number}", "error": str(error)[:1500]})
            jobs_done[job.name] += 1
            number += 1
            shutil.rmtree(folder)
            print(f"{kills.total()} kills, {len(failures)} failed ({job.name})", file=sys.stderr, flush=True)
    counts = {"jobs": jobs_done, "kills": kills, "moments": moments}
    return {"cases": moments.total()} | {name: dict(each) for name, each in counts.items()} | {"failures": failures}
