"""What a server needs to know of a trained model: latency, throughput, memory and disk space in each engine.

`python -m bench.serving MODEL LINES` translates each line of the text file LINES alone, and then all lines together,
with beam 4. It prints a row an engine: the median milliseconds of a line alone, lines a second together, the resident
MiB of the process afterwards, and the MB (10^6 bytes) of the weights on disk. Each engine has its own process, in which
CTranslate2 runs without torch. Figures are medians over rounds, in which the engines take turns.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from transformers.utils import logging

from bench.measuring import Row, in_turns, make_parser, report
from vaswani_transformer.convert import to_ctranslate2
from vaswani_transformer.support.checked_loading import load_model, load_tokenizer

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
CHILD = """
import json, sys, time
folder, dtype, threads, lines = *sys.argv[1:3], int(sys.argv[3]), json.load(sys.stdin)
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


def measure(code: str, folder: Path, dtype: str, lines: list[str], threads: int) -> list[float]:
    """Return the seconds of a line alone and of all lines, and the MiB of a new process."""
    finished = subprocess.run(
        [sys.executable, "-c", CHILD.format(engine=code), str(folder), dtype, str(threads)],
        input=json.dumps(lines),
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
    )
    return json.loads(finished.stdout.splitlines()[-1])


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser("serving", __doc__, {"rounds": 1}, rounds=3, threads=1)
    parser.add_argument("model", type=Path, help="the folder of a model")
    parser.add_argument("lines", type=Path, help="a text file with a sentence on each line")
    options = parser.parse_args(arguments)
    logging.set_verbosity_error()
    lines = options.lines.read_text(encoding="utf-8").splitlines()
    model: Any = load_model(str(options.model), local_files_only=True)
    tokenizer = load_tokenizer(str(options.model), local_files_only=True)
    with tempfile.TemporaryDirectory() as name:
        engines = {
            "plain": (OURS, options.model, "plain"),
            "prepared float32": (OURS, options.model, "float32"),
            "prepared int8": (OURS, options.model, "int8"),
        }
        for dtype in ("float32", "int8"):
            folder = Path(name) / dtype
            to_ctranslate2(model, tokenizer, folder, dtype)
            engines[f"CTranslate2 {dtype}"] = (CTRANSLATE2, folder, dtype)
        calls = {
            engine: lambda code=code, folder=folder, dtype=dtype: measure(code, folder, dtype, lines, options.threads)
            for engine, (code, folder, dtype) in engines.items()
        }
        measured = in_turns(calls, options.rounds)
        rows: list[Row] = []
        for engine, (_, folder, _) in engines.items():
            alone, together, resident = (statistics.median(column) for column in zip(*measured[engine], strict=True))
            weights = [path for path in folder.iterdir() if path.suffix in (".safetensors", ".bin")]
            rows.append(
                {
                    "engine": engine,
                    "ms a line alone": 1000 * alone,
                    "lines a second together": len(lines) / together,
                    "resident MiB": resident,
                    "weights, MB": sum(path.stat().st_size for path in weights) / 1e6,
                }
            )
    report(rows, options)


if __name__ == "__main__":
    main()
