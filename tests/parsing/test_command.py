"""The command and `parse`: a tree a line with the line's words, drawing, and errors of one line."""

from pathlib import Path

import pytest

from tests.commands import Run, command_runner, error_line, lines
from tests.models import ModelAndTokenizer, memorizing_model, model_of_pairs, save
from tests.trees import GOLD, read
from vaswani_transformer import VaswaniTransformerTokenizer
from vaswani_transformer.parsing import command, draw_tree_text, linearize
from vaswani_transformer.parsing.command import parse
from vaswani_transformer.parsing.linear import linear_tokens

TREES = read(GOLD)[:4]
SENTENCES = [" ".join(tree.words) for tree in TREES]


@pytest.fixture(scope="module")
def parser() -> ModelAndTokenizer:
    """Return a model that memorized four trees, and its tokenizer."""
    tokenizer = VaswaniTransformerTokenizer.train_from_iterator(SENTENCES, vocab_size=300)
    targets = [linearize(tree) for tree in TREES]
    tokenizer.add_tokens(sorted(linear_tokens(targets)))
    model = memorizing_model(tokenizer, dict(zip(SENTENCES, targets, strict=True)), steps=150)
    model.use_paper_decoding()
    model.generation_config.update(max_source_relative_length=60)
    return model, tokenizer


@pytest.fixture(scope="module")
def folder(parser: ModelAndTokenizer, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Save the model and its tokenizer."""
    return str(save(tmp_path_factory.mktemp("parser"), *parser))


@pytest.fixture
def run(folder: str, capsysbinary: pytest.CaptureFixture[bytes]) -> Run:
    return command_runner(command.main, folder, capsysbinary)


def test_model_that_is_no_parser_is_refused(run: Run, saved: Path) -> None:
    for options in ((), ("--interactive",)):
        assert error_line(run(*options, stdin="I know\n", model=saved)).startswith(
            f"{saved}: is not a parser: its vocabulary has no tree tags. Use a model"
        )
    with pytest.raises(ValueError, match="is not a parser"):
        list(parse(*model_of_pairs(), ["I know"]))


def test_every_line_has_its_tree_and_an_empty_line_stays_empty(run: Run) -> None:
    output = run("--tokenized", stdin=lines([SENTENCES[0], "", *SENTENCES[1:]]))
    assert output == (lines([TREES[0], "", *TREES[1:]]), "", 0)
    for options in ((), ("--interactive",)):
        assert run(*options, stdin="The dog slept.\n") == (f"{TREES[0]}\n", "", 0)


def test_tree_of_any_output_has_the_words_of_its_line(run: Run) -> None:
    texts = ["under a bridge (near York)", "dog " * 30, "\u5c71"]  # five tokens have room for four words
    output, errors, status = run("--tokenized", "--beams=1", "--max_length=5", stdin=lines(texts))
    escaped = [text.replace("(", "-LRB-").replace(")", "-RRB-").split() for text in texts]
    assert ([tree.words for tree in read(output)], status) == (escaped, 0)
    unknown, malformed = errors.splitlines()
    assert unknown.endswith("(first: line 3, '\u5c71').")
    assert malformed == "2 of the 3 sentences had malformed output, and their trees were repaired."


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--draw", "--output=trees.ptb"], "--draw writes several lines for each tree"),
        (["--too_long=error", "--max_source_tokens=2"], "standard input, line 1: "),
    ],
)
def test_invalid_option_or_input_ends_the_command_with_one_line(arguments: list[str], message: str, run: Run) -> None:
    assert message in error_line(run(*arguments, stdin=lines(SENTENCES)))


def test_parse_takes_text_or_words_and_returns_the_commands_trees(parser: ModelAndTokenizer) -> None:
    actual = list(parse(*parser, ["The dog slept.", TREES[1].words], num_beams=2))
    assert actual == [(TREES[0], False), (TREES[1], False)]
    assert list(parse(*parser, ["The dog slept.", TREES[1].words], num_beams=2, skip=1)) == actual[1:]
    with pytest.raises(TypeError, match="pass a list of sentences"):
        next(parse(*parser, "The dog slept."))
    for word in ("New York", ""):
        with pytest.raises(
            ValueError, match=rf"^sentences: a word is empty or contains white space; got '{word}', exp"
        ):
            next(parse(*parser, [["The", word]]))


def test_drawing_has_a_line_a_node(run: Run) -> None:
    drawing = "TOP\n└── S\n    ├── NP\n    │   ├── DT The\n    │   └── NN dog\n    ├── VP\n"
    drawing += "    │   └── VBD slept\n    └── . ."
    assert draw_tree_text(TREES[0]) == drawing
    assert run("--draw", stdin="The dog slept.\n") == (f"{drawing}\n", "", 0)
