"""Conversion of fairseq's vocabulary, with merges or a SentencePiece model, to a tokenizer."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, Speech2TextTokenizer

from ..support.command import UserError
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
        entry = line.rstrip().removesuffix(" #fairseq:overwrite")
        token, _, count = entry.rpartition(" ")
        if not token or not count.removeprefix("-").isdigit():
            raise UserError(f"{path}, line {number}: not a token and its count; choose fairseq's dict.txt.")
        tokens.append(token)

    # The last entry of a token counts, except that special tokens keep their first.
    ids = {token: index for index, token in enumerate(tokens)}
    for index, token in enumerate(SPECIAL_TOKENS):
        ids[token] = index
    return [token if ids[token] == index else f"{token} {index}" for index, token in enumerate(tokens)]


def read_merges(path: Path) -> list[tuple[str, str]]:
    """Return the merges of subword-nmt (version 0.2) or fastBPE, in order."""
    merges = []
    for number, line in enumerate(read_lines(path), start=1):
        pieces = line.rstrip("\r").split(" ")
        if number == 1 and line.startswith("#version"):
            continue
        if len(pieces) not in (2, 3) or "</w>" in pieces[:2]:
            problem = "not a merge of subword-nmt 0.2 or fastBPE"
            raise UserError(f"{path}, line {number}: {problem}; choose the file of merges that one of them wrote.")
        merges.append((pieces[0], pieces[1]))
    return merges


def word_tokenizer(tokens: list[str]) -> Tokenizer:
    """Return a tokenizer for texts that are already split into sub-words, by SentencePiece or subword-nmt."""
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    if any(token.startswith("▁") for token in tokens):
        tokenizer.decoder = decoders.Metaspace()
    else:
        # `Replace` sees one token at a time: each gets a space at its end (\z), and only the fused text shows which
        # "@@" is before a space. The last token's space is stripped.
        separate = decoders.Replace(Regex(r"\z"), " ")
        join_words = decoders.Replace("@@ ", "")
        strip_end = decoders.Strip(" ", 0, 1)
        tokenizer.decoder = decoders.Sequence([separate, decoders.Fuse(), join_words, strip_end])
    return tokenizer


def merging_tokenizer(tokens: list[str], merges: list[tuple[str, str]]) -> Tokenizer:
    """Return a byte-pair tokenizer for texts that are split into words.

    A piece at the end of a word has the suffix "</w>", unlike in `dict.txt`. Intermediate pieces of merges follow those
    of `dict.txt`.
    """
    vocabulary = {}
    for index, token in enumerate(tokens):
        if token.endswith("@@") or token in SPECIAL_TOKENS:
            vocabulary[token.removesuffix("@@")] = index
        else:
            vocabulary[f"{token}</w>"] = index
    for first, second in merges:
        for piece in (first, second, first + second):
            vocabulary.setdefault(piece, len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.decoder = decoders.BPEDecoder("</w>")
    return tokenizer


def sentencepiece_tokenizer(tokens: list[str], model: Path) -> PreTrainedTokenizerBase:
    """Return a tokenizer that looks up the pieces of a SentencePiece model in a vocabulary, as fairseq does."""
    vocabulary = {token: index for index, token in enumerate(tokens)}
    with TemporaryDirectory() as folder, load_errors(str(model)):
        file = Path(folder, "vocab.json")
        file.write_text(json.dumps(vocabulary), encoding="utf-8")
        return Speech2TextTokenizer(str(file), str(model), split_special_tokens=True)


def fairseq_tokenizer(dictionary: Path, codes: Path | None) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a fairseq model.

    With merges as `codes`, texts must be split into words, as by Moses; without `codes`, into sub-words. With a
    SentencePiece model, named `*.model`, they are plain texts.
    """
    tokens = read_dictionary(dictionary)
    if codes is not None and codes.suffix == ".model":
        return sentencepiece_tokenizer(tokens, codes)
    tokenizer = word_tokenizer(tokens) if codes is None else merging_tokenizer(tokens, read_merges(codes))

    # Merges need intermediate pieces that the model has no embedding for. Their ids follow the model's, and the
    # tokenizer replaces those that remain in a text by `<unk>`.
    settings = {}
    if (entries := tokenizer.get_vocab_size()) != len(tokens):
        settings[PASSING_KEY] = [len(tokens), entries]
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", SPECIAL_TOKENS.index("</s>"))]
    )
    return VaswaniTransformerTokenizer(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        bos_token="<s>",
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        **settings,
    )
