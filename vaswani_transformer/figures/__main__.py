"""The command `python -m vaswani_transformer.figures`, which writes a web page of a search and its attention."""

from pathlib import Path

from transformers.utils import logging

from ..support.command import MODEL_HELP, CommandParser, exit_on_user_error, say
from ..support.files import write_errors
from ..support.loading import load_model, load_tokenizer
from ..tokenizer import check_vocabulary
from .page import attention_page, search_and_attention_page


def main(arguments: list[str] | None = None) -> None:
    parser = CommandParser(
        allow_abbrev=False,
        prog="python -m vaswani_transformer.figures",
        description="Write one HTML page that shows how a model translates a sentence: the search, and the attention.",
    )
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("source", metavar="sentence", help="sentence to translate")
    parser.add_argument("--target", help="a translation, for its attention only (default: the model's own)")
    parser.add_argument("--output", type=Path, default=Path("attention.html"), help="the page (attention.html)")
    parser.add_argument("--force", action="store_true", help="replace the file that --output names")
    options = parser.parse_args(arguments)
    if options.output.exists() and not options.force:
        parser.error(f"{options.output}: the file exists; choose a different --output, or replace it with --force.")
    logging.disable_progress_bar()
    with exit_on_user_error(ValueError):
        tokenizer = load_tokenizer(options.model)
        model = load_model(options.model)
        check_vocabulary(model, tokenizer)
        if options.target is None:
            page = search_and_attention_page(model, tokenizer, options.source)
        else:
            page = attention_page(model, tokenizer, options.source, options.target)
        with write_errors(options.output, "make room, or choose a different --output"):
            options.output.write_text(page, encoding="utf-8")
    say(str(options.output))


if __name__ == "__main__":
    main()
