"""ENGINE: the energy against the teacher's own loss and against loops, its gradient, and a run by a recipe.

B batch, T target, V vocabulary.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM

from tests.batches import END, padded_batch, targets
from tests.models import tiny_model
from tests.training.runs import LANGUAGE, FinishedRun, assert_resumes, entries, train_in, trainer_in
from training import energy as energy_module
from training.energy import OPERATORS, Energy, EnergyTrainer

PAD = 1
ONE_HOT = ("straight_through_softmax", "straight_through_logits", "straight_through_gumbel")


def student_batch(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return a batch with padding on both sides and m = 1, and logits (B, T, V + 1), the last column for `<mask>`.

    `<pad>` is never the most likely word, since the teacher's own loss leaves it out.
    """
    tokens, mask = padded_batch([3, 7, 4], "left")
    is_real = targets(5, 1, 4).ne(-100)
    logits = torch.randn(3, 5, 100, dtype=dtype)
    logits[..., PAD] -= 9
    return logits.requires_grad_(), is_real, tokens, mask


def argmax_labels(logits: Tensor, is_real: Tensor) -> Tensor:
    """Return the likeliest words, with `</s>` at the end of each text and -100 at padding."""
    labels = logits[..., :99].argmax(-1).masked_fill(~is_real, -100)
    for row, length in enumerate(is_real.sum(1).tolist()):
        labels[row, length - 1] = END
    return labels


@pytest.mark.parametrize("operator", ONE_HOT)
def test_energy_of_words_is_the_teachers_loss_of_them(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one-hot operators and without noise, the energy is the negative log-likelihood of the argmax."""
    monkeypatch.setattr(energy_module, "gumbel_noise", torch.zeros_like)
    teacher, (logits, is_real, tokens, mask) = tiny_model().double(), student_batch()
    labels = argmax_labels(logits, is_real)
    expected = teacher(input_ids=tokens, attention_mask=mask, labels=labels).loss * is_real.sum()
    energy = Energy(teacher, operator, operator)
    energies = energy(logits, is_real, tokens, mask)
    torch.testing.assert_close(energies.sum(), expected)
    torch.testing.assert_close(energy.of_argmax(logits, is_real, tokens, mask), energies.detach())


@pytest.mark.parametrize("inputs", ["softmax", "gumbel_softmax"])
@pytest.mark.parametrize("outputs", ["softmax", "straight_through_softmax"])
def test_energy_equals_loops(inputs: str, outputs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loops go over the words of every position: they mix embeddings, and weigh the teacher's log-probabilities."""
    noise = torch.randn(10, 99).double()
    monkeypatch.setattr(energy_module, "gumbel_noise", lambda _: noise)
    teacher, (logits, is_real, tokens, mask) = tiny_model().double(), student_batch()
    energies, row_noise = Energy(teacher, inputs, outputs)(logits, is_real, tokens, mask), iter(noise)
    table = teacher.model.decoder.embed_tokens.weight * 32**0.5
    for row, m in enumerate((5, 1, 4)):
        log_probs = logits[row, :m, :99].log_softmax(-1)
        noises = torch.stack([next(row_noise) for _ in range(m)])
        read = log_probs.exp() if inputs == "softmax" else (log_probs + noises).softmax(-1)
        words = [table[0], *(sum(read[t, v] * table[v] for v in range(99)) for t in range(m - 1))]
        source = {"input_ids": tokens[row : row + 1], "attention_mask": mask[row : row + 1]}
        scores = teacher(**source, decoder_inputs_embeds=torch.stack(words)[None]).logits[0].log_softmax(-1)
        scored = log_probs.exp() if outputs == "softmax" else torch.eye(99).double()[log_probs.argmax(-1)]
        expected = -sum((scored[t] * scores[t]).sum() for t in range(m - 1)) - scores[m - 1, END]
        torch.testing.assert_close(energies[row], expected)


@pytest.mark.parametrize("operator", OPERATORS)
def test_gradients_pass_through_the_teacher_and_none_stay_in_it(operator: str) -> None:
    teacher, (logits, is_real, tokens, mask) = tiny_model().double().train(), student_batch()
    Energy(teacher, operator, operator)(logits, is_real, tokens, mask).sum().backward()
    assert not teacher.training
    assert all(weight.grad is None for weight in teacher.parameters())
    assert logits.grad is not None
    reached = logits.grad.abs().sum(-1) > 0
    ends = is_real.cumsum(1) == is_real.sum(1, keepdim=True)
    assert torch.equal(reached, is_real & ~ends)  # the teacher's `</s>` counts after any last word
    assert float(logits.grad[..., 99].abs().sum()) == 0  # the teacher has no `<mask>`


def test_straight_through_operator_has_the_value_of_words_and_the_gradient_of_its_soft_form() -> None:
    log_probs = torch.randn(4, 9).double().log_softmax(-1).requires_grad_()
    noise, weights = torch.randn(4, 9).double(), torch.randn(4, 9).double()
    soft = {
        "straight_through_softmax": log_probs.exp(),
        "straight_through_logits": log_probs,
        "straight_through_gumbel": (log_probs + noise).softmax(-1),
    }
    for name, expected in soft.items():
        value = OPERATORS[name](log_probs, noise)
        scores = log_probs + noise if "gumbel" in name else log_probs
        assert torch.equal(value, torch.eye(9).double()[scores.argmax(-1)])
        operators = (value, expected)
        gradients = [torch.autograd.grad(each, log_probs, weights, retain_graph=True)[0] for each in operators]
        torch.testing.assert_close(*gradients)


# Runs


@pytest.fixture
def engine(arguments: list[str], teacher: Path, tmp_path: Path) -> EnergyTrainer:
    """Return a trainer of ENGINE, under a teacher with random weights."""
    more = ["--model.kind=cmlm", f"--tokenizer.path={teacher}", f"--training.energy_from={teacher}"]
    more += ["--model.dropout=0.0", "--model.length_loss_weight=2.0"]
    trainer = trainer_in(arguments, tmp_path / "run", *more)
    assert isinstance(trainer, EnergyTrainer)
    return trainer


def test_loss_of_a_step_is_the_energy_and_the_weighted_loss_of_the_length(engine: EnergyTrainer) -> None:
    (batch,), tokens = engine.get_batch_samples(iter(engine.get_train_dataloader()), 1, engine.args.device)
    is_real = batch["labels"].ne(-100)
    num_tokens = is_real.sum()
    assert tokens == num_tokens
    model: Any = engine.model
    outputs = model.train()(**batch, skip_logits=False)
    energy = engine.energy(outputs.logits, is_real, batch["input_ids"], batch["attention_mask"]).sum()
    loss = engine.training_step(model, batch, tokens)
    torch.testing.assert_close(loss, energy.detach() / num_tokens + 2 * outputs.length_loss.detach())
    engine.log({"loss": 0.0})
    logged = engine.state.log_history[-1]
    assert logged["loss"] == pytest.approx(logged["energy"] + 2 * logged["length_loss"], rel=1e-5)


def test_evaluation_has_the_energy_of_a_target_token_and_no_perplexity(engine: EnergyTrainer) -> None:
    metrics = engine.evaluate()
    assert {"eval_loss", "eval_bleu", "eval_energy"} < metrics.keys()
    assert "eval_perplexity" not in metrics
    model: Any = engine.model
    tokenizer: Any = engine.processing_class
    total, tokens = 0.0, 0
    for text in LANGUAGE:
        batch = tokenizer(text, text_target=text[::-1], return_tensors="pt")
        source, is_real = (batch["input_ids"], batch["attention_mask"]), torch.ones_like(batch["labels"]).bool()
        with torch.no_grad():
            logits = model(*source, decoder_attention_mask=is_real.long()).logits
        total += engine.energy.of_argmax(logits, is_real, *source).item()
        tokens += is_real.numel()
    assert metrics["eval_energy"] == pytest.approx(total / tokens, rel=1e-4)


@pytest.fixture(scope="module")
def trained(finished_run: FinishedRun, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the arguments of a run of ENGINE, from a CMLM of three steps and under the finished run's model."""
    start, teacher = tmp_path_factory.mktemp("models") / "cmlm", finished_run.folder
    family = ["--model.kind=cmlm", f"--tokenizer.path={teacher}", "--training.evaluation_iterations=1"]
    train_in(finished_run.arguments, start, *family, "--training.steps=3")
    models = [f"--training.start_from={start}", f"--training.energy_from={teacher}"]
    return [*finished_run.arguments, *family, *models]


@pytest.mark.slow
def test_run_lowers_the_energy_of_the_argmax_and_resumes_to_the_bit(trained: list[str], tmp_path: Path) -> None:
    """The run saves no teacher, and chooses its checkpoint by the energy."""
    more = ["--training.steps=12", "--training.energy_inputs=straight_through_gumbel"]
    more += ["--training.learning_rate_scale=5"]
    whole = tmp_path / "whole"
    results = train_in(trained, whole, *more)
    energies = {entry["step"]: entry["eval_energy"] for entry in entries(results, "eval_energy")}
    assert energies[12] < energies[3]
    assert results["best_validation_energy"] == min(energies.values())
    assert results["validation"]["energy"] == pytest.approx(min(energies.values()), rel=1e-5)
    assert all(e["loss"] == pytest.approx(e["energy"] + e["length_loss"], rel=1e-5) for e in entries(results))
    start = trained[-2].partition("=")[2]
    saved, before = (AutoModelForSeq2SeqLM.from_pretrained(folder).state_dict() for folder in (whole, start))
    assert saved.keys() == before.keys()
    assert_resumes(trained, whole, 3, tmp_path / "resumed", *more)


@pytest.mark.slow
def test_precision_of_a_run_is_that_of_its_teacher_too(
    trained: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds in training and in evaluations."""
    precisions, call = set(), Energy.__call__

    def watched(self: Energy, *inputs: Any) -> Any:
        precisions.add((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
        return call(self, *inputs)

    monkeypatch.setattr(Energy, "__call__", watched)
    train_in(trained, tmp_path / "run", "--training.steps=1", "--training.precision=bf16")
    assert precisions == {(True, True), (False, True)}
