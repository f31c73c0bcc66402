"""Another vocabulary for a trained model: the entries of the old one from which each new entry starts."""

from transformers import PreTrainedTokenizerBase

from vaswani_transformer.tokenizer import WORD_START, text_encoder

UNREADABLE = "\ufffd"  # what a byte becomes that is no character on its own


def starting_entries(
    tokenizer: PreTrainedTokenizerBase, trained: PreTrainedTokenizerBase
) -> tuple[dict[int, list[int]], int]:
    """Return the ids in the trained vocabulary from whose mean each id of the new one starts.

    A common token starts from itself, and any other from the fewest tokens that write its text in the trained
    vocabulary (Gee et al. 2022, "Fast Vocabulary Transfer"), as it is, in small letters, with a capital at its
    beginning or without its space, so that HOUSE starts from house. Other special tokens, and texts that the trained
    vocabulary cannot write, have no entry.

    Returns:
        the ids, and the number of common tokens.
    """
    vocabulary = tokenizer.get_vocab()
    known = trained.get_vocab()
    entries = {index: [known[token]] for token, index in vocabulary.items() if token in known}
    common = len(entries)

    # The tokens of all spellings of all other texts, encoded at once.
    special = set(tokenizer.all_special_tokens)
    owners, spellings = [], []
    for token, index in vocabulary.items():
        text = text_of(tokenizer, token)
        if token not in known and token not in special and UNREADABLE not in text:
            for written in (text, text.lstrip(" ")):
                for spelling in dict.fromkeys((written, written.lower(), written.title())):
                    owners.append(index)
                    spellings.append(spelling)
    encoded = text_encoder(trained)(spellings, add_special_tokens=False)["input_ids"] if spellings else []
    for index, ids in zip(owners, encoded, strict=True):
        is_written = bool(ids) and trained.unk_token_id not in ids
        if is_written and (index not in entries or len(ids) < len(entries[index])):
            entries[index] = ids
    return entries, common


def text_of(tokenizer: PreTrainedTokenizerBase, token: str) -> str:
    """Return the text of a token, with the space that begins it."""
    if token.startswith(WORD_START):
        return f" {token.removeprefix(WORD_START)}"
    return str(tokenizer.convert_tokens_to_string([token]))
