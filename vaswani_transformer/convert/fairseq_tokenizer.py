"""A tokenizer from fairseq's vocabulary and merges."""

from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from ..support.errors import UserError
from ..tokenizer import VaswaniTransformerTokenizer

SPECIAL_TOKENS = ("<s>", "<pad>", "</s>", "<unk>")  # 0 to 3 in every vocabulary of fairseq


def read_lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").rstrip("\n").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 ({error}); give the file that fairseq uses.") from error


def read_dictionary(path: Path) -> list[str]:
    """Return the tokens of a `dict.txt` in the order of their ids, after the four special tokens."""
    tokens = list(SPECIAL_TOKENS)
    for number, line in enumerate(read_lines(path), start=1):
        token, _, count = line.removesuffix(" #fairseq:overwrite").rpartition(" ")
        if not token or not count.isdigit():
            raise UserError(f"{path}, line {number}: not a token and its count; give fairseq's dict.txt.")
        tokens.append(token)
    return tokens


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
    """Return a tokenizer of texts that are split into sub-words already, with "@@" after each that continues."""
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(Regex(r"\z"), " "), decoders.Fuse(), decoders.Replace("@@ ", ""), decoders.Strip(" ", 0, 1)]
    )
    return tokenizer


def merging_tokenizer(tokens: list[str], merges: list[tuple[str, str]]) -> Tokenizer:
    """Return a tokenizer of texts that are split into words.

    A piece that ends a word has the suffix "</w>" here and none in `dict.txt`.
    """
    ends = {token: token if token in SPECIAL_TOKENS else token + "</w>" for token in tokens}
    vocabulary = {
        token.removesuffix("@@") if token.endswith("@@") else ends[token]: index for index, token in enumerate(tokens)
    }
    if unknown := [pair for pair in merges if not vocabulary.keys() >= {*pair, pair[0] + pair[1]}]:
        raise UserError(
            f"{len(unknown)} of {len(merges)} merges have pieces that the vocabulary lacks, the first "
            f"{' '.join(unknown[0])!r}; a tokenizer.json cannot treat those as unknown: leave out --codes, and "
            "split the texts by them beforehand."
        )
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.decoder = decoders.BPEDecoder("</w>")
    return tokenizer


def fairseq_tokenizer(dictionary: Path, codes: Path | None) -> VaswaniTransformerTokenizer:
    """Return a tokenizer of texts that are split into words, as by Moses, or without `codes` into sub-words."""
    tokens = read_dictionary(dictionary)
    tokenizer = word_tokenizer(tokens) if codes is None else merging_tokenizer(tokens, read_merges(codes))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", SPECIAL_TOKENS.index("</s>"))]
    )
    names = dict(zip(("bos_token", "pad_token", "eos_token", "unk_token"), SPECIAL_TOKENS, strict=True))
    return VaswaniTransformerTokenizer(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **names)
