"""What importing the package and a first translation cost: `python -m bench.imports MODEL`.

Each row runs its lines, after those of the rows above it, in a new process. It prints the CPU seconds and the largest
MiB of the process, medians over rounds, in which the rows take turns.
"""

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
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
    """Return the figures of the process after each stage."""
    names = list(STAGES)
    codes = list(STAGES.values())
    calls = {}
    for count in range(len(names) - options.last, len(names)):
        program = "\n".join(codes[: count + 1])
        calls[names[count]] = functools.partial(measure, program, options.model)
    rows: list[Row] = []
    for name, results in in_turns(calls, options.rounds).items():
        seconds, mib = (statistics.median(column) for column in zip(*results, strict=True))
        rows.append({"after": name, "CPU seconds": seconds, "MiB": mib})
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser("imports", __doc__, {"rounds": 1, "last": 1}, rounds=5)
    parser.add_argument("model", type=Path, help="the folder of a model")
    count = len(STAGES)
    parser.add_argument("--last", type=int, choices=range(1, count + 1), default=count, help=f"the last rows ({count})")
    options = parser.parse_args(arguments)
    report(stage_rows(options), options)


if __name__ == "__main__":
    main()
