"""Distillation: a teacher's translations as training targets, written in parts, resumed, sharded and checked."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import (
    PAIRS,
    Run,
    error_line,
    model_of_pairs,
    no_space,
    paper_model_of_pairs,
    run_main,
    save,
    tiny_model,
    user_error,
)
from tests.nar_models import tiny_nat
from tests.training.runs import TWO_PROCESSES, kill, last_of_each, make_arguments, run_to_end, start
from training import distill as command
from training.data import distilled
from training.data.distilled import Distillation, open_distilled
from training.data.pairs import load_pairs
from training.data.stream import PairStream
from training.distill import main
from training.recipe.fields import DataRecipe, load_recipe
from training.report.results import fingerprints
from training.report.terminal import targets_line
from training.run.preparation import check_distilling_teacher
from training.train import run as train
from vaswani_transformer.translation import Hypothesis, Translation
from vaswani_transformer.translation.loading import LoadOptions

SOURCES = list(PAIRS) * 2  # four parts of three sentences


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """Write a recipe whose real targets are their reversed sources."""
    return Path(make_arguments(tmp_path, train=SOURCES, validation=SOURCES[:2], test=SOURCES[2:4])[0])


@pytest.fixture(scope="module")
def finished(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a distillation of the sources in parts of three, which no test changes."""
    folder = tmp_path_factory.mktemp("finished")
    (path,) = make_arguments(folder, train=SOURCES)
    main([str(saved), path, f"--output_dir={folder / 'distilled'}", "--window=3"])
    return folder / "distilled"


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    """Return a copy of that distillation, which a test may change."""
    return shutil.copytree(finished, tmp_path / "distilled")


@pytest.fixture
def distill(saved: Path, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs the command on parts of three sentences and returns output, errors and status."""

    def distill(
        *arguments: str, model: Path | str = saved, folder: Path = tmp_path / "distilled"
    ) -> tuple[str, str, str | int | None]:
        window = [] if any(argument.startswith("--window=") for argument in arguments) else ["--window=3"]
        return run_main(main, [model, recipe, f"--output_dir={folder}", *window, *arguments], capsys)

    return distill


def test_progress_looks_at_each_complete_part_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(command, "LOG_SECONDS", 0.0)
    record = {"data": {"sources": 40}, "settings": {"window": 4}}
    distillation, looked = Distillation(tmp_path, record), []
    monkeypatch.setattr(Distillation, "counts", lambda _, number: looked.append(number) or (number < done or None))
    done = 0
    progress = command.Progress(distillation, list(range(10)))
    for done in range(1, 11):
        looked.clear()
        progress.part_done(done == 10)
        assert looked == list(range(done - 1, 10))
    assert progress.count() == 40


def contents(folder: Path) -> dict[str, bytes]:
    """Return the bytes of every file of a distillation."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".lock"}


def data_of(recipe: Path, folder: Path, *fields: str) -> DataRecipe:
    return load_recipe(recipe, last_of_each(f"--data.distilled={folder}", *fields)).data


def test_distillation_replaces_training_targets_only(distill: Run, recipe: Path, tmp_path: Path) -> None:
    output, errors, status = distill()
    assert (errors, status) == ("", 0)
    counts = {"sources": 12, "kept": 12, "dropped": {}, "missing_parts": 0}
    assert json.loads(output).items() >= counts.items()
    pairs = load_pairs(data_of(recipe, tmp_path / "distilled"))
    assert list(zip(pairs["train"]["source"], pairs["train"]["target"], strict=True)) == list(PAIRS.items()) * 2
    assert pairs["validation"]["target"][:] == [source[::-1] for source in SOURCES[:2]]
    assert pairs["test"]["target"][:] == [source[::-1] for source in SOURCES[2:4]]


def test_run_says_which_targets_it_learns_from(distill: Run, saved: Path, recipe: Path, tmp_path: Path) -> None:
    distill("--min_length_difference=-1")  # drops four pairs
    folder = tmp_path / "distilled"
    for kind in ("autoregressive", "nat", "cmlm"):
        fields = [f"--model.kind={kind}"]
        real, by_teacher = load_recipe(recipe, fields), load_recipe(recipe, [*fields, f"--data.distilled={folder}"])
        assert targets_line(real, None) == "Training targets: those of the data."
        expected = f"Training targets: written by {saved.name} for 8 of 12 sources, in {folder}."
        assert targets_line(by_teacher, open_distilled(by_teacher.data)) == expected
    energy = load_recipe(recipe, ["--model.kind=cmlm", f"--training.energy_from={saved}"])
    assert targets_line(energy, None).startswith("Training targets, for their lengths only: those of the data")


def test_distilled_stream_equals_the_pairs_in_memory(finished: Path, recipe: Path) -> None:
    data = data_of(recipe, finished, "--data.streaming=true")
    assert list(PairStream(data, seed=0)) == list(PAIRS.items()) * 2
    assert load_pairs(data)["train"]["target"][:] == list(PAIRS.values()) * 2


def test_parts_are_plain_pairs_that_a_recipe_reads_by_themselves(folder: Path, recipe: Path) -> None:
    data = load_recipe(recipe, [f"--data.train=../{folder.name}/00001.jsonl"]).data
    assert load_pairs(data)["train"]["target"][:] == list(PAIRS.values())[3:]


def test_interrupted_distillation_resumes_to_the_same_bytes(
    distill: Run, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = distilled.write_atomically

    def interrupted(path: Path, text: str) -> None:
        if path.name == "00002.json":  # after the data of this part
            raise KeyboardInterrupt
        write(path, text)

    monkeypatch.setattr(distilled, "write_atomically", interrupted)
    _, errors, status = distill()
    assert (errors, status) == ("Interrupted; the same command resumes the distillation.\n", 130)
    assert "00003.jsonl" not in contents(tmp_path / "distilled")
    monkeypatch.undo()
    before = (tmp_path / "distilled" / "00001.jsonl").stat().st_mtime_ns
    assert distill()[2] == 0
    assert contents(tmp_path / "distilled") == contents(finished)
    assert (tmp_path / "distilled" / "00001.jsonl").stat().st_mtime_ns == before


def test_full_disk_ends_the_command_with_one_line(distill: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distilled, "write_atomically", no_space)
    assert error_line(distill()).endswith(
        "cannot be written: No space left on device; make room, and the same command resumes it.\n"
    )


def test_shards_together_equal_the_whole(distill: Run, finished: Path, recipe: Path, tmp_path: Path) -> None:
    output, _, _ = distill("--shard=2/3")
    assert json.loads(output)["missing_parts"] == 3
    with user_error(r"distillation is unfinished; part 00000 of 4 is missing"):
        load_pairs(data_of(recipe, tmp_path / "distilled"))
    for shard in ("3/3", "1/3"):
        distill(f"--shard={shard}", folder=tmp_path / "elsewhere")
    for path in (tmp_path / "elsewhere").iterdir():
        path.replace(tmp_path / "distilled" / path.name)
    assert contents(tmp_path / "distilled") == contents(finished)
    assert len(load_pairs(data_of(recipe, tmp_path / "distilled"))["train"]) == 12


@pytest.mark.parametrize(
    ("limit", "dropped"),
    [
        ("--max_length=8", {"source_too_long": 8}),  # four of the six sources have nine tokens
        ("--min_length_difference=-1", {"length_difference": 4}),  # two of the six pairs differ by two
        ("--max_length_difference=-1", {"length_difference": 2}),  # one pair does not differ
    ],
)
def test_pairs_outside_the_limits_are_dropped_and_counted(
    distill: Run, recipe: Path, tmp_path: Path, limit: str, dropped: dict[str, int]
) -> None:
    counts = json.loads(distill(limit)[0])
    kept = 12 - sum(dropped.values())
    assert (counts["dropped"], counts["kept"]) == (dropped, kept)
    assert len(load_pairs(data_of(recipe, tmp_path / "distilled"))["train"]) == kept


@pytest.mark.parametrize(
    ("tokens", "reason"), [(9, "length_difference"), (10, ""), (20, ""), (21, "length_difference"), (24, "too_long")]
)
def test_limits_include_their_ends(tokens: int, reason: str) -> None:
    translation = Translation([Hypothesis("a", 2, None)], 15, False, 23)
    limits = {"max_length": 23, "min_length_difference": -5, "max_length_difference": 5}
    assert command.select_pair(translation, tokens, limits) == reason


def test_sources_have_the_recipes_limit_where_positions_have_no_end(saved: Path, recipe: Path, tmp_path: Path) -> None:
    options, _ = command.parse_arguments([str(saved), str(recipe), f"--output_dir={tmp_path}"])
    for limit in (8, 2000):
        assert command.load_teacher(options, DataRecipe(max_length=limit))[0].max_source_tokens == limit


@pytest.mark.parametrize(("text", "reason"), [("z " * 50, "too_long"), (" ", "empty")])
def test_lengths_are_those_of_the_text_in_training_and_not_of_the_ids_that_the_teacher_wrote(
    distill: Run, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, reason: str
) -> None:
    monkeypatch.setattr(command.Translator, "_decode", lambda self, targets: [Hypothesis(text, 3, None)])
    assert json.loads(distill("--batch_tokens=1", "--max_length=30")[0])["dropped"] == {reason: 12}
    with user_error("has no pairs, since all were dropped"):
        load_pairs(data_of(recipe, tmp_path / "distilled"))


def test_search_is_the_models_unless_it_is_given(distill: Run, tmp_path: Path) -> None:
    model, tokenizer = paper_model_of_pairs()
    saved = {"num_beams": 3, "max_length": 512, "bad_words_ids": [[1]], "forced_eos_token_id": 2}  # as of Marian
    model.generation_config = model.config.make_generation_config(**saved)
    save(tmp_path / "model", model, tokenizer)
    for arguments, more in (([], {}), (["--beams=2", "--length_penalty=1"], {"num_beams": 2, "length_penalty": 1.0})):
        folder = tmp_path / f"options{len(arguments)}"
        assert distill(*arguments, model=tmp_path / "model", folder=folder)[2] == 0
        search = Distillation.load(folder).record["search"]
        assert search == saved | more | {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}


@pytest.mark.parametrize("option", ["--beams=2", "--length_penalty=1"])
def test_beams_of_a_model_without_any_end_the_command_before_the_folder_is_made(
    distill: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    tokenizer = model_of_pairs()[1]
    save(tmp_path / "nat", tiny_nat(vocab_size=len(tokenizer)), tokenizer)
    capsys.readouterr()  # the bar of the saved model
    assert "nat predicts all words at once and has no beams; leave them out." in error_line(
        distill(option, model=tmp_path / "nat")
    )
    assert not (tmp_path / "distilled").exists()


def test_output_is_another_name_of_output_dir(saved: Path, recipe: Path, tmp_path: Path) -> None:
    main([str(saved), str(recipe), "--output", str(tmp_path / "other"), "--window=3", "--beams=1"])
    assert (tmp_path / "other" / "distillation.json").exists()


def test_fingerprint_of_the_data_holds_that_of_the_distillation(
    folder: Path, saved: Path, recipe: Path, tmp_path: Path
) -> None:
    data = data_of(recipe, folder)
    prints = fingerprints(data, load_pairs(data), open_distilled(data))
    assert "distilled" not in prints["validation"]
    distillation = prints["train"]["distilled"]
    assert distillation["teacher"] == {"name": saved.name, "digest": LoadOptions(str(saved)).digest()}
    assert distillation["kept"] == prints["train"]["pairs"] == 12
    assert distillation["search"]["max_source_relative_length"] == 50
    assert json.loads(json.dumps(prints)) == prints
    assert Distillation.load(folder.rename(tmp_path / "moved")).fingerprint() == distillation


OTHER = "was written for other sources than data.train has; got 12"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (["--data.source=de", "--data.target=en"], "has other sides; got en-de, expected de-en. Name another"),
        (["--data.train=validation.jsonl"], f"{OTHER} of another text"),
        (["--data.train=test.jsonl", "--data.streaming=true"], OTHER),
        (["--data.distilled=nowhere"], "nowhere: has no readable distillation.json, so it is no folder of python -m"),
        (["--data.distilled=null", "--data.teacher=."], "data.teacher: without effect, since data.distilled is null;"),
    ],
)
def test_training_rejects_a_distillation_of_other_data(
    finished: Path, recipe: Path, fields: list[str], message: str
) -> None:
    with user_error(message):
        load_pairs(data_of(recipe, finished, *fields))


@pytest.mark.parametrize("field", ["data.teacher", "training.encoder_from"])
def test_training_rejects_a_distillation_by_another_teacher(
    finished: Path, saved: Path, recipe: Path, tmp_path: Path, field: str
) -> None:
    other = tmp_path / "other"
    tiny_model().save_pretrained(other)
    fields = [f"--data.distilled={finished}", f"--{field}={other}"]
    with user_error(rf"was written by another teacher; got {saved.name}, expected the present"):
        check_distilling_teacher(load_recipe(recipe, fields), Distillation.load(finished), {})
    recipe_of_run = load_recipe(recipe, [f"--output_dir={tmp_path / 'run'}", *fields])
    if field == "data.teacher":
        with user_error("was written by another teacher"):
            train(recipe_of_run)
        assert not (tmp_path / "run").exists()
    checked = load_recipe(recipe, [fields[0], f"--data.teacher={saved}", f"--training.encoder_from={other}"])
    check_distilling_teacher(checked, Distillation.load(finished), {})


def test_training_rejects_parts_that_were_changed_or_mixed(
    distill: Run, folder: Path, recipe: Path, tmp_path: Path
) -> None:
    distill("--beams=2", folder=tmp_path / "greedy")
    data, part = data_of(recipe, folder), folder / "00001.jsonl"
    text = part.read_text()
    part.write_text(text.replace("libro", "lobro"))
    with user_error(r"00001\.jsonl: was changed after it was written; remove it and repeat"):
        load_pairs(data)
    for byte in (b"\xff", b"{", b"\n"):
        content = bytearray(text.encode())
        content[20:21] = byte
        part.write_bytes(content)
        with user_error(r"00001\.jsonl: was changed after it was written; remove it and repeat"):
            list(PairStream(data_of(recipe, folder, "--data.streaming=true"), seed=0))
    part.write_text(text[:-10])
    with user_error(r"unfinished; part 00001 of 4 is missing"):
        load_pairs(data)
    for name in ("00001.json", "00001.jsonl"):
        (tmp_path / "greedy" / name).replace(folder / name)
    with user_error(r"00001\.json: is of another distillation than .*distillation\.json; put only"):
        load_pairs(data)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--beams=2"], "holds another distillation, search.num_beams differs; give the same command to resume it"),
        (["--data.train=test.jsonl"], "holds another distillation, data.first.sha256 differs; give the same command"),
        (["--data.train=no.jsonl"], "no.jsonl: there is no such file; set data.path"),
        (["--data.distilled=DIR"], "data.distilled: a teacher translates the real sources; leave it out."),
        (["--min_length_difference=30"], "--min_length_difference=30: more than --max_length_difference=20; exchange"),
        (["--nothing=1"], "--nothing: no such option; there are --"),
        (["--beem=1"], "Did you mean --beams?"),
        (["--device=nowhere"], "--device=nowhere: the model cannot run there"),
        (["--shard=3/2"], "argument --shard: got '3/2', expected i/n with i from 1 to n, such as 2/3"),
    ],
)
def test_distillation_that_cannot_be_written_ends_the_command_with_one_line(
    distill: Run, tmp_path: Path, arguments: list[str], message: str
) -> None:
    distill("--shard=1/4")
    before = contents(tmp_path / "distilled")
    assert message in error_line(distill(*arguments))
    assert contents(tmp_path / "distilled") == before


def test_invalid_folder_or_model_ends_the_command_with_one_line(distill: Run, recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "mine").write_text("mine")
    for result, message in (
        (distill(folder=tmp_path / "used"), "used: holds files that are no distillation; give another --output_dir."),
        (distill(folder=recipe), "own.yaml"),
        (distill(model="./nothing"), "./nothing: there is no such folder"),
    ):
        assert message in error_line(result)


@pytest.mark.slow
def test_killed_distillation_and_two_processes_write_the_bytes_of_one(
    distill: Run, saved: Path, recipe: Path, tmp_path: Path
) -> None:
    rows = [json.dumps({"translation": {"en": f"{source} {n}", "de": "x"}}) for n in range(30) for source in PAIRS]
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(rows))
    arguments: list[str] = [str(saved), str(recipe)]
    more: dict[str, Any] = {"module": "training.distill"}
    distill("--window=9", folder=tmp_path / "whole")
    killed = start(arguments, tmp_path / "killed", "--window=9", **more)
    while not (tmp_path / "killed" / "00003.json").exists() and killed.poll() is None:
        time.sleep(0.005)
    kill(killed)
    assert len([*Distillation.load(tmp_path / "killed").missing_parts()]) > 3
    run_to_end(arguments, tmp_path / "killed", "--window=9", launcher=TWO_PROCESSES, **more)
    assert len(contents(tmp_path / "whole")) == 41
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


@pytest.mark.slow
def test_run_on_distilled_pairs_records_them_and_resumes_only_with_them(
    distill: Run, folder: Path, recipe: Path, tmp_path: Path
) -> None:
    fields = [f"--output_dir={tmp_path / 'run'}", f"--data.distilled={tmp_path / 'distilled'}"]
    results = train(load_recipe(recipe, [*fields, "--training.steps=3"]))
    assert results["data"]["train"]["distilled"] == Distillation.load(folder).fingerprint()
    assert results["recipe"]["data"]["distilled"] == "distilled"
    distill("--beams=2", folder=tmp_path / "other")
    folder.rename(tmp_path / "first")
    (tmp_path / "other").rename(folder)
    with user_error(r"data\.train: these are not the pairs that the run .* was begun with"):
        train(load_recipe(recipe, [*fields, "--training.steps=6"]))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("distillation.json", '{"data": {"sources": 1e999}, "settings": {"window": 2}}'),
        ("distillation.json", '{"data": {"sources": 5}, "settings": {"window": 2}}'),
        ("00000.json", '{"kept": [], "dropped": {}, "bytes": 0, "sha256": "x", "distillation": "x"}'),
        ("00000.json", '{"kept": 1, "dropped": 1, "bytes": 0, "sha256": "x", "distillation": "x"}'),
    ],
)
def test_hostile_folder_of_distilled_pairs_is_an_error(folder: Path, recipe: Path, name: str, content: str) -> None:
    (folder / name).write_text(content)
    with user_error(r"(so it is no folder of|part 00000 of \d is missing)"):
        load_pairs(data_of(recipe, folder))


def test_count_of_more_parts_than_memory_holds_is_an_error(folder: Path, recipe: Path) -> None:
    record = json.loads((folder / "distillation.json").read_text())
    record["data"]["sources"] = 2**62
    (folder / "distillation.json").write_text(json.dumps(record))
    for part in folder.glob("0*.json"):
        part.unlink()
    with user_error(r"the distillation is unfinished; part 00000 of \d{15,} is missing"):
        load_pairs(data_of(recipe, folder))
