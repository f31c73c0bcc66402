"""The command `vaswani-translate MODEL < source.txt > target.txt`, also `python -m vaswani_transformer.translation`."""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from ..cpu.model import Prepared
from ..support.command_line import positive_argument
from ..support.errors import UserError, one_line
from ..support.loading import LoadOptions, load_model, load_model_and_tokenizer
from .lines import SEARCH, LineFormat, LineOptions, Result, count_lines, load_translator, make_parser, run
from .pairs import Pair, pairs_of
from .reranking import Reranker
from .targets import TargetScore, TargetScorer
from .translator import WIDTH_OPTIONS, Translation, Translator, width_setting

SCORES = (
    "log_probability", "length_log_probability", "estimated_log_probability", "tokens", "token_log_probabilities",
)  # fmt: skip
"""Fields of `TargetScore` in JSON Lines."""

LIMITS_OF_TEXTS = ("batch_tokens", "max_source_tokens", "too_long")
"""Settings of a `Translator` that a `TargetScorer` has too."""


def rounded(value: Any) -> Any:
    """Return a value of JSON with four digits of its numbers, None for minus infinity."""
    if isinstance(value, list):
        return [rounded(each) for each in value]
    if isinstance(value, float):
        return round(value, 4) if math.isfinite(value) else None
    return value


@dataclass(frozen=True)
class TranslationOptions(LineOptions):
    """Options of `vaswani-translate`."""

    format: Literal["text", "jsonl"] = "text"
    field: str | None = None
    source: str | None = None
    scores: bool = False
    nbest: int | None = None
    score_targets: Path | None = None
    rerank: str | None = None
    prefix: Path | None = None
    target: str | None = None
    details: bool = False
    alignment_layer: int | None = None

    def check(self) -> None:
        super().check()
        if self.interactive and self.format != "text":
            raise UserError("--interactive reads and writes plain text; leave out --format.")
        for option in ("interactive", "scores", "nbest", "rerank", "prefix", "details", *SEARCH):
            value = getattr(self, option)
            if self.score_targets and not (value is None or value is False):  # 0 is a length penalty
                raise UserError(f"--{option}: has no use for given targets; leave it or --score_targets out.")
        if self.interactive and self.prefix:
            raise UserError("--interactive reads only sources; leave out --prefix.")
        for option in ("score_targets", "prefix"):
            if (path := getattr(self, option)) is not None:
                self.check_file(path, f"--{option}")

    def check_file(self, path: Path, option: str) -> None:
        """Raise an error for a file of targets that is missing or does not fit the input."""
        path.stat()  # raises for a missing file
        count, expected = count_lines(path), count_lines(self.input)
        if None not in (count, expected) and count != expected:
            numbers = f"got {count} lines, expected {expected}, as in {self.input}"
            raise UserError(f"{option}={path}: needs a line for each line of the input; {numbers}. Correct one.")

    @property
    def target_file(self) -> Path | None:
        """File with a target, or the prefix of one, for each line."""
        return self.score_targets or self.prefix

    def record(self) -> dict[str, Any]:
        """Return the settings that results depend on, among them what there is besides sources."""
        given = {"targets": self.score_targets, "prefixes": self.prefix, "details": self.details}
        flags = {name: True if value else None for name, value in given.items()}
        teacher = None if self.rerank is None else self.teacher().digest()
        return {**super().record(), **flags, "rerank": teacher}

    def teacher(self) -> LoadOptions:
        """Return the options for loading the teacher of `--rerank`; `--revision` is that of the model alone."""
        return LoadOptions(str(self.rerank), self.device, self.dtype, trust_remote_code=self.trust_remote_code)

    def translator_settings(self) -> dict[str, Any]:
        settings = super().translator_settings()
        settings["scores"] = self.scores
        settings["alignment_layer"] = self.alignment_layer
        if self.nbest is not None:
            settings["num_return_sequences"] = self.nbest
        return settings

    def check_search(self, translator: Translator) -> None:
        """Raise UserError for an option that the model does not support, or for more results than the search finds."""
        super().check_search(translator)
        if self.prefix is not None:
            translator.check_prefixes("--prefix")
        if self.details:
            translator.check_autoregressive("--details")
        width = translator.most_hypotheses
        if self.nbest is not None and self.nbest > width:
            problem = f"more than the search finds; got {self.nbest}, expected at most {width}"
            name = width_setting(translator.model)
            fix = "Leave it out." if name is None else f"Use a larger {WIDTH_OPTIONS[name]}, or a smaller --nbest."
            raise UserError(f"--nbest: {problem}. {fix}")


@dataclass
class TranslationFormat(LineFormat[TranslationOptions]):
    """Input lines of text or JSON, and output lines of translations, the unfinished of which it counts."""

    unfinished: int = 0
    first_unfinished: int = 0  # its line

    def read(self, line: bytes, where: str) -> str:
        language = self.options.source
        return self.read_field(line, where, language, language or self.options.field or "text")

    def read_all(self, lines: Iterable[bytes], name: str) -> Iterator[str | Pair]:
        texts = cast(Iterator[str], super().read_all(lines, name))
        path = self.options.target_file
        return texts if path is None else pairs_of(texts, self.read_targets(path), name, str(path))

    def read_targets(self, path: Path) -> Iterator[str]:
        """Yield the target of each line of a file; a line of JSON has it where `write` and data sets do."""
        language = self.options.target
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                yield self.read_field(line, f"{path}, line {number}", language, language or "translation")

    def read_field(self, line: bytes, where: str, language: str | None, key: str) -> str:
        """Return the text of a line, of JSON in the field `key`, or in the translations of `language`."""
        text = super().read(line, where)
        if not text or self.options.format == "text":
            return text
        try:
            row = json.loads(text)
            texts = row if language is None else row["translation"]
            value = texts[key].strip()
            value.encode()  # fails for half of a surrogate pair
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            expected = f'{{"{key}": "..."}}'
            if language is not None:
                expected = f'{{"translation": {expected}}}'
            problem = f"got {text[:80]}, expected {expected} ({one_line(error)})"
            raise UserError(
                f"{where}: {problem}; correct the line, or change --field, --source or --target."
            ) from error
        return value

    def results(
        self, translator: Any, window: list[Any], number: int, progress: Callable[[int], object]
    ) -> Sequence[Result]:
        if isinstance(translator, TargetScorer):
            return translator.score_window(window, number, progress)
        return super().results(translator, window, number, progress)

    def write_score(self, score: TargetScore) -> list[str]:
        """Return the line of a target's log-probability."""
        if self.options.format == "text":
            return [f"{score.log_probability:.4f}"]
        values = {name: getattr(score, name) for name in SCORES if getattr(score, name) is not None}
        return [json.dumps({name: rounded(value) for name, value in values.items()}, ensure_ascii=False)]

    def write(self, translation: Translation | TargetScore, number: int) -> list[str]:
        if isinstance(translation, TargetScore):
            return self.write_score(translation)
        if translation.is_unfinished:
            self.unfinished += 1
            self.first_unfinished = self.first_unfinished or number
        if self.options.format == "text":
            return self.write_text(translation, number)
        rows: list[dict[str, Any]] = []
        for hypothesis in translation.hypotheses:
            row: dict[str, Any] = {"translation": hypothesis.text}
            if hypothesis.score is not None:
                row["score"] = rounded(hypothesis.score)
            if hypothesis.is_unfinished:
                row["unfinished"] = True
            if (details := hypothesis.details) is not None:
                row["tokens"] = details.tokens
                row["token_log_probabilities"] = rounded(details.token_log_probabilities)
                row["alignment"] = details.pharaoh
            rows.append(row)
        result = rows[0] if self.options.nbest is None else {**rows[0], "nbest": rows}
        return [json.dumps(result, ensure_ascii=False)]

    def write_text(self, translation: Translation, number: int) -> list[str]:
        """Return a line of text for each hypothesis, after its number and score if options ask for them."""
        lines = []
        for hypothesis in translation.hypotheses:
            line = re.sub(r"[\r\n]", " ", hypothesis.text)
            if self.options.scores:
                line = f"{hypothesis.score:.4f}\t{line}"
            if self.options.nbest is not None:
                line = f"{number}\t{line}"
            lines.append(line)
        return lines

    def summary(self, count: int) -> str:
        """Return the number of unfinished translations, or an empty string."""
        if not self.unfinished:
            return ""
        subject = "1 translation is" if self.unfinished == 1 else f"{self.unfinished} translations are"
        where = f"first: line {self.first_unfinished}"
        return f"{subject} unfinished, cut off at the length limit or repeating the same words ({where})."


def load_scorer(options: TranslationOptions, layouts: dict[str, str]) -> TargetScorer:
    """Return the scorer of the command's model, prepared with the recorded `layouts`."""
    settings = {name: getattr(options, name) for name in LIMITS_OF_TEXTS}
    return TargetScorer(*load_model_and_tokenizer(options, layouts), **settings)


def set_details(options: TranslationOptions, translator: Translator) -> None:
    """Let a translator take details from the unprepared model if a command asks for them."""
    if options.details:
        source: dict[str, Any] = {"revision": options.revision, "trust_remote_code": options.trust_remote_code}
        is_prepared = isinstance(translator.model, Prepared)
        translator.details_from = (
            load_model(options.model, dtype="float32", **source) if is_prepared else translator.model
        )


def load_detailed(options: TranslationOptions, layouts: dict[str, str]) -> Translator:
    """Return the translator of a command, possibly with details."""
    translator = load_translator(options, layouts)
    set_details(options, translator)
    return translator


def load_reranker(options: TranslationOptions, layouts: dict[str, str]) -> Reranker:
    """Return the translator of a command whose teacher chooses, both prepared with the recorded `layouts`."""
    model, tokenizer = load_model_and_tokenizer(options, layouts)
    teacher, teacher_tokenizer = load_model_and_tokenizer(options.teacher(), layouts)
    layouts.update(getattr(teacher, "layouts", {}))
    settings = {**options.translator_settings(), "scores": False}  # they are the teacher's
    scorer = TargetScorer(teacher, teacher_tokenizer, **{name: settings[name] for name in LIMITS_OF_TEXTS})
    reranker = Reranker(model, tokenizer, scorer, **settings)
    options.check_search(reranker)
    set_details(options, reranker)
    return reranker


def main(arguments: list[str] | None = None) -> None:
    description = "Translate a text line by line, in order, by the model's own search."
    parser, lines = make_parser("vaswani-translate", description, "text to translate", "results")
    lines.add_argument("--format", choices=("text", "jsonl"), default="text", help="format of input and output (text)")
    key = lines.add_mutually_exclusive_group()
    key.add_argument("--field", metavar="NAME", help='field of JSON Lines with the text: {"NAME": "..."} (text)')
    key.add_argument("--source", metavar="LANGUAGE", help='or its language, in {"translation": {"LANGUAGE": "..."}}')
    scores_help = "write the score that ranks translations, such as log P(Y|X) / lp(Y), and a tab before each"
    lines.add_argument("--scores", action="store_true", help=scores_help)
    nbest_help = "write the N best, each after its line number and a tab"
    lines.add_argument("--nbest", type=positive_argument, metavar="N", help=nbest_help)
    score_help = "write the log-probability of the target in each line of FILE, instead of translating"
    lines.add_argument("--score_targets", type=Path, metavar="FILE", help=score_help)
    rerank_help = "write, of all lengths, latents or beams of the search, the translation that this model finds best"
    lines.add_argument("--rerank", metavar="TEACHER", help=rerank_help)
    prefix_help = "begin each translation with the text in its line of FILE; an empty line leaves it free"
    lines.add_argument("--prefix", type=Path, metavar="FILE", help=prefix_help)
    target_help = 'language of FILE, in {"translation": {"LANGUAGE": "..."}} (JSON Lines of {"translation": "..."})'
    lines.add_argument("--target", metavar="LANGUAGE", help=target_help)
    details_help = "add each token with its log-probability, and the alignment of words, to JSON Lines"
    lines.add_argument("--details", action="store_true", help=details_help)
    layer_help = "decoder layer whose attention aligns the words of --details, counted from 1 (the last)"
    lines.add_argument("--alignment_layer", type=positive_argument, metavar="N", help=layer_help)
    options = TranslationOptions(**vars(parser.parse_args(arguments)))
    if options.format == "text" and (options.field or options.source):
        parser.error("--field and --source select the text of JSON Lines; add --format=jsonl.")
    if options.target and not (options.target_file and options.format == "jsonl"):
        parser.error("--target selects the targets of JSON Lines; add --format=jsonl, and --score_targets or --prefix.")
    if options.details and options.format == "text":
        parser.error("--details adds fields to JSON Lines; add --format=jsonl.")
    if options.alignment_layer and not options.details:
        parser.error("--alignment_layer is a setting of --details; add it.")
    load: Callable[..., Translator | TargetScorer] = load_detailed
    if options.score_targets is not None:
        load = load_scorer
    elif options.rerank is not None:
        load = load_reranker
    run(TranslationFormat(options), lambda layouts: load(options, layouts))
