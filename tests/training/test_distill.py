"""Distillation: a teacher's translations as training targets, resumed, shared out and checked."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import (
    PAIRS,
    Run,
    error_line,
    model_of_pairs,
    paper_model_of_pairs,
    run_main,
    save,
    tiny_model,
    user_error,
)
from tests.training.runs import TWO_PROCESSES, kill, make_arguments, run_to_end, start
from training import distill as command
from training.data import load_pairs
from training.distill import main
from training.recipe import load_recipe
from vaswani_transformer.cpu.linear import chosen_layouts
from vaswani_transformer.translation import Hypothesis, Translation
from vaswani_transformer.translation.translator import Translator

SOURCES = list(PAIRS) * 2
WHOLE = "00000-of-00001.jsonl"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """Write a recipe whose real targets are their reversed sources."""
    return Path(make_arguments(tmp_path, train=SOURCES, validation=SOURCES[:2], test=SOURCES[2:4])[0])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "distilled"


@pytest.fixture
def distill(saved: Path, recipe: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs the command in windows of three, and returns output, errors and status."""

    def distill(*arguments: str, model: Path | str = saved, folder: Path = folder) -> tuple[str, str, str | int | None]:
        capsys.readouterr()  # the bars of saving
        return run_main(main, [model, recipe, f"--output_dir={folder}", "--window=3", *arguments], capsys)

    return distill


def contents(folder: Path) -> dict[str, bytes]:
    """Return the bytes of the files of pairs."""
    return {path.name: path.read_bytes() for path in folder.glob("*.jsonl")}


def distilled_pairs(recipe: Path, folder: Path) -> dict[str, list[tuple[str, str]]]:
    splits = load_pairs(load_recipe(recipe, [f"--data.distilled={folder}"]))
    return {str(name): list(zip(rows["source"], rows["target"], strict=True)) for name, rows in splits.items()}


def test_distillation_replaces_training_targets_only(distill: Run, recipe: Path, folder: Path) -> None:
    output, _, status = distill()
    assert status == 0
    assert json.loads(output) == {"output_dir": str(folder), "kept": 12, "dropped": {}}
    pairs = distilled_pairs(recipe, folder)
    assert pairs["train"] == list(PAIRS.items()) * 2
    assert pairs["validation"] == [(source, source[::-1]) for source in SOURCES[:2]]
    assert pairs["test"] == [(source, source[::-1]) for source in SOURCES[2:4]]


@pytest.mark.parametrize(("lines", "torn"), [(0, b""), (4, b'{"translation": {"en": "hel'), (12, b"")])
def test_interrupted_file_is_completed_to_the_bytes_of_an_uninterrupted_one(
    distill: Run, folder: Path, lines: int, torn: bytes
) -> None:
    """A kill may leave half a line."""
    distill()
    whole = contents(folder)
    partial = b"".join(whole[WHOLE].splitlines(keepends=True)[:lines]) + torn
    (folder / WHOLE).rename(folder / f"{WHOLE}.part").write_bytes(partial)
    output, _, status = distill()
    assert (json.loads(output)["kept"], status) == (12, 0)
    assert contents(folder) == whole
    assert not list(folder.glob("*.part"))
    assert (distill()[2], contents(folder)) == (0, whole)  # nothing is left to do


def test_resumed_distillation_has_the_layouts_of_the_interrupted_one(
    distill: Run, folder: Path, no_layouts: None
) -> None:
    distill()
    (folder / WHOLE).rename(folder / f"{WHOLE}.part").write_bytes(b"")
    recorded = dict.fromkeys(chosen_layouts, "torch")
    (folder / WHOLE).with_suffix(".layouts").write_text(json.dumps(recorded))
    chosen_layouts.clear()
    assert distill()[2] == 0
    assert chosen_layouts == recorded
    assert not list(folder.glob("*.layouts"))


def test_interrupted_distillation_whose_pairs_are_partly_dropped_is_completed(distill: Run, folder: Path) -> None:
    """A line has the number of its source, which tells where to resume."""
    distill("--min_length_difference=-1")
    whole = contents(folder)
    lines = whole[WHOLE].splitlines(keepends=True)
    assert [json.loads(line)["number"] for line in lines] != list(range(len(lines)))
    (folder / WHOLE).rename(folder / f"{WHOLE}.part").write_bytes(b"".join(lines[:3]))
    distill("--min_length_difference=-1")
    assert contents(folder) == whole


def test_shards_together_have_every_pair_once(distill: Run, recipe: Path, folder: Path, tmp_path: Path) -> None:
    distill("--shard=2/3")
    with user_error(r"data\.distilled: .*distilled has 1 of 3 files; repeat training\.distill"):
        distilled_pairs(recipe, folder)
    for shard in ("3/3", "1/3"):
        distill(f"--shard={shard}", folder=tmp_path / "elsewhere")
    for path in (tmp_path / "elsewhere").glob("*.jsonl"):
        path.replace(folder / path.name)
    assert sorted(distilled_pairs(recipe, folder)["train"]) == sorted(list(PAIRS.items()) * 2)


def test_pairs_outside_the_limits_are_dropped_and_counted(distill: Run, recipe: Path, folder: Path) -> None:
    """Two of the six pairs differ by two tokens."""
    assert json.loads(distill("--min_length_difference=-1")[0])["dropped"] == {"length_difference": 4}
    assert len(distilled_pairs(recipe, folder)["train"]) == 8


@pytest.mark.parametrize(
    ("tokens", "reason"), [(9, "length_difference"), (10, ""), (20, ""), (21, "length_difference"), (24, "too_long")]
)
def test_limits_include_their_ends(tokens: int, reason: str) -> None:
    translation = Translation([Hypothesis("a", 2, None)], 15, False, 23)
    given = ["m", "r", "--output_dir=d", "--min_length_difference=-5", "--max_length_difference=5"]
    options, _ = command.parse_arguments(given)
    assert command.drop_reason(translation, tokens, options, 23) == reason


@pytest.mark.parametrize(("text", "reason"), [("z " * 50, "too_long"), (" ", "empty")])
def test_lengths_are_those_of_the_text_in_training_and_not_of_the_ids_that_the_teacher_wrote(
    distill: Run, monkeypatch: pytest.MonkeyPatch, text: str, reason: str
) -> None:
    def translate_batch(self: Translator, sources: list[list[int]], texts: list[str]) -> list[list[Hypothesis]]:
        return [[Hypothesis(text, 3, None)] for _ in sources]

    monkeypatch.setattr(command.Translator, "translate_batch", translate_batch)
    assert json.loads(distill("--batch_tokens=1", "--data.max_length=30")[0])["dropped"] == {reason: 12}


def test_search_is_the_models_unless_it_is_given(distill: Run, tmp_path: Path) -> None:
    """A saved end that is forced, as Marian's, is recorded too."""
    model, tokenizer = paper_model_of_pairs()
    saved = {"num_beams": 3, "max_length": 512, "bad_words_ids": [[1]], "forced_eos_token_id": 2}
    model.generation_config = model.config.make_generation_config(**saved)
    save(tmp_path / "model", model, tokenizer)
    for arguments, more in (([], {}), (["--beams=2", "--length_penalty=1"], {"num_beams": 2, "length_penalty": 1.0})):
        folder = tmp_path / f"options{len(arguments)}"
        assert distill(*arguments, model=tmp_path / "model", folder=folder)[2] == 0
        search = json.loads((folder / "distillation.json").read_text())["search"]
        assert (saved | more).items() <= search.items()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--beams=2"], "holds another distillation, its search differs; give the same command to resume it"),
        (["--min_length_difference=-9"], "holds another distillation, its settings differs"),
        (["--shard=1/2"], "holds another distillation, its settings differs"),
        (["--data.train=test.jsonl"], "holds another distillation, its data differs; give the same command"),
        (["--data.train=no.jsonl"], "no.jsonl"),
        (["--nothing=1"], "nothing"),
        (["--device=nowhere"], "--device=nowhere: cannot be loaded"),
    ],
)
def test_distillation_that_cannot_be_written_ends_the_command_with_one_line(
    distill: Run, folder: Path, arguments: list[str], message: str
) -> None:
    distill("--shard=1/4")
    before = {path: path.read_bytes() for path in folder.iterdir()}
    shard = [] if "--shard=1/2" in arguments else ["--shard=1/4"]
    assert message in error_line(distill(*shard, *arguments))
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_another_teacher_or_a_folder_of_other_files_is_an_error(
    distill: Run, saved: Path, folder: Path, tmp_path: Path
) -> None:
    distill()
    tokenizer = model_of_pairs()[1]
    other = save(tmp_path / saved.name, tiny_model(vocab_size=len(tokenizer)), tokenizer)
    assert "its teacher differs" in error_line(
        distill(model=other)
    )  # it has the name of the first, as one trained anew
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "mine").write_text("mine")
    assert "used: holds files that are no distillation; give another" in error_line(distill(folder=tmp_path / "used"))


@pytest.mark.slow
def test_killed_distillation_of_two_processes_writes_the_bytes_of_an_uninterrupted_one(
    distill: Run, saved: Path, recipe: Path, folder: Path, tmp_path: Path
) -> None:
    rows = [json.dumps({"translation": {"en": f"{source} {n}", "de": "x"}}) for n in range(30) for source in PAIRS]
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(rows))
    more: dict[str, Any] = {"module": "training.distill", "launcher": TWO_PROCESSES}
    arguments, killed = [str(saved), str(recipe), "--window=9", "--batch_tokens=20"], tmp_path / "killed"
    for shard in (1, 2):
        distill("--window=9", "--batch_tokens=20", f"--shard={shard}/2", folder=folder)
    process = start(arguments, killed, **more)
    while not any(path.stat().st_size for path in killed.glob("*.part")) and process.poll() is None:
        time.sleep(0.005)
    kill(process)
    assert contents(killed).keys() < contents(folder).keys()
    run_to_end(arguments, killed, **more)
    assert contents(killed) == contents(folder)
