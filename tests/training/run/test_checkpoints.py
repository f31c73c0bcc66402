"""Checkpoints are complete or ignored, after any kill and on a full disk, and the best is never deleted."""

import json
import re
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save, save_file

from tests.helpers import no_space, user_error
from tests.training import runs
from training.recipe.fields import TrainingRecipe
from training.run.checkpoints import (
    all_checkpoints,
    changed_file,
    check_same_sharding,
    checkpoint_at,
    complete_checkpoints,
    has_ended,
    intact_checkpoint,
    is_beyond,
    last_checkpoint,
    mark_complete,
    remove,
    rotate,
    run_write_errors,
    settle,
    step_of,
    writing,
)
from vaswani_transformer import VaswaniTransformerForConditionalGeneration
from vaswani_transformer.support.errors import OutputError, UserError


def make_checkpoint(folder: Path, step: int, *, best: int | None = None, finished: bool = True) -> Path:
    """Write a checkpoint of three small files."""
    checkpoint = checkpoint_at(folder, step)
    checkpoint.mkdir(parents=True)
    state = {"global_step": step, "best_global_step": best, "log_history": [], "stateful_callbacks": {}}
    (checkpoint / "trainer_state.json").write_text(json.dumps(state))
    for name in ("model.safetensors", "optimizer.pt", "rng_state_1.pth"):
        (checkpoint / name).write_text(name)
    (checkpoint / "manifest.json.part").touch()
    if finished:
        mark_complete(checkpoint)
    return checkpoint


def steps_of(checkpoints: list[Path]) -> list[int]:
    return [step_of(checkpoint) for checkpoint in checkpoints]


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "flipped bit": ("model.safetensors", flip_a_bit),
    "zeros": ("optimizer.pt", lambda file: file.write_bytes(bytes(file.stat().st_size))),
    "cut": ("rng_state_1.pth", lambda file: file.write_bytes(file.read_bytes()[:-1])),
    "missing": ("rng_state_1.pth", Path.unlink),
    "newline": ("trainer_state.json", lambda file: file.write_text(f"{file.read_text()}\n")),
    "half a manifest": ("manifest.json", lambda file: file.write_text(file.read_text()[:20])),
    "no object": ("manifest.json", lambda file: file.write_text("[]")),
    "no manifest": ("manifest.json", Path.unlink),
}


def test_only_exact_names_are_checkpoints(tmp_path: Path) -> None:
    for step, finished in ((100, True), (9, True), (20, False), (3, True)):
        make_checkpoint(tmp_path, step, finished=finished)
    folder = tmp_path / "checkpoints"
    copies = ["checkpoint-100-good", "checkpoint-good-140", "checkpoint-0200", "checkpoint-\u0663", "my-checkpoint-9"]
    for name in copies:
        shutil.copytree(folder / "checkpoint-100", folder / name)
    (folder / "checkpoint-7").write_text("a file")
    assert steps_of(all_checkpoints(tmp_path)) == [3, 9, 20, 100]
    assert steps_of(complete_checkpoints(tmp_path)) == [3, 9, 100]
    assert runs.last_step(tmp_path) == 100
    settle(tmp_path)
    rotate(tmp_path, 1, None)
    assert {path.name for path in folder.iterdir()} == {"checkpoint-100", "checkpoint-7", *copies}
    assert last_checkpoint(tmp_path / "nowhere") is None


def test_damaged_manifest_with_a_name_that_no_file_can_have_is_noticed(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, 3)
    (checkpoint / "manifest.json").write_text('{"\\ud800": [1, "x"]}')
    assert changed_file(checkpoint) == "\ud800"


@pytest.mark.parametrize("damage", DAMAGES)
def test_run_sets_damaged_checkpoints_aside_and_deletes_unfinished_ones(tmp_path: Path, damage: str) -> None:
    for step, finished in ((3, True), (6, False), (9, True), (15, False)):
        make_checkpoint(tmp_path, step, finished=finished)
    name, spoil = DAMAGES[damage]
    for turn in ("", "-2"):
        checkpoint = make_checkpoint(tmp_path, 12)
        spoil(checkpoint / name)
        before = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
        assert changed_file(checkpoint) == name
        assert intact_checkpoint(tmp_path) == checkpoint_at(tmp_path, 9)
        settle(tmp_path)
        assert steps_of(all_checkpoints(tmp_path)) == [3, 9]
        aside = checkpoint.with_name(f"checkpoint-12.damaged{turn}")
        assert {path.name: path.read_bytes() for path in aside.iterdir()} == before


@pytest.mark.parametrize("damage", DAMAGES)
def test_run_without_an_intact_checkpoint_is_an_error_that_changes_nothing(tmp_path: Path, damage: str) -> None:
    name, spoil = DAMAGES[damage]
    for step in (3, 6):
        spoil(make_checkpoint(tmp_path, step) / name)
    for _ in range(2):
        with user_error(rf"no checkpoint is as .*; in checkpoint-6 the first such file is {name}"):
            settle(tmp_path)
    assert steps_of(all_checkpoints(tmp_path)) == [3, 6]


def test_run_interrupted_in_its_first_checkpoint_starts_over(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 3, finished=False)
    (tmp_path / "checkpoints" / "checkpoint-6").mkdir()  # killed before its first file
    (tmp_path / "checkpoints" / "checkpoint-1.part").mkdir()  # killed while it was deleted
    settle(tmp_path)
    assert not list((tmp_path / "checkpoints").iterdir())


@pytest.mark.parametrize(("first", "resumed"), [(3, "checkpoint-6"), (9, "the start")])
def test_advice_for_a_damaged_best_checkpoint_leads_out(tmp_path: Path, first: int, resumed: str) -> None:
    for step in range(first, 16, 3):
        make_checkpoint(tmp_path, step, best=min(step, 9))
    flip_a_bit(checkpoint_at(tmp_path, 9) / "model.safetensors")
    advice = f"move checkpoint-9 and all later ones elsewhere, and the same command trains from {resumed}"
    with user_error(rf"checkpoint-9/model.safetensors: is not as training wrote it; .*{advice}\."):
        settle(tmp_path)
    settle(tmp_path, needs_best=False)  # for the mean of the last ones
    assert steps_of(all_checkpoints(tmp_path)) == list(range(first, 16, 3))
    for checkpoint in all_checkpoints(tmp_path):
        if step_of(checkpoint) >= 9:
            checkpoint.rename(tmp_path / checkpoint.name)
    settle(tmp_path)
    assert steps_of(all_checkpoints(tmp_path)) == list(range(first, 9, 3))


def test_rotation_deletes_a_link_and_not_what_it_names(tmp_path: Path) -> None:
    target = make_checkpoint(tmp_path, 3).rename(tmp_path / "elsewhere")
    checkpoint_at(tmp_path, 3).symlink_to(target)
    newest = make_checkpoint(tmp_path, 6)
    assert intact_checkpoint(tmp_path) == newest
    rotate(tmp_path, 1, None)
    assert steps_of(all_checkpoints(tmp_path)) == [6]
    assert changed_file(target) is None


@settings(max_examples=30)
@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=12), st.integers(1, 4))
def test_best_and_newest_checkpoints_are_never_deleted(
    tmp_path_factory: pytest.TempPathFactory, saves: list[tuple[bool, bool]], keep: int
) -> None:
    """Each example is a sequence of saves, some of them a new best, some incomplete."""
    run, best, saved = tmp_path_factory.mktemp("run"), None, []
    for step, (is_best, is_partial) in enumerate(saves, start=1):
        if is_partial:
            make_checkpoint(run, step, finished=False)
            continue
        make_checkpoint(run, step)
        best = step if is_best else best
        saved.append(step)
        rotate(run, keep, best)
        kept = steps_of(complete_checkpoints(run))
        protected = {step, best} - {None}
        assert protected <= set(kept)
        assert len(kept) == min(len(saved), max(keep, len(protected)))
        unprotected = [other for other in kept if other not in protected]
        assert unprotected == [other for other in saved if other not in protected][len(saved) - len(kept) :]


@pytest.mark.parametrize(
    ("error", "is_of_a_write"),
    [
        (OSError(28, "No space left on device"), True),
        (Exception("No space left on device (os error 28)"), True),  # of tokenizers
        (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0"), True),  # of torch
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (UserError("tokenizer.json: cannot be read (os error 28)"), False),
    ],
)
def test_failed_writes_of_every_library_are_one_line(error: Exception, is_of_a_write: bool, tmp_path: Path) -> None:
    with pytest.raises(OutputError if is_of_a_write else type(error)) as caught, run_write_errors(tmp_path):
        raise error
    assert is_of_a_write == str(caught.value).startswith(f"{tmp_path}: cannot be written: ")


def test_manifest_that_a_full_disk_does_not_hold_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.run.checkpoints.write_atomically", no_space)
    checkpoint = checkpoint_at(tmp_path, 3)
    with (
        pytest.raises(OutputError, match=r"checkpoint-3: cannot be written: No space left on device; make room"),
        run_write_errors(checkpoint),
        writing(checkpoint),
    ):
        (checkpoint / "model.safetensors").touch()
    settle(tmp_path)
    assert all_checkpoints(tmp_path) == []


def test_interrupted_deletion_leaves_nothing_that_looks_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = make_checkpoint(tmp_path, 3)
    monkeypatch.setattr(shutil, "rmtree", lambda path, **_: None)
    remove(checkpoint)
    assert all_checkpoints(tmp_path) == []


@pytest.mark.parametrize(
    ("was_stopped", "limits", "expected"),
    [
        (False, {"steps": 7, "minutes": 1, "patience": 1}, (False, True)),
        (False, {"steps": 6}, (True, False)),
        (False, {"steps": 5}, (True, True)),
        (True, {"steps": 7}, (False, False)),
        (True, {"steps": 7, "minutes": 1.4}, (True, True)),
        (True, {"steps": 7, "minutes": 1.6}, (False, False)),
        (True, {"steps": 7, "patience": 2}, (True, False)),
        (True, {"steps": 7, "patience": 3}, (False, False)),
    ],
)
def test_limits_of_the_present_recipe_decide_whether_a_run_has_ended(
    tmp_path: Path, was_stopped: bool, limits: dict[str, Any], expected: tuple[bool, bool]
) -> None:
    """Step 6 came after 90 seconds, and the last 2 evaluations before it were not better."""
    checkpoint = make_checkpoint(tmp_path, 6)
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    state["stateful_callbacks"] = {
        "TrainerControl": {"args": {"should_training_stop": was_stopped}},
        "EarlyStoppingCallback": {"attributes": {"early_stopping_patience_counter": 2}},
    }
    (checkpoint / "trainer_state.json").write_text(json.dumps(state))
    (checkpoint / "watch.json").write_text('{"trained": 90.0, "time": {}}')
    training = TrainingRecipe(**limits)
    assert (has_ended(checkpoint, training), is_beyond(checkpoint, training)) == expected


@pytest.mark.parametrize(("was_sharded", "words"), [(True, "written with FSDP2.*without it"), (False, "without.*with")])
def test_checkpoint_with_another_sharding_is_an_error(tmp_path: Path, was_sharded: bool, words: str) -> None:
    checkpoint = make_checkpoint(tmp_path, 3)
    if was_sharded:
        (checkpoint / "pytorch_model_fsdp.bin").write_text("")
    check_same_sharding(checkpoint, was_sharded)
    with user_error(f"{words}.*; launch it as before"):
        check_same_sharding(checkpoint, not was_sharded)


@pytest.mark.slow
def test_run_and_data_that_were_moved_resume_from_a_checkpoint_before_a_damaged_one(
    finished_run: runs.FinishedRun, tmp_path: Path
) -> None:
    arguments, uninterrupted, *_ = finished_run
    folder = runs.rewound(uninterrupted, 6, tmp_path / "moved")
    optimizer = checkpoint_at(folder, 6) / "optimizer.pt"
    optimizer.write_bytes(bytes(optimizer.stat().st_size))
    shutil.copytree(Path(arguments[0]).parent / "data", tmp_path / "data")
    _, errors = runs.start(arguments, folder, f"--data.path={tmp_path / 'data'}").communicate(timeout=300)
    assert "checkpoint-6: optimizer.pt is not as training wrote it; kept as checkpoint-6.damaged." in errors
    assert "Resuming from step 3 of 9." in errors
    assert "does not exist" not in errors
    runs.assert_same_checkpoints(uninterrupted, folder)
    assert yaml.safe_load((folder / "recipe.yaml").read_text())["data"]["path"] == str(tmp_path / "data")


DAMAGED_FILES = {
    "recipe.yaml": ("a: [", r"holds no recipe; got 'while parsing .*\. Restore it, or give another --output_dir\."),
    "data.json": ("[]", r"is damaged; got list, expected dict; restore it, or if the data is the same, remove it, and"),
    "models.json": ("\0", r"cannot be read \(Expecting value.*\); restore it, or give another --output_dir\."),
    "trainer_state.json": ("{}", r"global_step is damaged; got null, expected int; remove .*trainer_state\.json, and"),
    "watch.json": ('{"trained": "x"}', r'trained is damaged; got "x", expected float; restore it, or remove it, and'),
    "results.json": ("{", r"cannot be read \(.*\); restore it, or give the training command again without it\."),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DAMAGED_FILES)
def test_damaged_file_of_a_run_is_one_line(finished_run: runs.FinishedRun, tmp_path: Path, name: str) -> None:
    """The run was interrupted while it scored, or is extended."""
    folder = shutil.copytree(finished_run.folder, tmp_path / "run")
    more = ["--training.steps=12"] if name == "results.json" else []
    if not more:
        (folder / "results.json").unlink()
    content, message = DAMAGED_FILES[name]
    (folder / name).write_text(content)
    with user_error(rf"^{folder / name}: {message}[^\n]*$"):
        runs.train_in(finished_run.arguments, folder, *more)


@pytest.mark.slow
@pytest.mark.parametrize("file", ["training_args.bin", "optimizer.pt", "trainer_state.json", "manifest.json"])
def test_run_killed_while_it_writes_a_checkpoint_resumes_from_the_one_before(
    finished_run: runs.FinishedRun, tmp_path: Path, file: str
) -> None:
    arguments, uninterrupted, *_ = finished_run
    killed = tmp_path / "killed"
    process = runs.start(arguments, killed, change=f"{file}@6")
    process.communicate(timeout=300)
    assert process.returncode == -signal.SIGKILL
    assert steps_of(all_checkpoints(killed)) == [3, 6]
    assert (checkpoint_at(killed, 6) / "model.safetensors").exists()
    assert runs.last_step(killed) == 3
    runs.run_to_end(arguments, killed)
    runs.assert_same_checkpoints(uninterrupted, killed)


def test_ranks_wait_for_each_other_before_a_checkpoint_is_written_and_before_it_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that finds the folder without its mark, or with a manifest that lacks its files, has not waited."""
    checkpoint, seen = checkpoint_at(tmp_path, 3), []

    class State:
        is_main_process = True

        def wait_for_everyone(self) -> None:
            seen.append({path.name for path in checkpoint.iterdir()})

    monkeypatch.setattr("training.run.checkpoints.PartialState", State)
    with writing(checkpoint):
        (checkpoint / "model.safetensors").write_text("weights")
    assert seen == [{"manifest.json.part"}, {"manifest.json.part", "model.safetensors"}]
    assert complete_checkpoints(tmp_path) == [checkpoint]


@pytest.mark.slow
def test_checkpoint_is_complete_only_after_every_process_has_written_its_files(
    arguments: list[str], tmp_path: Path
) -> None:
    """The second of two processes is killed while it writes its random state; the first does not wait for that.

    The same command resumes in the middle of the second epoch, bit for bit on a CPU, with dropout.
    """
    arguments = [*arguments, "--training.steps=9"]
    uninterrupted, killed = tmp_path / "uninterrupted", tmp_path / "killed"
    runs.run_to_end(arguments, uninterrupted, launcher=runs.TWO_PROCESSES)
    dying = runs.start(arguments, killed, launcher=runs.TWO_PROCESSES, change="rng_state_1.pth@6")
    dying.communicate(timeout=300)
    assert dying.returncode != 0
    assert steps_of(all_checkpoints(killed)) == [3, 6]
    assert runs.last_step(killed) == 3
    runs.run_to_end(arguments, killed, launcher=runs.TWO_PROCESSES)
    runs.assert_same_checkpoints(uninterrupted, killed)
    assert runs.results_in(killed)["processes"] == 2


@pytest.mark.slow
def test_resuming_run_rejects_weights_that_its_model_would_not_have_saved(
    finished_run: runs.FinishedRun, tmp_path: Path
) -> None:
    """First it was killed after its training, then after the checkpoint of step 6."""
    arguments, finished, *_ = finished_run
    folder, name = shutil.copytree(finished, tmp_path / "run"), "model.encoder.layers.0.feed_forward.fc1.bias"
    saved = load_file(folder / "model.safetensors")
    not_finite = {**saved, name: torch.full((16,), torch.nan)}
    results = (folder / "results.json").rename(tmp_path / "results.json")
    save_file(not_finite, folder / "model.safetensors", {"format": "pt"})
    message = rf"{name} \(float32\); remove {folder / 'trainer_state.json'}, and the run takes the"
    with user_error(message):
        runs.train_in(arguments, folder)
    results.rename(folder / "results.json")
    runs.rewind(folder, 6)
    checkpoint, no_weights = checkpoint_at(folder, 6), {**saved}
    del no_weights[name]
    fix = "estore it, or move checkpoint-6 elsewhere, and the run"
    for content, message in (
        (save(no_weights, {"format": "pt"}), rf"missing: {name}\. R{fix}"),
        (save(not_finite, {"format": "pt"}), rf"{name} \(float32\); r{fix}"),
        (b"no weights", rf"model\.safetensors: cannot be read .*; r{fix}"),
    ):
        (checkpoint / "model.safetensors").write_bytes(content)
        mark_complete(checkpoint)
        with user_error(rf"checkpoint-6.*{message}"):
            runs.train_in(arguments, folder)
    remove(checkpoint)
    assert runs.train_in(arguments, folder)["steps"] == 9


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="only Linux limits the files of a running process")
def test_full_disk_ends_a_run_with_one_line_and_keeps_earlier_checkpoints(
    finished_run: runs.FinishedRun, tmp_path: Path
) -> None:
    """A limit on the size of a file simulates it: the weights are smaller, the optimizer's state is larger."""
    arguments, uninterrupted, *_ = finished_run
    folder = tmp_path / "run"
    process = runs.start(arguments, folder)
    runs.wait_for_checkpoint(process, folder)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (50_000, 50_000))
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 2
    assert re.search(
        r"^\S+checkpoint-\d+: cannot be written: .*; make room, .* and repeat the command .*$", errors, re.MULTILINE
    )
    assert "Traceback" not in errors
    assert runs.last_step(folder) < 9
    runs.run_to_end(arguments, folder)
    runs.assert_same_checkpoints(uninterrupted, folder)


@pytest.mark.slow
def test_trained_model_that_the_disk_fails_is_written_by_the_same_command(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first file is already there, without content."""
    save_pretrained = VaswaniTransformerForConditionalGeneration.save_pretrained

    def tear(model: VaswaniTransformerForConditionalGeneration, folder: Any, **settings: Any) -> None:
        if "checkpoint-" in str(folder):
            return save_pretrained(model, folder, **settings)
        (Path(folder) / "config.json").touch()
        return no_space()

    with monkeypatch.context() as patch:
        patch.setattr(VaswaniTransformerForConditionalGeneration, "save_pretrained", tear)
        with pytest.raises(OutputError, match="No space left on device; make room"):
            runs.train_in(arguments, tmp_path / "run", "--training.steps=3")
    assert runs.train_in(arguments, tmp_path / "run", "--training.steps=3")["steps"] == 3
    assert load_file(tmp_path / "run" / "model.safetensors")
