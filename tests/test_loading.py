"""Every way of saving and loading gives the same model without a network; a wrong one is an error of one line."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer, DataCollatorForSeq2Seq

import vaswani_transformer
from tests.batches import FLOAT32, random_batch, random_tokens
from tests.models import FAMILY, PAIRS, TINY, assert_matrix_shared, tiny_cmlm, tiny_config, tiny_model, tiny_nat
from vaswani_transformer import (
    MaskingCollator,
    VaswaniTransformerConfig,
    VaswaniTransformerForConditionalGeneration,
    VaswaniTransformerModel,
    VaswaniTransformerTokenizer,
)
from vaswani_transformer.pipeline import VaswaniTransformerTranslationPipeline
from vaswani_transformer.registration import register
from vaswani_transformer.stacks import VaswaniTransformerDecoder, VaswaniTransformerEncoder
from vaswani_transformer.tokenizer import check_vocabulary
from vaswani_transformer.translation.translator import translate

VARIANTS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "learned": {"position_embedding": "learned", "attention_bias": True, "d_v": 5},
}


def load_from_the_meta_device(folder: Path) -> VaswaniTransformerForConditionalGeneration:
    state = VaswaniTransformerForConditionalGeneration.from_pretrained(folder).state_dict()
    with torch.device("meta"):
        model = VaswaniTransformerForConditionalGeneration(VaswaniTransformerConfig.from_pretrained(folder))
    model.to_empty(device="cpu").load_state_dict(state)
    return model.eval()


LOADERS: dict[str, Callable[[Path], Any]] = {
    "class": VaswaniTransformerForConditionalGeneration.from_pretrained,
    "Auto class": AutoModelForSeq2SeqLM.from_pretrained,
    "from the meta device": load_from_the_meta_device,
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("load", LOADERS)
def test_logits_and_ties_are_the_same_for_every_way_of_saving_and_loading(
    load: str, shards: bool, variant: str, tmp_path: Path
) -> None:
    model, batch = tiny_model(**VARIANTS[variant]), random_batch()
    model.save_pretrained(tmp_path, max_shard_size="20KB" if shards else "1GB")
    stored = [name for path in tmp_path.glob("*.safetensors") for name in load_file(path)]
    assert sorted(stored) == sorted(name for name, _ in model.named_parameters())
    again = LOADERS[load](tmp_path)
    assert type(again) is VaswaniTransformerForConditionalGeneration
    assert not again.training
    torch.testing.assert_close(again(**batch).logits, model(**batch).logits, **FLOAT32)
    again.tie_weights()  # to_empty gives every module its own matrix
    assert_matrix_shared(again, variant != "untied")


def test_body_and_complete_model_load_from_each_other(tmp_path: Path) -> None:
    model, batch = tiny_model(), random_batch()
    model.save_pretrained(tmp_path / "whole")
    body = AutoModel.from_pretrained(tmp_path / "whole")
    assert type(body) is VaswaniTransformerModel
    states = body(**batch).last_hidden_state
    torch.testing.assert_close(states, model.model(**batch).last_hidden_state, **FLOAT32)
    body.save_pretrained(tmp_path / "body")
    complete = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "body")
    torch.testing.assert_close(complete(**batch).logits, model(**batch).logits, **FLOAT32)


@pytest.mark.parametrize("variant", [None, "fp16"])
def test_shards_replace_an_earlier_file(variant: str | None, tmp_path: Path) -> None:
    for size in ("1GB", "20KB", "1GB"):
        model = VaswaniTransformerForConditionalGeneration(tiny_config())
        model.save_pretrained(tmp_path, max_shard_size=size, variant=variant)
        loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, variant=variant)
        assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


def test_auto_classes_know_the_package_after_repeated_registration(saved: Path) -> None:
    register()
    importlib.reload(vaswani_transformer)
    config = AutoConfig.for_model("vaswani_transformer", **TINY)
    assert type(config) is type(AutoConfig.from_pretrained(saved)) is VaswaniTransformerConfig
    assert type(AutoModel.from_config(config)) is VaswaniTransformerModel
    assert type(AutoModelForSeq2SeqLM.from_config(config)) is VaswaniTransformerForConditionalGeneration
    assert type(AutoTokenizer.from_pretrained(saved)) is VaswaniTransformerTokenizer


MODELS = {"transformer": tiny_model, **FAMILY}
OTHERS = [(family, other) for family in MODELS for other in MODELS if family != other]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Save a model of each family."""
    root = tmp_path_factory.mktemp("families")
    for family, make in MODELS.items():
        make().save_pretrained(root / family)
    return {family: root / family for family in MODELS}


@pytest.mark.parametrize(("family", "other"), OTHERS)
@pytest.mark.parametrize("part", ["ForConditionalGeneration", "Model"])
def test_checkpoint_of_another_family_ends_in_one_line(
    folders: dict[str, Path], family: str, other: str, part: str
) -> None:
    model_class: Any = type(MODELS[family]())
    model_class, auto_class = {
        "ForConditionalGeneration": (model_class, "AutoModelForSeq2SeqLM"),
        "Model": (model_class.body_class, "AutoModel"),
    }[part]
    message = f"got vaswani_{other}, expected vaswani_{family} for .* {auto_class}"
    for folder, settings in ((folders[other], {}), (folders[other].parent, {"subfolder": other})):
        with pytest.raises(ValueError, match=message) as error:
            model_class.from_pretrained(folder, **settings)
        assert str(error.value).startswith(f"{folder}: was saved from a different model family; ")
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("family", MODELS)
def test_class_loads_its_own_family_and_the_auto_classes_load_every_one(folders: dict[str, Path], family: str) -> None:
    model_class, folder = type(MODELS[family]()), folders[family]
    every_way: list[Any] = [
        model_class.from_pretrained(str(folder.parent), subfolder=family, output_loading_info=True),
        model_class.from_pretrained(folder, config=AutoConfig.from_pretrained(folder), output_loading_info=True),
        AutoModelForSeq2SeqLM.from_pretrained(folder, output_loading_info=True),
    ]
    for loaded, report in every_way:
        assert type(loaded) is model_class
        assert not report["missing_keys"]
    body, report = AutoModel.from_pretrained(folder, output_loading_info=True)
    assert type(body) is type(AutoModel.from_config(body.config)) is model_class.body_class
    assert not report["missing_keys"]


@pytest.mark.parametrize("family", MODELS)
def test_encoder_of_any_family_loads_by_itself(family: str, tmp_path: Path) -> None:
    model, source = MODELS[family](), random_tokens(2, 5)
    model.get_encoder().save_pretrained(tmp_path)
    again = VaswaniTransformerEncoder.from_pretrained(tmp_path)
    torch.testing.assert_close(
        again(source).last_hidden_state, model.model.encoder(source).last_hidden_state, **FLOAT32
    )


def test_decoder_saves_and_loads_by_itself(tmp_path: Path) -> None:
    decoder, tokens = tiny_model(position_embedding="learned").get_decoder(), random_tokens(2, 5)
    decoder.save_pretrained(tmp_path)
    again = VaswaniTransformerDecoder.from_pretrained(tmp_path)
    torch.testing.assert_close(again(tokens).last_hidden_state, decoder(tokens).last_hidden_state, **FLOAT32)


def tokenizer_of_pairs() -> VaswaniTransformerTokenizer:
    return VaswaniTransformerTokenizer.train_from_iterator([*PAIRS, *PAIRS.values()], vocab_size=280)


def make_pipeline(model: Any, tokenizer: Any, _: list[str]) -> Any:
    return VaswaniTransformerTranslationPipeline(model=model, tokenizer=tokenizer, device="cpu")


@pytest.mark.parametrize("tokens_before", [None, 0, 1])
def test_tokenizer_without_the_models_mask_ends_in_one_line(tokens_before: int | None) -> None:
    tokenizer = tokenizer_of_pairs()
    model = tiny_cmlm(vocab_size=len(tokenizer) + 2, mask_token_id=len(tokenizer))
    if tokens_before is not None:
        tokenizer.add_tokens(["<other>"] * tokens_before)
        tokenizer.add_special_tokens({"mask_token": "<mask>"})
    if tokens_before == 0:
        check_vocabulary(model, tokenizer)
        return
    with pytest.raises(ValueError, match=r"its tokenizer does not fit the model's mask_token_id; got .* <mask>, exp"):
        check_vocabulary(model, tokenizer)


@pytest.mark.parametrize("call", [translate, make_pipeline])
def test_tokenizer_of_another_model_ends_pipeline_and_translate(call: Callable[..., Any]) -> None:
    tokenizer = tokenizer_of_pairs()
    filled = tiny_cmlm(vocab_size=len(tokenizer) + 1, mask_token_id=len(tokenizer))
    with pytest.raises(ValueError, match=r"^VaswaniCmlmFor\w+: its tokenizer does not fit .* got None for <mask>"):
        call(filled, tokenizer, ["a"])
    with pytest.raises(ValueError, match=r"^VaswaniNatFor\w+: its tokenizer has \d+ entries, the model only 99; use"):
        call(tiny_nat(), tokenizer, ["a"])


def test_collator_with_targets_padded_on_the_left_ends_in_one_line() -> None:
    tokenizer = tokenizer_of_pairs()
    collator = DataCollatorForSeq2Seq(tokenizer)
    rows = [dict(tokenizer(source, text_target=target)) for source, target in PAIRS.items()]
    tokenizer.padding_side = "left"
    with pytest.raises(ValueError, match=r"^labels: a target must begin at the first position; .* on the right\.$"):
        MaskingCollator(collator, 5, 1)(rows)
