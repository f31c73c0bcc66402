"""Parts of a run that is not run: the batches and the log of a step, an evaluation, and a checkpoint."""

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from tests.training import runs
from training.monitor.monitor import trained_seconds
from training.run.checkpoints import read_state
from training.trainer.draws import add_random_choices

CMLM = ["--model.kind=cmlm", "--model.dropout=0.0"]


@pytest.mark.parametrize("step", [0, 3])
def test_random_choices_depend_on_the_step_and_not_on_the_micro_batch(
    arguments: list[str], tmp_path: Path, step: int
) -> None:
    """Each step has two micro-batches, and the first batch begins the present step."""
    trainer = runs.trainer_in(arguments, tmp_path / "run", *CMLM, "--training.device_tokens=30")
    trainer.state.global_step = step
    batches = 3 * list(trainer.get_train_dataloader())[:1]
    for number, batch in enumerate(trainer.with_random_choices(iter(batches))):
        expected = add_random_choices(batches[0], trainer.recipe, trainer.processing_class, step + number // 2)
        assert torch.equal(batch["labels"], expected["labels"])


@pytest.mark.parametrize("processes", [1, 2])
def test_log_of_a_step_has_its_loss_and_its_parts_once_on_any_processes(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    """The Trainer multiplies each process's loss by their number. The oracle is the model's loss of the batch."""
    trainer = runs.trainer_in(arguments, tmp_path / "run", *CMLM)
    monkeypatch.setattr(Accelerator, "num_processes", processes)
    batch = next(trainer.with_random_choices(iter(trainer.get_train_dataloader())))
    expected = trainer.model.train()(**{name: batch[name] for name in batch if name != "number"})
    trainer.training_step(trainer.model, batch, batch["labels"].ne(-100).sum())
    logged = trainer.monitor.metrics(0)
    assert logged["loss"] == pytest.approx(expected.loss.item(), rel=1e-5)
    assert logged["length_loss"] == pytest.approx(expected.length_loss.item(), rel=1e-5)


def test_sharded_model_is_autocast_by_the_trainer(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accelerate wraps the forward pass of any other model."""
    trainer = runs.trainer_in(arguments, tmp_path / "run", "--training.precision=bf16")
    for is_sharded in (False, True):
        monkeypatch.setattr(trainer, "is_fsdp_enabled", is_sharded)
        with trainer.compute_loss_context_manager():
            assert torch.is_autocast_enabled(trainer.args.device.type) == is_sharded


def test_pass_for_the_loss_of_an_evaluation_keeps_no_cache(arguments: list[str], tmp_path: Path) -> None:
    """The cache of a search is made by the search."""
    trainer, caches = runs.trainer_in(arguments, tmp_path / "run"), []
    batch = next(iter(trainer.get_eval_dataloader()))
    sources = [trainer.evaluated["source"][pair] for pair in batch.pop("pair").tolist()]
    trainer.model.eval().register_forward_hook(lambda _, __, outputs: caches.append(outputs.past_key_values))
    assert len(trainer.translate(batch, sources)) == len(sources)
    assert caches[0] is None
    assert caches[1] is not None


@pytest.mark.parametrize("is_extra", [False, True])
def test_checkpoint_has_the_time_so_far_and_a_state_that_names_no_folder(
    arguments: list[str], tmp_path: Path, is_extra: bool
) -> None:
    """A run's folder may move. A checkpoint that only a signal asked for is marked."""
    trainer, checkpoint = runs.trainer_in(arguments, tmp_path / "run"), tmp_path / "checkpoint-3"
    checkpoint.mkdir()
    trainer.monitor.trained_before = 3600.0
    trainer.state.best_model_checkpoint, trainer.state.best_global_step = str(checkpoint), 3
    trainer.stopping.is_extra = is_extra
    trainer.save_position(checkpoint)
    assert 3600 < trained_seconds(checkpoint) < 3660
    state = read_state(checkpoint, "")
    assert (state.best_model_checkpoint, state.best_global_step) == (None, 3)
    assert (checkpoint / "interrupted").exists() == is_extra


def test_weights_gathered_from_all_processes_are_saved_and_pushed_with_a_tied_matrix_once(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sharded model has only the weights of its process."""
    trainer, pushed = runs.trainer_in(arguments, tmp_path / "run"), {}
    gathered = {name: torch.ones_like(weight) for name, weight in trainer.model.state_dict().items()}

    def read(api: object, folder: Path, *settings: object) -> None:
        pushed.update(load_file(folder / "model.safetensors"))

    monkeypatch.setattr(trainer.accelerator, "get_state_dict", lambda model: dict(gathered))
    monkeypatch.setattr("training.trainer.trainer.upload", read)
    trainer.hub_model_id = "somebody/own"
    trainer.push_to_hub()
    trainer._save(str(tmp_path), dict(gathered))
    tied = trainer.model.all_tied_weights_keys
    assert runs.equal(pushed, {name: weight for name, weight in gathered.items() if name not in tied})
    assert runs.equal(pushed, load_file(tmp_path / "model.safetensors"))


def test_resumed_trainer_pushes_before_its_first_evaluation(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its state has the last evaluation's values without the signature of their metric."""
    trainer, cards = runs.trainer_in(arguments, tmp_path / "run"), []
    trainer.state.log_history = [
        {"eval_loss": 2.0, "eval_perplexity": 7.4, "eval_sacrebleu": 1.5, "step": 4, "epoch": 1.0}
    ]

    def read(api: object, folder: Path, *settings: object) -> None:
        cards.append((folder / "README.md").read_text())

    monkeypatch.setattr("training.trainer.trainer.upload", read)
    trainer.hub_model_id = "somebody/own"
    trainer.push_to_hub()
    assert len(cards) == 1
    assert "validation set, " not in cards[0]
