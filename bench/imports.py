"""The cost of importing the package and of a first translation: `python -m bench.imports MODEL`.

For each row a new process runs the code of all rows up to it. The command prints the process's CPU seconds and its
largest MiB, medians over rounds, in which the rows take turns.
"""

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
from itertools import accumulate
from pathlib import Path

from bench.measuring import Row, in_turns, make_parser, report

STAGES = {
    "import torch": "import torch",
    "import transformers": "import transformers",
    "what any model imports": """
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, MarianMTModel, PreTrainedTokenizerFast
from transformers.pipelines import PIPELINE_REGISTRY
""",
    "import vaswani_transformer": "from vaswani_transformer import prepare_for_inference, translate",
    "load the model": """
model, tokenizer = (auto.from_pretrained(folder) for auto in (AutoModelForSeq2SeqLM, AutoTokenizer))
""",
    "prepare it in int8": "model = prepare_for_inference(model, 'int8')",
    "translate a sentence": "list(translate(model, tokenizer, ['Where are they?']))",
}
START = "import sys; folder = sys.argv[1]"
END = """
import json, time
status = open("/proc/self/status").read()  # `getrusage` would count the process that started this one
print(json.dumps([time.process_time(), int(status.partition("VmHWM:")[2].split()[0]) / 1024]))
"""


def measure(code: str, folder: Path) -> tuple[float, float]:
    """Return the CPU seconds and the largest MiB of a new process that runs `code`."""
    command = [sys.executable, "-c", "\n".join((START, code, END)), str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    finished = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    seconds, mib = json.loads(finished.stdout.splitlines()[-1])
    return seconds, mib


def stage_rows(options: argparse.Namespace) -> list[Row]:
    """Return the figures of a process up to each of the last stages."""
    programs = list(accumulate(STAGES.values(), lambda program, code: f"{program}\n{code}"))
    calls = {}
    for name, program in list(zip(STAGES, programs, strict=True))[-options.last :]:
        calls[name] = functools.partial(measure, program, options.model)
    rows: list[Row] = []
    for name, results in in_turns(calls, options.rounds).items():
        seconds, mib = (statistics.median(column) for column in zip(*results, strict=True))
        rows.append({"after": name, "CPU seconds": seconds, "MiB": mib})
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser("imports", __doc__, {"rounds": 1, "last": 1}, rounds=5)
    parser.add_argument("model", type=Path, help="the folder of a model")
    count = len(STAGES)
    last = f"measure only this number of rows, the last ones ({count})"
    parser.add_argument("--last", type=int, choices=range(1, count + 1), default=count, help=last)
    options = parser.parse_args(arguments)
    report(stage_rows(options), options)


if __name__ == "__main__":
    main()
