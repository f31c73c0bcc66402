"""Distillation: a teacher's translations as training targets, resumed, shared out and checked."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.commands import Finished, Run, error_line, run_main, user_error
from tests.models import PAIRS, model_of_pairs, paper_model_of_pairs, save, tiny_model
from tests.training.runs import TWO_PROCESSES, make_arguments, run_to_end, start
from training import distill as command
from training.data import load_pairs
from training.distill import main
from training.recipe import load_recipe
from vaswani_transformer.cpu.linear import timed_layouts
from vaswani_transformer.support.files import ResumableFile
from vaswani_transformer.translation import Hypothesis, Translation
from vaswani_transformer.translation.translator import NanError, Translator

SOURCES = list(PAIRS) * 2
RECORD = "00000-of-00001.jsonl.record"


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

    def distill(*arguments: str, model: Path | str = saved, folder: Path = folder) -> Finished:
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


@pytest.fixture
def interrupted(distill: Run, monkeypatch: pytest.MonkeyPatch, no_layouts: None) -> None:
    """Interrupt a distillation, some of whose pairs are dropped, in its third window."""
    write, written = ResumableFile.write, []

    def fail(self: ResumableFile, texts: list[str], lines: list[str]) -> None:
        if len(written) == 2:
            raise RuntimeError("interrupted")
        written.append(lines)
        write(self, texts, lines)

    with monkeypatch.context() as patch:
        patch.setattr(ResumableFile, "write", fail)
        with pytest.raises(RuntimeError, match="interrupted"):
            distill("--min_length_difference=-1")


def test_interrupted_distillation_is_completed_to_the_bytes_and_counts_of_an_uninterrupted_one(
    interrupted: None, distill: Run, recipe: Path, folder: Path, tmp_path: Path
) -> None:
    with user_error(r"data\.distilled: .*distilled has 0 of 1 finished files; repeat training\.distill"):
        distilled_pairs(recipe, folder)
    whole = json.loads(distill("--min_length_difference=-1", folder=tmp_path / "whole")[0])
    for _ in range(2):  # the second time nothing is left to do
        totals = json.loads(distill("--min_length_difference=-1")[0])
        assert totals == whole | {"output_dir": str(folder)}
        assert contents(folder) == contents(tmp_path / "whole")
    assert totals["dropped"] == {"length_difference": 4}
    assert len(distilled_pairs(recipe, folder)["train"]) == 8


def test_resumed_distillation_has_the_layouts_of_the_interrupted_one(
    interrupted: None, distill: Run, folder: Path
) -> None:
    record = json.loads((folder / RECORD).read_text())
    recorded = dict.fromkeys(record["layouts"], "torch")
    (folder / RECORD).write_text(json.dumps(record | {"layouts": recorded}))
    timed_layouts.clear()
    assert distill("--min_length_difference=-1")[2] == 0
    assert json.loads((folder / RECORD).read_text())["layouts"] == recorded
    assert not timed_layouts


@pytest.mark.parametrize("shard", ["0/2", "3/2", "-1/2", "1", "x/y", "1/0"])
def test_share_that_does_not_exist_is_an_error(distill: Run, shard: str) -> None:
    assert f"argument --shard: got '{shard}', expected i/n with i from 1 to n" in error_line(
        distill(f"--shard={shard}")
    )


def test_shards_together_have_every_pair_once(distill: Run, recipe: Path, folder: Path, tmp_path: Path) -> None:
    distill("--shard=2/3")
    with user_error(r"data\.distilled: .*distilled has 1 of 3 finished files; repeat training\.distill"):
        distilled_pairs(recipe, folder)
    for shard in ("3/3", "1/3"):
        distill(f"--shard={shard}", folder=tmp_path / "elsewhere")
    for path in (tmp_path / "elsewhere").iterdir():
        path.replace(folder / path.name)
    assert sorted(distilled_pairs(recipe, folder)["train"]) == sorted(list(PAIRS.items()) * 2)


def test_share_without_sources_is_finished_at_once(distill: Run, folder: Path) -> None:
    output, _, status = distill("--shard=13/13")
    assert status == 0
    assert json.loads(output) == {"output_dir": str(folder), "kept": 0, "dropped": {}}
    assert contents(folder) == {"00012-of-00013.jsonl": b""}


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
    written = [Hypothesis(text, 3, None)]
    monkeypatch.setattr(Translator, "translate_batch", lambda _, sources, texts: [written] * len(sources))
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
        search = json.loads((folder / RECORD).read_text())["search"]
        assert (saved | more).items() <= search.items()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--beams=2"],
            "00000-of-00004.jsonl: was written with different settings (beams); it stays unchanged: rerun",
        ),
        (["--shard=1/2"], "contains a different number of shares; rerun the original"),
        (["--data.train=test.jsonl"], "was written from a different input: the first 3 texts differ"),
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


def test_copies_in_other_letters_are_those_of_the_translations(distill: Run, recipe: Path, folder: Path) -> None:
    upper = "--data.variants.upper=1"
    assert json.loads(distill(upper)[0])["kept"] == 12
    pairs = load_pairs(load_recipe(recipe, [upper, f"--data.distilled={folder}"]), ["train"])["train"]
    capitals = [(source.upper(), target.upper()) for source, target in PAIRS.items()]
    assert list(zip(pairs["source"], pairs["target"], strict=True)) == list(PAIRS.items()) * 2 + capitals * 2


def test_folder_of_other_files_is_an_error(recipe: Path) -> None:
    with user_error(r"contains other files than those of training\.distill; got data\.jsonl\. Name one file"):
        (recipe.parent / "other").mkdir()
        (recipe.parent / "other" / "data.jsonl").touch()
        load_pairs(load_recipe(recipe, [f"--data.distilled={recipe.parent / 'other'}"]), ["train"])


def test_error_names_the_place_of_a_text_in_the_whole_input(distill: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(translator: Translator, texts: list[str], first: int, **_: Any) -> list[Translation]:
        if first:
            raise NanError(first)
        return translate_window(translator, texts, first)

    translate_window = Translator.translate_window
    monkeypatch.setattr(Translator, "translate_window", fail)
    assert "Text 3: the scores of its translation are NaN" in error_line(distill())


def test_another_teacher_of_the_same_name_is_an_error(distill: Run, saved: Path, tmp_path: Path) -> None:
    distill()
    tokenizer = model_of_pairs()[1]
    other = save(tmp_path / saved.name, tiny_model(vocab_size=len(tokenizer)), tokenizer)
    assert "was written with different settings (teacher" in error_line(distill(model=other))


@pytest.mark.slow
def test_killed_distillation_of_two_processes_writes_the_bytes_of_an_uninterrupted_one(
    distill: Run, saved: Path, recipe: Path, folder: Path, tmp_path: Path
) -> None:
    rows = [json.dumps({"translation": {"en": f"{source} {n}", "de": "x"}}) for n in range(30) for source in PAIRS]
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(rows))
    more: dict[str, Any] = {"module": "training.distill", "launch": TWO_PROCESSES}
    arguments, killed = [str(saved), str(recipe), "--window=9", "--batch_tokens=20"], tmp_path / "killed"
    for shard in (1, 2):
        distill("--window=9", "--batch_tokens=20", f"--shard={shard}/2", folder=folder)
    process = start(arguments, killed, **more)
    while not any(path.stat().st_size for path in killed.glob("*.jsonl")) and process.poll() is None:
        time.sleep(0.005)
    process.kill()
    assert contents(killed) != contents(folder)
    run_to_end(arguments, killed, **more)
    assert contents(killed) == contents(folder)
