"""PEFT adapters give the same results saved, loaded and merged; one that cannot learn is an error."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForSeq2SeqLM, GenerationConfig

from tests.batches import FLOAT32, random_batch, random_tokens, targets
from tests.models import EVERY_FAMILY, tiny_model

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*gradient_checkpointing:FutureWarning", "ignore:.*tie_word_embeddings:UserWarning"
)

# The shared matrix stays frozen, is trained in a few rows, or in copies that are no longer tied.
VARIANTS: dict[str, dict[str, Any]] = {
    "all linear layers": {"target_modules": "all-linear"},
    "with some tokens": {"trainable_token_indices": [5, 6, 7, 80, 81]},
    "with embeddings and projection": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "with norms": {"modules_to_save": ["add_norm.norm"]},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_adapter_is_saved_and_loaded_onto_the_model_and_merged_into_one(variant: str, tmp_path: Path) -> None:
    batch = random_batch()
    fields: dict[str, Any] = {"target_modules": ["q_proj"], **VARIANTS[variant]}
    adapter: Any = get_peft_model(tiny_model(), LoraConfig(r=4, task_type="SEQ_2_SEQ_LM", **fields)).eval()
    for weight in (weight for weight in adapter.parameters() if weight.requires_grad):
        weight.data += 0.1 * torch.randn(weight.shape)
    logits = adapter(**batch).logits
    assert not torch.allclose(logits, tiny_model()(**batch).logits)
    adapter.save_pretrained(str(tmp_path / "adapter"))
    loaded, plain = PeftModel.from_pretrained(tiny_model(), tmp_path / "adapter"), tiny_model()
    plain.load_adapter(str(tmp_path / "adapter"))
    for again in (loaded, plain):
        torch.testing.assert_close(again(**batch).logits, logits, **FLOAT32)
    merged = adapter.merge_and_unload()
    torch.testing.assert_close(merged(**batch).logits, logits, **FLOAT32)
    merged.save_pretrained(tmp_path / "merged")
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(again(**batch).logits, merged(**batch).logits, **FLOAT32)
    names = ("model.shared", "model.encoder.embed_tokens", "model.decoder.embed_tokens", "lm_head")
    is_tied = "embed_tokens" not in VARIANTS[variant].get("modules_to_save", [])
    assert (len({again.get_submodule(name).weight for name in names}) == 1) == is_tied


# Each is read as a whole or by positions: relative keys and values, lengths, learned positions.
TABLES = {"nat": "relative_keys", "iterative_vae": "relative_values", "cmlm": "length_token", "autoregressive": "table"}


@pytest.mark.parametrize("family", TABLES)
def test_lora_on_a_table_learns_and_is_merged(family: str) -> None:
    model, expected = (EVERY_FAMILY[family](position_embedding="learned") for _ in range(2))
    adapter = get_peft_model(model, LoraConfig(r=2, target_modules=[TABLES[family]])).eval()
    batch = {"input_ids": random_tokens(3, 5), "labels": targets(4, 2, 3)}
    tables = [weight for weight in adapter.parameters() if weight.requires_grad]
    for weight in tables:
        torch.nn.init.normal_(weight)
    loss = adapter(**batch).loss
    loss.backward()
    assert all(weight.grad is not None and bool(weight.grad.any()) for weight in tables)
    assert not torch.allclose(loss, expected(**batch).loss)
    torch.testing.assert_close(adapter.merge_and_unload()(**batch).loss, loss, **FLOAT32)


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_adapter_of_norms_that_peft_would_not_load_is_an_error_before_training(family: str) -> None:
    batch = {"input_ids": random_tokens(2, 5), "labels": targets(3, 2)}
    for names in (["self_attn_add_norm"], ["add_norm.norm"]):
        get_peft_model(EVERY_FAMILY[family](), LoraConfig(target_modules=["q_proj"], modules_to_save=names))(**batch)
    adapter = get_peft_model(EVERY_FAMILY[family](), LoraConfig(target_modules=["q_proj"], modules_to_save=["norm"]))
    with pytest.raises(ValueError, match=r'^modules_to_save: .* Use \["add_norm.norm"\]\.$'):
        adapter(**batch)


@pytest.mark.parametrize(
    ("tied", "settings"),
    [
        (True, {"target_modules": ["shared"]}),
        (True, {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}),
        (False, {"trainable_token_indices": [5, 6]}),
    ],
    ids=str,
)
def test_adapter_without_tokens_is_an_error(tied: bool, settings: dict[str, Any]) -> None:
    """PEFT ties adapters only if the config says that the output projection is tied."""
    plain: dict[str, Any] = {"target_modules": ["q_proj"]}
    config = LoraConfig(**plain | settings)
    adapter = get_peft_model(tiny_model(tie_word_embeddings=tied), config)
    with pytest.raises(ValueError, match=r"`shared` is wrapped in a \w+, which would learn"):
        adapter(**random_batch())


def test_merged_model_is_not_saved_into_its_adapters_folder(tmp_path: Path) -> None:
    adapter: Any = get_peft_model(tiny_model(), LoraConfig(target_modules=["q_proj"]))
    adapter.save_pretrained(str(tmp_path))
    with pytest.raises(ValueError, match=r"contains adapter_config\.json, .* Save the model in a different folder\.$"):
        adapter.merge_and_unload().save_pretrained(tmp_path)
    assert not list(tmp_path.glob("model*"))


@pytest.mark.parametrize(
    ("family", "target", "search"),
    [
        ("autoregressive", "q_proj", {"generation_config": GenerationConfig(num_beams=2)}),
        ("autoregressive", "q_proj", {"do_sample": True, "num_return_sequences": 2}),
        ("autoregressive", "table", {}),
        ("cmlm", "q_proj", {"length_beam_size": 2}),
        ("cmlm", "lm_head", {}),
        ("ctc", "lm_head", {}),
        ("ctc", "q_proj", {"num_beams": 2}),
    ],
    ids=str,
)
def test_adapters_that_cannot_differ_by_row_are_an_error(family: str, target: str, search: dict[str, Any]) -> None:
    config = LoraConfig(target_modules=[target], init_lora_weights=False, task_type="SEQ_2_SEQ_LM")
    model = EVERY_FAMILY[family](position_embedding="learned")
    adapter: Any = get_peft_model(model, config, adapter_name="first").eval()
    batch = {"input_ids": random_tokens(2, 5), "attention_mask": torch.ones(2, 5, dtype=torch.long)}
    with pytest.raises(ValueError, match=r"^adapter_names: cannot differ by row in .* decode the texts of each"):
        adapter.generate(**batch, adapter_names=["first", "__base__"], **search)
