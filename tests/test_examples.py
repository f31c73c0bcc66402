"""Each script of examples/ runs outside the checkout, and what tutorials show runs in its smallest form.

`test_service.py` starts the service of examples/.
"""

import ast
import gzip
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import Seq2SeqTrainingArguments

from tests import ROOT
from tests.command_parsers import blocks_of, commands_of
from tests.commands import run_main, run_python
from tests.forks import run_forked
from tests.hub import Hub, client_environment, serving
from tests.models import model_of_pairs, tiny_model
from tests.training.runs import TWO_PROCESSES
from training import compare, score
from training.recipe import RECIPES, load_recipe
from training.train import run


def run_example(name: str, folder: Path, *arguments: str, launch: Sequence[str] = ()) -> list[str]:
    """Return the lines that an example prints."""
    return run_forked(str(ROOT / "examples" / name), *arguments, folder=folder, launch=launch).splitlines()


def test_every_example_is_run_here_and_listed() -> None:
    scripts = {path.name for path in (ROOT / "examples").glob("*.py")}
    assert scripts == {"trainer_script.py", "own_data.py", "adapters.py"}
    listed = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in listed for name in scripts)


@pytest.mark.slow
def test_trainer_script_learns_its_task_on_two_processes(tmp_path: Path) -> None:
    launch = TWO_PROCESSES
    output = run_example("trainer_script.py", tmp_path, "--output_dir=model", "--steps=350", launch=launch)
    assert sum(line.endswith(" are right") for line in output) == 1
    assert int(output[-1].split()[0]) >= 80  # all of them with two seeds; rounding decides about the last few
    assert (tmp_path / "model" / "model.safetensors").exists()


def test_trainer_script_shuffles_in_every_epoch(tmp_path: Path) -> None:
    pairs = [{"input_ids": [5] * (1 + index % 20), "labels": [5] * 4} for index in range(200)]
    trainer_class = runpy.run_path(str(ROOT / "examples" / "trainer_script.py"))["TokenBudgetTrainer"]
    arguments = Seq2SeqTrainingArguments(str(tmp_path), report_to="none", use_cpu=True)
    trainer = trainer_class(tiny_model(), arguments, train_dataset=pairs)
    batches = trainer.get_train_dataloader().batch_sampler
    first, again = list(batches), list(batches)
    trainer.state.epoch = 1.0
    assert first == again != list(batches)


@pytest.mark.slow
def test_own_data_becomes_a_run_that_translates(tmp_path: Path) -> None:
    output = run_example("own_data.py", tmp_path, "--folder=own")
    results = json.loads((tmp_path / "own" / "run" / "results.json").read_text(encoding="utf-8"))
    losses = [entry["loss"] for entry in results["curve"] if "loss" in entry]
    assert losses[-1] < losses[0] / 2
    assert all(output[-2:])


@pytest.mark.slow
def test_adapter_learns_and_merges(tmp_path: Path) -> None:
    for saved in model_of_pairs():
        saved.save_pretrained(tmp_path / "plain")
    output = run_example("adapters.py", tmp_path, "--model=plain", "--output_dir=adapted")
    assert sum(line.startswith("adapted:") for line in output) == 1
    before, after = (ast.literal_eval(output[row].partition(":")[2].strip()) for row in (0, -1))
    assert before != after
    assert (tmp_path / "adapted" / "merged" / "model.safetensors").exists()


# Tutorials

DOCS = ROOT / "docs"
BOOKS = """
import datasets
import evaluate
from sacrebleu import corpus_bleu


class Bleu:
    @staticmethod
    def compute(predictions, references):
        return {"score": corpus_bleu(predictions, [references]).score}


evaluate.load = {"sacrebleu": Bleu}.get
rows = [{"id": str(n), "translation": {"en": f"book {n}", "it": f"libro {n}"}} for n in range(60)]
datasets.load_dataset = lambda *_, **__: datasets.Dataset.from_list(rows)
"""
SMALLER = {  # what the script of own-script.md has, and what its test has instead
    "vocab_size=8000": "vocab_size=300", "test_size=1000": "test_size=4", "=4096": "=40",
    "max_steps=10_000": "max_steps=4", "eval_steps=1000": "eval_steps=2", "save_steps=1000": "save_steps=2",
    "d_model=128": "d_model=16",
}  # fmt: skip
SMALL = [
    *("--tokenizer.vocab_size=300", "--data.validation=3", "--data.test=3", "--training.steps=2"),
    *("--training.evaluation_steps=2", "--model.d_model=16", "--model.d_ff=16", "--training.precision=fp32"),
    *("--model.encoder_layers=1", "--model.decoder_layers=1", "--decoding.max_source_relative_length=2"),
]


@pytest.mark.slow
def test_own_pairs_become_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainings = [words[3:] for words in commands_of(DOCS / "own-data.md") if "training.train" in words]
    (recipe, *arguments), (_, *trial), (_, *with_languages) = trainings[:3]
    monkeypatch.chdir(tmp_path)
    Path("pairs").mkdir()
    lines = [f"{n} trees and {m} dogs" for n in range(6) for m in range(6)]
    for source, target in (("source", "target"), ("en", "it")):
        Path(f"pairs/{source}.txt").write_text("\n".join(lines), encoding="utf-8")
        Path(f"pairs/{target}.txt").write_text("\n".join(line[::-1] for line in lines), encoding="utf-8")
    for given in (arguments, trial, with_languages):
        run(load_recipe(ROOT / recipe, [*given, *SMALL]))
    results = json.loads(Path("runs/own/results.json").read_text(encoding="utf-8"))
    assert [results["data"][split]["pairs"] for split in ("train", "validation", "test")] == [30, 3, 3]
    for name in ("trial", "en-it"):
        assert Path(f"runs/{name}/model.safetensors").exists()


TRANSLATE = "from vaswani_transformer.translation.command import main; main()"


@pytest.mark.slow
def test_several_corpora_and_tags_become_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of docs/own-data.md, with a small model."""
    monkeypatch.chdir(tmp_path)
    Path("pairs").mkdir()
    for saved in model_of_pairs():
        saved.save_pretrained(tmp_path / "runs" / "reverse")
    lines = [f"{n} trees and {m} dogs" for n in range(6) for m in range(6)]
    sides = {"source": lines, "target": [line[::-1] for line in lines]}
    for side, language in (("source", "en"), ("target", "it")):
        for name in ("", "more.", "train.", "valid.", "test."):
            texts = "\n".join(name + text for text in sides[side])
            Path(f"pairs/{name}{side}.txt").write_text(f"{texts}\n", encoding="utf-8")
            Path(f"pairs/{name}{language}").write_text(f"{texts}\n", encoding="utf-8")
    Path("pairs/mono.txt").write_text("one\ntwo\n", encoding="utf-8")

    blocks = blocks_of(DOCS / "own-data.md", "bash")
    wanted = [block for block in blocks if "runs/two-" in block or "runs/back-" in block]
    assert len(wanted) == 3
    small = [argument for argument in SMALL if "validation" not in argument and "test" not in argument]
    held_out = [argument for argument in SMALL if argument not in small]
    for block in wanted:
        shell, _, command = block.partition("python -m training.train ")
        script = shell.replace("vaswani-translate", f"{sys.executable} -c '{TRANSLATE}'")
        for split in ("valid.", "test.") if "train.en" in script else ():  # as the page says
            script += script.replace("train.", split)
        subprocess.run(["bash", "-ec", script], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
        recipe, *arguments = shlex.split(command.replace("\\\n", " "))
        own = small if "--data.validation" in command else [*small, *held_out]
        run(load_recipe(ROOT / recipe, [*arguments, *own]))
    trained = {
        path.name: json.loads((path / "data.json").read_text())["train"]["pairs"] for path in Path("runs").glob("*-*")
    }
    of_two_corpora = trained.pop("two-corpora")  # six pairs of either are held out
    assert of_two_corpora in {3 * (36 - count) + 36 - (6 - count) for count in range(7)}
    assert trained == {"back-translated": 2 * 36 + 2, "two-directions": 2 * 36}
    assert "<bt> " in Path("pairs/bt.source.txt").read_text()


PAGE, RECIPE = DOCS / "fine-tuning.md", "training/recipes/fine-tune.yaml"
FEW = ["--data.validation=3", "--data.test=3"]


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Go to a folder with the shipped model, the recipes and 36 English-German pairs."""
    for name in ("training", "models"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "pairs").mkdir()
    lines = [f"{n} trees and {m} dogs" for n in range(6) for m in range(6)]
    for language, words in (("en", lines), ("de", [line[::-1] for line in lines])):
        (tmp_path / "pairs" / f"{language}.txt").write_text("\n".join(words), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def commands_with(*names: str) -> list[list[str]]:
    """Return the arguments of the commands of the page of fine-tuning that have all names, after `python -m MODULE`."""
    return [words[3:] for words in commands_of(PAGE) if set(names) <= set(words)]


@pytest.mark.slow
def test_shipped_model_is_fine_tuned_on_pairs_and_scored_on_those_held_out(
    clone: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, _ = commands_with("training.score", "--data.path=pairs", RECIPE)
    training, *_ = commands_with("training.train", "--data.path=pairs", RECIPE)
    assert run_main(score.main, [*before, *FEW, "--output=before.json"], capsys)[2] == 0
    small = [*FEW, "--training.steps=2", "--training.evaluation_steps=2", "--training.precision=fp32"]
    results = run(load_recipe(training[0], [*training[1:], *small]))
    assert json.loads(Path("before.json").read_text())["data"]["fingerprint"] == results["data"]["test"]
    assert "CC BY 2.0 FR" in results["start_licenses"]["start_from"]
    assert (clone / "runs" / "domain" / "model.safetensors").exists()

    change, comparison = commands_with("training.compare")
    output, errors, status = run_main(compare.main, change, capsys)
    assert (errors, status) == ("", 0)
    assert "A before.jsonl\nB runs/domain\n" in output

    (new,) = commands_with("training.train", "--output_dir=runs/new")
    data = [load_recipe(recipe, arguments).data for recipe, *arguments in (new, training)]
    assert len({(one.validation, one.test, one.split_seed) for one in data}) == 1
    run(load_recipe(new[0], [*new[1:], *SMALL]))
    output, errors, status = run_main(compare.main, comparison, capsys)
    assert (errors, status) == ("", 0)
    assert "A runs/new\nB runs/domain\n" in output


@pytest.mark.slow
def test_new_and_old_pairs_are_mixed_and_the_old_test_set_is_scored(
    clone: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = [{"translation": {"en": f"{n} dogs", "de": f"{n} Hunde"}} for n in range(30)]
    for folder in ("captions", "everyday"):
        Path(folder).mkdir()
        for split in ("train", "validation", "test"):
            lines = "".join(f"{json.dumps(pair)}\n" for pair in (pairs if split == "train" else pairs[:3]))
            Path(folder, f"{split}.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (mixing,) = [block for block in blocks_of(PAGE, "bash") if "shuf" in block]
    subprocess.run(["bash", "-e", "-c", mixing], check=True)
    (training,) = commands_with("training.train", "--data.path=captions")
    small = ["--training.steps=2", "--training.evaluation_steps=2", "--training.precision=fp32"]
    results = run(load_recipe(training[0], [*training[1:], *small, "--data.train=mixed.jsonl.gz"]))
    assert results["data"]["train"]["pairs"] == 60
    (scoring,) = commands_with("training.score", "--data.path=everyday")
    assert run_main(score.main, scoring, capsys)[2] == 0


@pytest.mark.slow
def test_lora_learns_the_pairs_that_are_not_held_out_and_is_merged(
    clone: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("peft")
    (block,) = [block for block in blocks_of(PAGE, "python") if "runs/lora" in block]
    smaller = {'["--data.path=pairs"]': str(["--data.path=pairs", *FEW]), "num_train_epochs=1": "max_steps=2"}
    for text, small in smaller.items():
        assert text in block
        block = block.replace(text, small)
    Path("lora.py").write_text(block, encoding="utf-8")
    assert "trainable params: 405,504" in run_forked("lora.py", folder=clone)
    _, after = commands_with("training.score", "--data.path=pairs", RECIPE)
    assert run_main(score.main, [*after, *FEW], capsys)[2] == 0
    base, merged = (load_file(f"{folder}/model.safetensors") for folder in ("models/tatoeba-en-de", after[0]))
    name = "model.encoder.layers.0.self_attn.q_proj.weight"
    assert not base[name].equal(merged[name])
    assert base["model.shared.weight"].equal(merged["model.shared.weight"])


def test_options_for_other_files_are_those_of_a_recipe() -> None:
    text = (DOCS / "own-data.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\|.*\| `(--data.*)` \|$", text, flags=re.MULTILINE)
    kinds = [load_recipe(RECIPES / "own.yaml", ["--data.path=pairs", *shlex.split(row)]).data.kind for row in rows]
    assert kinds == ["text", "csv", "csv", "json", "parquet"]


@pytest.mark.slow
def test_seq2seq_trainer_goes_from_a_data_set_to_the_hub_and_back(tmp_path: Path) -> None:
    """The script runs a few steps of a tiny model, on pairs that are not downloaded."""
    script, loading, *_ = blocks_of(DOCS / "own-script.md", "python")
    for large, small in SMALLER.items():
        assert large in script
        script = script.replace(large, small)
    with serving(Hub()) as url:
        environment = client_environment(url, tmp_path / "home") | {"PYTHONPATH": str(ROOT)}
        output = run_python(BOOKS + script, folder=tmp_path, **environment)
        loaded = run_python(
            f"import sys; sys.modules['vaswani_transformer'] = None\n{loading}", folder=tmp_path, **environment
        )
    assert output.count("'eval_bleu'") == 2
    first, _ = ast.literal_eval(output.splitlines()[-1])
    assert ast.literal_eval(loaded.splitlines()[-1]) == [first]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["json", "csv"])
def test_own_rows_replace_the_data_set_of_the_script(kind: str, tmp_path: Path) -> None:
    """The lines that the page prints run in place of those of the script, on rows with one more column."""
    page = DOCS / "own-script.md"
    data = blocks_of(page, "python")[0].partition("# Model")[0]
    (given,) = [block for block in blocks_of(page, "text") if f'load_dataset("{kind}"' in block]
    (shown,) = re.findall(r"^rows = load_dataset.*$", data, flags=re.MULTILINE)
    texts = [(f"book {n}", f"libro {n}") for n in range(30)]
    rows = [json.dumps({"translation": {"en": en, "it": it}, "page": 7}) for en, it in texts]
    (tmp_path / "pairs.jsonl").write_text("\n".join(rows), encoding="utf-8")
    cells = ["en,it,page", *(f"{en},{it},7" for en, it in texts)]
    (tmp_path / "pairs.csv").write_text("\n".join(cells), encoding="utf-8")
    script = data.replace(shown, given).replace("vocab_size=8000", "vocab_size=300").replace("=1000", "=4")
    (tmp_path / "rows.py").write_text(f"{script}\nprint(pairs['train'].column_names, len(pairs['train']))")
    columns, count = run_forked("rows.py", folder=tmp_path).rsplit(" ", 1)
    assert (sorted(ast.literal_eval(columns)), int(count)) == (["input_ids", "labels"], 26)
