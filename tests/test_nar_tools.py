"""The non-autoregressive families with Hugging Face's Trainer; prepared copies."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments

from tests.helpers import PAIRS, random_tokens
from tests.nar_models import FAMILY, family_of_pairs, targets
from vaswani_transformer import MaskingCollator, prepare_for_inference


def trainer_for(family: str, folder: Path, collates_masks: bool = False, **settings: Any) -> Seq2SeqTrainer:
    model, tokenizer = family_of_pairs(family, d_model=64, d_ff=128, dropout=0.0)
    data: Any = [dict(tokenizer(source, text_target=target)) for source, target in PAIRS.items()]
    collator: Any = DataCollatorForSeq2Seq(tokenizer, model)
    if collates_masks:
        collator = MaskingCollator(collator, tokenizer.mask_token_id, tokenizer.pad_token_id)
    arguments = Seq2SeqTrainingArguments(
        str(folder),
        report_to="none",
        use_cpu=True,
        predict_with_generate=True,
        per_device_train_batch_size=6,
        save_strategy="no",
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        **settings,
    )

    def exact(prediction: Any) -> dict[str, float]:
        hypotheses = tokenizer.batch_decode(prediction.predictions.clip(0), skip_special_tokens=True)
        pairs = zip(hypotheses, PAIRS.values(), strict=True)
        return {"exact": sum(text == target for text, target in pairs) / len(PAIRS)}

    return Seq2SeqTrainer(
        model,
        arguments,
        collator,
        train_dataset=data,
        eval_dataset=data,
        processing_class=tokenizer,
        compute_metrics=exact,
    )


@pytest.mark.slow
@pytest.mark.parametrize(("family", "collates_masks"), [("nat", False), ("cmlm", False), ("cmlm", True)])
def test_stock_trainer_trains_and_generates(family: str, collates_masks: bool, tmp_path: Path) -> None:
    """The model memorizes six pairs; the loss is over real tokens, or over those that the collator masks."""
    trainer = trainer_for(family, tmp_path, collates_masks, max_steps=300, generation_max_length=40)
    settings: dict[str, Any] = {"num_iterations": 4} if family == "cmlm" else {}
    before = trainer.evaluate(**settings)
    trainer.train()
    after = trainer.evaluate(**settings)
    assert after["eval_loss"] < before["eval_loss"] / 4
    assert after["eval_exact"] == 1
    assert trainer.evaluate(**settings)["eval_loss"] == after["eval_loss"]


def test_evaluation_loss_of_a_stock_trainer_does_not_depend_on_the_masks(tmp_path: Path) -> None:
    plain, masking = (trainer_for("cmlm", tmp_path, collates_masks) for collates_masks in (False, True))
    plain.compute_metrics = masking.compute_metrics = None
    expected = plain.evaluate()["eval_loss"]
    assert [masking.evaluate()["eval_loss"] for _ in range(2)] == pytest.approx([expected] * 2, rel=1e-6)


@pytest.mark.parametrize("family", FAMILY)
@pytest.mark.parametrize("settings", [{"label_smoothing_factor": 0.1}, {"compute_loss_func": lambda *_, **__: 0}])
def test_trainer_that_computes_the_loss_itself_is_an_error(
    family: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    smoothing = settings.get("label_smoothing_factor", 0)
    trainer = trainer_for(family, tmp_path, max_steps=1, label_smoothing_factor=smoothing)
    trainer.compute_loss_func = settings.get("compute_loss_func")
    with pytest.raises(ValueError, match=r"^labels: .* config\.label_smoothing"):
        trainer.train()


@pytest.mark.parametrize("family", FAMILY)
def test_trainer_with_beams_is_an_error_before_training(family: str, tmp_path: Path) -> None:
    trainer = trainer_for(family, tmp_path, generation_num_beams=4)
    with pytest.raises(ValueError, match=r"^num_beams: "):
        trainer.evaluate()


@pytest.mark.parametrize("family", FAMILY)
def test_prepared_copy_gives_the_same_tokens(family: str) -> None:
    """In float32; the other two have 8 bits a number, and their scores and losses stay near."""
    model, source = FAMILY[family](), random_tokens(3, 6)
    settings: dict[str, Any] = {
        "length_beam_size": 3,
        "num_iterations": 3 if family == "cmlm" else 1,
        "return_history": True,
    }
    labels = targets(5, 3, 4)
    loss = model(input_ids=source, labels=labels).loss
    expected = model.generate(source, **settings, return_dict_in_generate=True)
    for dtype, tolerance in (("float32", 1e-4), ("bfloat16", 0.05), ("int8", 0.05)):
        prepared = prepare_for_inference(model, dtype)
        torch.testing.assert_close(prepared(input_ids=source, labels=labels).loss, loss, rtol=tolerance, atol=tolerance)
        found: Any = prepared.generate(source, **settings, return_dict_in_generate=True)
        torch.testing.assert_close(found.sequences_scores, expected.sequences_scores, rtol=tolerance, atol=tolerance)
        assert dtype != "float32" or torch.equal(found.history, expected.history)


@pytest.mark.parametrize("family", FAMILY)
def test_gradient_checkpointing_gives_the_same_gradient(family: str) -> None:
    source, labels = random_tokens(3, 6), targets(5, 3, 4)
    gradients = []
    for checkpoints in (False, True):
        model = FAMILY[family](dropout=0.0).train()
        if checkpoints:
            model.gradient_checkpointing_enable()
        torch.manual_seed(0)
        model(input_ids=source, labels=labels).loss.backward()
        gradients.append([weight.grad for weight in model.parameters()])
    for first, second in zip(*gradients, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-6)
