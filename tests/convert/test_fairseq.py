"""Models and vocabularies of fairseq: imported, they compute what FSMT does; others end in one line."""

import argparse
import json
import math
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoModelForSeq2SeqLM

from tests.commands import user_error
from tests.convert.originals import (
    ARGUMENTS,
    CODES,
    END,
    PAD,
    WORDS,
    D,
    V,
    assert_alike,
    fairseq_state,
    fsmt,
    save_checkpoint,
)
from tests.models import PAIRS, load_tokenizer
from vaswani_transformer.convert.command import main
from vaswani_transformer.convert.fairseq import from_fairseq
from vaswani_transformer.convert.fairseq_tokenizer import fairseq_tokenizer
from vaswani_transformer.tokenizer import text_encoder
from vaswani_transformer.translation.translator import unknown_words


@pytest.mark.parametrize(("newer", "scale"), [(True, True), (False, False)])
def test_fairseq_checkpoint_computes_what_fsmt_does(newer: bool, scale: bool, tmp_path: Path) -> None:
    original = fsmt(scale_embedding=scale)
    path = save_checkpoint(tmp_path / "c.pt", fairseq_state(original), newer, no_scale_embedding=not scale)
    imported = from_fairseq(path)
    assert_alike(imported.model, original, PAD)
    assert imported.difference is not None
    assert imported.difference < 1e-4
    config = imported.model.config
    assert (config.target_start_token_id, config.max_position_embeddings, config.dropout) == (END, 64, 0.3)


def test_relu_dropout_is_the_activation_dropout_where_that_is_zero(tmp_path: Path) -> None:
    """As in fairseq, whose newer configurations always have both."""
    state = fairseq_state(fsmt())
    for activation, relu, expected in ((0.0, 0.2, 0.2), (0.1, 0.0, 0.1), (0.1, 0.2, 0.1)):
        path = save_checkpoint(tmp_path / "c.pt", state, activation_dropout=activation, relu_dropout=relu)
        assert from_fairseq(path).model.config.activation_dropout == expected


def test_fairseq_learned_positions_begin_after_the_padding_id(tmp_path: Path) -> None:
    tables = {f"{stack}.embed_positions.weight": torch.randn(30 + PAD + 1, D) for stack in ("encoder", "decoder")}
    imported = from_fairseq(save_checkpoint(tmp_path / "c.pt", fairseq_state(fsmt()) | tables))
    assert imported.difference is None
    for stack, table in zip(("encoder", "decoder"), tables.values(), strict=True):
        actual = imported.model.get_parameter(f"model.{stack}.input_embedding.positions.table.weight")
        assert torch.equal(actual, table[PAD + 1 :])


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_one_stack_may_have_learned_positions(stack: str, tmp_path: Path) -> None:
    """fairseq has a setting for each stack; FSMT, which has only sinusoids, cannot check such a model."""
    table = torch.randn(64 + PAD + 1, D)
    state = fairseq_state(fsmt()) | {f"{stack}.embed_positions.weight": table}
    imported = from_fairseq(save_checkpoint(tmp_path / "c.pt", state))
    assert imported.difference is None
    actual = imported.model.get_parameter(f"model.{stack}.input_embedding.positions.table.weight")
    assert torch.equal(actual, table[PAD + 1 :])


@pytest.mark.parametrize("module", ["numpy._core", "numpy.core"])  # of NumPy 2 and 1
def test_numpy_values_in_a_checkpoint_are_read(module: str, tmp_path: Path) -> None:
    state = fairseq_state(fsmt())
    values = {"best": np.float64(2.5), "step": np.int64(3), "counts": np.array([1, 2]), "names": np.array(["a"])}
    saved = {"model": state, "args": argparse.Namespace(**ARGUMENTS), "extra_state": values}
    torch.save(saved, tmp_path / "c.pt", _use_new_zipfile_serialization=False)  # no checksums
    content = (tmp_path / "c.pt").read_bytes()
    (tmp_path / "c.pt").write_bytes(re.sub(rb"numpy\._?core", module.encode(), content))
    assert from_fairseq(tmp_path / "c.pt").difference is not None


class Malicious:
    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return (exec, ("raise SystemExit('code was run')",))


def test_checkpoint_cannot_run_code(tmp_path: Path) -> None:
    torch.save({"model": {}, "args": argparse.Namespace(inner=Malicious())}, tmp_path / "c.pt")
    with user_error(r"c\.pt: cannot be loaded: .*exec"):
        from_fairseq(tmp_path / "c.pt")


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"version https://git-lfs.github.com/spec/v1\n"])
def test_file_without_a_checkpoint_or_settings_is_an_error(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "c.pt").write_bytes(content)
    is_named = content == b"" or content.startswith(b"version")
    with user_error(r"c\.pt: contains no weights; got a" if is_named else r"c\.pt: cannot be loaded: "):
        from_fairseq(tmp_path / "c.pt")
    save_checkpoint(tmp_path / "c.pt", fairseq_state(fsmt()))
    (tmp_path / "settings.json").write_bytes(content)
    with user_error(r"settings\.json: cannot be loaded: "):
        from_fairseq(tmp_path / "c.pt", config=tmp_path / "settings.json")


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        (
            {},
            {"encoder_normalize_before": True},
            "has encoder_normalize_before, which the paper's model does not support",
        ),
        ({"decoder.layer_norm.weight": torch.ones(D)}, {}, r"cannot be loaded: .*Unexpected key.*decoder.layer_norm"),
        (
            {"decoder.embed_tokens.weight": torch.ones(V, D)},
            {},
            "source and target embeddings differ, but this model needs",
        ),
        ({}, {"activation_fn": "relu_squared_or_so"}, "cannot be loaded: .*activation_function.*'relu_squared_or_so'"),
        (
            {},
            {"decoder_attention_heads": 2},
            "needs equal encoder_attention_heads and decoder_attention_heads; got 4 and 2",
        ),
        ({"decoder.layers.0.fc2.bias": torch.full((D,), math.nan)}, {}, "NaN or infinite numbers in decoder.layers.0"),
        ({}, {"max_source_positions": 10**12}, r"has 1,000,000,000,000 positions, expected at most"),
    ],
)
def test_fairseq_weight_or_setting_that_the_paper_lacks_is_an_error_that_names_it(
    change: dict[str, Any], arguments: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = save_checkpoint(tmp_path / "c.pt", fairseq_state(fsmt()) | change, **arguments)
    with user_error(message):
        from_fairseq(path)


def test_checkpoint_without_its_settings_takes_them_from_a_file(tmp_path: Path) -> None:
    original = fsmt()
    torch.save({"model": fairseq_state(original)}, tmp_path / "c.pt")
    with pytest.raises(ValueError, match=r"got None and None\. Write them"):
        from_fairseq(tmp_path / "c.pt")
    (tmp_path / "settings.json").write_text(json.dumps(ARGUMENTS))
    assert_alike(from_fairseq(tmp_path / "c.pt", config=tmp_path / "settings.json").model, original, PAD)
    torch.save({"weights": {}}, tmp_path / "c.pt")
    with pytest.raises(ValueError, match='is not a fairseq checkpoint; its "model" is missing'):
        from_fairseq(tmp_path / "c.pt")


@pytest.fixture
def vocabulary(tmp_path: Path) -> Path:
    (tmp_path / "dict.txt").write_text("".join(f"{word} 7\n" for word in WORDS))
    (tmp_path / "codes").write_text(CODES)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("codes", "l o\nw </w>\n", "line 2: not a merge of subword-nmt 0.2 or fastBPE"),
        ("dict.txt", "a 1\nb\n", "line 2: not a token and its count; choose fairseq's dict.txt"),
        ("dict.txt", "\udcff 1\n", "dict.txt: cannot be loaded: .* can't decode byte 0xff in position 0"),
    ],
)
def test_malformed_vocabulary_or_merges_are_an_error(name: str, content: str, message: str, vocabulary: Path) -> None:
    (vocabulary / name).write_text(content, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(ValueError, match=message):
        fairseq_tokenizer(vocabulary / "dict.txt", vocabulary / "codes")


def split_word(word: str, merges: list[tuple[str, str]]) -> list[str]:
    """Return the pieces of a word by subword-nmt's rules: of the pairs in it, the first of the merges is merged."""
    pieces = [*word[:-1], word[-1] + "</w>"]
    while pairs := [pair for pair in pairwise(pieces) if pair in merges]:
        first, second = min(pairs, key=merges.index)
        index = 0
        while index < len(pieces) - 1:
            if (pieces[index], pieces[index + 1]) == (first, second):
                pieces[index : index + 2] = [first + second]
            index += 1
    return [*(f"{piece}@@" for piece in pieces[:-1]), pieces[-1].removesuffix("</w>")]


def test_dictionary_of_final_pieces_gives_the_ids_of_subword_nmt_and_fairseq(tmp_path: Path) -> None:
    """A word cut short ends in pieces that the dictionary lacks and merges pass through: <unk> in fairseq."""
    texts = [*PAIRS, *PAIRS.values()]
    words = [word for text in texts for word in text.split()]
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.BpeTrainer(vocab_size=90, end_of_word_suffix="</w>", show_progress=False)
    learned.train_from_iterator(texts, trainer)
    merges = [(first, second) for first, second in json.loads(learned.to_str())["model"]["merges"]]
    pieces = list(dict.fromkeys(piece for word in words for piece in split_word(word, merges)))
    (tmp_path / "dict.txt").write_text("".join(f"{piece} 1\n" for piece in pieces))
    (tmp_path / "codes").write_text("#version: 0.2\n" + "".join(f"{first} {second}\n" for first, second in merges))
    fairseq_tokenizer(tmp_path / "dict.txt", tmp_path / "codes").save_pretrained(tmp_path / "saved")
    tokenizer = load_tokenizer(tmp_path / "saved")
    ids = {piece: index for index, piece in enumerate(["<s>", "<pad>", "</s>", "<unk>", *pieces])}
    assert len(tokenizer) == len(tokenizer.get_vocab()) == len(ids)
    cut = sorted({word[:end] for word in words for end in range(1, len(word) + 1)})
    split = {word: split_word(word, merges) for word in cut}
    made = {first + second for first, second in merges}
    passing = [word for word in cut if any(p.removesuffix("@@") in made for p in split[word] if p not in ids)]
    assert passing
    split_by_hand = fairseq_tokenizer(tmp_path / "dict.txt", None)
    for text in (*texts, " ".join(cut)):
        pieces = [piece for word in text.split() for piece in split[word]]
        expected = [*(ids.get(piece, 3) for piece in pieces), 2]
        assert text_encoder(tokenizer)(text)["input_ids"] == split_by_hand(" ".join(pieces))["input_ids"] == expected
    assert text_encoder(tokenizer)("<s>")["input_ids"] == [*(ids.get(piece, 3) for piece in ("<@@", "s@@", ">")), 2]
    for each in (tokenizer, split_by_hand):
        token_ids = [tokenizer(text)["input_ids"] for text in texts]
        assert each.batch_decode(token_ids, skip_special_tokens=True) == texts
    assert unknown_words(tokenizer, tokenizer(passing), passing) == [[word] for word in passing]


@pytest.mark.parametrize(
    ("dictionary", "ids"),
    [
        ("a -0\nb -1\n", [4, 5, 2]),  # scores of sentencepiece as counts
        ("a 2 \nb 1\t\r\n", [4, 5, 2]),
        ("<s> 0 #fairseq:overwrite\n</s> 0 #fairseq:overwrite\na 2\nb 1\n", [6, 7, 2]),
        ("a 2\nb 1\na 1 #fairseq:overwrite \n", [6, 5, 2]),
    ],
)
def test_dictionary_is_read_as_fairseq_reads_it(dictionary: str, ids: list[int], tmp_path: Path) -> None:
    (tmp_path / "dict.txt").write_text(dictionary)
    tokenizer = fairseq_tokenizer(tmp_path / "dict.txt", None)
    assert tokenizer("a b")["input_ids"] == ids
    assert len(tokenizer) == 4 + len(dictionary.splitlines())
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a b"


def test_sentencepiece_model_splits_and_joins_texts(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    texts, path = [*PAIRS, *PAIRS.values()], tmp_path / "bpe.model"
    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts), model_writer=file, vocab_size=60, hard_vocab_limit=False, minloglevel=2
        )
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(path))
    split = [pieces.encode(text, out_type=str) for text in texts]
    known = dict.fromkeys(piece for line in split[:-1] for piece in line)
    (tmp_path / "dict.txt").write_text("".join(f"{piece} 1\n" for piece in known), encoding="utf-8")
    fairseq_tokenizer(tmp_path / "dict.txt", path).save_pretrained(tmp_path / "saved")
    tokenizer = load_tokenizer(tmp_path / "saved")
    ids = {piece: index for index, piece in enumerate(["<s>", "<pad>", "</s>", "<unk>", *known])}
    for text, line in zip([*texts, "a</s>"], [*split, pieces.encode("a</s>", out_type=str)], strict=True):
        assert tokenizer(text)["input_ids"] == [*(ids.get(piece, 3) for piece in line), 2]
    split_by_hand = fairseq_tokenizer(tmp_path / "dict.txt", None)
    for text, line in zip(texts[:-1], split, strict=False):
        assert split_by_hand(" ".join(line))["input_ids"] == tokenizer(text)["input_ids"]
        for each in (tokenizer, split_by_hand):
            assert each.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text
    with user_error(r"none\.model: cannot be loaded: "):
        fairseq_tokenizer(tmp_path / "dict.txt", tmp_path / "none.model")


def test_command_imports_a_fairseq_checkpoint(vocabulary: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = save_checkpoint(vocabulary / "c.pt", fairseq_state(fsmt())), vocabulary / "out"
    call = ["fairseq", str(path), str(out), f"--dict={vocabulary / 'dict.txt'}", f"--codes={vocabulary / 'codes'}"]
    with pytest.raises(SystemExit):
        main(call)
    assert "got 20 entries including the special tokens, expected 40. Choose the dict.txt" in capsys.readouterr().err
    assert not out.exists()
    with (vocabulary / "dict.txt").open("a") as file:
        file.writelines(f"madeupword{number:04} 0\n" for number in range(1, 21))
    main(call)
    assert "Largest difference of log-probabilities on random sentences: " in capsys.readouterr().out
    tokenizer, model = load_tokenizer(out), AutoModelForSeq2SeqLM.from_pretrained(out)
    generated = model.generate(**tokenizer(["low lowest"], return_tensors="pt"), max_new_tokens=4)
    assert generated[0, 0] == END
    assert {file.suffix for file in out.iterdir()} == {".json", ".safetensors"}
