"""The model in CTranslate2 has the same probabilities and searches; a folder is written completely or not at all."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.builders import uneven_model
from tests.exports import (
    assert_same_probabilities,
    log_probs,
    log_probs_of_ctranslate2,
    padded,
    searched_by_ctranslate2,
)
from tests.helpers import PAIRS, WITH_SCORES, load_tokenizer, model_of_pairs, random_tokens, tiny_model
from vaswani_transformer import (
    VaswaniTransformerForConditionalGeneration,
    VaswaniTransformerTokenizer,
    prepare_for_inference,
)
from vaswani_transformer.convert.ctranslate2_exporter import ACTIVATIONS, to_ctranslate2

END = 2


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"layer_norm_eps": 0.5},
        {"scale_embedding": False},
        {"tie_word_embeddings": False},
        {"attention_bias": True},
        {"position_embedding": "learned", "max_position_embeddings": 20},
        {"d_k": 16, "d_v": 16},
        {"d_k": 4, "d_v": 4},
        {"d_k": 4, "d_v": 12, "attention_bias": True},
        {"d_k": 12, "d_v": 4},
        {"encoder_layers": 1, "decoder_layers": 3, "num_heads": 1},
        {"num_heads": 5, "d_k": 7, "d_v": 3},
        *({"activation_function": name} for name in ACTIVATIONS),
    ],
    ids=str,
)
def test_converted_model_has_the_same_probabilities(overrides: dict[str, Any], tmp_path: Path) -> None:
    """gelu_fast and gelu_new are one formula with other rounding, far closer to each other than to the exact GELU."""
    model = uneven_model(**overrides)
    to_ctranslate2(model, None, tmp_path / "converted")
    assert_same_probabilities(model, tmp_path / "converted")


def test_converted_output_projection_keeps_its_bias(tmp_path: Path) -> None:
    model = uneven_model()
    model.set_output_embeddings(nn.Linear(model.config.d_model, model.config.vocab_size))
    nn.init.normal_(model.lm_head.bias)
    to_ctranslate2(model, None, tmp_path / "converted")
    assert_same_probabilities(model, tmp_path / "converted")


def generate_with_scores(
    model: VaswaniTransformerForConditionalGeneration, sources: list[list[int]], **settings: Any
) -> list[list[tuple[list[int], float]]]:
    """Return what `generate()` returns: the tokens of each source's n best and their scores."""
    options: dict[str, Any] = {"num_return_sequences": 1, **WITH_SCORES, **settings}
    generated: Any = model.generate(**padded(sources), **options)
    rows = [row[: row.index(END) + 1] if END in row else row for row in generated.sequences[:, 1:].tolist()]
    scores = generated.sequences_scores.tolist()
    every, count = list(zip(rows, scores, strict=True)), options["num_return_sequences"]
    return [every[start : start + count] for start in range(0, len(every), count)]


def assert_same_search(
    model: VaswaniTransformerForConditionalGeneration,
    folder: Path,
    sources: list[list[int]],
    is_early: bool,
    **settings: Any,
) -> None:
    patience, stopping = (1, True) if is_early else (1000, "never")
    theirs = searched_by_ctranslate2(
        folder,
        sources,
        patience=patience,
        beam_size=settings["num_beams"],
        length_penalty=settings["length_penalty"],
        max_decoding_length=settings["max_new_tokens"],
        num_hypotheses=settings["num_return_sequences"],
    )
    ours = generate_with_scores(model, sources, length_penalty_type="power", early_stopping=stopping, **settings)
    for original, converted in zip(ours, theirs, strict=True):
        assert [tokens for tokens, _ in converted] == [tokens for tokens, _ in original]
        assert [score for _, score in converted] == pytest.approx([score for _, score in original], abs=1e-4)


@pytest.mark.slow
@settings(max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    num_beams=st.sampled_from([2, 4, 5]),
    alpha=st.sampled_from([0.6, 1.0, 2.0]),
    limit=st.integers(1, 12),
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    every=st.booleans(),
    is_early=st.booleans(),
)
def test_beam_search_under_power_equals_generate(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    num_beams: int,
    alpha: float,
    limit: int,
    lengths: list[int],
    every: bool,
    is_early: bool,
) -> None:
    """Token for token and score for score, for a batch of sources of unequal length."""
    model, folder = uneven_model(seed, vocab_size=20), tmp_path_factory.mktemp("models") / "converted"
    to_ctranslate2(model, None, folder)
    sources = [[*random_tokens(length, vocab_size=20).tolist(), END] for length in lengths]
    count = num_beams if every else 1
    search = {"num_beams": num_beams, "length_penalty": alpha, "max_new_tokens": limit, "num_return_sequences": count}
    assert_same_search(model, folder, sources, is_early, **search)


@pytest.mark.parametrize("seed", range(3))
def test_search_with_one_beam_equals_greedy_generate(seed: int, tmp_path: Path) -> None:
    model = uneven_model(seed, vocab_size=12)
    to_ctranslate2(model, None, tmp_path / "converted")
    sources = [[*random_tokens(length, vocab_size=12).tolist(), END] for length in (3, 8, 1)]
    greedy = model.generate(**padded(sources), max_new_tokens=9)[:, 1:].tolist()
    converted = searched_by_ctranslate2(tmp_path / "converted", sources, beam_size=1, max_decoding_length=9)
    expected = [row[: row.index(END) + 1] if END in row else row for row in greedy]
    assert [tokens for ((tokens, _),) in converted] == expected


@pytest.mark.slow
@pytest.mark.parametrize("quantization", [None, "float32", "int8", "bfloat16", "float16", "int16"])
@pytest.mark.parametrize("num_beams", [1, 4])
def test_trained_model_translates_the_same_in_every_stored_dtype(
    quantization: str | None, num_beams: int, tmp_path: Path
) -> None:
    model, tokenizer = model_of_pairs()
    folder = to_ctranslate2(model, tokenizer, tmp_path / "converted", quantization)
    converted = searched_by_ctranslate2(folder, tokenizer(list(PAIRS))["input_ids"], beam_size=num_beams)
    texts = [tokenizer.decode(best[0], skip_special_tokens=True) for best, *_ in converted]
    assert texts == list(PAIRS.values())


@pytest.mark.slow
@pytest.mark.parametrize(("quantization", "tolerance"), [("bfloat16", 0.03), ("float16", 0.004), ("int8", 0.6)])
def test_probabilities_in_fewer_bits_are_close(quantization: str, tolerance: float, tmp_path: Path) -> None:
    """The measure is log P of a token, a mean over sentences that the model knows and does not.

    A weight of 8 bits, of -127 to 127, is off by up to 1/254 of its row's largest; bfloat16 keeps 8 binary digits of
    each weight and float16 11. The means that were measured are 0.007, 0.0007 and 0.02. In int8 it is 0.3 on a CPU
    without VNNI, whose sums of two products saturate in 16 bits; two sentences differ by several units.
    """
    model, tokenizer = model_of_pairs()
    sources = tokenizer([*PAIRS, "hello", "my book is black"])["input_ids"]
    targets = random_tokens(len(sources), 8, vocab_size=300)
    to_ctranslate2(model, None, tmp_path / "converted", quantization)
    rounded = log_probs_of_ctranslate2(tmp_path / "converted", sources, targets)
    difference = (rounded - log_probs(model, sources, targets)).abs().mean()
    assert 0 < difference < tolerance


@pytest.mark.parametrize("quantization", [None, "int8", "bfloat16", "int16"])
def test_conversion_changes_nothing_in_the_model(quantization: str | None, tmp_path: Path) -> None:
    """CTranslate2 quantizes in place."""
    model = uneven_model()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    to_ctranslate2(model, None, tmp_path / "converted", quantization)
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name])


def test_model_in_bfloat16_is_converted_from_its_own_weights(tmp_path: Path) -> None:
    model = uneven_model().bfloat16()
    to_ctranslate2(model, None, tmp_path / "converted")
    assert_same_probabilities(model.float(), tmp_path / "converted")


def test_tied_embeddings_are_stored_once_and_fewer_bits_take_less_space(tmp_path: Path) -> None:
    model = uneven_model(vocab_size=2000)
    sizes = {}
    for quantization in (None, "bfloat16", "int8"):
        folder = to_ctranslate2(model, None, tmp_path / str(quantization), quantization, positions=8)
        sizes[quantization] = (folder / "model.bin").stat().st_size
    weights = sum(weight.numel() for weight in model.parameters())
    assert 4 * weights < sizes[None] < 4 * weights + 20_000
    assert 1.9 < sizes[None] / sizes["bfloat16"] < 2.1
    assert 3.3 < sizes[None] / sizes["int8"] < 4


def test_vocabulary_has_the_tokenizers_strings_and_names_for_entries_without_one(tmp_path: Path) -> None:
    tokenizer = VaswaniTransformerTokenizer.train_from_iterator(["a b"], vocab_size=270)
    size = len(tokenizer)
    model = tiny_model(vocab_size=size + 3)
    folder = to_ctranslate2(model, tokenizer, tmp_path / "converted")
    strings = json.loads((folder / "shared_vocabulary.json").read_text())
    assert strings[:size] == tokenizer.convert_ids_to_tokens(list(range(size)))
    assert len(set(strings)) == size + 3
    saved = json.loads((folder / "config.json").read_text())
    assert (saved["bos_token"], saved["eos_token"], saved["decoder_start_token"]) == ("<s>", "</s>", "<s>")
    assert saved["unk_token"] == "<pad>"
    assert saved["add_source_eos"] is False
    text = "naïve\n</s> <s>"
    assert load_tokenizer(folder)(text).input_ids == tokenizer(text).input_ids


def test_vocabulary_of_word_pieces_names_its_unknown_token(tmp_path: Path) -> None:
    tokenizer = VaswaniTransformerTokenizer.train_from_iterator(["a b"], vocab_size=20, algorithm="wordpiece")
    folder = to_ctranslate2(tiny_model(vocab_size=len(tokenizer)), tokenizer, tmp_path / "converted")
    assert json.loads((folder / "config.json").read_text())["unk_token"] == "<unk>"


def prepared() -> nn.Module:
    return prepare_for_inference(tiny_model())


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda: tiny_model().model, {}, "A VaswaniTransformerModel is not a VaswaniTransformerFor"),
        (prepared, {}, r"is a \w+Linear that is wrapped, or whose weight is not loaded; merge adapters"),
        (lambda: tiny_model().to("meta"), {}, r"is a Linear that is wrapped, or whose weight is not loaded"),
        (lambda: tiny_model(activation_function="mish"), {}, "CTranslate2 has no activation function 'mish'; it has"),
        (lambda: tiny_model(attention_window=3), {}, "attention_window: CTranslate2 has no restricted self-attention"),
        (lambda: tiny_model(eos_token_id=[2, 4]), {}, r"one token as eos_token_id; got \[2, 4\]\. Set one"),
    ],
    ids=lambda value: value.__name__ if callable(value) else str(value),
)
def test_model_that_ctranslate2_cannot_represent_is_an_error_that_leaves_no_file(
    make: Callable[[], Any], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        to_ctranslate2(make(), None, tmp_path / "converted", **options)
    assert list(tmp_path.iterdir()) == []


def test_tokenizer_of_another_model_is_an_error_that_leaves_no_file(tmp_path: Path) -> None:
    tokenizer = VaswaniTransformerTokenizer.train_from_iterator(["a b"], vocab_size=270)
    with pytest.raises(ValueError, match=r"has ids up to \d+ and the model a vocabulary of 99 entries"):
        to_ctranslate2(tiny_model(), tokenizer, tmp_path / "converted")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_lora_adapter_is_an_error_until_it_is_merged(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(uneven_model(), peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2))
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            weight.data.normal_()
    with pytest.raises(ValueError, match="merge adapters with merge_and_unload"):
        to_ctranslate2(adapted, None, tmp_path / "converted")
    with pytest.raises(ValueError, match=r"q_proj is a Linear that is wrapped"):
        to_ctranslate2(adapted.get_base_model(), None, tmp_path / "converted")
    merged = adapted.merge_and_unload()
    to_ctranslate2(merged, None, tmp_path / "converted")
    assert_same_probabilities(merged, tmp_path / "converted")
