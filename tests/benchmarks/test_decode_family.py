"""The benchmark of the families runs on tiny models, and its table holds what it measured."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

from tests.benchmarks.decode_family import main
from tests.helpers import PAIRS, Run, error_line, load_tokenizer, run_main, save, tiny_model, write_pairs
from tests.nar_models import family_of_pairs
from training.tasks.metrics import bleu
from vaswani_transformer import VaswaniTransformerTokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of each family and a model with another vocabulary, as folders, and twelve pairs."""
    root = tmp_path_factory.mktemp("family")
    nat, tokenizer = family_of_pairs("nat")
    other = VaswaniTransformerTokenizer.train_from_iterator(["quite other words"], vocab_size=270)
    save(root / "ar", tiny_model(vocab_size=len(tokenizer)), tokenizer)
    save(root / "nat", nat, tokenizer)
    save(root / "cmlm", *family_of_pairs("cmlm"))
    save(root / "other", tiny_model(vocab_size=len(other)), other)
    write_pairs(root / "test.jsonl", 2 * list(PAIRS.items()))
    return root


@pytest.fixture
def run(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command with some of the models; return its output, errors and status."""
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)  # the tests have one

    def run(names: list[str], *options: str) -> tuple[str, str, str | int | None]:
        models = [f"--model={name.upper()}={folder / name}" for name in names]
        return run_main(main, ["--tiny", *models, f"--data={folder / 'test.jsonl'}", *options], capsys)

    return run


def test_table_has_a_row_for_each_search(run: Run, tmp_path: Path) -> None:
    settings = ["--iterations", "1", "3", "--history=2", f"--output={tmp_path / 'found'}"]
    output, errors, status = run(["ar", "nat", "cmlm"], *settings, "--distilled", "NAT")
    assert (errors, status) == ("", 0)
    results = json.loads((tmp_path / "found.json").read_text())
    arms = {(arm["model"], arm["passes"]): arm for arm in results["arms"]}
    assert list(arms) == [
        *(("AR, beam 1", "m"), ("AR, beam 4", "m"), ("NAT, l = 1", "1"), ("NAT, l = 5", "1")),
        *((f"CMLM, l = {length}", passes) for length in (1, 5) for passes in ("1", "3")),
    ]
    assert results["baselines"] == ["AR, beam 4", "AR, beam 1"]
    assert [arm["distilled"] for arm in arms.values()] == [False, False, True, True, *[False] * 4]
    assert arms["AR, beam 4", "m"]["threads"]["1"]["speed_up"]["AR, beam 4"] == 1
    assert all(arm["threads"]["1"]["milliseconds_p90"] > 0 for arm in arms.values())
    text = (tmp_path / "found.md").read_text()
    assert output == f"{text}\n"
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert len({line.count("|") for line in rows[:10]}) == 1
    for arm in arms.values():
        assert any(line.startswith(f"| {arm['model']} |") and f"| {arm['bleu']:.2f} |" in line for line in rows)


def test_quality_is_that_of_the_models_own_translations(run: Run, folder: Path, tmp_path: Path) -> None:
    run(["cmlm"], "--iterations=3", "--lengths=2", f"--output={tmp_path / 'found'}")
    (arm,) = json.loads((tmp_path / "found.json").read_text())["arms"]
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder / "cmlm"), load_tokenizer(folder / "cmlm")
    texts: Any = [
        tokenizer.decode(
            model.generate(**tokenizer([source], return_tensors="pt"), num_iterations=3, length_beam_size=2)[0],
            skip_special_tokens=True,
        )
        for source in PAIRS
    ]
    assert arm["bleu"] == pytest.approx(bleu(texts * 2, list(PAIRS.values()) * 2)["bleu"])
    assert arm["threads"]["1"]["speed_up"] == {}


def test_sentences_are_shown_after_each_iteration(run: Run) -> None:
    output, _, _ = run(["ar", "cmlm"], "--iterations", "1", "4", "--lengths=1", "--history=3")
    shown = output.split("## 3 sentences after each iteration")[1]
    assert shown.count("Source: ") == shown.count("| AR, beam 4 | m |") == 3
    assert [shown.count(f"| CMLM, l = 1 | {step} |") for step in range(1, 6)] == [3, 3, 3, 3, 0]


def test_scores_after_the_last_iteration_are_those_of_the_table(run: Run, tmp_path: Path) -> None:
    settings = ["--iterations=3", "--lengths=1", "--refinement", f"--output={tmp_path / 'found'}"]
    output, _, _ = run(["nat", "cmlm"], *settings)
    rows = [row.split(" | ") for row in output.split("## After each iteration")[1].splitlines() if "l = 1" in row]
    assert [row[:2] for row in rows] == [["| NAT, l = 1", "1"], *(["| CMLM, l = 1", step] for step in "123")]
    arms = json.loads((tmp_path / "found.json").read_text())["arms"]
    for arm, row in zip(arms, (rows[0], rows[-1]), strict=True):
        assert row[2:4] == [f"{arm['bleu']:.2f}", f"{arm['repeats']:.2%}"]
    assert [row[4].strip(" |%") for row in rows[:2]] == ["", ""]  # nothing came before
    assert all(0 <= float(row[4].strip(" |%")) <= 100 for row in rows[2:])


def test_shares_of_the_parts_make_up_the_whole_time(run: Run) -> None:
    output, _, _ = run(["ar", "nat"], "--lengths=1", "--parts")
    _, _, heading, _, row, *_ = output.split("## Share of each part")[1].split("\n")
    assert [cell.strip() for cell in heading.split("|")][2] == "encoder"
    shares = [int(cell.strip(" %")) for cell in row.split("|")[2:-1] if cell.strip()]
    assert row.startswith("| NAT, l = 1, 1 |")
    assert len(shares) == 7  # no latent steps
    assert sum(shares) == pytest.approx(100, abs=4)


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        (
            ["ar", "other"],
            [],
            "--model=OTHER: its tokenizer gives other tokens than that of AR. Give models that share",
        ),
        (["ar", "ar"], [], "--model=AR: expected NAME=FOLDER with a new name."),
        (["ar"], ["--distilled", "NAT"], "--distilled: no model is named NAT. Give names of --model."),
        (["ar"], ["--warmup=12"], "--data: 12 sentences; give more than --warmup and at least --history."),
        (["ar"], ["--target=fr"], "no side 'fr'"),
        (["nothing"], [], "there is no such folder"),
    ],
    ids=str,
)
def test_models_that_cannot_be_compared_end_the_command_with_one_line(
    run: Run, names: list[str], options: list[str], message: str
) -> None:
    assert message in error_line(run(names, *options))
