"""The mean of a run's last checkpoints becomes a separate model."""

from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests.commands import error_line, run_main
from tests.models import tiny_model
from training.average import average, main
from training.checkpoints import CHECKPOINTS, INTERRUPTED, mark_complete
from training.models import learned_pairs
from vaswani_transformer import VaswaniTransformerForConditionalGeneration


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """Write a run with checkpoints at steps 2, 9 and 10, an interrupted one at 11 and an unfinished one at 12."""
    run = tmp_path / "run"
    for step in (2, 9, 10, 11, 12):
        model = tiny_model()
        for weight in model.parameters():
            torch.nn.init.constant_(weight, float(step))
        folder = run / CHECKPOINTS / f"checkpoint-{step}"
        model.save_pretrained(folder)
        for name in ("optimizer.pt", "trainer_state.json", "tokenizer.json", "tokenizer_config.json"):
            (folder / name).write_text("{}")
        if step == 11:
            (folder / INTERRUPTED).touch()
        if step != 12:
            mark_complete(folder)
    return run


def test_average_takes_the_last_complete_checkpoints_by_step(run_folder: Path, tmp_path: Path) -> None:
    assert average(run_folder, 2, tmp_path / "mean") == [9, 10]
    weights = load_file(tmp_path / "mean" / "model.safetensors").values()
    assert all((weight == 9.5).all() and weight.dtype == torch.float32 for weight in weights)
    model = VaswaniTransformerForConditionalGeneration.from_pretrained(tmp_path / "mean")
    assert model.lm_head.weight is model.model.shared.weight


def test_averaged_model_has_its_tokenizer_and_no_file_of_training(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(main, [run_folder, "--last=2", f"--output_dir={tmp_path / 'mean'}"], capsys)[2] == 0
    model = {"config.json", "generation_config.json", "model.safetensors"}
    assert {path.name for path in (tmp_path / "mean").iterdir()} == model | {"tokenizer.json", "tokenizer_config.json"}


def test_averaged_model_tells_which_pairs_it_has_learned_from(run_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"en": "one", "de": "eins"}\n')
    data = {"kind": "json", "path": str(tmp_path), **dict.fromkeys(("train", "validation"), "train.jsonl")}
    (run_folder / "recipe.yaml").write_text(yaml.safe_dump({"name": "own", "data": data}))
    average(run_folder, 2, tmp_path / "mean")
    learned = learned_pairs([str(tmp_path / "mean")])
    assert learned.is_complete
    assert [pairs.to_dict() for pairs in learned.pairs] == [{"source": ["one"], "target": ["eins"]}]


def test_averaged_model_has_a_tokenizer_of_other_files(run_folder: Path, tmp_path: Path) -> None:
    """Marian's are `vocab.json` and two `.spm`."""
    names = {"vocab.json", "source.spm", "target.spm"}
    for name in names:
        (run_folder / CHECKPOINTS / "checkpoint-10" / name).write_text("{}")
    mark_complete(run_folder / CHECKPOINTS / "checkpoint-10")
    average(run_folder, 1, tmp_path / "mean")
    assert names <= {path.name for path in (tmp_path / "mean").iterdir()}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{tmp}/rum", "--last=2", "--output_dir={tmp}/mean"], "{tmp}/rum: has 0 complete checkpoints, expected 2"),
        (["{run}", "--last=0", "--output_dir={tmp}/mean"], "argument --last: "),
        (["{run}", "--last=2", "--output_dir={tmp}"], "the folder is in use; choose a different one"),
    ],
)
def test_command_that_cannot_average_ends_with_one_line(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    capsys.readouterr()  # the bars of saving
    given = [argument.format(tmp=tmp_path, run=run_folder) for argument in arguments]
    assert message.format(tmp=tmp_path) in error_line(run_main(main, given, capsys))
    assert not (tmp_path / "mean").exists()
