"""A run takes only a folder that it may write, and writes nothing before its data is read."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import ByT5Tokenizer

from tests.helpers import load_tokenizer, no_space, user_error
from tests.training.runs import begin_run, last_of_each, prepare_run, recipe_in
from training import train
from training.monitor.monitor import MONITOR_FILE
from training.recipe.fields import load_recipe
from training.run import checkpoints, checks, preparation
from training.run.checkpoints import STATE, checkpoint_at, mark_complete, run_lock
from training.run.folder import diff_trees, prepare_folder
from training.train import run
from vaswani_transformer.support.errors import OutputError

LEARNED, NO_DATA, STREAM = "--model.position_embedding=learned", "--data.path=/nowhere", "--data.streaming=true"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--training.source_tokens=5"], r"training\.source_tokens: a pair has \d+ tokens .* than the 5 of a step"),
        (["--data.test=../own.yaml"], r"own\.yaml, line 1: not JSON"),
        (["--model.d_model=1000000000", "--model.encoder_layers=900"], r"^model: .* memory; got [\d,]+ GiB, expected "),
        ([LEARNED, "--model.max_position_embeddings=30"], r"max_position_embeddings: split validation needs \d+ posi"),
        ([STREAM, "--data.max_length=61"], r"training\.source_tokens: a pair may have 61 tokens on that side"),
        (
            [STREAM, "--data.max_length=40", "--data.buffer=20", "--training.device_tokens=20"],
            r"data\.buffer: 20 pairs are too few for 3 micro-batches of a step; give at",
        ),
        ([NO_DATA, "--training.attention=flex_attention"], r"^training\.attention: flex_attention does not train on a"),
        ([NO_DATA, "--training.attention=flash_attention_2"], r"^training\.attention: .* CPU, eager and sdpa do;"),
        *(
            ([NO_DATA, f"--output_dir={folder}"], r"is not a writable folder \(\w.*\); give another --output_dir\.$")
            for folder in ("/proc/x", "/proc/1/x/y", "x" * 300)
        ),
    ],
)
def test_run_that_cannot_train_is_one_line_before_its_folder_is_made(
    arguments: list[str], tmp_path: Path, more: list[str], message: str
) -> None:
    """What needs no data ends it before the data is read, as `NO_DATA` shows."""
    settings = last_of_each(*arguments[1:], f"--output_dir={tmp_path / 'run'}", *more)
    with user_error(message):
        run(load_recipe(arguments[0], settings))
    assert not (tmp_path / "run").exists()


def test_flash_attention_in_fp32_is_an_error(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "uses_cpu", lambda: False)
    more = (NO_DATA, f"--output_dir={tmp_path / 'run'}", "--training.attention=flash_attention_2")
    with user_error(
        r"^training\.precision: flash_attention_2 has no kernels for fp32; .* --training\.precision=bf16 or"
    ):
        run(load_recipe(arguments[0], last_of_each(*arguments[1:], *more, "--training.precision=fp32")))


@pytest.mark.parametrize("name", ["link", "."])
def test_rejected_run_removes_its_files_alone_and_no_folder_that_was_there(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder, check = tmp_path / "run", preparation.check_pairs
    folder.mkdir()
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.chdir(folder)

    def check_and_annotate(*parts: Any) -> None:
        (folder / "notes.txt").write_text("mine")
        check(*parts)

    monkeypatch.setattr(preparation, "check_pairs", check_and_annotate)
    arguments = [*arguments, f"--output_dir={tmp_path / name if name == 'link' else name}"]
    with user_error(r"training\.source_tokens: a pair has \d+ tokens"):
        run(load_recipe(arguments[0], [*arguments[1:], "--training.source_tokens=5"]))
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    assert (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("more", ["--training.source_tokens=3", "--tokenizer.vocab_size=290", "--seed=2017"])
def test_second_command_changes_nothing_in_any_phase_before_training(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: str
) -> None:
    arguments, phases = [*arguments, f"--output_dir={tmp_path / 'run'}"], []
    recipe, other = (load_recipe(arguments[0], [*arguments[1:], *mine]) for mine in ([], [more]))

    def interpose(module: Any, name: str) -> None:
        phase = getattr(module, name)

        def begin_another(*parts: Any) -> Any:
            with user_error(r"run: another run is using it; end its processes"):
                run(other)
            phases.append(name)
            if name == "make_trainer":
                raise KeyboardInterrupt
            return phase(*parts)

        monkeypatch.setattr(module, name, begin_another)

    for name in ("load_pairs", "make_tokenizer", "tokenize", "record_models"):
        interpose(preparation, name)
    interpose(train, "make_trainer")
    with pytest.raises(KeyboardInterrupt):
        run(recipe)
    assert phases == ["load_pairs", "make_tokenizer", "tokenize", "record_models", "make_trainer"]
    assert prepare_folder(recipe).before == dataclasses.replace(recipe, output_dir=None)
    assert len(load_tokenizer(tmp_path / "run")) == 280


def test_tokenizer_without_a_tokenizer_json_begins_a_run_and_resumes_it(arguments: list[str], tmp_path: Path) -> None:
    ByT5Tokenizer().save_pretrained(tmp_path / "bytes")
    assert not (tmp_path / "bytes" / "tokenizer.json").exists()
    more = [f"--output_dir={tmp_path / 'run'}", f"--tokenizer.path={tmp_path / 'bytes'}"]
    recipe = load_recipe(arguments[0], [*arguments[1:], *more, "--model.decoder_start_token_id=0"])
    first, second = (prepare_run(recipe) for _ in range(2))
    assert isinstance(first.tokenizer, ByT5Tokenizer)
    assert first.encoded["train"][:] == second.encoded["train"][:]


def test_folder_that_cannot_be_created_is_an_error(tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("file/run", "file", "link/run", "link"):
        with user_error(rf"{name[:4]} is not a writable folder"):
            prepare_folder(recipe_in(arguments, tmp_path / name))


def test_run_without_an_empty_folder_is_an_error(tmp_path: Path, arguments: list[str]) -> None:
    with user_error(r"output_dir: the run needs a folder;"):
        prepare_folder(load_recipe(arguments[0], arguments[1:]))
    with user_error(r"holds files that are not a run; give another --output_dir"):
        prepare_folder(recipe_in(arguments, tmp_path))


def test_another_recipe_does_not_take_over_an_unfinished_run(tmp_path: Path, arguments: list[str]) -> None:
    recipe = recipe_in(arguments, tmp_path / "run")
    folder = begin_run(recipe)
    assert prepare_folder(recipe).path == folder
    other = recipe_in(arguments, folder, "--training.warmup_steps=7")
    with user_error(r"unfinished run of another recipe, training\.warmup_steps differs"):
        prepare_folder(other)
    longer = recipe_in(arguments, folder, "--training.steps=1000")
    assert prepare_folder(longer).changed == ["training.steps"]
    (folder / "results.json").write_text("{}")
    with user_error(r"holds a finished run; give another .* and nothing else, to extend it\.$"):
        prepare_folder(recipe)
    other = recipe_in(arguments, folder, "--training.steps=1000", "--training.warmup_steps=7")
    with user_error(r"nothing else \(training\.warmup_steps differs too\), to extend it\.$"):
        prepare_folder(other)


def test_run_that_its_minutes_ended_before_its_scores_may_be_executed_in_another_way(
    tmp_path: Path, arguments: list[str]
) -> None:
    """As where its last evaluation needs more memory than there is: the run is to get no more minutes."""
    arguments = [*arguments, "--training.minutes=1"]
    checkpoint = checkpoint_at(begin_run(recipe_in(arguments, tmp_path / "run")), 5)
    checkpoint.mkdir(parents=True)
    control = {"TrainerControl": {"args": {"should_training_stop": True}}}
    (checkpoint / STATE).write_text(json.dumps({"stateful_callbacks": control}))
    (checkpoint / MONITOR_FILE).write_text('{"trained": 61.0, "time": {}}')
    mark_complete(checkpoint)
    smaller = recipe_in(arguments, tmp_path / "run", "--training.evaluation_batch_size=2")
    assert prepare_folder(smaller).changed == ["training.evaluation_batch_size"]
    with user_error(r"holds an unfinished run of 5 steps in 1\.0 minutes so far; give training\.steps and"):
        prepare_folder(recipe_in(arguments, tmp_path / "run", "--training.minutes=0.5"))


def test_folder_in_place_of_the_lock_is_named(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "run" / ".lock").mkdir(parents=True)
    recipe = recipe_in(arguments, tmp_path / "run")
    for use in (prepare_folder, run):
        with user_error(r"\.lock: is a folder, where a file that locks .*; remove or rename it\.$"):
            use(recipe)


def test_lock_that_another_command_has_just_removed_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "lock", lambda file, _: Path(file.name).unlink())
    with user_error(r"run: another run is using it"), run_lock(tmp_path / "run"):
        pass


def test_longer_run_that_the_disk_does_not_hold_is_one_line(
    tmp_path: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, longer = (recipe_in(arguments, tmp_path / "run", f"--training.steps={steps}") for steps in (10, 20))
    prepare_run(recipe)

    monkeypatch.setattr("training.run.preparation.write_atomically", no_space)
    with pytest.raises(OutputError, match=r"run: cannot be written: No space left on device; make room"):
        prepare_run(longer)


def test_fingerprints_that_the_disk_does_not_hold_are_one_line(
    tmp_path: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run whose data.json was removed, as its error advises, writes it again."""
    recipe = recipe_in(arguments, tmp_path / "run")
    prepare_run(recipe)
    (tmp_path / "run" / "data.json").unlink()
    monkeypatch.setattr("training.run.preparation.write_atomically", no_space)
    with pytest.raises(OutputError, match=r"run: cannot be written: No space left on device; make room"):
        prepare_run(recipe)


def test_files_of_a_run_killed_at_its_start_do_not_block_the_next(tmp_path: Path, arguments: list[str]) -> None:
    folder = tmp_path / "run"
    (folder / "tmp1.part").mkdir(parents=True)
    (folder / "recipe.yaml.part").write_text("name: ow")
    (folder / ".lock").touch()
    recipe = recipe_in(arguments, folder)
    prepare_run(recipe)
    names = {"data.json", "recipe.yaml", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in folder.iterdir()} == names


def test_differing_fields_are_named() -> None:
    assert diff_trees({"a": 1, "b": {"c": 2, "d": 3}}, {"a": 1, "b": {"c": 4, "d": 3}, "e": 5}) == ["b.c", "e"]


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "trainer_state.json.part"])
def test_link_to_a_file_in_a_runs_folder_is_an_error(arguments: list[str], tmp_path: Path, name: str) -> None:
    folder, other = tmp_path / "run", tmp_path / "other"
    folder.mkdir()
    other.write_text("mine")
    (folder / name).symlink_to(other)
    with user_error(rf"{name}: is a link, through which a run would write another file; put the"):
        prepare_folder(recipe_in(arguments, folder))
    assert other.read_text() == "mine"
