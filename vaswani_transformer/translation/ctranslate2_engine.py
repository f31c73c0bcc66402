"""Beam search by CTranslate2 in a folder that `to_ctranslate2` wrote. Needs the extra `ctranslate2`.

P rows of the table of positions.
"""

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.utils import logging

from ..config import as_token_ids
from ..search import LENGTH_PENALTY_TYPES, length_penalty
from ..support.checked_loading import FIX_OF_FILE, GENERATION_CONFIG, load_errors, load_tokenizer
from ..support.errors import UserError, one_line
from ..support.files import read_json
from ..support.saved_settings import check_search_settings
from ..tokenizer import text_encoder
from .engine import ScoredTokens

logger = logging.get_logger(__name__)

POSITIONS_KEY = "max_position_embeddings"  # in config.json: P, which CTranslate2 itself does not store
DEFAULT_RELATIVE_LENGTH = 50  # tokens, as in the paper (6.1)
UNSUPPORTED_SETTINGS = (
    "begin_suppress_tokens", "do_sample", "encoder_no_repeat_ngram_size", "encoder_repetition_penalty",
    "exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id", "min_length", "min_new_tokens",
    "no_repeat_ngram_size", "repetition_penalty", "sequence_bias", "suppress_tokens",
)  # fmt: skip
"""Saved settings that change the results of `generate()` and that this search does not have."""


def import_ctranslate2() -> Any:
    try:
        import ctranslate2
    except ImportError as error:
        raise ImportError('CTranslate2 is not installed; install it with "pip install ctranslate2".') from error
    return ctranslate2


def read_folder(folder: Path) -> tuple[PreTrainedTokenizerBase | None, list[str], int, GenerationConfig]:
    """Return the tokenizer, the strings of the tokens, P and the saved settings of a converted model."""
    try:
        tokens = json.loads((folder / "shared_vocabulary.json").read_text(encoding="utf-8"))
        positions = json.loads((folder / "config.json").read_text(encoding="utf-8"))[POSITIONS_KEY]
        if not (isinstance(tokens, list) and isinstance(positions, int)):
            raise TypeError("neither a vocabulary nor a number of positions")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f'{folder}: has no model that "vaswani-convert ctranslate2" wrote; convert one to this folder first.'
        ) from error
    settings = read_json(folder / GENERATION_CONFIG, FIX_OF_FILE)
    check_search_settings(str(folder), settings, len(tokens))
    with load_errors(str(folder)):
        saved = GenerationConfig.from_dict(settings)
    has_tokenizer = (folder / "tokenizer_config.json").is_file()
    tokenizer = load_tokenizer(str(folder)) if has_tokenizer else None
    return tokenizer, tokens, positions, saved


def first_given(*values: Any) -> Any:
    return next(value for value in values if value is not None)


class CTranslate2Engine:
    """Beam search by CTranslate2 in a folder that `to_ctranslate2` wrote; settings default to the saved ones.

    Under "power" a search with `patience` 1 equals `generate()` with `early_stopping=True`, token for token and with
    the same scores up to rounding. With a `patience` so large that only the length limit ends it, it equals "never".
    CTranslate2 has no "gnmt": there lp(Y) ranks the hypotheses that it has finished. Saved settings that it does not
    support, such as `no_repeat_ngram_size`, are named in a warning.

    Args:
        folder: the folder, with the tokenizer's files.
        scores: whether to return scores.
        num_beams: 1 for greedy search.
        length_penalty: alpha.
        length_penalty_type: "power" or "gnmt".
        patience: the search for a text ends at `num_beams` times `patience` finished hypotheses. 1 is fast, but stops
            before longer hypotheses that are better.
        max_new_tokens: the limit of a translation, `</s>` included; it overrides a saved
            `max_source_relative_length`.
        max_source_relative_length: how many tokens longer than the longest source of a call a translation may be;
            50 if neither it nor `max_new_tokens` is given or saved. The table of positions limits both.
        num_return_sequences: n, the translations of each text, at most `num_beams`.
        batch_tokens: source tokens of a batch, padding included; 0 for no limit.
        device: "cpu", "cuda" or "auto".
        compute_type: how CTranslate2 computes; "default": as the weights are stored, or the nearest type that it has.
        threads: threads of the CPU; None: as many as torch uses.

    Raises:
        ImportError: CTranslate2 is not installed.
        UserError: the folder has no converted model, or a setting is out of range.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        scores: bool = False,
        num_beams: int | None = None,
        length_penalty: float | None = None,
        length_penalty_type: str | None = None,
        patience: float = 2.0,
        max_new_tokens: int | None = None,
        max_source_relative_length: int | None = None,
        num_return_sequences: int = 1,
        batch_tokens: int = 4096,
        device: str = "cpu",
        compute_type: str = "default",
        threads: int | None = None,
    ) -> None:
        self.tokenizer, self.tokens, self.positions, saved = read_folder(Path(folder))
        self.ids = {token: index for index, token in enumerate(self.tokens)}
        self.scores, self.num_translations, self.batch_tokens = scores, num_return_sequences, batch_tokens
        self.num_beams = first_given(num_beams, saved.num_beams, 1)
        self.patience = patience
        self.alpha = first_given(length_penalty, saved.length_penalty, 1.0)
        self.penalty_type = length_penalty_type or getattr(saved, "length_penalty_type", "power")
        if max_new_tokens is None:
            max_new_tokens = saved.max_new_tokens
            if max_source_relative_length is None:
                max_source_relative_length = getattr(saved, "max_source_relative_length", None)
        has_limit = max_source_relative_length is not None or max_new_tokens is not None
        self.relative = max_source_relative_length if has_limit else DEFAULT_RELATIVE_LENGTH
        self.max_new_tokens = max_new_tokens
        self.ends = as_token_ids(saved.eos_token_id) or None  # None: the converted model's
        self.suppressed = [[self.tokens[index] for index in sequence] for sequence in saved.bad_words_ids or []]
        self.check_settings()
        if unsupported := sorted(saved.to_diff_dict().keys() & set(UNSUPPORTED_SETTINGS)):
            logger.warning("%s: CTranslate2 searches without the saved %s.", folder, ", ".join(unsupported))
        threads = torch.get_num_threads() if threads is None else threads
        package = import_ctranslate2()
        try:
            self.translator = package.Translator(
                str(folder), device=device, compute_type=compute_type, intra_threads=threads
            )
        except (ValueError, RuntimeError) as error:
            raise UserError(
                f"{folder}: CTranslate2 cannot load it on device {device!r} as {compute_type!r}: "
                f"{one_line(error).removesuffix('.')}; give another device or type, or convert the model again."
            ) from error

    def check_settings(self) -> None:
        if self.penalty_type not in LENGTH_PENALTY_TYPES:
            raise UserError(f"length_penalty_type is {self.penalty_type!r}; choose one of {LENGTH_PENALTY_TYPES}.")
        for name, value in (("length_penalty", self.alpha), ("patience", self.patience)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise UserError(f"{name} is {value!r}, expected a finite number; set it, or convert the model again.")
        if not 1 <= self.num_translations <= self.num_beams:
            raise UserError(
                f"num_return_sequences ({self.num_translations}) is not from 1 to num_beams ({self.num_beams}); raise "
                "num_beams or lower it."
            )
        if self.max_new_tokens is not None and not 1 <= self.max_new_tokens <= self.positions:
            raise UserError(
                f"max_new_tokens ({self.max_new_tokens}) is not from 1 to the table of {self.positions} positions; "
                "lower it, or convert the model with more positions."
            )

    @property
    def search(self) -> dict[str, Any]:
        """The complete search, for records."""
        search = {
            "num_beams": self.num_beams,
            "length_penalty": self.alpha,
            "length_penalty_type": self.penalty_type,
            "patience": self.patience,
            "max_new_tokens": self.max_new_tokens,
            "max_source_relative_length": self.relative,
            "bad_words": self.suppressed or None,
        }
        return {name: value for name, value in search.items() if value is not None}

    def max_source_tokens(self) -> int:
        """Return the tokens that a text may have, so that positions are left for its translation."""
        return max(1, self.positions - (self.relative or 0))

    def limit(self, longest: int) -> int:
        """Return the tokens that a translation may have if the longest source has `longest`."""
        if longest > self.positions:
            raise UserError(
                f"A text of {longest} tokens is longer than the table of {self.positions} positions; shorten it, or "
                "convert the model with more positions."
            )
        relative = self.positions if self.relative is None else longest + self.relative
        return min(self.positions, relative, self.max_new_tokens or self.positions)

    def __call__(self, sources: Sequence[Sequence[int]]) -> list[list[ScoredTokens]]:
        """Return, for each text as a list of tokens, the tokens with `</s>` and scores of its n best hypotheses."""
        results = self.translator.translate_batch(
            [[self.tokens[index] for index in source] for source in sources],
            beam_size=self.num_beams,
            patience=self.patience,
            num_hypotheses=self.num_beams if self.penalty_type == "gnmt" else self.num_translations,
            length_penalty=self.alpha,
            max_input_length=0,
            max_decoding_length=self.limit(max(map(len, sources), default=1)),
            min_decoding_length=0,
            suppress_sequences=self.suppressed,
            end_token=self.ends,
            max_batch_size=self.batch_tokens,
            batch_type="tokens",
            return_scores=True,
            return_end_token=True,
        )
        return [self.rank(result.hypotheses, result.scores) for result in results]

    def rank(self, hypotheses: list[list[str]], scores: list[float]) -> list[ScoredTokens]:
        """Return the n best hypotheses, the best first."""
        if self.penalty_type == "gnmt":
            rescored = zip(hypotheses, map(self.score_by_lp, hypotheses, scores), strict=True)
            ranked = sorted(rescored, key=lambda pair: -pair[1])
        else:
            ranked = list(zip(hypotheses, scores, strict=True))
        return [
            ([self.ids[token] for token in tokens], score if self.scores else None)
            for tokens, score in ranked[: self.num_translations]
        ]

    def score_by_lp(self, hypothesis: list[str], score: float) -> float:
        """Return log P(Y | X) / lp(Y) from CTranslate2's log P(Y | X) / |Y|^alpha."""
        length = max(1, len(hypothesis))
        return score * length**self.alpha / length_penalty(length, self.alpha)

    def translate(self, texts: Sequence[str]) -> list[str]:
        """Return the best translation of each text.

        Raises:
            TypeError: `texts` is a single text, whose characters would be the texts.
            UserError: the folder has no tokenizer, or a text is longer than the table of positions.
        """
        if isinstance(texts, str):
            raise TypeError(f"texts is the str {texts!r}; give a list of texts, for example [text].")
        if self.tokenizer is None:
            raise UserError("The model was converted without its tokenizer; convert it with its tokenizer.")
        encode = text_encoder(self.tokenizer)
        hypotheses = self(encode(list(texts), return_attention_mask=False)["input_ids"])
        return self.tokenizer.batch_decode([best[0][0] for best in hypotheses], skip_special_tokens=True)
