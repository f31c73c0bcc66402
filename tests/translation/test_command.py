"""The command writes a line per line, in order, by the search of the model or of its options, and resumes a file."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, MarianConfig

from tests import ROOT
from tests.commands import Run, command_runner, error_line, lines, user_error
from tests.forks import ForkedCommand
from tests.models import (
    EVERY_FAMILY,
    SLOT_FAMILY,
    SOURCES,
    TARGETS,
    family_of_pairs,
    load_tokenizer,
    model_of_pairs,
    paper_model_of_pairs,
    save,
    tiny_marian,
    tiny_model,
)
from vaswani_transformer import (
    VaswaniTransformerForConditionalGeneration,
    prepare_for_inference,
    score_targets,
)
from vaswani_transformer.convert.ctranslate2_exporter import to_ctranslate2
from vaswani_transformer.cpu import linear
from vaswani_transformer.cpu.encoder import PreparedEncoder
from vaswani_transformer.cpu.model import Prepared
from vaswani_transformer.support import loading
from vaswani_transformer.support.loading import LoadOptions
from vaswani_transformer.translation import command
from vaswani_transformer.translation.command import (
    TranslationFormat,
    TranslationOptions,
    load_translator,
    translate_lines,
)
from vaswani_transformer.translation.translator import Hypothesis, Translation, translate


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Save the model of pairs with the paper's search."""
    return str(save(tmp_path_factory.mktemp("model"), *paper_model_of_pairs()))


@pytest.fixture
def run(folder: str, capsysbinary: pytest.CaptureFixture[bytes]) -> Run:
    return command_runner(command.main, folder, capsysbinary)


def test_every_line_has_its_translation_and_an_empty_line_stays_empty(run: Run) -> None:
    source = [SOURCES[0], "", *SOURCES[1:4], " \t", *SOURCES[4:]]
    expected = [TARGETS[0], "", *TARGETS[1:4], "", *TARGETS[4:]]
    assert run(stdin=lines(source)) == (lines(expected), "", 0)
    assert run("--window=3", "--batch_tokens=20", stdin=lines(source)[:-1]) == (lines(expected), "", 0)
    assert run(stdin="") == ("", "", 0)


def n_best(folder: str, **settings: Any) -> list[list[Hypothesis]]:
    """Return what the command prints: its model is prepared, and another one rounds the last digit differently."""
    model, tokenizer = prepare_for_inference(AutoModelForSeq2SeqLM.from_pretrained(folder)), load_tokenizer(folder)
    return [translation.hypotheses for translation in translate(model, tokenizer, SOURCES, scores=True, **settings)]


def test_scores_stand_before_their_translations_and_the_lines_number_before_n_best_ones(run: Run, folder: str) -> None:
    source = lines(SOURCES).encode()
    expected = lines(f"{best[0].score:.4f}\t{best[0].text}" for best in n_best(folder))
    assert run("--scores", stdin=source) == (expected, "", 0)
    every = enumerate(n_best(folder, num_return_sequences=3), start=1)
    expected = lines(f"{number}\t{each.score:.4f}\t{each.text}" for number, best in every for each in best)
    assert run("--nbest=3", "--scores", stdin=source) == (expected, "", 0)


def test_json_lines_give_json_lines(run: Run, folder: str) -> None:
    rows = [json.dumps({"id": number, "text": text}) for number, text in enumerate(SOURCES)]
    output, _, _ = run("--format=jsonl", stdin=lines([*rows, '{"text": ""}', ""]))
    assert [json.loads(line) for line in output.splitlines()] == [{"translation": text} for text in [*TARGETS, "", ""]]
    output, _, _ = run("--format=jsonl", "--nbest=2", "--scores", stdin=lines(rows))
    for line, best in zip(output.splitlines(), n_best(folder, num_return_sequences=2), strict=True):
        expected = [{"translation": each.text, "score": round(cast(float, each.score), 4)} for each in best]
        assert json.loads(line) == expected[0] | {"nbest": expected}


def test_line_ends_only_at_a_line_feed_and_a_byte_order_mark_is_no_text() -> None:
    stream = "\ufeffone\r\n\n  two\rthree \u2028four\n\ufefffive \ufeff"
    form = TranslationFormat(TranslationOptions("a model"))
    texts = [form.read(line, "f") for line in io.BytesIO(stream.encode())]
    assert texts == ["one", "", "two\rthree \u2028four", "five \ufeff"]


@pytest.mark.parametrize(
    ("row", "field", "language"),
    [
        ({"text": " a\nb ", "id": 1}, None, None),
        ({"sentence": "a\nb", "text": "b"}, "sentence", None),
        ({"translation": {"en": "a\nb", "de": "b"}}, None, "en"),
    ],
)
def test_text_of_json_lines_is_in_the_field_of_the_option(
    row: dict[str, Any], field: str | None, language: str | None
) -> None:
    form = TranslationFormat(TranslationOptions("a model", format="jsonl", field=field, source=language))
    assert form.read(json.dumps(row).encode(), "f") == "a\nb"


@pytest.mark.parametrize(
    ("line", "language", "message"),
    [
        (
            '{"text": ',
            None,
            r'f: got \{"text":, expected \{"text": "\.\.\."\} \(Expecting value: .*\); correct the line',
        ),
        ('{"text": "a\\ud800"}', None, "surrogates not allowed"),
        *((line, None, "f: got .*, exp") for line in ('{"text": 3}', "{}", "[1]", '"t"', "[" * 100_000)),
        ('{"translation": {"en": null}}', "en", r'expected \{"translation": \{"en": "\.\.\."\}\}'),
    ],
)
def test_line_without_a_text_is_an_error_that_names_it(line: str, language: str | None, message: str) -> None:
    form = TranslationFormat(TranslationOptions("a model", format="jsonl", source=language))
    with user_error(message):
        form.read(line.encode(), "f")


def test_translation_is_written_on_one_line() -> None:
    translation = Translation([Hypothesis("a\nb\r\nc\rd", 1, None)], 1, False, 1)
    form = TranslationFormat(TranslationOptions("a model"))
    assert form.write(translation, 1) == ["a b  c d"]


def test_search_is_the_models_unless_options_set_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, generate = [], VaswaniTransformerForConditionalGeneration.generate

    def watched(self: VaswaniTransformerForConditionalGeneration, **arguments: Any) -> Any:
        others = ("input_ids", "attention_mask", "nan_handler")
        calls.append({name: value for name, value in arguments.items() if name not in others})
        return generate(self, **arguments)

    monkeypatch.setattr(VaswaniTransformerForConditionalGeneration, "generate", watched)
    run(stdin="hello world")
    run("--beams=2", "--length_penalty=1.5", "--max_length=3", "--nbest=2", stdin="hello world")
    saved = {"num_beams": 2, "length_penalty": 1.5, "max_new_tokens": 3, "num_return_sequences": 2}
    assert calls == [{"num_return_sequences": 1}, saved]


@pytest.mark.parametrize(
    ("family", "options", "settings"),
    [
        ("nat", ["--length_penalty=2", "--max_length=5"], {"length_penalty": 2.0, "max_new_tokens": 5}),
        ("cmlm", ["--iterations=4"], {"num_iterations": 4}),
        ("cmlm", ["--length_beam=3", "--nbest=2"], {"length_beam_size": 3, "num_return_sequences": 2}),
    ],
    ids=str,
)
def test_non_autoregressive_model_translates_by_its_options_and_scores_by_its_own_scores(
    run: Run, tmp_path: Path, family: str, options: list[str], settings: dict[str, int]
) -> None:
    model, tokenizer = family_of_pairs(family)
    save(tmp_path, model, tokenizer)
    rows = lines(json.dumps({"text": text}) for text in SOURCES)
    output, _, status = run(*options, "--scores", "--format=jsonl", stdin=rows.encode(), model=tmp_path)
    assert status == 0
    actual = [row for line in output.splitlines() for row in json.loads(line).get("nbest", [json.loads(line)])]
    expected = []
    for source in SOURCES:
        batch = tokenizer([source], return_tensors="pt")
        best = model.generate(**batch, return_dict_in_generate=True, **settings)
        texts = tokenizer.batch_decode(best.sequences, skip_special_tokens=True)
        expected += list(zip(texts, best.sequences_scores.tolist(), strict=True))
    assert [row["translation"] for row in actual] == [text for text, _ in expected]
    assert [row["score"] for row in actual] == pytest.approx([score for _, score in expected], abs=2e-3)


def test_given_targets_get_their_log_probabilities(run: Run, folder: str, tmp_path: Path) -> None:
    """In JSON Lines the targets may be what the command wrote, or a language of a data set."""
    path = tmp_path / "targets"
    path.write_text(lines(TARGETS))
    output, errors, status = run("--score_targets", path, stdin=lines(SOURCES))
    assert (errors, status) == ("", 0)
    model = prepare_for_inference(AutoModelForSeq2SeqLM.from_pretrained(folder))
    expected = list(score_targets(model, load_tokenizer(folder), SOURCES, TARGETS))
    assert [float(line) for line in output.splitlines()] == [round(each.log_probability, 4) for each in expected]

    path.write_text(lines(json.dumps({"translation": text}) for text in TARGETS))
    rows = lines(json.dumps({"text": text}) for text in SOURCES)
    output, _, _ = run("--format=jsonl", "--score_targets", path, stdin=rows)
    for line, each in zip(output.splitlines(), expected, strict=True):
        tokens = [round(value, 4) for value in each.token_log_probabilities or ()]
        total = {"log_probability": round(each.log_probability, 4)}
        assert json.loads(line) == total | {"tokens": each.tokens, "token_log_probabilities": tokens}

    pairs = zip(SOURCES, TARGETS, strict=True)
    path.write_text(lines(json.dumps({"translation": {"en": en, "es": es}}) for en, es in pairs))
    options = ("--format=jsonl", "--source=en", "--target=es", "--score_targets", path)
    assert run(*options, stdin=path.read_bytes()) == (output, "", 0)


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_scores_of_targets_resume_to_the_same_bytes_with_every_family(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    save(tmp_path / "model", *family_of_pairs(family))
    source, targets, uninterrupted, path = (tmp_path / name for name in ("source", "targets", "whole", "path"))
    source.write_text(lines(json.dumps({"text": text}) for text in SOURCES))
    rows = [json.dumps({"translation": text}) for text in ["gato " * 50, *TARGETS[1:]]]
    targets.write_text(lines(rows))
    arguments = ["--format=jsonl", "--score_targets", targets, "--window=2", "--input", source, "--output"]
    assert run(*arguments, uninterrupted, model=tmp_path / "model") == ("", "", 0)
    with monkeypatch.context() as patch:
        patch.setattr(TranslationFormat, "write", interrupted(4))
        assert run(*arguments, path, model=tmp_path / "model")[2] == 130
    targets.write_text(lines([rows[1], *rows[1:]]))
    message = f"{path}: was written from a different input: the first 2 texts differ"
    assert error_line(run(*arguments, path, model=tmp_path / "model")).startswith(message)
    targets.write_text(lines(rows))
    assert run(*arguments, path, model=tmp_path / "model")[2] == 0
    assert path.read_bytes() == uninterrupted.read_bytes()
    first = json.loads(path.read_text().splitlines()[0])
    assert (first["log_probability"] is None) == (family in SLOT_FAMILY)
    options = ["--format=jsonl", "--input", source, "--output", path]
    assert "different settings (targets)" in error_line(run(*options, model=tmp_path / "model"))


def test_targets_that_do_not_fit_the_lines_end_the_command_with_one_line(run: Run, tmp_path: Path) -> None:
    source, targets = tmp_path / "source", tmp_path / "targets"
    source.write_text(lines(SOURCES))
    targets.write_text(lines(TARGETS[:2]))
    problem = "needs a line for each line of the input; got 2 lines, expected 6, as in"
    line = error_line(run("--score_targets", targets, "--input", source, model="nothing"))
    assert line == f"--score_targets={targets}: {problem} {source}. Correct one.\n"
    line = error_line(run("--score_targets", targets, stdin=source.read_bytes()))
    assert line.startswith(f"{targets}: not as many texts as in standard input; got 2, expected one for each.")
    for option in ("--length_penalty=0", "--scores"):
        name = option.partition("=")[0]
        message = f"{name}: has no effect on given targets; leave it or --score_targets out.\n"
        assert error_line(run("--score_targets", targets, option, model="nothing")) == message
    assert "No such file" in error_line(run("--score_targets=nothing", stdin="cat\n"))
    assert "add --format=jsonl, and --score_targets or --prefix. --help lists" in error_line(
        run("--target=de", stdin="cat\n")
    )


def test_translations_continue_the_prefix_of_their_line(run: Run, tmp_path: Path, monkeypatch: Any) -> None:
    """In JSON Lines the prefixes may be beginnings of a language of a data set; a resumed file has the same bytes."""
    prefixes = ["", "te amo mucho", "la gata es", "buenas", "", "este"]
    source, path, whole, part = (tmp_path / name for name in ("source", "prefixes", "whole", "part"))
    source.write_text(lines(SOURCES))
    path.write_text(lines(prefixes))
    options = ["--prefix", path, "--window=2", "--max_length=20", "--input", source]
    output, _, status = run(*options)
    assert status == 0
    texts = output.splitlines()
    assert all(text.startswith(prefix) for text, prefix in zip(texts, prefixes, strict=True))
    assert (texts[0], texts[4]) == (TARGETS[0], TARGETS[4])

    assert run(*options, "--output", whole)[2] == 0
    with monkeypatch.context() as patch:
        patch.setattr(TranslationFormat, "write", interrupted(4))
        assert run(*options, "--output", part)[2] == 130
    changed = "was written with different settings (prefixes)"
    assert changed in error_line(run(*options[2:], "--output", part))
    assert run(*options, "--output", part)[2] == 0
    assert part.read_bytes() == whole.read_bytes() == output.encode()

    pairs = zip(SOURCES, prefixes, strict=True)
    path.write_text(lines(json.dumps({"translation": {"en": en, "es": es}}) for en, es in pairs))
    rows = ["--format=jsonl", "--source=en", "--target=es", "--max_length=20", "--prefix", path]
    output, _, _ = run(*rows, stdin=path.read_bytes())
    assert [json.loads(line)["translation"] for line in output.splitlines()] == texts


def test_prefix_that_cannot_be_continued_ends_the_command_with_one_line(run: Run, tmp_path: Path) -> None:
    path, model = tmp_path / "prefixes", tmp_path / "model"
    path.write_text("el\n")
    save(model, *family_of_pairs("nat"))
    line = error_line(run("--prefix", path, stdin="cat\n", model=model))
    assert line.startswith("--prefix: not supported by the model; got a ")
    line = error_line(run("--prefix", path, "--interactive", stdin="cat\n"))
    assert line.startswith("--interactive reads only sources; leave out --prefix.")


def test_details_are_the_tokens_their_log_probabilities_and_the_alignment(
    run: Run, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All else in a line is as without the option, and a resumed file has the same bytes."""
    source, whole, part = (tmp_path / name for name in ("source", "whole", "part"))
    source.write_text(lines([*(json.dumps({"text": text}) for text in SOURCES), ""]))
    arguments = ["--format=jsonl", "--window=2", "--nbest=2", "--scores", "--input", source]
    plain, _, _ = run(*arguments)
    output, errors, status = run(*arguments, "--details")
    assert (errors, status) == ("", 0)
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder), load_tokenizer(folder)
    expected = [each.details for each in translate(model, tokenizer, [*SOURCES, ""], details_from=model)]
    for line, without, details in zip(output.splitlines(), plain.splitlines(), expected, strict=True):
        row, best = json.loads(line), json.loads(line)["nbest"][0]
        assert details is not None
        for each in (row, *row["nbest"]):
            probabilities = each.pop("token_log_probabilities")
            assert len(probabilities) == len(each.pop("tokens"))
            each.pop("alignment")
        assert (best["tokens"], best["alignment"]) == (details.tokens, details.pharaoh)
        assert best["token_log_probabilities"] == pytest.approx(details.token_log_probabilities, abs=1e-3)
        assert row == json.loads(without)

    assert run(*arguments, "--details", "--output", whole)[2] == 0
    with monkeypatch.context() as patch:
        patch.setattr(TranslationFormat, "write", interrupted(4))
        assert run(*arguments, "--details", "--output", part)[2] == 130
    assert "was written with different settings (details)" in error_line(run(*arguments, "--output", part))
    assert run(*arguments, "--details", "--output", part)[2] == 0
    assert part.read_bytes() == whole.read_bytes() == output.encode()


@pytest.mark.parametrize("kind", ["nat", "ctranslate2", "text", "layer"])
def test_details_that_cannot_be_had_end_the_command_with_one_line(run: Run, tmp_path: Path, kind: str) -> None:
    model = tmp_path / "model"
    arguments, message = ["--format=jsonl", "--details"], "--details: not supported by the model; got a "
    if kind == "ctranslate2":
        pytest.importorskip("ctranslate2")
        to_ctranslate2(*model_of_pairs(), model)
        message = f"{model}: cannot be loaded: "
    elif kind == "text":
        arguments, message = ["--details"], "--details adds fields to JSON Lines; add --format=jsonl."
    elif kind == "layer":
        arguments, message = ["--alignment_layer=1"], "--alignment_layer is a setting of --details; add it."
    else:
        save(model, *family_of_pairs(kind))
    assert message in error_line(run(*arguments, stdin='{"text": "cat"}\n', model=model))


def test_lines_with_unknown_words_are_counted_in_one_line_at_the_end(run: Run) -> None:
    texts = [SOURCES[0], f"{SOURCES[0]} wärld", SOURCES[1], "§ \x1b"]
    _, errors, status = run("--max_length=5", stdin=lines(texts))
    warning = "2 lines contain out-of-vocabulary words, so the results are guesses (first: line 2, 'wärld')"
    assert (errors.splitlines()[0], status) == (f"standard input: {warning}.", 0)
    assert "vocabulary" not in run("--max_length=5", stdin=lines(SOURCES))[1]
    _, errors, _ = run("--interactive", "--max_length=5", stdin=lines(texts[:2]))
    assert "Out-of-vocabulary words (their translations are guesses): 'wärld'." in errors


def test_unfinished_translations_are_counted_at_the_end_and_marked_in_json(run: Run) -> None:
    limited = lines(["hello world", "", "this is a book", "the cat is black"])
    output, errors, status = run("--max_length=6", stdin=limited)
    warning = "2 translations are unfinished, cut off at the length limit or repeating the same words (first: line 3)"
    assert (output.splitlines()[:2], errors, status) == ([TARGETS[0], ""], f"{warning}.\n", 0)
    rows = lines(json.dumps({"text": text}) for text in limited.splitlines())
    output, _, _ = run("--max_length=6", "--format=jsonl", stdin=rows)
    marks = [json.loads(line).get("unfinished") for line in output.splitlines()]
    assert marks == [None, None, True, True]
    _, errors, _ = run("--interactive", "--max_length=6", stdin=limited)
    assert errors == "Unfinished: the translation reached the length limit, or repeats itself.\n" * 2


@pytest.mark.parametrize(("dtype", "expected"), [("auto", "float32"), ("int8", "int8"), ("float16", None)])
def test_model_on_a_cpu_is_prepared_in_the_requested_dtype(
    run: Run, monkeypatch: pytest.MonkeyPatch, dtype: str, expected: str | None
) -> None:
    dtypes = []
    monkeypatch.setattr(
        loading, "prepare_for_inference", lambda *given: dtypes.append(given[1]) or prepare_for_inference(*given)
    )
    assert run("--device=cpu", f"--dtype={dtype}", stdin=lines(SOURCES)) == (lines(TARGETS), "", 0)
    assert dtypes == ([] if expected is None else [expected])


def test_non_autoregressive_model_is_prepared_too_and_one_of_another_package_is_not(tmp_path: Path) -> None:
    save(tmp_path / "cmlm", *family_of_pairs("cmlm"))
    assert isinstance(loading.load_model_and_tokenizer(LoadOptions(str(tmp_path / "cmlm"), "cpu", "int8"))[0], Prepared)
    _, tokenizer = model_of_pairs()
    save(tmp_path / "marian", tiny_marian(vocab_size=len(tokenizer)).half(), tokenizer)
    for dtype, expected in (("auto", torch.float32), ("float16", torch.float16)):
        model, _ = loading.load_model_and_tokenizer(LoadOptions(str(tmp_path / "marian"), "cpu", dtype))
        assert model.dtype == expected


def test_line_that_is_too_long_is_truncated_with_a_warning_or_kept_or_an_error(run: Run) -> None:
    source = lines([SOURCES[0], "", "is a book this good morning", SOURCES[1]]).encode()
    output, errors, status = run("--max_source_tokens=9", stdin=source)
    kept, no_errors, _ = run("--max_source_tokens=9", "--too_long=keep", stdin=source)
    assert (status, no_errors) == (0, "")
    assert [output.splitlines()[index] for index in (0, 1, 3)] == [kept.splitlines()[index] for index in (0, 1, 3)]
    assert errors == ("standard input, line 3: 19 tokens, more than 9, so it was truncated; see --too_long.\n")
    output, errors, status = run("--max_source_tokens=9", "--too_long=error", "--window=1", stdin=source)
    assert (output, status) == (lines([TARGETS[0], ""]), 2)
    assert errors == ("standard input, line 3: 19 tokens, more than 9; shorten it, or choose a different --too_long.\n")


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("tried to allocate 9 GiB\nand more"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 40 bytes."),
    ],
)
def test_batch_too_large_for_the_device_ends_the_command_with_the_way_out(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: RuntimeError
) -> None:
    monkeypatch.setattr(VaswaniTransformerForConditionalGeneration, "generate", Mock(side_effect=error))
    fix = "use a smaller --batch_tokens or fewer --beams."
    assert error_line(run(stdin="cat\n")) == f"The device has too little memory for a batch; {fix}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--interactive", "--output=x"], "--interactive uses standard input and output; leave out --input"),
        (["--interactive", "--format=jsonl"], "--interactive reads and writes plain text; leave out --format."),
        (["--field=x"], "--field and --source select the text of JSON Lines; add --format=jsonl."),
        (["--format=jsonl", "--field=x", "--source=en"], "argument --source: not allowed with argument --field"),
        (["--input=/nothing"], "/nothing: No such file or directory"),
        ([f"--output={ROOT}"], f"{ROOT}: Is a directory"),
        ([f"--input={__file__}", f"--output={__file__}"], f"--output={__file__}: is the input, which stays unchanged;"),
        (["--device=meta"], "--device=meta: contains shapes without numbers; use --device=cpu"),
        (["--nbest=5"], "--nbest: more than the search finds; got 5, expected at most 4. Use a larger --beams"),
        (["--iterations=2"], "--iterations=2: "),
        (["--format=jsonl"], "standard input, line 1: got cat, expected"),
        (["--device=nowhere"], "--device=nowhere: cannot be loaded: "),
        (["--beams=0"], "argument --beams: got '0', expected an integer of at least 1"),
        (["--length_penalty=1e4"], "argument --length_penalty: got '1e4', expected a number from -10 to 10"),
        (["--length_penalty=long"], "argument --length_penalty: got 'long', expected a number from -10 to 10"),
        (["--beam=1"], "unrecognized arguments: --beam=1; did you mean --beams? --help lists the options.\n"),
        (["--nothing"], "unrecognized arguments: --nothing. --help lists the options.\n"),
        ([], "standard input, line 2: not UTF-8 ('utf-8' codec can't decode byte 0xff in position 0: "),
    ],
)
def test_invalid_option_or_input_ends_the_command_with_one_line(run: Run, arguments: list[str], message: str) -> None:
    assert message in error_line(run(*arguments, stdin=b"cat\n\xff\n"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"cat\0", "line 1: contains a NUL character, as UTF-16 and damaged files do; correct the line, or convert"),
        (b"version https://git-lfs.github.com/spec/v1\n", "line 1: is a pointer of Git LFS, not the file; run git lfs"),
    ],
)
def test_input_that_is_no_text_ends_the_command_with_one_line(run: Run, line: bytes, message: str) -> None:
    assert message in error_line(run(stdin=line))


@pytest.mark.parametrize(
    ("family", "option"),
    [
        ("autoregressive", "--iterations=1"),
        ("autoregressive", "--length_beam=1"),
        ("autoregressive", "--length_bonus=0"),
        ("nat", "--beams=1"),
        ("ctc", "--iterations=1"),
        ("dag", "--length_beam=1"),
    ],
)
def test_option_that_asks_for_what_a_model_does_anyway_changes_nothing(
    run: Run, tmp_path: Path, family: str, option: str
) -> None:
    save(tmp_path, *family_of_pairs(family))
    assert run(option, stdin=b"cat\n", model=tmp_path) == run(stdin=b"cat\n", model=tmp_path)


@pytest.mark.parametrize(
    ("family", "option", "message"),
    [
        ("nat", "--nbest=2", "--nbest: more than the search finds; got 2, expected at most 1. Use a larger --length_b"),
        ("cmlm", "--nbest=2", "expected at most 1. Use a larger --length_beam, or a smaller --nbest."),
        ("ctc", "--nbest=2", "--nbest: more than the search finds; got 2, expected at most 1. Use a larger --beams"),
        ("ctc", "--length_beam=2", "--length_beam=2: "),
        ("dag", "--beams=2", "--beams=2: "),
        ("dag", "--nbest=2", "--nbest: more than the search finds; got 2, expected at most 1. Leave it out."),
        ("ctc", "--decoding_strategy=greedy", "--decoding_strategy=greedy: "),
        ("nat", "--iterations=2", "--iterations=2: "),
        ("iterative_vae", "--beams=2", "--beams=2: "),
        ("nat", "--length_bonus=0.5", "--length_bonus=0.5: "),
        ("autoregressive", "--length_bonus=0.5", "--length_bonus=0.5: "),
    ],
)
def test_option_that_a_non_autoregressive_model_lacks_ends_the_command_with_one_line(
    run: Run, tmp_path: Path, family: str, option: str, message: str
) -> None:
    save(tmp_path, *family_of_pairs(family))
    assert message in error_line(run(option, stdin=lines(SOURCES), model=tmp_path))


@pytest.mark.parametrize("way", ["symlink", "hard link", "spelling"])
def test_output_that_is_the_input_by_another_name_is_an_error(run: Run, tmp_path: Path, way: str) -> None:
    source, other = tmp_path / "source.txt", tmp_path / "other.txt"
    source.write_text("cat\n")
    if way == "symlink":
        other.symlink_to(source)
    elif way == "hard link":
        other.hardlink_to(source)
    else:
        (tmp_path / "folder").mkdir()
        other = tmp_path / "folder" / ".." / "source.txt"
    line = error_line(run(f"--input={source}", f"--output={other}"))
    assert line == f"--output={other}: is the input, which stays unchanged; choose a different --output.\n"
    assert source.read_text() == "cat\n"


@pytest.mark.parametrize(("stream", "option"), [("stdin", "--input"), ("stdout", "--output")])
def test_closed_standard_stream_is_an_error_that_names_the_option(
    run: Run, folder: str, monkeypatch: pytest.MonkeyPatch, stream: str, option: str
) -> None:
    monkeypatch.setattr(sys, stream, None)
    form = TranslationFormat(TranslationOptions(folder))
    with user_error(rf"standard (in|out)put: is closed; use {option}\."):
        translate_lines(form, lambda layouts: load_translator(form.options, layouts))


def test_model_that_does_not_fit_ends_the_command_with_one_line(run: Run, folder: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder)
    save(tmp_path / "other", tiny_model(), tokenizer)
    expected = f"{tmp_path}/other: its tokenizer has {len(tokenizer)} entries, the model only 99; use the tokenizer of "
    assert error_line(run(stdin="cat\n", model=tmp_path / "other")).startswith(expected)
    MarianConfig(vocab_size=9, pad_token_id=1, decoder_start_token_id=1).save_pretrained(tmp_path)
    assert error_line(run("--dtype=int8", "--device=cpu", stdin="cat\n", model=tmp_path)) == (
        f"--dtype=int8: is for models of this package on a CPU, not for {tmp_path} on cpu; "
        "choose a different --dtype, or --device=cpu.\n"
    )


def interrupted(stop_at: int) -> Callable[[TranslationFormat, Translation, int], list[str]]:
    """Return a method that stops the command, like a signal, before it writes result number `stop_at`."""
    write = TranslationFormat.write

    def stop(form: TranslationFormat, translation: Translation, number: int) -> list[str]:
        if number == stop_at:
            raise KeyboardInterrupt
        return write(form, translation, number)

    return stop


@pytest.mark.parametrize("form", ["text", "jsonl"])
def test_interrupted_output_resumes_to_the_bytes_of_an_uninterrupted_one(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    source, uninterrupted, path = (tmp_path / name for name in ("source", "whole", "path"))
    source.write_text(lines(json.dumps({"text": text}) if form == "jsonl" else text for text in SOURCES))
    options = [f"--format={form}", "--nbest=2", "--scores", "--window=2", "--batch_tokens=20"]
    arguments = [*options, "--input", source]
    assert run(*arguments, "--output", uninterrupted) == ("", "", 0)
    with monkeypatch.context() as patch:
        patch.setattr(TranslationFormat, "write", interrupted(4))
        assert run(*arguments, "--output", path) == ("", "Interrupted; the same command resumes it.\n", 130)
    path.write_bytes(path.read_bytes() + b"a part")
    assert run(*arguments, "--output", path) == ("", f"{path}: resumes after line 2 of {source}.\n", 0)
    assert path.read_bytes() == uninterrupted.read_bytes()
    monkeypatch.setattr(command, "load_translator", lambda _: pytest.fail("the model is loaded"))
    assert run(*arguments, "--output", path) == ("", f"{path}: is finished already and stays unchanged.\n", 0)


def test_resumed_output_has_the_layouts_of_its_record_whatever_the_times(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_layouts: None
) -> None:
    source, uninterrupted, path = (tmp_path / name for name in ("source", "whole", "path"))
    source.write_text(lines(SOURCES))
    arguments = ["--scores", "--window=3", "--input", source, "--output"]
    monkeypatch.setattr(linear, "best_times", lambda products, rows: [2.0, 1.0])
    run(*arguments, uninterrupted)
    with monkeypatch.context() as patch:
        patch.setattr(TranslationFormat, "write", interrupted(4))
        run(*arguments, path)
    record_path = path.with_name("path.record")
    recorded = json.loads(record_path.read_text(encoding="utf-8"))["layouts"]
    linear.timed_layouts.clear()
    monkeypatch.setattr(linear, "best_times", lambda products, rows: [1.0, 2.0])
    assert run(*arguments, path)[2] == 0
    assert path.read_bytes() == uninterrupted.read_bytes()
    assert json.loads(record_path.read_text(encoding="utf-8"))["layouts"] == recorded
    assert not linear.timed_layouts
    assert set(recorded.values()) <= {"torch"}


def test_unfinished_output_of_other_settings_or_another_model_is_an_error_and_other_batches_are_not(
    run: Run, saved: Path, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other model is the same with another search."""
    source, path = tmp_path / "source", tmp_path / "path"
    source.write_text(lines(SOURCES))
    arguments = ("--input", source, "--output", path)
    with monkeypatch.context() as patch:
        patch.setattr(TranslationFormat, "write", interrupted(5))
        run(*arguments, "--window=4")
    for options, model, problem in ((["--scores"], folder, "scores"), ([], saved, "model")):
        line = error_line(run(*arguments, *options, model=model))
        assert line.startswith(
            f"{path}: was written with different settings ({problem}); it stays unchanged: rerun the original command"
        )
        assert path.read_text() == lines(TARGETS[:4])
    assert run(*arguments, "--batch_tokens=10")[2] == 0
    assert path.read_text() == lines(TARGETS)


def test_record_has_the_complete_search_and_a_device_has_none(run: Run, tmp_path: Path) -> None:
    run("--beams=2", "--output", tmp_path / "target", stdin="cat\n")
    search = json.loads((tmp_path / "target.record").read_text())["search"]
    assert (search["num_beams"], search["length_penalty_type"], search["max_source_relative_length"]) == (2, "gnmt", 50)
    assert run("--output", "/dev/null", stdin="cat\n") == ("", "", 0)


@pytest.mark.slow
def test_killed_command_leaves_an_output_that_can_resume(run: Run, folder: str, tmp_path: Path) -> None:
    source, uninterrupted, path = (tmp_path / name for name in ("source", "whole", "path"))
    source.write_text(lines(SOURCES * 8))
    arguments = ("--window=7", "--nbest=2", "--scores", "--input", str(source))
    process = ForkedCommand("vaswani_transformer.translation", [folder, *arguments, "--output", str(path)])
    while not path.exists() or path.stat().st_size < 200:
        assert process.poll() is None
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert 0 < path.read_text().count("\n") < 96
    assert run(*arguments, "--output", path)[2] == 0
    run(*arguments, "--output", uninterrupted)
    assert path.read_bytes() == uninterrupted.read_bytes()


def test_interactive_session_prints_a_line_for_a_line(run: Run) -> None:
    typed = b"a\xff\n" + lines([SOURCES[0], "", SOURCES[1]]).encode()
    output, errors, status = run("--interactive", stdin=typed)
    assert (output, status) == (lines([TARGETS[0], "", TARGETS[1]]), 0)
    assert errors.startswith("standard input, line 1: not UTF-8 (")
    options = ("--interactive", "--too_long=error", "--max_source_tokens=8")
    output, errors, _ = run(*options, stdin=lines(SOURCES[:3]))
    assert (output, errors.partition(";")[0]) == (lines(TARGETS[:2]), "standard input, line 3: 9 tokens, more than 8")


@pytest.mark.parametrize(("is_terminal", "prompt"), [(False, ""), (True, "> ")])
def test_interactive_session_in_a_terminal_prompts_unless_its_output_goes_elsewhere(
    folder: str, is_terminal: bool, prompt: str, monkeypatch: pytest.MonkeyPatch, capsysbinary: Any
) -> None:
    prompts, typed = [], iter(SOURCES[:2])

    def answer(shown: str) -> str:
        prompts.append(shown)
        if (line := next(typed, None)) is None:
            raise EOFError
        return line

    terminal = io.TextIOWrapper(io.BytesIO())
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", terminal)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    monkeypatch.setattr("builtins.input", answer)
    command.main([folder, "--interactive"])
    output, errors = (text.decode() for text in capsysbinary.readouterr())
    assert (output, errors, prompts) == (lines(TARGETS[:2]), "", [prompt] * 3)


def start(folder: str, *arguments: str, **pipes: Any) -> Any:
    """Start the command in another process."""
    command = [sys.executable, "-m", "vaswani_transformer.translation", folder, *arguments]
    return subprocess.Popen(command, cwd=ROOT, **pipes)


@pytest.mark.slow
def test_endless_input_is_translated_as_it_arrives_until_the_reader_closes_the_pipe(folder: str) -> None:
    process = start(folder, "--window=2", stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    for pair in (0, 1), (2, 3):
        process.stdin.write(lines(SOURCES[index] for index in pair).encode())
        process.stdin.flush()
        assert [process.stdout.readline().decode() for _ in pair] == [f"{TARGETS[index]}\n" for index in pair]
    process.stdout.close()
    process.stdin.write(lines(SOURCES).encode())
    process.stdin.close()
    assert (process.stderr.read(), process.wait(60)) == (b"", 141)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_full_output_device_ends_the_command_with_one_line(folder: str) -> None:
    with open("/dev/full", "wb") as full:
        process = start(folder, stdin=subprocess.PIPE, stdout=full, stderr=subprocess.PIPE)
    _, errors = process.communicate(b"cat\n")
    assert (errors.decode(), process.returncode) == (
        "standard output: cannot be written: No space left on device; make room, or choose a different --output.\n",
        2,
    )


def test_scores_of_nan_end_the_command_with_the_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of three lines, which is the longest."""
    encode = PreparedEncoder.fast_pass

    def overflow(self: Any, *inputs: Any) -> torch.Tensor:
        states = encode(self, *inputs)
        return states.index_fill(0, torch.tensor([0]), torch.nan)

    monkeypatch.setattr(PreparedEncoder, "fast_pass", overflow)
    for beams in ("--beams=1", "--beams=3"):
        output, errors, status = run(beams, stdin=b"hello world\nthis is a book this good morning\nhello\n")
        assert (output, status) == ("", 2)
        assert errors == (
            "standard input, line 2: the scores of its translation are NaN; use --dtype=float32, and check that the "
            "model's weights are finite.\n"
        )
