"""A Marian model of a few words."""

import json
from pathlib import Path

import pytest
from transformers import MarianTokenizer

from tests.convert.originals import marian


@pytest.fixture(scope="module")
def marian_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a Marian model with its usual tokenizer: two sentencepiece models and a vocabulary."""
    sentencepiece = pytest.importorskip("sentencepiece")
    folder = tmp_path_factory.mktemp("models") / "marian"
    folder.mkdir()
    texts = ["the cat is black", "good morning", "el gato es negro", "buenos dias"] * 20
    for name in ("source", "target"):
        with (folder / f"{name}.spm").open("wb") as file:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(texts), model_writer=file, vocab_size=40, hard_vocab_limit=False, minloglevel=2
            )
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / "source.spm"))
    strings = [pieces.id_to_piece(index) for index in range(len(pieces))]
    order = ["</s>", "<unk>", *(piece for piece in strings if piece not in ("<s>", "</s>", "<unk>")), "<pad>"]
    (folder / "vocab.json").write_text(json.dumps({piece: index for index, piece in enumerate(order)}))
    MarianTokenizer(str(folder / "source.spm"), str(folder / "target.spm"), str(folder / "vocab.json")).save_pretrained(
        folder
    )
    model = marian(vocab_size=len(order), pad_token_id=len(order) - 1, decoder_start_token_id=len(order) - 1)
    model.generation_config.bad_words_ids = [[len(order) - 1]]
    model.save_pretrained(folder)
    return folder
