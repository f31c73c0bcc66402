"""The command `vaswani-translate MODEL < source.txt > target.txt`, also `python -m vaswani_transformer.translation`."""

import json
import math
import re
from dataclasses import dataclass
from typing import Any, Literal

from ..support.command_line import positive_argument
from ..support.errors import UserError, one_line
from ..support.modes import is_non_autoregressive
from .lines import LineFormat, LineOptions, load_translator, make_parser, run
from .translator import Translation, Translator


@dataclass(frozen=True)
class TranslationOptions(LineOptions):
    """Options of `vaswani-translate`."""

    format: Literal["text", "jsonl"] = "text"
    field: str | None = None
    source: str | None = None
    scores: bool = False
    nbest: int | None = None

    def check(self) -> None:
        super().check()
        if self.interactive and self.format != "text":
            raise UserError("--interactive reads and writes plain text; leave out --format.")

    def translator_settings(self) -> dict[str, Any]:
        settings = super().translator_settings()
        settings["scores"] = self.scores
        if self.nbest is not None:
            settings["num_return_sequences"] = self.nbest
        return settings

    def check_search(self, translator: Translator) -> None:
        """Raise UserError for an option that the model does not support, or for more results than the search finds."""
        super().check_search(translator)
        search = translator.settings.values
        if is_non_autoregressive(translator.model):
            width = search.get("length_beam_size", 1) * search.get("num_latent_samples", 1)
            fix = "Use a larger --length_beam, or a smaller --nbest."
            if "length_beam_size" not in translator.model.family_settings:
                fix = "Leave it out."
        else:
            width = math.inf if search.get("do_sample") else search.get("num_beams", 1)
            fix = "Use more --beams, or a smaller --nbest."
        if self.nbest is not None and self.nbest > width:
            problem = f"more than the search finds; got {self.nbest}, expected at most {width}"
            raise UserError(f"--nbest: {problem}. {fix}")


@dataclass
class TranslationFormat(LineFormat[TranslationOptions]):
    """Input lines of text or JSON, and output lines of translations, the unfinished of which it counts."""

    unfinished: int = 0
    first_unfinished: int = 0  # its line

    def read(self, line: bytes, where: str) -> str:
        text = super().read(line, where)
        if not text or self.options.format == "text":
            return text
        language = self.options.source
        key = language or self.options.field or "text"
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
            raise UserError(f"{where}: {problem}; correct the line, or change --field or --source.") from error
        return value

    def write(self, translation: Translation, number: int) -> list[str]:
        if translation.is_unfinished:
            self.unfinished += 1
            self.first_unfinished = self.first_unfinished or number
        if self.options.format == "text":
            return self.write_text(translation, number)
        rows: list[dict[str, Any]] = []
        for hypothesis in translation.hypotheses:
            row: dict[str, Any] = {"translation": hypothesis.text}
            if hypothesis.score is not None:
                row["score"] = round(hypothesis.score, 4)
            if hypothesis.is_unfinished:
                row["unfinished"] = True
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
    options = TranslationOptions(**vars(parser.parse_args(arguments)))
    if options.format == "text" and (options.field or options.source):
        parser.error("--field and --source select the text of JSON Lines; add --format=jsonl.")
    run(TranslationFormat(options), lambda layouts: load_translator(options, layouts))
