"""Every command of `bench/` runs in its `--tiny` form and prints its table."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bench import layer_complexity
from bench.kills import write_recipe
from tests.builders import family_of_pairs
from tests.forks import run_forked
from tests.helpers import PAIRS, ROOT, model_of_pairs, save, tiny_model, write_pairs

# Each module's arguments and a column of its table; MODEL, DATA, RECIPE and FOLDER are made for the test.
SMALL = ["--training.steps=2", "--training.evaluation_steps=2"]
COMMANDS: dict[str, tuple[list[str], str]] = {
    "data_pace": ([], "target tokens/s"),
    "decode_against_marian": (["--beams=1", "--arms", "ours", "int8"], "ratio to Marian"),
    "decode_before_after": ([str(ROOT)], "same tokens"),
    "decode_family": (
        ["--model=AR=FOLDER/ar", "--model=CMLM=FOLDER/cmlm", "--data=DATA", "--history=2", "--refinement"],
        "tokens changed",
    ),
    "dialects": (["iterative_vae"], "right words"),
    "dialects flowseq": (["flowseq"], "latent_temperature"),
    "gpu": (["--minutes=13", "--out=FOLDER/results"], "difference"),
    "kills": ([], "kills of all processes"),
    "layer_complexity": (["--output=FOLDER/table1"], "self-attention, fused"),
    "memory": ([], "peak MiB"),
    "serving": (["FOLDER/ar", "FOLDER/lines.txt"], "resident MiB"),
    "table3": (["RECIPE", *SMALL, "--output_dir=FOLDER/runs"], "paper's BLEU"),
    "train_against_marian": ([], "ours to it"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_bench_prints_its_table(name: str, tmp_path: Path) -> None:
    if name in ("serving", "decode_against_marian"):
        pytest.importorskip("ctranslate2", reason="the ctranslate2 extra is not installed")
    arguments, column = COMMANDS[name]
    made = {"FOLDER": str(tmp_path)}
    if name == "table3":
        made["RECIPE"] = write_recipe(tmp_path)
    if name == "decode_family":
        model, tokenizer = family_of_pairs("cmlm")
        save(tmp_path / "cmlm", model, tokenizer)
        save(tmp_path / "ar", tiny_model(vocab_size=len(tokenizer)), tokenizer)
        write_pairs(tmp_path / "test.jsonl", 2 * list(PAIRS.items()))
        made["DATA"] = str(tmp_path / "test.jsonl")
    if name == "serving":
        save(tmp_path / "ar", *model_of_pairs())
        (tmp_path / "lines.txt").write_text("\n".join(PAIRS), encoding="utf-8")
    for word, value in made.items():
        arguments = [argument.replace(word, value) for argument in arguments]
    output = run_forked(f"bench.{name.partition(' ')[0]}", "--tiny", *arguments, folder=ROOT)
    lines = output.splitlines()
    heading = next(number for number, line in enumerate(lines) if f" {column} |" in line)
    assert lines[heading].count("|") == lines[heading + 2].count("|") > 2


def test_gpu_command_needs_no_extra() -> None:
    absent = "".join(f"sys.modules[{name!r}] = None;" for name in ("datasets", "evaluate", "jsonargparse", "psutil"))
    subprocess.run([sys.executable, "-c", f"import sys; {absent} import bench.gpu_parts"], cwd=ROOT, check=True)


@pytest.mark.parametrize("layer", ["self-attention", "convolutional"])
def test_operations_of_a_layer_are_those_that_torch_counts(layer: str) -> None:
    """torch counts neither the products of a fused LSTM nor those of fused attention on a CPU."""
    options = layer_complexity.parse_arguments(["--kernel=5"])
    with FlopCounterMode(display=False) as counter:
        layer_complexity.make_layer(layer, 64, options)(torch.randn(1, 24, 64))
    assert counter.get_total_flops() == layer_complexity.operations(layer, 24, 64, options)
