"""Kill small runs by SIGKILL at random moments, and compare the weights with those of an uninterrupted run.

`python -m bench.kills --kills 200` repeats a case until it has killed 200 times: it starts a run, kills it, and starts
it again by the same command, until the run ends. Half of the kills come at any moment of the run. The others come
shortly after a checkpoint's folder appears, while the run writes files, evaluates or trains on. Of a run of two
processes a kill ends both, or only one, and then the launcher ends the other. The final weights, those of each
checkpoint, and the scores must equal those of the uninterrupted run to the bit. The command exits with 1 if they
differ or if a start fails.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import Popen, TimeoutExpired
from typing import Any

import psutil
import yaml

from bench.measuring import ROOT, Row, make_parser, report

WORDS = [f"{number} {noun}" for number in ("one", "two", "three", "four") for noun in ("tree", "dog", "house", "sea")]
SMALL: dict[str, Any] = {
    "d_model": 16,
    "d_ff": 16,
    "num_heads": 2,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "dropout": 0.1,
}
TRAINING = {"steps": 14, "evaluation_steps": 3, "source_tokens": 60, "target_tokens": 60, "keep_checkpoints": 10}
LAUNCH = ("accelerate.commands.launch", f"--config_file={ROOT}/training/accelerate/two-cpu-processes.yaml", "-m")
RUNS: dict[str, tuple[tuple[str, ...], list[str]]] = {  # the launcher, and fields that differ from the recipe's
    "one process": ((), []),
    "two processes": (LAUNCH, []),
    "mean of checkpoints": ((), ["--training.average_last=2"]),
    "CMLM": ((), ["--model.kind=cmlm", "--decoding.num_iterations=3"]),
    "FlowSeq": ((), ["--model.kind=flowseq", "--training.decoder_steps=4", "--training.kl_warmup_steps=4"]),
}
LIMIT = 900.0  # seconds after which a run counts as hanging


@dataclass
class Run:
    """A run's command without its folder, and what happened to it.

    Attributes:
        seconds: the time of the uninterrupted run.
        expected: the weights and scores of the uninterrupted run.
        counts: how many cases were run, how many failed, and how many kills of each kind there were.
    """

    name: str
    command: list[str]
    seconds: float = 0.0
    expected: dict[str, Any] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    def start(self, folder: Path) -> Popen[bytes]:
        with (folder.parent / "log.txt").open("ab") as log:
            command = [*self.command, f"--output_dir={folder}"]
            return Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)


def write_recipe(folder: Path) -> str:
    """Write pairs of words and their letters reversed, and return the recipe of a small run on them."""
    for split, texts in (("train", 5 * WORDS), ("validation", WORDS), ("test", WORDS)):
        lines = (json.dumps({"translation": {"en": text, "de": text[::-1]}}) for text in texts)
        (folder / f"{split}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    data = {"kind": "json", "path": str(folder)} | {name: f"{name}.jsonl" for name in ("train", "validation", "test")}
    recipe = {"name": "kills", "data": data, "tokenizer": {"vocab_size": 280}, "model": SMALL, "training": TRAINING}
    (folder / "kills.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return str(folder / "kills.yaml")


def result_of(folder: Path) -> dict[str, Any]:
    """Return the bytes of all weights of a finished run, and its scores."""
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    weights = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.safetensors")}
    return weights | {"scores": [results[split]["bleu"] for split in ("validation", "test")], "steps": results["steps"]}


def finish(run: Run, folder: Path) -> None:
    """Start a run and wait until it ends.

    Raises:
        RuntimeError: the run fails.
    """
    status = run.start(folder).wait(LIMIT)
    if status:
        log = (folder.parent / "log.txt").read_text(encoding="utf-8", errors="replace")
        raise RuntimeError(f"the run failed with status {status}; its log ends with: {log[-600:]}")


def checkpoints_in(folder: Path) -> set[Path]:
    return set((folder / "checkpoints").glob("checkpoint-*"))


def wait_for_moment(run: Run, process: Popen[bytes], folder: Path, draw: random.Random) -> None:
    """Wait for a random moment of a run, or its end; half of the moments come shortly after a new checkpoint."""
    is_aimed = draw.random() < 0.5
    before = checkpoints_in(folder)
    end = time.monotonic() + draw.uniform(0, 1.1 * run.seconds)
    while process.poll() is None and (is_aimed or time.monotonic() < end):
        if is_aimed and checkpoints_in(folder) - before:
            time.sleep(draw.choice((0.02, 0.4)) * draw.random())
            return
        time.sleep(0.002)


def kill(process: Popen[bytes], draw: random.Random) -> str:
    """Kill all processes of a run, or one of several, whose launcher ends the others; return which."""
    with suppress(psutil.NoSuchProcess):  # the run has just ended
        parent = psutil.Process(process.pid)
        children = parent.children(recursive=True)
        ranks = [child for child in children if "training.train" in child.cmdline()]
        victims = [parent, *children]
        which = "all processes"
        if len(ranks) > 1 and draw.random() < 0.5:
            victims = [draw.choice(ranks)]
            which = "one process of two"
        for victim in victims:
            with suppress(psutil.NoSuchProcess):
                victim.kill()
        process.wait(LIMIT)
        return which
    return "no process"


def run_case(run: Run, folder: Path, draw: random.Random, most: int) -> None:
    """Kill a run two to five times, but at most `most` times, finish it, and compare its result.

    Raises:
        RuntimeError: a start fails, or the result differs.
    """
    output = folder / "run"
    for _ in range(min(most, draw.randint(2, 5))):
        process = run.start(output)
        wait_for_moment(run, process, output, draw)
        if process.poll() is not None:
            if process.returncode:
                finish(run, output)  # raises with the log, unless the failure was the machine's and does not come again
            break
        complete = {mark.parent for mark in (output / "checkpoints").glob("*/complete")}
        is_saving = bool(checkpoints_in(output) - complete)
        run.counts[f"kills of {kill(process, draw)}"] += 1
        run.counts["kills"] += 1
        run.counts["in a save"] += is_saving
        if (output / "results.json").exists():
            break  # the kill came between the last file of the run and its exit; a finished run does not start again

    # The run to its end, and what differs.
    if not (output / "results.json").exists():
        finish(run, output)
    result = result_of(output)
    names = run.expected.keys() | result.keys()
    if differing := sorted(name for name in names if run.expected.get(name) != result.get(name)):
        raise RuntimeError(f"differs from the uninterrupted run in {', '.join(differing)}")


def begin(run: Run, folder: Path) -> None:
    """Take the seconds and the result of an uninterrupted run.

    Raises:
        RuntimeError: the run fails.
    """
    start = time.monotonic()
    finish(run, folder)
    run.seconds = time.monotonic() - start
    run.expected = result_of(folder)


def run_cases(runs: list[Run], top: Path, options: argparse.Namespace) -> None:
    """Run cases of all runs in turn until there were `--kills` kills, or an uninterrupted run fails."""
    number = 0
    kills = 0
    while kills < options.kills:
        run = runs[number % len(runs)]
        folder = top / str(number)
        folder.mkdir()
        try:
            if not run.expected:
                begin(run, folder / "whole")
            run_case(run, folder, random.Random(f"{options.seed}/{run.name}/{number}"), options.kills - kills)
        except (RuntimeError, TimeoutExpired) as error:
            run.counts["failed"] += 1
            print(f"{run.name}, case {number}: {error}", file=sys.stderr, flush=True)
            if not run.expected:
                return
        run.counts["cases"] += 1
        shutil.rmtree(folder)
        number += 1
        kills = sum(each.counts["kills"] for each in runs)


def main(arguments: list[str] | None = None) -> int:
    """Kill runs until there were enough kills; return 1 if a case failed."""
    parser = make_parser("kills", __doc__, {"kills": 1, "runs": ["one process"]})
    parser.add_argument("--kills", type=int, default=200, help="end after this number of kills (200)")
    parser.add_argument("--seed", type=int, default=1, help="of the moments of the kills (1)")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS), help="the runs to kill (all)")
    options = parser.parse_args(arguments)
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        recipe = write_recipe(Path(folder))
        for name in options.runs:
            launcher, fields = RUNS[name]
            runs.append(Run(name, [sys.executable, "-m", *launcher, "training.train", recipe, *fields]))
        run_cases(runs, Path(folder), options)
    rows: list[Row] = [{"run": run.name, "failed": 0, **run.counts} for run in runs]
    report(rows, options)
    return int(any(run.counts["failed"] for run in runs))


if __name__ == "__main__":
    sys.exit(main())
