"""The trained models in the repository: small, loaded without a flag, and as their cards and results say."""

import json
import unicodedata
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from tokenizers import Tokenizer, normalizers
from transformers import AutoModelForSeq2SeqLM, pipeline

from tests import ROOT

MODELS = [ROOT / "models" / name for name in ("tatoeba-en-de", "tatoeba-en-de-ctc")]
of_each_model = pytest.mark.parametrize("folder", MODELS, ids=lambda folder: folder.name)


@of_each_model
def test_trained_model_is_small_and_has_float32_weights_in_memory_and_no_code(folder: Path) -> None:
    stored, size = (torch.float16, 10e6) if folder.name.endswith("-ctc") else (torch.float32, 20e6)
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= size
    assert {path.suffix for path in files} == {".json", ".md", ".safetensors"}
    assert {weights.dtype for weights in load_file(folder / "model.safetensors").values()} == {stored}
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    assert {weights.dtype for weights in model.parameters()} == {torch.float32}
    assert model.config.use_cache == (model.config.model_type == "vaswani_transformer")
    assert model.num_parameters() == json.loads((folder / "results.json").read_text(encoding="utf-8"))["parameters"]


def test_models_have_the_same_tokenizer() -> None:
    texts = {(folder / "tokenizer.json").read_text(encoding="utf-8") for folder in MODELS}
    assert len(texts) == 1


def test_tokenizer_gives_equal_texts_equal_ids_and_texts_in_nfc_those_of_training() -> None:
    """The texts have each character that normalization concerns, if in NFC, among letters that it could join."""
    tokenizer, trained = (Tokenizer.from_file(str(MODELS[0] / "tokenizer.json")) for _ in range(2))
    trained.normalizer = normalizers.Sequence([])
    characters = map(chr, range(0x30000))  # beyond them none is concerned
    concerned = [each for each in characters if unicodedata.combining(each) or unicodedata.decomposition(each)]
    texts = [f"e{each}u x{each}" for each in concerned]
    texts = [text for text in texts if unicodedata.is_normalized("NFC", text)]
    assert len(texts) > 5000
    ids, before = (each.encode_batch_fast(texts) for each in (tokenizer, trained))
    differing = [text for text, now, then in zip(texts, ids, before, strict=True) if now.ids != then.ids]
    assert differing == []
    for text in ("Ich hätte gerne eine Tasse Tee für Zoë.", "Ångström"):
        assert tokenizer.encode(unicodedata.normalize("NFD", text)).ids == trained.encode(text).ids


@of_each_model
def test_pipeline_translates_with_the_trained_model(folder: Path) -> None:
    translator = pipeline("vaswani-translation", model=str(folder))
    texts = ["Where are they?", "I would like a cup of tea."]
    assert all(output["translation_text"].strip() for output in translator(texts))


@of_each_model
def test_card_has_the_scores_and_the_source_of_the_data(folder: Path) -> None:
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    card = ModelCard.load(folder / "README.md")
    scores = {(score.dataset_split, score.metric_type): score.metric_value for score in card.data.eval_results}
    assert scores["test", "bleu"] == round(results["test"]["bleu"], 2)
    assert scores["test", "chrf"] == round(results["test"]["chrf"], 2)
    assert "[CC BY 2.0 FR]" in card.text
    assert "contributors of [Tatoeba]" in card.text
