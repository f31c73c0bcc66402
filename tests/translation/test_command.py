"""The command writes a line per line, in order, with the search of the model or of its options, and checks these."""

import argparse
import json
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, MarianConfig

from tests.builders import tiny_marian
from tests.helpers import ROOT, Run, error_line, load_tokenizer, model_of_pairs, save, tiny_model
from tests.translation.commands import SOURCES, TARGETS, lines
from vaswani_transformer import (
    VaswaniTransformerForConditionalGeneration,
    VaswaniTransformerTokenizer,
    prepare_for_inference,
)
from vaswani_transformer.translation import command, loading
from vaswani_transformer.translation.translator import Hypothesis, Translation, translate


def test_every_line_has_its_translation_and_an_empty_line_stays_empty(run: Run) -> None:
    source = [SOURCES[0], "", *SOURCES[1:4], " \t", *SOURCES[4:]]
    expected = [TARGETS[0], "", *TARGETS[1:4], "", *TARGETS[4:]]
    assert run(stdin=lines(source).encode()) == (lines(expected), "", 0)
    assert run("--window=3", "--batch_tokens=20", stdin=lines(source).encode()[:-1]) == (lines(expected), "", 0)


def test_empty_input_has_empty_output(run: Run) -> None:
    assert run(stdin=b"") == ("", "", 0)


def test_files_are_read_and_written(run: Run, tmp_path: Path) -> None:
    source, target = tmp_path / "source.txt", tmp_path / "target.txt"
    source.write_text(lines(SOURCES))
    assert run("--input", source, "--output", target) == ("", "", 0)
    assert target.read_text() == lines(TARGETS)
    assert {path.name for path in tmp_path.iterdir()} == {"source.txt", "target.txt", "target.txt.record"}


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
    output, _, _ = run("--format=jsonl", stdin=lines([*rows, '{"text": ""}', ""]).encode())
    assert [json.loads(line) for line in output.splitlines()] == [{"translation": text} for text in [*TARGETS, "", ""]]
    output, _, _ = run("--format=jsonl", "--nbest=2", "--scores", stdin=lines(rows).encode())
    for line, best in zip(output.splitlines(), n_best(folder, num_return_sequences=2), strict=True):
        expected = [{"translation": each.text, "score": round(cast(float, each.score), 4)} for each in best]
        assert json.loads(line) == expected[0] | {"nbest": expected}


@pytest.mark.parametrize(
    ("option", "row"),
    [
        ("--field=sentence", {"sentence": SOURCES[0], "text": "cat"}),
        ("--source=en", {"translation": {"en": SOURCES[0], "es": "gato"}}),
    ],
)
def test_text_is_read_from_the_field_of_the_option(run: Run, option: str, row: dict[str, Any]) -> None:
    output, _, _ = run("--format=jsonl", option, stdin=json.dumps(row).encode())
    assert json.loads(output) == {"translation": TARGETS[0]}


def test_search_is_the_models_unless_options_set_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, generate = [], VaswaniTransformerForConditionalGeneration.generate

    def watched(self: VaswaniTransformerForConditionalGeneration, **arguments: Any) -> Any:
        calls.append({name: value for name, value in arguments.items() if name not in ("input_ids", "attention_mask")})
        return generate(self, **arguments)

    monkeypatch.setattr(VaswaniTransformerForConditionalGeneration, "generate", watched)
    run(stdin=b"hello world")
    run("--beams=2", "--length_penalty=1.5", "--max_length=3", "--nbest=2", stdin=b"hello world")
    saved = {"num_beams": 2, "length_penalty": 1.5, "max_new_tokens": 3, "num_return_sequences": 2}
    assert calls == [{"num_return_sequences": 1}, saved]


@pytest.mark.parametrize(("max_source_tokens", "can_keep"), [([], False), (["--max_source_tokens=2"], True)])
def test_advice_for_a_line_that_is_too_long_works(
    run: Run, tmp_path: Path, max_source_tokens: list[str], can_keep: bool
) -> None:
    tokenizer = model_of_pairs()[1]
    positions: dict[str, Any] = {"position_embedding": "learned", "max_position_embeddings": 5}
    save(tmp_path, tiny_model(vocab_size=len(tokenizer), **positions), tokenizer)
    line = b"a a\n" if can_keep else b"the cat is black\n"
    for choice in ("truncate", "error", "keep"):
        _, errors, status = run(f"--too_long={choice}", *max_source_tokens, stdin=line, model=tmp_path)
        assert ("--too_long=keep" in errors) == (can_keep and choice != "keep")
        assert status == (0 if choice == "truncate" or (choice == "keep" and can_keep) else 2)


def test_record_of_an_output_has_the_complete_search(run: Run, tmp_path: Path) -> None:
    (tmp_path / "source").write_text("cat\n")
    run("--beams=2", "--input", tmp_path / "source", "--output", tmp_path / "target")
    search = json.loads((tmp_path / "target.record").read_text())["search"]
    assert (search["num_beams"], search["length_penalty_type"], search["max_source_relative_length"]) == (2, "gnmt", 50)


@pytest.fixture(scope="module")
def folder_of_words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a model whose vocabulary holds every word of its texts, "hello" and "world" among them."""
    tokenizer = VaswaniTransformerTokenizer.train_from_iterator(SOURCES + TARGETS, 2000, "wordpiece")
    return save(tmp_path_factory.mktemp("words"), tiny_model(vocab_size=len(tokenizer)), tokenizer)


def test_unknown_words_are_named_in_one_warning_or_end_a_strict_command(
    run: Run, folder_of_words: Path, tmp_path: Path
) -> None:
    """A strict command keeps the lines before, and without --strict it resumes to the same file."""
    source, output = tmp_path / "source.txt", tmp_path / "target.txt"
    texts = [SOURCES[0], f"{SOURCES[0]} warld", SOURCES[1], "§ \x1b"]
    source.write_text(lines(texts), encoding="utf-8")
    files = ("--max_length=5", f"--input={source}", f"--output={output}")
    _, errors, status = run(*files, "--strict", model=folder_of_words)
    message = "line 2: 'warld': the vocabulary lacks them; change the line, or leave out --strict.\n"
    assert (errors, status) == (f"{source}, {message}", 2)
    assert output.read_bytes().count(b"\n") == 1
    _, errors, status = run(*files, model=folder_of_words)
    assert status == 0
    warning = "2 lines have words that the vocabulary lacks, whose results are guesses (line 2: 'warld'); --strict ends"
    assert f"{source}: {warning} at such a line.\n" in errors
    text, errors, _ = run("--max_length=5", stdin=lines(texts).encode(), model=folder_of_words)
    assert text == output.read_text(encoding="utf-8")
    assert f"standard input: {warning}" in errors
    assert run("--strict", "--max_length=5", stdin=lines(SOURCES).encode(), model=folder_of_words)[1:] == ("", 0)


def test_interactive_session_names_the_unknown_words_of_a_line(run: Run, folder_of_words: Path) -> None:
    typed = f"{SOURCES[0]} warld\n{SOURCES[0]}\n".encode()
    output, errors, status = run("--interactive", "--max_length=5", stdin=typed, model=folder_of_words)
    assert (output.count("\n"), status) == (2, 0)
    assert errors == "Unknown words, whose results are guesses: 'warld'.\n"


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("--dtype=auto", ["float32"]),
        ("--dtype=float32", ["float32"]),
        ("--dtype=bfloat16", ["bfloat16"]),
        ("--dtype=int8", ["int8"]),
        ("--dtype=float16", []),
    ],
)
def test_model_on_a_cpu_is_prepared_in_the_requested_dtype(
    run: Run, monkeypatch: pytest.MonkeyPatch, option: str, expected: list[str]
) -> None:
    dtypes = []
    monkeypatch.setattr(
        loading, "prepare_for_inference", lambda *given: dtypes.append(given[1]) or prepare_for_inference(*given)
    )
    assert run("--device=cpu", option, stdin=lines(SOURCES).encode()) == (lines(TARGETS), "", 0)
    assert dtypes == expected


def test_model_of_another_architecture_on_a_cpu_is_loaded_in_float32(tmp_path: Path) -> None:
    _, tokenizer = model_of_pairs()
    save(tmp_path, tiny_marian(vocab_size=len(tokenizer)).half(), tokenizer)
    for dtype, expected in (("auto", torch.float32), ("float16", torch.float16)):
        model, _ = loading.load_model_and_tokenizer(loading.LoadOptions(str(tmp_path), "cpu", dtype))
        assert model.dtype == expected


def test_int8_is_an_error_on_other_devices_and_for_other_models(run: Run, folder: str, tmp_path: Path) -> None:
    assert error_line(run("--dtype=int8", "--device=meta", stdin=b"cat\n")) == (
        f"--dtype=int8: is for models of this package on a CPU; got {folder} of type 'vaswani_transformer' on meta. "
        "Give --device=cpu, or another --dtype.\n"
    )
    MarianConfig(vocab_size=9, pad_token_id=1, decoder_start_token_id=1).save_pretrained(tmp_path)
    assert error_line(run("--dtype=int8", "--device=cpu", stdin=b"cat\n", model=tmp_path)).endswith(
        "of type 'marian' on cpu. Give another --dtype.\n"
    )


def test_tokenizer_of_another_model_ends_the_command_with_one_line(run: Run, folder: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder)
    save(tmp_path, tiny_model(), tokenizer)
    expected = f"{tmp_path}: its tokenizer has {len(tokenizer)} entries and the model 99; give a model with its own.\n"
    assert run(stdin=b"cat\n", model=tmp_path) == ("", expected, 2)


def test_line_that_is_too_long_is_truncated_with_a_warning_or_kept_or_an_error(run: Run) -> None:
    source = lines([SOURCES[0], "", "is a book this good morning", SOURCES[1]]).encode()
    output, errors, status = run("--max_source_tokens=9", stdin=source)
    kept, no_errors, _ = run("--max_source_tokens=9", "--too_long=keep", stdin=source)
    assert (status, no_errors) == (0, "")
    assert [output.splitlines()[index] for index in (0, 1, 3)] == [kept.splitlines()[index] for index in (0, 1, 3)]
    scored, kept_scored = (
        run("--max_source_tokens=9", "--scores", *more, stdin=source)[0].splitlines()[2]
        for more in ((), ("--too_long=keep",))
    )
    assert scored != kept_scored
    assert errors.startswith("standard input, line 3: 19 tokens, more than 9, so it was truncated; --too_long=keep")
    output, errors, status = run("--max_source_tokens=9", "--too_long=error", "--window=1", stdin=source)
    assert (output, status) == (lines([TARGETS[0], ""]), 2)
    assert errors.startswith("standard input, line 3: 19 tokens, more than 9; shorten it, or give --too_long=truncate")


def test_line_beyond_the_learned_positions_ends_the_command_with_one_line(
    run: Run, folder: str, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(folder)
    model = tiny_model(vocab_size=len(tokenizer), position_embedding="learned", max_position_embeddings=30)
    save(tmp_path, model, tokenizer)
    source = lines(["cat", "cat " * 30]).encode()
    output, errors, status = run("--too_long=keep", "--max_length=5", "--window=1", stdin=source, model=tmp_path)
    assert (output.count("\n"), errors.count("\n"), status) == (1, 1, 2)
    assert errors.startswith("standard input, line 2: ")
    assert "tokens, more than 30; shorten it, or give --too_long=truncate: the model has positions for no" in errors
    assert error_line(run("--max_source_tokens=31", stdin=source, model=tmp_path)).startswith(
        "max_source_tokens (31) is more than the model's table of positions"
    )


def test_progress_bar_is_shown_on_request_and_counts_the_lines_of_a_file(run: Run, tmp_path: Path) -> None:
    assert "2line" in run("--progress", stdin=b"cat\ncat\n")[1]
    (tmp_path / "source").write_text(lines(SOURCES))
    assert "6/6" in run("--progress", "--input", tmp_path / "source", stdin=b"")[1]


def test_translation_is_written_on_one_line() -> None:
    form = command.LineFormat(argparse.Namespace(format="text", scores=False, nbest=None))
    translation = Translation([Hypothesis("a\nb\r\nc\rd", 1, None)], 1, False, 1)
    assert form.write(translation, 1) == ["a b  c d"]


def test_error_other_than_memory_is_not_reported_as_memory(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    monkeypatch.setattr(VaswaniTransformerForConditionalGeneration, "generate", Mock(side_effect=error))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        run(stdin=b"cat\n")


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("tried to allocate 9 GiB\nand more"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
        MemoryError(),
    ],
)
def test_batch_too_large_for_the_device_ends_the_command_with_the_way_out(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(VaswaniTransformerForConditionalGeneration, "generate", Mock(side_effect=error))
    message = "The device has too little memory for a batch; give a smaller --batch_tokens.\n"
    assert run(stdin=b"cat\n") == ("", message, 1)
    with_beams = message.replace("give", "give a smaller --beams, or")
    assert run("--beams=100000", stdin=b"cat\n") == ("", with_beams, 1)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./nothing", "./nothing: there is no such folder; name one with a model, or a model on the Hub."),
        ("nobody/nothing", "nobody/nothing: no folder here, so a name on the Hub: cannot be loaded: "),
    ],
)
def test_missing_model_ends_the_command_with_one_line(run: Run, name: str, message: str) -> None:
    assert error_line(run(model=name)).startswith(message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--interactive", "--output=x"], "--interactive reads and writes lines of text; leave out --input"),
        (["--interactive", "--strict"], "--interactive names each line's unknown words and continues; leave out --str"),
        (["--field=x"], "--field and --source are of JSON Lines; give --format=jsonl as well."),
        (["--format=jsonl", "--field=x", "--source=en"], "--field and --source both say where the text is"),
        (["--beams=0"], "argument --beams: got '0', expected an integer of at least 1"),
        (["--batch_tokens=-1"], "argument --batch_tokens: got '-1', expected an integer of at least 1"),
        (["--beams=nan"], "argument --beams: got 'nan', expected an integer"),
        (["--length_penalty=nan"], "--length_penalty=nan: lengths to this power overflow; give a number from -50"),
        (["--length_penalty=x"], "argument --length_penalty: invalid float value: 'x'"),
        (["--length_penalty=1e308"], "--length_penalty=1e+308: lengths to this power overflow; give a number from -50"),
        (["--max_length=99999999999999999999"], "expected an integer of at least 1 and below 2^31"),
        ([f"--input={ROOT}"], f"--input={ROOT}: is a folder; name a file."),
        (["--input=/nothing", f"--output={__file__}"], "--input=/nothing: does not exist; name an existing file"),
        (["--input=/proc/self/mem"], "/proc/self/mem: cannot be read: Input/output error; name a file that can be"),
        ([f"--output={ROOT}"], f"--output={ROOT}: is a folder; name a file."),
        (["--output=/nothing/path"], "--output=/nothing/path: /nothing is not a folder; make it first."),
        (["--output=/proc/x"], "/proc/x: cannot be written: No such file or directory; name another --output"),
        (["--beam=1"], "unrecognized arguments: --beam=1"),
        ([f"--input={__file__}", f"--output={__file__}"], "the input itself; name another file."),
        (["--format=jsonl"], "standard input, line 1: not JSON"),
        (["--nbest=5"], "--nbest=5: more than the 4 beams; give --beams=5 as well."),
        (["--device=nowhere"], "--device=nowhere: the model cannot run there: "),
        (["--device=meta"], "--device=meta: weights have no values there; give a device that computes."),
        ([], "standard input, line 2: not UTF-8 (byte 0xff at byte 1 of the line); correct the line"),
    ],
)
def test_invalid_option_or_input_ends_the_command_with_one_line(run: Run, arguments: list[str], message: str) -> None:
    assert message in error_line(run(*arguments, stdin=b"cat\n\xff\n"))
