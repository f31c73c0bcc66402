"""Latency, throughput, memory and disk space of a trained model in each engine, for those who run it on a server.

`python -m bench.serving MODEL LINES` translates each line of the text file LINES alone, and then all lines together,
with beam 4. It prints a row for each engine: the median milliseconds of a line alone, lines a second together, the
resident MiB of the process afterwards, and the MB (10^6 bytes) of the weights on disk. Each engine runs in a new
process, CTranslate2 without torch. Figures are medians over rounds, in which the engines take turns; those of each
round appear on standard error as soon as they are measured. `--engines` chooses the engines.

With `--clients N` it measures the service of examples/ instead, on one core with CTranslate2 and with torch, both in
int8. N clients on this machine send one line in each request. At full load each client sends its next request as soon
as it has an answer. At half load requests arrive at random at half of the measured rate, and a latency includes the
time until a client is free. The command prints the lines a second, the lines a second of the service's CPU time, the
latency that 50%, 95% and 99% of the requests stay below, and the resident and the largest MiB of the service. Each load
takes at most `--requests` and at most a minute, so three rounds with both engines take at most 13 minutes. Keep the
clients off the service's core, or they slow it down.

With `--calls` it compares instead the cost of `translate()`, the pipeline and the service's engine with that of
`generate()` and its tokenizer: in one process, prepared in int8, one line in each call, alternately. It prints the
milliseconds of a line in each, and the median ratio to `generate()`.
"""

import argparse
import contextlib
import functools
import importlib.util
import itertools
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from bench.measuring import (
    ROOT,
    Row,
    clock,
    in_turns,
    make_parser,
    median_ratio,
    report,
    resident_mib,
    seconds_of,
    spell,
)
from vaswani_transformer import prepare_for_inference, translate
from vaswani_transformer.convert import to_ctranslate2
from vaswani_transformer.pipeline import VaswaniTransformerTranslationPipeline
from vaswani_transformer.support.command import exit_on_user_error
from vaswani_transformer.support.loading import load_model, load_tokenizer

OURS = """
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
from vaswani_transformer import prepare_for_inference, translate
torch.set_num_threads(threads)
model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
model = model if dtype == "plain" else prepare_for_inference(model, dtype)
def run(texts):
    return list(translate(model, tokenizer, texts, num_beams=4))
"""
CTRANSLATE2 = """
import ctranslate2
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
translator = ctranslate2.Translator(folder, compute_type=dtype, intra_threads=threads, inter_threads=1)
def run(texts):
    tokens = [tokenizer.encode(text).tokens for text in texts]
    return translator.translate_batch(tokens, beam_size=4, max_batch_size=32)
"""
ENGINES = {  # of each engine the code, the folder of its weights and the precision
    "plain": (OURS, "torch", "plain"),
    "prepared float32": (OURS, "torch", "float32"),
    "prepared int8": (OURS, "torch", "int8"),
    "CTranslate2 float32": (CTRANSLATE2, "float32", "float32"),
    "CTranslate2 int8": (CTRANSLATE2, "int8", "int8"),
}
SERVED = ("CTranslate2 int8", "prepared int8")  # what the service runs
SERVICE = ROOT / "examples" / "service" / "service.py"
LOAD_SECONDS = 60
CHILD = """
import json, sys, time
folder, dtype, threads = sys.argv[1:]
threads = int(threads)
lines = json.load(sys.stdin)
{engine}
def seconds(texts):
    start = time.perf_counter()
    run(texts)
    return time.perf_counter() - start
seconds(lines[:2])
alone = sorted(seconds([line]) for line in lines)[len(lines) // 2]
together = seconds(lines)
status = open("/proc/self/status").read()
resident = int(status.partition("VmRSS:")[2].split()[0]) / 1024
print(json.dumps([alone, together, resident]))
"""


def medians(calls: Mapping[str, Callable[[], Row]], rounds: int) -> dict[str, Row]:
    """Return the medians of each call's figures, and print those of each round to standard error."""

    def logged(name: str) -> Row:
        print(f"{name}: starts", file=sys.stderr, flush=True)
        row = calls[name]()
        figures = ", ".join(f"{column} {spell(value)}" for column, value in row.items())
        print(f"{name}: {figures}", file=sys.stderr, flush=True)
        return row

    measured = in_turns({name: functools.partial(logged, name) for name in calls}, rounds)
    result = {}
    for name, rows in measured.items():
        result[name] = {column: statistics.median(row[column] for row in rows) for column in rows[0]}
    return result


def measure(code: str, folder: Path, dtype: str, lines: list[str], threads: int) -> Row:
    """Return an engine's speed for lines alone and together, the MiB of its process, and the MB of its weights."""
    finished = subprocess.run(
        [sys.executable, "-c", CHILD.format(engine=code), str(folder), dtype, str(threads)],
        input=json.dumps(lines),
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
    )
    alone, together, resident = json.loads(finished.stdout.splitlines()[-1])
    weights = [path for path in folder.iterdir() if path.suffix in (".safetensors", ".bin")]
    return {
        "ms a line alone": 1000 * alone,
        "lines a second together": len(lines) / together,
        "resident MiB": resident,
        "weights, MB": sum(path.stat().st_size for path in weights) / 1e6,
    }


def engine_rows(folders: dict[str, Path], lines: list[str], options: argparse.Namespace) -> list[Row]:
    """Return the figures of each engine."""
    calls = {}
    for engine in options.engines:
        code, folder, dtype = ENGINES[engine]
        calls[engine] = functools.partial(measure, code, folders[folder], dtype, lines, options.threads)
    return [{"engine": engine, **row} for engine, row in medians(calls, options.rounds).items()]


@contextlib.contextmanager
def running_service(folder: Path, clients: int, threads: int) -> Generator[tuple[int, int]]:
    """Start the service with a model, and yield the id of its process and its port."""
    command = [sys.executable, str(SERVICE), str(folder), "--port=0", f"--threads={threads}", f"--waiting={clients}"]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT)}
    streams: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **streams) as process:
        try:
            assert process.stderr is not None
            log = iter(process.stderr.readline, "")
            addresses = (re.search(r"http://127\.0\.0\.1:(\d+)", line) for line in log)
            yield process.pid, int(next(address[1] for address in addresses if address))
        finally:
            process.terminate()


def request(connection: HTTPConnection, line: str) -> None:
    """Translate a line, and read the whole answer."""
    connection.request("POST", "/translate", json.dumps({"text": line}))
    answer = connection.getresponse()
    body = answer.read()
    if answer.status != 200:
        raise RuntimeError(f"The service answered a request with status {answer.status}: {body!r}")


def arrivals(rate: float | None) -> Iterator[float]:
    """Yield the seconds at which requests arrive at random, `rate` a second; None means that all arrive at once."""
    generator = random.Random(0)
    seconds = 0.0
    while True:
        yield seconds
        if rate is not None:
            seconds += generator.expovariate(rate)


def latencies(port: int, jobs: Iterator[tuple[float, str]], clients: int, is_full: bool) -> tuple[list[float], float]:
    """Return the seconds that each job took, and those of all jobs together; none starts after `LOAD_SECONDS`.

    At full load a job begins when its request is sent, otherwise when it arrived.
    """
    lock = threading.Lock()  # an iterator serves one thread at a time
    taken = []
    begin = time.perf_counter()

    def client() -> None:
        with contextlib.closing(HTTPConnection("127.0.0.1", port, timeout=120)) as connection:
            while time.perf_counter() - begin < LOAD_SECONDS:
                with lock:
                    job = next(jobs, None)
                if job is None:
                    return
                arrival, line = job
                time.sleep(max(0.0, begin + arrival - time.perf_counter()))
                start = time.perf_counter() if is_full else begin + arrival
                request(connection, line)
                taken.append(time.perf_counter() - start)

    threads = [threading.Thread(target=client) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return taken, time.perf_counter() - begin


def cpu_seconds(pid: int) -> float:
    """Return the CPU time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure_service(folder: Path, lines: list[str], clients: int, requests: int, threads: int) -> Row:
    """Return the figures of a new service at full load, and then at half of the rate that it had."""

    def jobs(rate: float | None) -> Iterator[tuple[float, str]]:
        return itertools.islice(zip(arrivals(rate), itertools.cycle(lines), strict=False), requests)

    with running_service(folder, clients, threads) as (pid, port):
        latencies(port, itertools.islice(jobs(None), 2 * clients), clients, is_full=True)  # the first ones are slow
        before = cpu_seconds(pid)
        full, seconds = latencies(port, jobs(None), clients, is_full=True)
        used = cpu_seconds(pid) - before
        rate = len(full) / seconds
        half, _ = latencies(port, jobs(rate / 2), clients, is_full=False)
        memory = resident_mib(pid)
    row: Row = {"lines a second": rate, "lines a second of CPU time": len(full) / used}
    for load, taken in (("full", full), ("half", half)):
        percentiles = statistics.quantiles(taken, n=100, method="inclusive")
        for percent in (50, 95, 99):
            row[f"ms at {load} load, {percent}%"] = 1000 * percentiles[percent - 1]
    row["resident MiB"] = memory["now"]
    row["largest MiB"] = memory["peak"]
    return row


def service_rows(folders: dict[str, Path], lines: list[str], options: argparse.Namespace) -> list[Row]:
    """Return the figures of the service with each engine, medians over rounds."""
    calls: dict[str, Callable[[], Row]] = {}
    for engine in options.engines:
        _, folder, _ = ENGINES[engine]
        calls[engine] = functools.partial(
            measure_service, folders[folder], lines, options.clients, options.requests, options.threads
        )
    return [{"service": engine, **row} for engine, row in medians(calls, options.rounds).items()]


def service_engine(folder: Path, threads: int) -> Any:
    """Return the engine of the service that runs a model in torch."""
    spec = importlib.util.spec_from_file_location("service", SERVICE)
    assert spec is not None
    assert spec.loader is not None
    service = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = service  # its dataclasses look for it there
    spec.loader.exec_module(service)
    return service.TorchEngine(folder, service.parse_arguments([str(folder), f"--threads={threads}"]))


def call_rows(folder: Path, lines: list[str], rounds: int, threads: int) -> list[Row]:
    """Return the milliseconds of a line in each call, and the ratio to those in `generate()`."""
    # Both models are prepared with the layouts that the service has timed, so that only the calls differ.
    engine = service_engine(folder, threads)
    tokenizer = load_tokenizer(str(folder), local_files_only=True)
    model: Any = prepare_for_inference(load_model(str(folder), local_files_only=True), "int8", engine.model.layouts)
    pipe: Any = VaswaniTransformerTranslationPipeline(model=model, tokenizer=tokenizer)

    def generate(line: str) -> list[str]:
        output = model.generate(**tokenizer([line], return_tensors="pt"))
        return tokenizer.batch_decode(output, skip_special_tokens=True)

    ways: dict[str, Callable[[str], object]] = {
        "generate": generate,
        "translate": lambda line: list(translate(model, tokenizer, [line])),
        "pipeline": pipe,
        "service": lambda line: engine.translate([line]),
    }

    # A line's time in a call is the median over rounds.
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    now = clock(threads)
    for line in lines:
        calls = {way: lambda call=call, line=line: seconds_of(lambda: call(line), now) for way, call in ways.items()}
        in_turns(calls, 1)  # the first calls are slow
        for way, taken in in_turns(calls, rounds).items():
            seconds[way].append(statistics.median(taken))
    return [
        {
            "call": way,
            "ms a line": 1000 * statistics.mean(taken),
            "ratio to generate": median_ratio(taken, seconds["generate"]),
        }
        for way, taken in seconds.items()
    ]


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser("serving", __doc__, {"rounds": 1, "requests": 20}, rounds=3, threads=1)
    parser.add_argument("model", type=Path, help="the folder of a model")
    parser.add_argument("lines", type=Path, help="a text file with a sentence on each line")
    parser.add_argument("--clients", type=int, default=0, help="measure the service with this number of clients (none)")
    parser.add_argument("--requests", type=int, default=300, help="most requests at each load (300)")
    engines = "engines to measure (all); the service runs only in int8"
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES), help=engines)
    parser.add_argument("--calls", action="store_true", help="compare the cost of calls with that of generate()")
    options = parser.parse_args(arguments)
    if options.clients:
        chosen = options.engines
        options.engines = [engine for engine in chosen if engine in SERVED]
        if not options.engines:
            names = " or ".join(SERVED)
            parser.error(f"--engines: the service runs none of these; got {', '.join(chosen)}, expected {names}")
    torch.set_num_threads(options.threads)
    logging.set_verbosity_error()

    with exit_on_user_error(OSError):
        lines = options.lines.read_text(encoding="utf-8").splitlines()
    if options.calls:
        report(call_rows(options.model, lines, options.rounds, options.threads), options)
        return
    model: Any = load_model(str(options.model), local_files_only=True)
    tokenizer = load_tokenizer(str(options.model), local_files_only=True)
    with tempfile.TemporaryDirectory() as name:
        folders = {"torch": options.model, "float32": Path(name) / "float32", "int8": Path(name) / "int8"}
        for dtype in {ENGINES[engine][1] for engine in options.engines} - {"torch"}:
            to_ctranslate2(model, tokenizer, folders[dtype], dtype)
        rows_of = service_rows if options.clients else engine_rows
        report(rows_of(folders, lines, options), options)


if __name__ == "__main__":
    main()
