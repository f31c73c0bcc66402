"""The model in CTranslate2 has the same probabilities and searches; a folder is written completely or not at all."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ctranslate2
import pytest
import torch
from transformers import AddedToken

from tests.commands import error_line, run_main, user_error
from tests.convert.originals import assert_same_probabilities
from tests.models import PAIRS, load_tokenizer, model_of_pairs, random_model, save, tiny_model
from vaswani_transformer import VaswaniTransformerTokenizer, prepare_for_inference
from vaswani_transformer.convert.command import main
from vaswani_transformer.convert.ctranslate2_exporter import ACTIVATIONS, to_ctranslate2


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"layer_norm_eps": 0.5},
        {"scale_embedding": False},
        {"tie_word_embeddings": False},
        {"attention_bias": True},
        {"position_embedding": "learned", "max_position_embeddings": 20},
        {"d_k": 4, "d_v": 12, "attention_bias": True},
        {"encoder_layers": 1, "decoder_layers": 3, "num_heads": 1},
        {"num_heads": 5, "d_k": 7, "d_v": 3},
        *({"activation_function": name} for name in ACTIVATIONS),
    ],
    ids=str,
)
def test_converted_model_has_the_same_probabilities(overrides: dict[str, Any], tmp_path: Path) -> None:
    model = random_model(**overrides)
    to_ctranslate2(model, None, tmp_path / "converted")
    assert_same_probabilities(model, tmp_path / "converted")


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["int8", "bfloat16"])
def test_trained_model_translates_the_same_in_every_stored_dtype(quantization: str, tmp_path: Path) -> None:
    model, tokenizer = model_of_pairs()
    folder = to_ctranslate2(model, tokenizer, tmp_path / "converted", quantization)
    sources = [tokenizer.convert_ids_to_tokens(tokenizer(text).input_ids) for text in PAIRS]
    results = ctranslate2.Translator(str(folder), intra_threads=1).translate_batch(sources, beam_size=4)
    ids: Any = [tokenizer.convert_tokens_to_ids(result.hypotheses[0]) for result in results]
    assert tokenizer.batch_decode(ids) == list(PAIRS.values())


def test_conversion_changes_nothing_in_the_model(tmp_path: Path) -> None:
    """CTranslate2 quantizes in place."""
    model = random_model()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    to_ctranslate2(model, None, tmp_path / "converted", "int8")
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name])


def test_model_in_bfloat16_is_converted_from_its_own_weights(tmp_path: Path) -> None:
    model = random_model().bfloat16()
    to_ctranslate2(model, None, tmp_path / "converted")
    assert_same_probabilities(model.float(), tmp_path / "converted")


def test_tied_embeddings_are_stored_once_and_fewer_bits_take_less_space(tmp_path: Path) -> None:
    model = random_model(vocab_size=2000)
    sizes = {}
    for quantization in (None, "bfloat16", "int8"):
        folder = to_ctranslate2(model, None, tmp_path / str(quantization), quantization, positions=8)
        sizes[quantization] = (folder / "model.bin").stat().st_size
    weights = sum(weight.numel() for weight in model.parameters())
    assert 4 * weights < sizes[None] < 4 * weights + 20_000
    assert 1.9 < sizes[None] / sizes["bfloat16"] < 2.1
    assert 3.3 < sizes[None] / sizes["int8"] < 4


@pytest.mark.parametrize("algorithm", ["bpe", "wordpiece"])
def test_vocabulary_has_the_tokenizers_strings_and_names_for_entries_without_one(
    algorithm: Any, tmp_path: Path
) -> None:
    tokenizer = VaswaniTransformerTokenizer.train_from_iterator(["a b"], vocab_size=270, algorithm=algorithm)
    tokenizer.add_tokens([AddedToken("<2es>", special=True), AddedToken("New York", normalized=False), "ĠĠ", "\u2028x"])
    size = len(tokenizer)
    model = tiny_model(vocab_size=size + 3)
    folder = to_ctranslate2(model, tokenizer, tmp_path / "converted")
    strings = json.loads((folder / "shared_vocabulary.json").read_text())
    assert strings[:size] == tokenizer.convert_ids_to_tokens(list(range(size)))
    assert len(set(strings)) == size + 3
    saved = json.loads((folder / "config.json").read_text())
    assert (saved["bos_token"], saved["eos_token"], saved["decoder_start_token"]) == ("<s>", "</s>", "<s>")
    assert saved["unk_token"] == ("<unk>" if algorithm == "wordpiece" else "<pad>")
    assert saved["add_source_eos"] is False
    text = "naïve\n</s> <s> <2es>New York ĠĠ\u2028x"
    assert {*range(size - 4, size)} < {*tokenizer(text).input_ids}
    assert [strings[index] for index in tokenizer(text).input_ids] == tokenizer(text).tokens()
    assert load_tokenizer(folder)(text).input_ids == tokenizer(text).input_ids


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tiny_model().model, "A VaswaniTransformerModel is not a VaswaniTransformerFor"),
        (
            lambda: prepare_for_inference(tiny_model()),
            r"is a \w+Linear that is wrapped, or whose weight is not loaded; merge adapters",
        ),
        (lambda: tiny_model().to("meta"), r"is a Linear that is wrapped, or whose weight is not loaded"),
        (
            lambda: tiny_model(activation_function="mish"),
            "activation_function: not supported by CTranslate2; got 'mish', expected one of",
        ),
        (
            lambda: tiny_model(attention_window=3),
            "attention_window: CTranslate2 does not support restricted self-attention",
        ),
        (
            lambda: tiny_model(eos_token_id=[2, 4]),
            r"eos_token_id: CTranslate2 needs a single token; got \[2, 4\]\. Set one",
        ),
    ],
    ids=lambda value: "" if callable(value) else value,
)
def test_model_that_ctranslate2_cannot_represent_is_an_error_that_leaves_no_file(
    make: Callable[[], Any], message: str, tmp_path: Path
) -> None:
    with user_error(message):
        to_ctranslate2(make(), None, tmp_path / "converted")
    tokenizer = VaswaniTransformerTokenizer.train_from_iterator(["a b"], vocab_size=270)
    with pytest.raises(ValueError, match=r"its tokenizer has \d+ entries, the model only 99"):
        to_ctranslate2(tiny_model(), tokenizer, tmp_path / "converted")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_lora_adapter_is_an_error_until_it_is_merged(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(random_model(), peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2))
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            weight.data.normal_()
    with pytest.raises(ValueError, match=r"merge an adapter by merge_and_unload\(\)"):
        to_ctranslate2(adapted, None, tmp_path / "converted")
    with pytest.raises(ValueError, match=r"q_proj is a Linear that is wrapped"):
        to_ctranslate2(adapted.get_base_model(), None, tmp_path / "converted")
    merged = adapted.merge_and_unload()
    to_ctranslate2(merged, None, tmp_path / "converted")
    assert_same_probabilities(merged, tmp_path / "converted")


def test_command_without_its_extra_ends_with_one_line_that_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    line = error_line(run_main(main, ["ctranslate2", tmp_path / "model", tmp_path / "converted"], capsys))
    assert line.startswith("CTranslate2: cannot be imported (")
    assert line.endswith('; run pip install "vaswani-transformer[ctranslate2]".\n')


def test_command_converts_a_folder_and_never_overwrites_one_without_force(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = VaswaniTransformerTokenizer.train_from_iterator([*PAIRS], vocab_size=300)
    model = random_model(vocab_size=len(tokenizer))
    model.use_paper_decoding()
    save(tmp_path / "model", model, tokenizer)
    call = ["ctranslate2", str(tmp_path / "model"), str(tmp_path / "converted"), "--quantization=int8"]
    main(call)
    assert capsys.readouterr().out.endswith("for CTranslate2, int8\n")
    before = (tmp_path / "converted" / "model.bin").read_bytes()
    used = error_line(run_main(main, call, capsys))
    assert "the folder is in use; choose a different one, or replace the model in it with --force" in used
    main([*call[:-1], "--force"])
    assert (tmp_path / "converted" / "model.bin").read_bytes() != before
    capsys.readouterr()  # of the conversion
    (tmp_path / "config.json").write_text("{}")  # as a folder of fairseq's files may have
    for output in (tmp_path / "model", tmp_path):
        given = ["ctranslate2", tmp_path / "model", output, "--force"]
        assert (
            error_line(run_main(main, given, capsys))
            == f"{output}: contains the model itself; choose a different folder.\n"
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "converted", "model"]
