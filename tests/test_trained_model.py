"""The trained model in the repository: small, loaded without a flag, and as its card and results say."""

import json
import unicodedata

import torch
from huggingface_hub import ModelCard
from tokenizers import Tokenizer, normalizers
from transformers import AutoModelForSeq2SeqLM, pipeline

from tests import ROOT

MODEL = ROOT / "models" / "tatoeba-en-de"


def test_trained_model_is_small_and_has_float32_weights_and_no_code() -> None:
    files = [path for path in MODEL.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 20e6
    assert {path.suffix for path in files} == {".json", ".md", ".safetensors"}
    model = AutoModelForSeq2SeqLM.from_pretrained(MODEL)
    assert {weights.dtype for weights in model.parameters()} == {torch.float32}
    assert model.config.use_cache
    assert model.num_parameters() == json.loads((MODEL / "results.json").read_text(encoding="utf-8"))["parameters"]


def test_tokenizer_gives_equal_texts_equal_ids_and_texts_in_nfc_those_of_training() -> None:
    """The texts have each character that normalization concerns, if in NFC, among letters that it could join."""
    tokenizer, trained = (Tokenizer.from_file(str(MODEL / "tokenizer.json")) for _ in range(2))
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


def test_pipeline_translates_with_the_trained_model() -> None:
    translator = pipeline("vaswani-translation", model=str(MODEL))
    texts = ["Where are they?", "I would like a cup of tea."]
    assert all(output["translation_text"].strip() for output in translator(texts))


def test_card_has_the_scores_and_the_source_of_the_data() -> None:
    results = json.loads((MODEL / "results.json").read_text(encoding="utf-8"))
    card = ModelCard.load(MODEL / "README.md")
    scores = {(score.dataset_split, score.metric_type): score.metric_value for score in card.data.eval_results}
    assert scores["test", "bleu"] == round(results["test"]["bleu"], 2)
    assert scores["test", "chrf"] == round(results["test"]["chrf"], 2)
    assert "[CC BY 2.0 FR]" in card.text
    assert "contributors of [Tatoeba]" in card.text
