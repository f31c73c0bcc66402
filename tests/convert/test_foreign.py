"""Models of FSMT and Marian: imported, they compute the same and translate the same; others end in one line."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, FSMTTokenizer, MarianMTModel, MarianTokenizer, PreTrainedModel

from tests.commands import error_line, run_main
from tests.convert.originals import END, PAD, V, assert_alike, fsmt, marian
from tests.models import load_tokenizer, tiny_nat
from vaswani_transformer.convert.command import main
from vaswani_transformer.convert.foreign import from_fsmt, from_marian


def import_again(original: PreTrainedModel, folder: Path) -> Any:
    """Save a model, and return what its importer makes of it."""
    original.save_pretrained(folder)
    read = from_marian if isinstance(original, MarianMTModel) else from_fsmt
    return read(str(folder), with_tokenizer=False)


def assert_imported(imported: Any, original: PreTrainedModel) -> None:
    """Assert that an imported model computes what the original does, on the importer's sentences too."""
    assert imported.difference is not None
    assert imported.difference < 1e-4
    assert_alike(imported.model, original, PAD)


@pytest.mark.parametrize(("activation", "scale"), [("swish", True), ("gelu", False)])
def test_marian_model_computes_the_same(activation: str, scale: bool, tmp_path: Path) -> None:
    original: Any = marian(activation_function=activation, scale_embedding=scale)
    imported = import_again(original, tmp_path)
    assert_imported(imported, original)
    assert imported.model.config.tie_word_embeddings
    assert imported.model.config.activation_function == activation.replace("swish", "silu")
    beams: dict[str, Any] = {"num_beams": 3, "max_new_tokens": 8}
    sources = torch.randint(4, V - 1, (2, 6))
    exact = imported.model.double(), original.double()  # rounding decides between no tokens
    assert torch.equal(*(model.generate(sources, **beams) for model in exact))


@pytest.mark.parametrize("sign", [1, -1])
def test_marian_bias_of_the_logits_is_folded_into_the_projection(sign: int, tmp_path: Path) -> None:
    """The logits are equal, not only the probabilities; the other sign in the folding would divide by zero."""
    original = marian()
    original.final_logits_bias.normal_(std=3)
    norm: Any = original.model.decoder.layers[-1].final_layer_norm
    norm.weight.data.uniform_(0.05, 2)
    norm.bias.data.copy_(sign * norm.weight.data)
    imported = import_again(original, tmp_path)
    assert not imported.model.config.tie_word_embeddings
    assert_imported(imported, original)
    imported.model.save_pretrained(tmp_path / "ours")
    assert_alike(AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "ours"), original, PAD)


def test_bias_that_rounding_would_lose_is_an_error(tmp_path: Path) -> None:
    original = marian()
    original.final_logits_bias.normal_()
    norm: Any = original.model.decoder.layers[-1].final_layer_norm
    norm.weight.data[3] = 0
    with pytest.raises(ValueError, match="logits differ by up to nan"):
        import_again(original, tmp_path)


@pytest.mark.parametrize("scale", [True, False])
def test_fsmt_model_computes_the_same(scale: bool, tmp_path: Path) -> None:
    original = fsmt(scale_embedding=scale)
    imported = import_again(original, tmp_path)
    assert_imported(imported, original)
    assert imported.model.config.target_start_token_id == END


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: marian(decoder_attention_heads=2), "logits differ by up to"),
        (lambda: marian(decoder_ffn_dim=12), "cannot be loaded: .*size mismatch for model.decoder"),
        (
            lambda: marian(share_encoder_decoder_embeddings=False, tie_word_embeddings=False),
            "this model needs a shared matrix",
        ),
        (
            lambda: fsmt(tie_word_embeddings=False, src_vocab_size=V + 1),
            "source and target embeddings differ, but this model needs",
        ),
    ],
)
def test_setting_without_a_counterpart_is_an_error_that_names_it(
    make: Callable[[], PreTrainedModel], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        import_again(make(), tmp_path)


def test_command_imports_a_marian_model_with_its_tokenizer(
    marian_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    main(["marian", str(marian_folder), str(out)])
    assert (
        "with a MarianTokenizer\nLargest difference of log-probabilities on random sentences: "
        in capsys.readouterr().out
    )
    tokenizer, reference = load_tokenizer(out), MarianTokenizer.from_pretrained(marian_folder)
    texts = ["the cat is good", "el morning"]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    assert torch.equal(batch["input_ids"], reference(texts, padding=True, return_tensors="pt")["input_ids"])
    model = AutoModelForSeq2SeqLM.from_pretrained(out).double()
    original: Any = MarianMTModel.from_pretrained(marian_folder).double()
    generated = model.generate(**batch, num_beams=2, max_new_tokens=6)
    expected = original.generate(**batch, num_beams=2, max_new_tokens=6)
    assert tokenizer.batch_decode(generated) == reference.batch_decode(expected)
    main(["marian", str(marian_folder), str(tmp_path / "bare"), "--without_tokenizer"])
    assert "without a tokenizer" in capsys.readouterr().out


def test_entry_without_a_token_is_decoded_as_nothing(marian_folder: Path, tmp_path: Path) -> None:
    """A padded vocabulary has more entries than its tokenizer, and a search may choose one."""
    folder = shutil.copytree(marian_folder, tmp_path / "padded")
    tokenizer = MarianTokenizer.from_pretrained(folder)
    pad = tokenizer.pad_token_id
    model = marian(vocab_size=(size := len(tokenizer) + 5), pad_token_id=pad, decoder_start_token_id=pad)
    model.generation_config.bad_words_ids = [[pad]]
    model.save_pretrained(folder)
    imported: Any = from_marian(str(folder))
    imported.tokenizer.save_pretrained(tmp_path / "saved")
    saved: Any = load_tokenizer(tmp_path / "saved")
    assert len(saved) == len(saved.get_vocab()) == size
    token_ids = saved(text_target="buenos dias")["input_ids"]
    assert token_ids == tokenizer(text_target="buenos dias")["input_ids"]
    assert saved.decode([size - 1, *token_ids[:-1], size - 5], skip_special_tokens=True) == "buenos dias"


def test_tokenizer_of_a_fsmt_model_is_imported_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sacremoses")
    pieces = ["<s>", "<pad>", "</s>", "<unk>", "a", "b</w>", "a</w>", "ab</w>"]
    for name in ("vocab-src.json", "vocab-tgt.json"):
        (tmp_path / name).write_text(json.dumps({piece: index for index, piece in enumerate(pieces)}))
    (tmp_path / "merges.txt").write_text("a b</w> 3\n")
    files = [str(tmp_path / name) for name in ("vocab-src.json", "vocab-tgt.json", "merges.txt")]
    FSMTTokenizer(["en", "de"], *files).save_pretrained(tmp_path / "fsmt")
    fsmt(src_vocab_size=8, tgt_vocab_size=8).save_pretrained(tmp_path / "fsmt")
    main(["fsmt", str(tmp_path / "fsmt"), str(tmp_path / "out")])
    assert "with a FSMTTokenizer" in capsys.readouterr().out
    assert load_tokenizer(tmp_path / "out")("ab a").input_ids == [7, 6, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fsmt", "{nat}", "{out}"], "wrong model type; got 'vaswani_nat', expected 'fsmt'"),
        (["marian", "{nat}", "{out}"], "wrong model type; got 'vaswani_nat', expected 'marian'"),
        (["ctranslate2", "{nat}", "{out}"], "wrong model type; got 'vaswani_nat', expected 'vaswani_transf"),
        (["ctranslate2", "{out}", "{out}"], "no folder here, so a name on the Hub: cannot be"),
        (["fairseq", "{out}/c.pt", "{out}", "--codes=x"], "a tokenizer needs the vocabulary too; add --dict=FILE"),
        (["marian", "{broken}", "{out}"], "broken: cannot be loaded: "),
    ],
    ids=str,
)
def test_model_that_cannot_be_converted_ends_the_command_with_one_line(
    arguments: list[str], message: str, marian_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = {name: tmp_path / name for name in ("nat", "broken", "out")}
    tiny_nat().save_pretrained(folders["nat"])
    shutil.copytree(marian_folder, folders["broken"])
    (folders["broken"] / "model.safetensors").write_bytes(b"x" * 10_000)
    capsys.readouterr()  # the bar of saving
    assert message in error_line(run_main(main, [part.format(**folders) for part in arguments], capsys))
    assert {path.name for path in tmp_path.iterdir()} == {"nat", "broken"}
