"""The tokenizer loses nothing of a text in NFC, and under its text encoder no text can contain its own end."""

import copy
import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast, TokenizersBackend

from tests.models import load_tokenizer
from vaswani_transformer import VaswaniTransformerTokenizer
from vaswani_transformer.tokenizer import source_encoder, text_encoder

TEXTS = [
    "the cat is black",
    "el gato es negro",
    "this is a book, isn't it?",
    "este es un libro, ¿no?",
    "good morning",
    "buenos días",
    "the black cat reads the black book",
    "el gato negro lee el libro negro",
]
BPE = VaswaniTransformerTokenizer.train_from_iterator(TEXTS, vocab_size=320)
WORD_PIECE = VaswaniTransformerTokenizer.train_from_iterator(TEXTS, vocab_size=120, algorithm="wordpiece")
TOKENIZERS = {"bpe": BPE, "wordpiece": WORD_PIECE}
ENCODERS = {name: text_encoder(tokenizer) for name, tokenizer in TOKENIZERS.items()}
# Any text, and texts that contain the characters of special tokens.
any_text = st.text()
spelling_text = st.lists(st.sampled_from(["</s>", "<pad>", "<s>", "<unk>", " ", "\n", "a", "gato", "é", "🙂"])).map(
    "".join
)
words = st.lists(st.sampled_from(" ".join(TEXTS).split()), min_size=1).map(" ".join)


def nfc(text: str) -> str:
    return unicodedata.normalize("NFC", text)


@settings(max_examples=100)
@given(st.lists(any_text | spelling_text, min_size=1, max_size=4))
def test_padded_batch_decodes_to_its_nfc(texts: list[str]) -> None:
    encode = ENCODERS["bpe"]
    batch = encode(texts, padding=True)
    assert set(batch) == {"input_ids", "attention_mask"}
    assert BPE.batch_decode(batch["input_ids"], skip_special_tokens=True) == list(map(nfc, texts))
    for tokens, mask, text in zip(batch["input_ids"], batch["attention_mask"], texts, strict=True):
        length = len(encode(text).input_ids)
        assert mask == [1] * length + [0] * (len(tokens) - length)
        assert tokens[length:] == [1] * (len(tokens) - length)


def tagged(name: str) -> VaswaniTransformerTokenizer:
    """Return a tokenizer with one language tag added as a special token and another as a plain one."""
    tokenizer = copy.deepcopy(TOKENIZERS[name])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<2es>"]})
    tokenizer.add_tokens(["<2de>"])
    tokenizer.add_tokens(["<2fr>"], special_tokens=True)
    return tokenizer


TAGGED = {name: tagged(name) for name in TOKENIZERS}


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=any_text | spelling_text | words)
def test_text_encoder_ends_every_text_exactly_once_also_with_a_tag(name: str, text: str) -> None:
    decoded = set()
    for tokenizer, tag in ((TOKENIZERS[name], ""), (TAGGED[name], "<2es>")):
        encode = text_encoder(tokenizer)
        tokens = encode(tag + text).input_ids
        assert tokens[-1] == 2
        assert not {0, 1, 2} & set(tokens[:-1])
        assert tokens[:-1] == encode(tag + text, add_special_tokens=False).input_ids
        assert not tag or tokens[0] == tokenizer.convert_tokens_to_ids(tag)
        decoded.add(tokenizer.decode(tokens, skip_special_tokens=True))
    assert len(decoded) == 1


MARKS = "\u2581\u2582"  # those of word pieces
separated = st.lists(st.sampled_from([*" \n\t.,'-_", *MARKS, "ab", "c1", "é", "e\u0301", "</s>", "x" * 120])).map(
    "".join
)


@settings(max_examples=100)
@given(learned=st.lists(any_text | separated, min_size=1, max_size=3), data=st.data())
def test_word_pieces_return_every_text_of_their_characters(learned: list[str], data: st.DataObject) -> None:
    tokenizer = VaswaniTransformerTokenizer.train_from_iterator(learned, 600, algorithm="wordpiece")
    characters = sorted({*"".join(map(nfc, learned)), *MARKS})
    texts = [*learned, *data.draw(st.lists(st.text(st.sampled_from(characters)), max_size=3))]
    tokens = text_encoder(tokenizer)(texts).input_ids
    for cleans_up in (False, True):
        decoded = tokenizer.batch_decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=cleans_up)
        assert decoded == list(map(nfc, texts))
    assert tokenizer.batch_decode(tokens) == [f"{nfc(text)}</s>" for text in texts]
    assert not any(tokenizer.unk_token_id in row for row in tokens)


def test_word_of_word_pieces_is_the_same_token_everywhere_and_an_unknown_character_takes_no_blank() -> None:
    tokenizer = VaswaniTransformerTokenizer.train_from_iterator([*TEXTS, "¿es este?"], 300, algorithm="wordpiece")
    for text in ("es", "¿es?", "el es", "libro\n\nes"):
        assert "\u2581es" in tokens_of(tokenizer, text)
    for text in ("el 日 gato", "el 日本 gato", "el ☃ gato"):
        tokens = tokenizer(text).input_ids
        assert tokens.count(3) == 1
        assert str(tokenizer.decode(tokens, skip_special_tokens=True)).split() == ["el", "gato"]


def test_word_pieces_read_capitals_as_small_letters_where_no_text_has_any(tmp_path: Path) -> None:
    WORD_PIECE.save_pretrained(tmp_path)
    reloaded: Any = AutoTokenizer.from_pretrained(tmp_path)
    for tokenizer in (WORD_PIECE, reloaded):
        assert tokenizer("Buenos DÍAS, ¿Este Libro?").input_ids == tokenizer("buenos días, ¿este libro?").input_ids
    with_capitals = VaswaniTransformerTokenizer.train_from_iterator([*TEXTS, "The Cat"], 130, algorithm="wordpiece")
    assert with_capitals("The").input_ids != with_capitals("the").input_ids
    assert tokens_of(with_capitals, "Gato")[:2] == ["\u2581", "<unk>"]


@pytest.mark.parametrize(("name", "size", "unknown"), [("bpe", 320, None), ("wordpiece", 120, 3)])
def test_special_tokens_come_first_and_ids_are_the_numbers_below_the_vocabulary_size(
    name: str, size: int, unknown: int | None
) -> None:
    tokenizer = TOKENIZERS[name]
    assert (tokenizer.bos_token, tokenizer.pad_token, tokenizer.eos_token) == ("<s>", "<pad>", "</s>")
    assert (tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert tokenizer.unk_token_id == unknown
    assert ("<unk>" in tokenizer.get_vocab()) == (unknown is not None)
    assert tokenizer.padding_side == "right"
    assert tokenizer("").input_ids == [2]
    assert sorted(tokenizer.get_vocab().values()) == list(range(len(tokenizer)))
    assert len(tokenizer) <= size


def tokens_of(tokenizer: Any, text: str) -> list[str]:
    return tokenizer.convert_ids_to_tokens(tokenizer(text).input_ids)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("load", [VaswaniTransformerTokenizer, AutoTokenizer, PreTrainedTokenizerFast])
def test_added_special_token_is_one_token_after_saving(
    load: type[AutoTokenizer | TokenizersBackend | VaswaniTransformerTokenizer], name: str, tmp_path: Path
) -> None:
    tagged(name).save_pretrained(tmp_path)
    assert not json.loads((tmp_path / "tokenizer_config.json").read_text()).get("split_special_tokens")
    again: Any = load.from_pretrained(tmp_path)
    for tokenizer in (again, text_encoder(again)):
        for tag in ("<2es>", "<2de>", "<2fr>"):
            tokens, tag_id = tokenizer(f"{tag} the cat").input_ids, again.convert_tokens_to_ids(tag)
            assert tokens[0] == tag_id
            assert tokens.count(tag_id) == 1
            assert tokenizer("the cat", text_target=f"{tag}the")["labels"][0] == tag_id
            assert again.decode(tokens, skip_special_tokens=False) == f"{tag} the cat</s>"


@pytest.mark.parametrize("algorithm", ["bpe", "BPE", "wordpiece", "Word-Piece"])
def test_vocabulary_depends_only_on_the_texts_and_the_algorithm_has_several_spellings(algorithm: str) -> None:
    name, size = ("bpe", 320) if algorithm.lower() == "bpe" else ("wordpiece", 120)
    for texts in (iter(TEXTS), tuple(TEXTS), [TEXTS[:2], *TEXTS[2:]]):
        again = VaswaniTransformerTokenizer.train_from_iterator(texts, size, algorithm=algorithm)
        assert again.get_vocab() == TOKENIZERS[name].get_vocab()
        assert again.special_tokens_map == TOKENIZERS[name].special_tokens_map


@pytest.mark.parametrize("name", TOKENIZERS)
def test_saved_tokenizer_loads_completely_and_its_json_needs_no_plugin(name: str, tmp_path: Path) -> None:
    tokenizer = TOKENIZERS[name]
    tokenizer.save_pretrained(tmp_path)
    texts = [*TEXTS, "", "a </s> b<pad><s>", "¿qué  tal ?\n", "don 't , wait !", "¡Hola, mundo!", "猫"]
    tokens = tokenizer(texts).input_ids
    assert name == "bpe" or 3 in tokens[-1]  # no word piece has this character
    for again in (VaswaniTransformerTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)):
        assert type(again) is VaswaniTransformerTokenizer
        assert again(texts).input_ids == tokens
        assert again.batch_decode(tokens) == tokenizer.batch_decode(tokens)
        assert again.special_tokens_map == tokenizer.special_tokens_map
        assert (again.unk_token_id, again.padding_side) == (tokenizer.unk_token_id, "right")
    file = str(tmp_path / "tokenizer.json")
    bare, plain = Tokenizer.from_file(file), PreTrainedTokenizerFast(tokenizer_file=file)
    assert [bare.encode(text).ids for text in texts] == plain(texts).input_ids == tokens
    assert [bare.decode(row) for row in tokens] == tokenizer.batch_decode(tokens, skip_special_tokens=True)


def test_any_tokenizer_json_loads_completely(tmp_path: Path) -> None:
    """A foreign tokenizer has other ids, another normalizer, a prefix and other special tokens."""
    pieces = ["<unk>", "<start>", "<end>", "▁", "▁the", "▁cat", "s", "a", "c", "e", "h", "t"]
    foreign = Tokenizer(models.Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], unk_id=0))
    foreign.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    foreign.pre_tokenizer, foreign.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    foreign.add_special_tokens(["<start>", "<end>"])
    foreign.post_processor = processors.TemplateProcessing("<start> $A <end>", None, [("<start>", 1), ("<end>", 2)])
    foreign.save(str(tmp_path / "tokenizer.json"))
    for folder in (tmp_path, tmp_path / "again"):
        loaded = VaswaniTransformerTokenizer.from_pretrained(folder)
        for text in ["the cats", "The Cats, ﬁne ☃!", ""]:
            expected = foreign.encode(text)
            assert loaded(text).input_ids == expected.ids
            assert loaded.decode(expected.ids, skip_special_tokens=True) == foreign.decode(expected.ids)
        loaded.save_pretrained(tmp_path / "again")


@pytest.mark.parametrize("name", TOKENIZERS)
def test_spaces_of_sources_are_spaces_and_those_of_targets_stay(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    encode = source_encoder(tokenizer)
    expected = tokenizer("the black cat").input_ids
    for space in "\u00a0\u2007\u2009\u202f\u3000":
        text = f"the{space}black{space}cat"
        encoded = encode([text], text_target=[text])
        assert encode(text).input_ids == encoded["input_ids"][0] == expected
        assert encoded["labels"][0] == tokenizer(text).input_ids != expected


@pytest.mark.parametrize("name", TOKENIZERS)
def test_canonically_equal_texts_have_equal_ids(name: str) -> None:
    decomposed = unicodedata.normalize("NFD", "buenos días, ¿qué tal?")
    assert decomposed != nfc(decomposed)
    assert TOKENIZERS[name](decomposed).input_ids == TOKENIZERS[name](nfc(decomposed)).input_ids
    again = VaswaniTransformerTokenizer.train_from_iterator(
        [unicodedata.normalize("NFD", text) for text in TEXTS], len(TOKENIZERS[name]), algorithm=name
    )
    assert again.get_vocab() == TOKENIZERS[name].get_vocab()


def test_saved_tokenizer_has_no_truncation_or_padding_of_an_earlier_call(tmp_path: Path) -> None:
    tokenizer = copy.deepcopy(BPE)
    tokenizer(TEXTS, truncation=True, max_length=3, padding="max_length")
    tokenizer.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "tokenizer.json").read_text())
    assert (saved["truncation"], saved["padding"]) == (None, None)


@pytest.mark.parametrize(
    ("texts", "size", "algorithm", "message"),
    [
        (TEXTS, 320, "unigram", r"algorithm: unknown; got 'unigram', expected one of bpe, wordpiece\."),
        ("corpus.txt", 300, "bpe", r"texts: a single text; got 'corpus\.txt', expected an iterable"),
        (["a", 7], 300, "wordpiece", r"texts: contains something that is not a text; got 7 of type int, expected str"),
        (TEXTS, 258, "bpe", r"vocab_size \(258\) is too small for the 256 bytes .* at least 259"),
        (["ab ba"], 8, "wordpiece", r"vocab_size \(8\) is too small for the 5 characters .* at least 9"),
    ],
)
def test_texts_size_or_algorithm_without_a_vocabulary_is_an_error(
    texts: Any, size: int, algorithm: str, message: str
) -> None:
    with pytest.raises(TypeError if message.startswith("texts") else ValueError, match=message):
        VaswaniTransformerTokenizer.train_from_iterator(texts, size, algorithm)


def test_tokens_of_a_text_computed_by_hand() -> None:
    """After the 256 bytes there is room for three merges, of the most frequent pairs: "lo", "low" and " low"."""
    tokenizer = VaswaniTransformerTokenizer.train_from_iterator(["low low low lower"], vocab_size=262)
    assert tokenizer.convert_ids_to_tokens(tokenizer("low lower").input_ids) == ["low", "Ġlow", "e", "r", "</s>"]
