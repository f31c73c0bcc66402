"""One sub-word vocabulary that source and target share (5.1)."""

import copy
import functools
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Self, TypeVar, cast

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>"}  # 0, 1, 2
LARGEST_ALPHABET = 1000
WHERE_IT_CAME_FROM = ("auto_map", "is_local", "local_files_only")
UNKNOWN_TOKEN = {"unk_token": "<unk>"}  # 3, where the vocabulary cannot spell every text
CONTROL_TOKENS = ("bos_token", "pad_token", "eos_token", "unk_token", "cls_token", "sep_token")
T = TypeVar("T")


def special_tokens(names: dict[str, str]) -> list[AddedToken]:
    return [AddedToken(token, special=True, normalized=False) for token in names.values()]


def train_byte_pair_encoding(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level byte-pair encoding: any text can be spelt, and comes back as it was (En-De in the paper)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocab_size < (least := len(alphabet) + len(SPECIAL_TOKENS)):
        raise ValueError(
            f"vocab_size ({vocab_size}) cannot hold the {len(alphabet)} bytes and {len(SPECIAL_TOKENS)} special "
            f"tokens; give at least {least}."
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=alphabet,
        special_tokens=special_tokens(SPECIAL_TOKENS),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def word_piece_tokenizer(vocabulary: dict[str, int]) -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(vocab=vocabulary, unk_token=UNKNOWN_TOKEN["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def train_word_piece(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Word-pieces within words and punctuation marks (En-Fr in the paper); a word with a strange character is `<unk>`.

    The alphabet, the most frequent characters, is given to the trainer sorted, at the head of a word and within one:
    by itself it numbers them in an order that changes from one training to the next.
    """
    texts = list(texts) if isinstance(texts, Iterator) else texts
    names = SPECIAL_TOKENS | UNKNOWN_TOKEN
    counts = Counter(character for text in texts for character in text if not character.isspace())
    alphabet = sorted(sorted(counts, key=lambda character: (-counts[character], character))[:LARGEST_ALPHABET])
    if vocab_size < (least := 2 * len(alphabet) + len(names)):
        raise ValueError(
            f"vocab_size ({vocab_size}) cannot hold the {len(alphabet)} characters of the texts, at the head of a word "
            f"and within one, and {len(names)} special tokens; give at least {least}."
        )
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        special_tokens=[*names.values(), *(f"##{character}" for character in alphabet)],
        show_progress=False,
    )
    trained = word_piece_tokenizer({})
    trained.train_from_iterator(texts, trainer)
    tokenizer = word_piece_tokenizer(trained.get_vocab())
    tokenizer.add_special_tokens(special_tokens(names))
    return tokenizer


ALGORITHMS = {"bpe": train_byte_pair_encoding, "wordpiece": train_word_piece}


class VaswaniTransformerTokenizer(PreTrainedTokenizerFast):
    """A fast tokenizer that ends every text with `</s>`; `text_encoder` gives one for which no text can end itself.

    It is a plain `tokenizer.json`, which Transformers and tokenizers read without this class; and this class reads
    any `tokenizer.json`, whoever made it. `tokenizer(sources, text_target=targets)` gives `labels`.
    """

    model_input_names = ["input_ids", "attention_mask"]

    @classmethod
    def train_from_iterator(cls, texts: Iterable[str], vocab_size: int, algorithm: str = "bpe") -> Self:
        """A tokenizer with a vocabulary learnt from `texts`, sources and targets together.

        The same texts give the same vocabulary in every process. `<s>`, `<pad>` and `</s>` are 0, 1 and 2, and
        `<unk>`, which only word-pieces need, 3. As with every tokenizer of Transformers, a text that spells a special
        token has that token; for texts that may spell any, take `text_encoder(tokenizer)`.

        Args:
            texts: every text to learn from.
            vocab_size: entries of the vocabulary; few texts may give fewer.
            algorithm: "bpe", byte-level and lossless, or "wordpiece".

        Raises:
            ValueError: an unknown algorithm, or a vocabulary too small for its alphabet.
        """
        name = algorithm.lower().replace("-", "").replace("_", "")
        if name not in ALGORITHMS:
            raise ValueError(f"{algorithm!r} is not a sub-word algorithm; choose one of {', '.join(ALGORITHMS)}.")
        tokenizer = ALGORITHMS[name](texts, vocab_size)
        end = SPECIAL_TOKENS["eos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"$A {end}", pair=f"$A {end} $B {end}", special_tokens=[(end, tokenizer.token_to_id(end))]
        )
        names = SPECIAL_TOKENS | (UNKNOWN_TOKEN if name == "wordpiece" else {})
        return cls(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **names)

    def with_remote_code(self) -> Self:
        """This tokenizer, over the same vocabulary, whose `save_pretrained` adds the package's code and `auto_map`.

        A shallow copy that counts as registered for AutoTokenizer; this tokenizer and its class stay as they are.
        """
        published = cast(Any, copy.copy(self))
        published._auto_class = "AutoTokenizer"
        return published

    def push_to_hub(self, repo_id: str, **settings: Any) -> str:
        """Publish the tokenizer with the code that loads it, in one commit; the settings are those of every one."""
        return super(VaswaniTransformerTokenizer, self.with_remote_code()).push_to_hub(repo_id, **settings)

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> tuple[str, ...]:
        """As every tokenizer: without the code, unless `register_for_auto_class()` or `push_to_hub=True` asks for it.

        A folder does not say from where this tokenizer was loaded, nor name code that it does not hold.
        """
        if kwargs.get("push_to_hub") and self._auto_class is None:
            return self.with_remote_code().save_pretrained(save_directory, *args, **kwargs)
        self.init_kwargs = {name: value for name, value in self.init_kwargs.items() if name not in WHERE_IT_CAME_FROM}
        return super().save_pretrained(save_directory, *args, **kwargs)


@functools.lru_cache(maxsize=2)
def with_special_tokens(state: str, control: frozenset[str]) -> Tokenizer:
    """The tokenizer that `state` serializes, of whose added tokens the control tokens alone are special."""
    fields = json.loads(state)
    for token in fields["added_tokens"]:
        token["special"] = token["content"] in control
    return Tokenizer.from_str(json.dumps(fields))


def text_encoder(tokenizer: T) -> T:
    """A copy of a tokenizer for encoding texts that may spell anything: no text ends or pads itself.

    `<s>`, `</s>`, `<pad>` and `<unk>` in a text are text to it, and tokens that a user has added, such as a language
    tag `<2es>`, are tokens. It only encodes; the tokenizer itself decodes, and is left as it is. A tokenizer that
    splits special tokens anyway, added ones too, or that is written in Python, is returned as it is.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerFast) or tokenizer.split_special_tokens:
        return tokenizer
    control = frozenset(str(token) for name in CONTROL_TOKENS if (token := getattr(tokenizer, name)) is not None)
    encoder = copy.copy(tokenizer)
    encoder.split_special_tokens = True
    added = tokenizer.added_tokens_decoder.values()
    if any(token.special != (token.content in control) for token in added):
        encoder._tokenizer = with_special_tokens(tokenizer.backend_tokenizer.to_str(), control)
    return encoder


__all__ = ["VaswaniTransformerTokenizer", "text_encoder"]
