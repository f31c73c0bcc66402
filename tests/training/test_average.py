"""The mean of the last checkpoints."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers import error_line, no_space, run_main, tiny_model, user_error
from training import average as average_module
from training.average import average, last_checkpoints, main
from training.run.checkpoints import UNFINISHED, WEIGHTS, mark_complete, rotate, step_of
from vaswani_transformer import VaswaniTransformerForConditionalGeneration
from vaswani_transformer.support.errors import OutputError


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


def test_average_takes_the_last_complete_checkpoints_by_step(run_folder: Path, tmp_path: Path) -> None:
    assert average(run_folder, 2, tmp_path / "mean") == [9, 10]
    weights = load_file(tmp_path / "mean" / "model.safetensors").values()
    assert all((weight == 9.5).all() and weight.dtype == torch.float32 for weight in weights)
    model = VaswaniTransformerForConditionalGeneration.from_pretrained(tmp_path / "mean")
    assert model.lm_head.weight is model.model.shared.weight


def spoil(folder: Path, way: str) -> None:
    """Change the checkpoint of step 9 in a way that its manifest notices, or knows and should not have written."""
    path = folder / "checkpoints" / "checkpoint-9" / "model.safetensors"
    if way == "a damaged file":
        path.write_bytes(path.read_bytes()[:-1])
        return
    weights = load_file(path)
    if way == "another model":
        weights = {"x": torch.zeros(1)}
    else:
        weights["model.shared.weight"][0, 0] = float(way)
    save_file(weights, path, metadata={"format": "pt"})
    mark_complete(path.parent)


NOT_FINITE = r"checkpoint-9: model\.shared\.weight has a value that is not finite; average"


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("a damaged file", r"checkpoint-9/model\.safetensors: is not as training wrote it; .* move its"),
        ("another model", r"checkpoint-10: holds other weights than .*checkpoint-9"),
        *[(value, NOT_FINITE) for value in ("nan", "inf")],
    ],
)
def test_checkpoint_without_its_weights_is_not_averaged(
    run_folder: Path, tmp_path: Path, way: str, message: str
) -> None:
    spoil(run_folder, way)
    with user_error(message):
        average(run_folder, 2, tmp_path / "mean")
    assert not (tmp_path / "mean").exists()
    (run_folder / "checkpoints" / "checkpoint-9").rename(tmp_path / "moved")
    assert average(run_folder, 2, tmp_path / "mean") == [2, 10]


@pytest.mark.parametrize(("keep", "steps"), [(1, [10]), (3, [9, 10]), (4, [2, 5, 9, 10])])
def test_best_checkpoint_counts_unless_later_ones_were_deleted(
    run_folder: Path, tmp_path: Path, keep: int, steps: list[int]
) -> None:
    checkpoints = run_folder / "checkpoints"
    shutil.copytree(checkpoints / "checkpoint-9", checkpoints / "checkpoint-5")
    rotate(run_folder, keep, best_step=2)
    assert average(run_folder, len(steps), tmp_path / "mean") == steps
    assert {path.name for path in (tmp_path / "mean").iterdir()} == {"config.json", "generation_config.json", WEIGHTS}
    with user_error(rf"has {len(steps)} complete checkpoints at its end, expected {len(steps) + 1}"):
        average(run_folder, len(steps) + 1, tmp_path / "other")
    (checkpoints / "checkpoint-2" / "model.safetensors").write_text("damaged")
    if keep < 4:
        assert [step_of(path) for path in last_checkpoints(run_folder, 3)] == steps


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{tmp}/rum", "--last=2", "--output_dir={tmp}/mean"], "{tmp}/rum: is not the folder of a run, or does not"),
        (["x" * 256, "--output_dir={tmp}/mean"], "xxx/checkpoints: File name too long"),
        (["{run}", "--last=0", "--output_dir={tmp}/mean"], "got '0', exp"),
        (["{run}", "--last=many"], "got 'many', exp"),
        (["{run}", "--last=9", "--output_dir={tmp}/mean"], "has 3 complete checkpoints at its end, expected 9"),
        (["{run}", "--last=2", "--output_dir={tmp}"], "is not empty"),
        (["{run}", "--last=2", "--output_dir={run}/file/mean"], "Not a directory; give another --output_dir.\n"),
    ],
)
def test_command_that_cannot_average_ends_with_one_line(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    capsys.readouterr()  # the bars of saving
    (run_folder / "file").touch()
    given = [argument.format(tmp=tmp_path, run=run_folder) for argument in arguments]
    assert message.format(tmp=tmp_path) in error_line(run_main(main, given, capsys))
    assert not (tmp_path / "mean").exists()


def test_what_a_killed_command_left_does_not_block_the_next(run_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "mean" / "tmp1.part").mkdir(parents=True)
    average(run_folder, 2, tmp_path / "mean")
    assert not list((tmp_path / "mean").glob("*.part"))


def test_failed_write_leaves_no_file_and_the_same_command_succeeds(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mean").mkdir()

    monkeypatch.setattr(average_module, "save_file", no_space)
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
    for name in (*tokenizer, "optimizer.pt", "rng_state.pth", "training_args.bin", "watch.json", "stream.json"):
        (last / name).write_text("")
    mark_complete(last)
    average(run_folder, 2, tmp_path / "mean")
    model = {"config.json", "generation_config.json", "model.safetensors"}
    assert {path.name for path in (tmp_path / "mean").iterdir()} == model | tokenizer


def test_command_prints_the_averaged_steps(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([str(run_folder), "--last=3", f"--output_dir={tmp_path / 'mean'}"])
    assert json.loads(capsys.readouterr().out)["averaged_steps"] == [2, 9, 10]
    assert all((weight == 7).all() for weight in load_file(tmp_path / "mean" / "model.safetensors").values())
