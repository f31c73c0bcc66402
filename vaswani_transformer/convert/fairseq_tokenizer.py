"""Conversion of fairseq's vocabulary, with merges or a SentencePiece model, to a tokenizer."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, Speech2TextTokenizer

from ..support.errors import UserError
from ..support.loading import load_errors
from ..tokenizer import PASSING_KEY, VaswaniTransformerTokenizer

SPECIAL_TOKENS = ("<s>", "<pad>", "</s>", "<unk>")  # 0 to 3 in every vocabulary of fairseq


def read_lines(path: Path) -> list[str]:
    with load_errors(str(path)):
        return path.read_text(encoding="utf-8").rstrip("\n").split("\n")


def read_dictionary(path: Path) -> list[str]:
    """Return the special tokens and the tokens of a `dict.txt`, in the order of their ids in fairseq.

    A line with `#fairseq:overwrite` redefines a token; its earlier entries get names that occur in no text.
    """
    tokens = list(SPECIAL_TOKENS)
    for number, line in enumerate(read_lines(path), start=1):
        entry, _, flag = line.rstrip().rpartition(" ")
        token, _, count = entry.rpartition(" ") if flag == "#fairseq:overwrite" else (entry, "", flag)
        if not token or not count.removeprefix("-").isdigit():
            raise UserError(f"{path}, line {number}: not a token and its count; give fairseq's dict.txt.")
        tokens.append(token)
    last = {token: index for each in (tokens, SPECIAL_TOKENS) for index, token in enumerate(each)}
    return [token if last[token] == index else f"{token} {index}" for index, token in enumerate(tokens)]


def read_merges(path: Path) -> list[tuple[str, str]]:
    """Return the merges of subword-nmt (version 0.2) or fastBPE, in order."""
    merges = []
    for number, line in enumerate(read_lines(path), start=1):
        pieces = line.rstrip("\r").split(" ")
        if number == 1 and line.startswith("#version"):
            continue
        if len(pieces) not in (2, 3) or "</w>" in pieces[:2]:
            raise UserError(f"{path}, line {number}: not a merge of subword-nmt 0.2 or fastBPE; give their merges.")
        merges.append((pieces[0], pieces[1]))
    return merges


def word_tokenizer(tokens: list[str]) -> Tokenizer:
    """Return a tokenizer for texts that are already split into sub-words, by SentencePiece or subword-nmt."""
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token="<unk>"))
    if any(token.startswith("▁") for token in tokens):
        tokenizer.decoder = decoders.Metaspace()
    else:
        joins = (decoders.Replace(Regex(r"\z"), " "), decoders.Fuse(), decoders.Replace("@@ ", ""))
        tokenizer.decoder = decoders.Sequence([*joins, decoders.Strip(" ", 0, 1)])
    return tokenizer


def merging_tokenizer(tokens: list[str], merges: list[tuple[str, str]]) -> Tokenizer:
    """Return a byte-pair tokenizer for texts that are split into words.

    A piece at the end of a word has the suffix "</w>", unlike in `dict.txt`. Intermediate pieces of merges follow those
    of `dict.txt`.
    """
    vocabulary = {
        token.removesuffix("@@") if token.endswith("@@") or token in SPECIAL_TOKENS else f"{token}</w>": index
        for index, token in enumerate(tokens)
    }
    for first, second in merges:
        for piece in (first, second, first + second):
            vocabulary.setdefault(piece, len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.decoder = decoders.BPEDecoder("</w>")
    return tokenizer


def sentencepiece_tokenizer(tokens: list[str], model: Path) -> PreTrainedTokenizerBase:
    """Return a tokenizer that looks up the pieces of a SentencePiece model in a vocabulary, as fairseq does."""
    with TemporaryDirectory() as folder, load_errors(str(model)):
        (vocabulary := Path(folder, "vocab.json")).write_text(
            json.dumps({token: index for index, token in enumerate(tokens)}), encoding="utf-8"
        )
        return Speech2TextTokenizer(str(vocabulary), str(model), split_special_tokens=True)


def fairseq_tokenizer(dictionary: Path, codes: Path | None) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a fairseq model.

    With merges as `codes`, texts must be split into words, as by Moses; without `codes`, into sub-words. With a
    SentencePiece model, named `*.model`, they are plain texts.
    """
    tokens = read_dictionary(dictionary)
    if codes is not None and codes.suffix == ".model":
        return sentencepiece_tokenizer(tokens, codes)
    tokenizer = word_tokenizer(tokens) if codes is None else merging_tokenizer(tokens, read_merges(codes))
    settings = {} if (entries := tokenizer.get_vocab_size()) == len(tokens) else {PASSING_KEY: [len(tokens), entries]}
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", SPECIAL_TOKENS.index("</s>"))]
    )
    names = dict(zip(("bos_token", "pad_token", "eos_token", "unk_token"), SPECIAL_TOKENS, strict=True))
    return VaswaniTransformerTokenizer(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **names, **settings
    )
