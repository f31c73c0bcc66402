"""Subword tokenizer with a vocabulary that source and target share (5.1)."""

import copy
import functools
import json
import os
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Self
from weakref import WeakKeyDictionary

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>"}  # 0, 1, 2
MAX_ALPHABET = 1000
WORD_START = "\u2581"  # before each word in word pieces
LITERAL = WORD_START + "\u2582"  # that character inside a text
LOADING_KEYS = ("auto_map", "is_local", "local_files_only")
"""Settings of loading, which are not saved."""

PASSING_KEY = "passing_pieces"
"""Setting in tokenizer_config.json: half-open range of ids of intermediate merges that the vocabulary lacks.

Such a piece becomes `<unk>` if no later merge consumes it.
"""
UNKNOWN_TOKEN = {"unk_token": "<unk>"}  # 3, for vocabularies that cannot encode every text
SPACES = dict.fromkeys(
    map(ord, "\u00a0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000"), " "
)
"""Unicode's other spaces, such as the no-break space, and the space that replaces them in sources."""
CONTROL_TOKENS = ("bos_token", "pad_token", "eos_token", "unk_token", "cls_token", "sep_token", "mask_token")


def train_byte_pair_encoding(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn a byte-level byte-pair encoding, which is lossless for texts in NFC (English-German in the paper)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    min_size = len(alphabet) + len(SPECIAL_TOKENS)
    if vocab_size < min_size:
        raise ValueError(
            f"vocab_size ({vocab_size}) is too small for the {len(alphabet)} bytes and {len(SPECIAL_TOKENS)} special "
            f"tokens; use at least {min_size}."
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=alphabet, special_tokens=[*SPECIAL_TOKENS.values()], show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def train_word_piece(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn word pieces with marked word beginnings (English-French in the paper); unknown characters become `<unk>`.

    A word consists of letters and digits. A single space between two words is implied, and other spaces are characters,
    so texts of known characters in NFC are encoded without loss. If no text has an uppercase letter, input is
    lowercased.

    The alphabet, the most frequent characters, is passed to the trainer to make training deterministic.
    """
    # The alphabet: the most frequent characters, and those that mark words.
    texts = [unicodedata.normalize("NFC", text) for text in texts]  # read twice
    names = {**SPECIAL_TOKENS, **UNKNOWN_TOKEN}
    counts = Counter(character for text in texts for character in text)
    frequent = sorted(counts, key=lambda character: (-counts[character], character))[:MAX_ALPHABET]
    alphabet = sorted({*frequent, *LITERAL})
    min_size = len(alphabet) + len(names)
    if vocab_size < min_size:
        raise ValueError(
            f"vocab_size ({vocab_size}) is too small for the {len(alphabet)} characters of texts and marks and the "
            f"{len(names)} special tokens; use at least {min_size}."
        )

    # Texts to marked words: "so-called cats" becomes "▁so-▁called▁cats".
    tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN_TOKEN["unk_token"], fuse_unk=True))
    marks = [
        normalizers.NFC(),
        normalizers.Replace(WORD_START, LITERAL),
        normalizers.Replace(Regex(r"(?<!\w)(?=\w)"), WORD_START),  # where a word begins
        normalizers.Replace(Regex(rf"(?<=\w) (?={WORD_START}\w)"), ""),  # the implied space
    ]
    characters = "".join(counts)
    lowercase = normalizers.Lowercase()
    has_capitals = lowercase.normalize_str(characters) != characters
    tokenizer.normalizer = normalizers.Sequence(marks if has_capitals else [lowercase, *marks])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(rf"{WORD_START}\w+"), "isolated")

    # And back.
    restored = [
        decoders.Fuse(),
        decoders.Replace(Regex(rf"(?<=\w){WORD_START}+(?=\w)"), " "),  # between two words
        decoders.Replace(Regex(rf"{WORD_START}(?!{LITERAL[1]})"), ""),  # all other marks
        decoders.Replace(LITERAL, WORD_START),
    ]
    tokenizer.decoder = decoders.Sequence(restored)

    # The pieces.
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        special_tokens=[*names.values()],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


ALGORITHMS = {"bpe": train_byte_pair_encoding, "wordpiece": train_word_piece}


def each_text(texts: Iterable[Any]) -> Iterator[str]:
    """Yield the texts in nested lists; raise TypeError for anything else."""
    for text in texts:
        if isinstance(text, list):
            yield from each_text(text)
        elif isinstance(text, str):
            yield text
        else:
            raise TypeError(
                f"texts: contains something that is not a text; got {text!r} of type {type(text).__name__}, expected "
                "str. Convert it, or leave it out."
            )


class VaswaniTransformerTokenizer(PreTrainedTokenizerFast):
    """Fast tokenizer that ends every text with `</s>`.

    It saves and loads a plain `tokenizer.json`, which Transformers and tokenizers also read without this class.
    `tokenizer(sources, text_target=targets)` also returns `labels`. For texts that may contain `</s>`, use
    `text_encoder`.
    """

    model_input_names = ["input_ids", "attention_mask"]

    @classmethod
    def train_from_iterator(cls, texts: Iterable[str | list[str]], vocab_size: int, algorithm: str = "bpe") -> Self:
        """Return a tokenizer with a vocabulary learned from `texts`, sources and targets together.

        Training is deterministic. The ids of `<s>`, `<pad>` and `</s>` are 0, 1 and 2; that of `<unk>`, which only word
        pieces have, is 3. As in every tokenizer of Transformers, the characters `</s>` in a text become the token
        `</s>`; use `text_encoder(tokenizer)` for texts that may contain them.

        Args:
            texts: the training texts, or lists of them.
            vocab_size: number of entries; a small amount of text may yield fewer.
            algorithm: "bpe", lossless for any text in NFC, or "wordpiece", lossless for texts in NFC of the 1,000 most
                frequent characters of `texts`. Other texts are encoded as their NFC.

        Raises:
            TypeError: `texts` is a single text or contains something other than texts.
            ValueError: the algorithm is unknown, or the vocabulary is too small for its alphabet.
        """
        if isinstance(texts, str):
            raise TypeError(
                f"texts: a single text; got {texts!r}, expected an iterable of texts. Pass [text] or an open file."
            )
        name = algorithm.lower().replace("-", "").replace("_", "")
        if name not in ALGORITHMS:
            raise ValueError(f"algorithm: unknown; got {algorithm!r}, expected one of {', '.join(ALGORITHMS)}.")
        tokenizer = ALGORITHMS[name](each_text(texts), vocab_size)

        # Every text ends with `</s>`.
        end = SPECIAL_TOKENS["eos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"$A {end}", pair=f"$A {end} $B {end}", special_tokens=[(end, tokenizer.token_to_id(end))]
        )

        settings: dict[str, Any] = dict(SPECIAL_TOKENS)
        if name == "wordpiece":
            settings.update(UNKNOWN_TOKEN)
        return cls(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **settings)

    @property
    def passing_ids(self) -> range:
        """Ids of intermediate merges, which the model's vocabulary lacks."""
        return range(*self.init_kwargs.get(PASSING_KEY, (0, 0)))

    def __len__(self) -> int:
        entries = super().__len__()
        passing = self.passing_ids
        return passing.start if passing and passing.stop == entries else entries

    def get_vocab(self) -> dict[str, int]:
        """Return the entries of the model's vocabulary, with their ids."""
        passing = self.passing_ids
        return {token: index for token, index in super().get_vocab().items() if index not in passing}

    def _convert_encoding(self, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], list[Any]]:
        fields, encodings = super()._convert_encoding(*args, **kwargs)
        if passing := self.passing_ids:
            rows = []
            for row in fields["input_ids"]:
                rows.append([self.unk_token_id if index in passing else index for index in row])
            fields["input_ids"] = rows
        return fields, encodings

    def train_new_from_iterator(self, *args: Any, **kwargs: Any) -> Any:
        """Return a tokenizer of the same algorithm with a vocabulary of new texts; arguments as in Transformers."""
        trained = super().train_new_from_iterator(*args, **kwargs)
        trained.init_kwargs.pop(PASSING_KEY, None)  # true of the old vocabulary only
        return trained

    def with_remote_code(self) -> Self:
        """Return a shallow copy, registered for AutoTokenizer, that saves its code and an `auto_map`."""
        published = copy.copy(self)
        published._auto_class = "AutoTokenizer"
        return published

    def push_to_hub(self, repo_id: str, **settings: Any) -> str:
        """Publish the tokenizer and its code in one commit; `settings` are those of `PushToHubMixin`."""
        return super(VaswaniTransformerTokenizer, self.with_remote_code()).push_to_hub(repo_id, **settings)

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> tuple[str, ...]:
        """Save the tokenizer; add code only after `register_for_auto_class()` or with `push_to_hub=True`.

        The folder does not contain the settings of loading, an `auto_map` without code, or truncation and padding of an
        earlier call.
        """
        if kwargs.get("push_to_hub") and self._auto_class is None:
            return self.with_remote_code().save_pretrained(save_directory, *args, **kwargs)
        self.init_kwargs = {name: value for name, value in self.init_kwargs.items() if name not in LOADING_KEYS}
        self.backend_tokenizer.no_truncation()
        self.backend_tokenizer.no_padding()
        return super().save_pretrained(save_directory, *args, **kwargs)


def check_text(text: object, subject: str) -> str:
    """Return `text`; raise TypeError unless it is a str, or ValueError for half of a surrogate pair."""
    if not isinstance(text, str):
        raise TypeError(
            f"{subject}: not a text to translate; got {text!r:.80} of type {type(text).__name__}, expected str. Leave "
            "it out, or convert it."
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{subject}: not a text; got {text!r:.80}, half of a surrogate pair ({error}).") from error
    return text


@functools.lru_cache(maxsize=2)
def with_only_control_tokens_special(state: str, control: frozenset[str]) -> Tokenizer:
    """Return the tokenizer that `state` serializes, with only the control tokens marked as special."""
    fields = json.loads(state)
    for token in fields["added_tokens"]:
        token["special"] = token["content"] in control
    return Tokenizer.from_str(json.dumps(fields))


def text_encoder(tokenizer: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy of a tokenizer that encodes `<s>`, `</s>`, `<pad>` and `<unk>` in texts as ordinary characters.

    Tokens that a user has added, such as a language tag `<2es>`, remain tokens. Use the copy only to encode. A
    tokenizer that already splits special tokens, or that is written in Python, is returned unchanged.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerFast) or tokenizer.split_special_tokens:
        return tokenizer
    tokens = [getattr(tokenizer, name) for name in CONTROL_TOKENS]
    control = frozenset(str(token) for token in tokens if token is not None)
    encoder = copy.copy(tokenizer)
    encoder.split_special_tokens = True

    # The encoder splits all special tokens, so those of a user must not be special in it.
    added = tokenizer.added_tokens_decoder.values()
    if any(token.special != (token.content in control) for token in added):
        encoder._tokenizer = with_only_control_tokens_special(tokenizer.backend_tokenizer.to_str(), control)
    return encoder


def source_encoder(tokenizer: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `text_encoder` for sources, in which no-break and other Unicode spaces count as spaces.

    Training and translation use it. A `text_target` is encoded unchanged.
    """
    encoder = text_encoder(tokenizer)

    def encode(sources: str | Sequence[str], **settings: Any) -> Any:
        if isinstance(sources, str):
            return encoder(sources.translate(SPACES), **settings)
        return encoder([source.translate(SPACES) for source in sources], **settings)

    return encode


ENTRIES: WeakKeyDictionary[Any, tuple[int, int]] = WeakKeyDictionary()
"""Length of each tokenizer and `needed_entries` at that length."""


def needed_entries(tokenizer: Any) -> int:
    """Return the number of embeddings that a tokenizer's ids need; its vocabulary is read when its length changes."""
    length, needed = ENTRIES.get(tokenizer, (-1, 0))
    if length != len(tokenizer):
        ids = [*tokenizer.get_vocab().values(), *tokenizer("")["input_ids"]]
        needed = 1 + max(ids, default=-1)
        ENTRIES[tokenizer] = (len(tokenizer), needed)
    return needed


def is_of_this_package(component: object) -> bool:
    """Return whether a model or tokenizer is one of this package, installed or loaded with its code from the Hub."""
    return hasattr(component, "with_remote_code")


def check_vocabulary(model: Any, tokenizer: Any) -> None:
    """Raise ValueError unless a model has an embedding for every token, and a CMLM the tokenizer's `<mask>`."""
    name = model.config.name_or_path or type(model).__name__
    entries = len(model.get_input_embeddings().weight)
    needed = needed_entries(tokenizer)
    if needed > entries:
        raise ValueError(
            f"{name}: its tokenizer has {needed} entries, the model only {entries}; use the tokenizer of this model."
        )
    mask_token_id = getattr(model.config, "mask_token_id", None)
    if mask_token_id is not None and mask_token_id != tokenizer.mask_token_id:
        raise ValueError(
            f"{name}: its tokenizer does not fit the model's mask_token_id; got {tokenizer.mask_token_id} for <mask>, "
            f"expected {mask_token_id}. Add <mask> by "
            'add_special_tokens({"mask_token": "<mask>"}), and save the tokenizer.'
        )
