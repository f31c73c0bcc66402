"""The mean of the last checkpoints."""

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers import tiny_model
from training import average as average_module
from training.average import average, last_checkpoints, main, mean_weights
from training.run.checkpoints import UNFINISHED, mark_complete, step_of
from vaswani_transformer import VaswaniTransformerForConditionalGeneration
from vaswani_transformer.support.errors import OutputError, UserError


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """Write a run with complete checkpoints at steps 2, 10 and 9, and an unfinished one at 11, and a copy of one."""
    run = tmp_path / "run"
    for step in (2, 10, 9, 11):
        model = tiny_model()
        for weight in model.parameters():
            torch.nn.init.constant_(weight, float(step))
        folder = run / "checkpoints" / f"checkpoint-{step}"
        model.save_pretrained(folder)
        (folder / "trainer_state.json").write_text("{}")
        (folder / UNFINISHED).touch()
        if step != 11:
            mark_complete(folder)
    shutil.copytree(run / "checkpoints" / "checkpoint-9", run / "checkpoints" / "checkpoint-good-140")
    return run


def test_averaged_weight_is_the_mean_over_the_checkpoints(tmp_path: Path) -> None:
    folders, models = [], []
    for seed in range(3):
        torch.manual_seed(seed)
        models.append(VaswaniTransformerForConditionalGeneration(tiny_model().config))
        folders.append(tmp_path / f"checkpoint-{seed}")
        models[-1].save_pretrained(folders[-1])
    mean = mean_weights(folders)
    states = [model.state_dict() for model in models]
    for name, weight in mean.items():
        torch.testing.assert_close(weight, torch.stack([state[name] for state in states]).mean(0))


def test_average_takes_the_last_complete_checkpoints_by_step(run_folder: Path, tmp_path: Path) -> None:
    assert average(run_folder, 2, tmp_path / "mean") == [9, 10]
    assert all((weight == 9.5).all() for weight in load_file(tmp_path / "mean" / "model.safetensors").values())
    model = VaswaniTransformerForConditionalGeneration.from_pretrained(tmp_path / "mean")
    assert model.lm_head.weight is model.model.shared.weight
    assert not (tmp_path / "mean" / "trainer_state.json").exists()
    assert not (tmp_path / "mean" / "manifest.json").exists()


def test_too_few_checkpoints_are_an_error(run_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has 3 complete checkpoints at its end, expected 4"):
        average(run_folder, 4, tmp_path / "mean")
    assert not (tmp_path / "mean").exists()


@pytest.mark.parametrize(("evaluated", "steps"), [([2, 5, 9, 10], [9, 10]), ([2, 9, 10], [2, 9, 10])])
def test_best_checkpoint_counts_unless_later_ones_were_deleted(
    run_folder: Path, tmp_path: Path, evaluated: list[int], steps: list[int]
) -> None:
    history = [{"step": step, "eval_loss": 1.0} for step in evaluated] + [{"step": 4, "loss": 1.0}]
    checkpoint = run_folder / "checkpoints" / "checkpoint-10"
    state = {"best_global_step": 2, "log_history": history}
    (checkpoint / "trainer_state.json").write_text(json.dumps(state))
    mark_complete(checkpoint)
    assert average(run_folder, len(steps), tmp_path / "mean") == steps
    with pytest.raises(
        UserError, match=rf"has {len(steps)} complete checkpoints at its end, expected {len(steps) + 1}"
    ):
        average(run_folder, len(steps) + 1, tmp_path / "other")
    (run_folder / "checkpoints" / "checkpoint-2" / "model.safetensors").write_text("damaged")
    if steps == [9, 10]:
        assert [step_of(path) for path in last_checkpoints(run_folder, 3)] == steps


def test_folder_without_a_run_and_last_0_are_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for last, message in (("2", f"{tmp_path / 'rum'}: is not the folder of a run, or does not"), ("0", "got '0', exp")):
        with pytest.raises(SystemExit):
            main([str(tmp_path / "rum"), f"--last={last}", f"--output_dir={tmp_path / 'mean'}"])
        assert message in capsys.readouterr().err


def test_output_folder_that_is_not_empty_is_an_error(run_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match=r"is not empty"):
        average(run_folder, 2, tmp_path)


def test_damaged_checkpoint_is_not_averaged(run_folder: Path, tmp_path: Path) -> None:
    weights = run_folder / "checkpoints" / "checkpoint-9" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(UserError, match=r"checkpoint-9/model\.safetensors: is not as training wrote it; .* move its"):
        average(run_folder, 2, tmp_path / "mean")
    weights.parent.rename(tmp_path / "moved")
    assert average(run_folder, 2, tmp_path / "mean") == [2, 10]


def test_what_a_killed_command_left_does_not_block_the_next(run_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "mean" / "tmp1.part").mkdir(parents=True)
    average(run_folder, 2, tmp_path / "mean")
    assert not list((tmp_path / "mean").glob("*.part"))


def test_failed_write_leaves_no_file_and_the_same_command_succeeds(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mean").mkdir()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(average_module, "save_file", full)
    with pytest.raises(OutputError, match=r"mean: cannot be written: No space"):
        average(run_folder, 2, tmp_path / "mean")
    monkeypatch.undo()
    assert not list((tmp_path / "mean").iterdir())
    assert average(run_folder, 2, tmp_path / "mean") == [9, 10]


def test_mean_that_was_killed_while_its_files_moved_has_no_weights(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[str] = []
    monkeypatch.setattr(Path, "replace", lambda _, target: moved.append(target.name))
    average(run_folder, 2, tmp_path / "mean")
    assert moved[-1] == "model.safetensors"


def test_averaged_model_has_every_file_of_its_tokenizer_and_none_of_training(run_folder: Path, tmp_path: Path) -> None:
    last, tokenizer = run_folder / "checkpoints" / "checkpoint-10", {"source.spm", "vocab.json", "chat_template.jinja"}
    for name in (*tokenizer, "optimizer.pt", "rng_state.pth", "training_args.bin"):
        (last / name).write_text("")
    mark_complete(last)
    average(run_folder, 2, tmp_path / "mean")
    model = {"config.json", "generation_config.json", "model.safetensors"}
    assert {path.name for path in (tmp_path / "mean").iterdir()} == model | tokenizer


def test_checkpoints_of_two_models_are_an_error(run_folder: Path, tmp_path: Path) -> None:
    other = run_folder / "checkpoints" / "checkpoint-10"
    save_file({"x": torch.zeros(1)}, other / "model.safetensors")
    mark_complete(other)
    with pytest.raises(UserError, match=r"checkpoint-10: holds other weights than .*checkpoint-9"):
        average(run_folder, 2, tmp_path / "mean")


def test_command_prints_what_it_averaged(run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(run_folder), "--last=3", f"--output_dir={tmp_path / 'mean'}"])
    assert json.loads(capsys.readouterr().out)["averaged_steps"] == [2, 9, 10]
    with pytest.raises(SystemExit) as end:
        main([str(run_folder), "--last=9", f"--output_dir={tmp_path / 'other'}"])
    assert end.value.code == 2


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_not_averaged(run_folder: Path, tmp_path: Path, value: float) -> None:
    path = run_folder / "checkpoints" / "checkpoint-9" / "model.safetensors"
    weights = load_file(path)
    weights["model.shared.weight"][0, 0] = value
    save_file(weights, path, metadata={"format": "pt"})
    mark_complete(path.parent)
    with pytest.raises(UserError, match=r"checkpoint-9: model\.shared\.weight has a value that is not finite; average"):
        average(run_folder, 2, tmp_path / "mean")
    assert not (tmp_path / "mean").exists()


def test_folder_that_cannot_be_made_ends_the_command_with_one_line(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as end:
        main([str(run_folder), "--last=2", f"--output_dir={tmp_path / 'file' / 'mean'}"])
    assert end.value.code == 2
    assert capsys.readouterr().err.endswith("mean: cannot be written: Not a directory; give another --output_dir.\n")


def test_wrong_argument_ends_the_command_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["run", "--last=many"])
    assert end.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
