"""The command writes a line per line, in order, after any interruption, and ends with one line for any error."""

import functools
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, GenerationConfig, MarianConfig

from tests.helpers import PAIRS, ROOT, model_of_pairs, tiny_model
from vaswani_transformer import VaswaniTransformerForConditionalGeneration, prepare_for_inference
from vaswani_transformer.convert.command import main as convert
from vaswani_transformer.translate import command, loading
from vaswani_transformer.translate.translator import translate

SOURCES, TARGETS = list(PAIRS), list(PAIRS.values())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Save the model of pairs with the paper's search."""
    trained, tokenizer = model_of_pairs()
    model = VaswaniTransformerForConditionalGeneration(trained.config)
    model.load_state_dict(trained.state_dict())
    model.use_paper_decoding()
    saved = tmp_path_factory.mktemp("model")
    model.save_pretrained(saved)
    tokenizer.save_pretrained(saved)
    return str(saved)


@pytest.fixture
def run(folder, monkeypatch, capsysbinary):
    """Return a function that runs the command in this process and returns its output, errors and status."""

    def run(*arguments, stdin=b"", model=folder):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        status = 0
        try:
            command.main([str(model), *map(str, arguments)])
        except SystemExit as end:
            status = end.code
        output, errors = capsysbinary.readouterr()
        return output.decode(), errors.decode(), status

    return run


def lines(texts):
    return "".join(f"{text}\n" for text in texts)


def start(folder, *arguments, **pipes):
    """Start the command in another process."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    module = [sys.executable, "-m", "vaswani_transformer.translate", folder]
    return subprocess.Popen([*module, *map(str, arguments)], cwd=ROOT, env=environment, **pipes)


def test_every_line_has_its_translation_and_an_empty_line_stays_empty(run):
    source = [SOURCES[0], "", *SOURCES[1:4], " \t", *SOURCES[4:]]
    expected = [TARGETS[0], "", *TARGETS[1:4], "", *TARGETS[4:]]
    assert run(stdin=lines(source).encode()) == (lines(expected), "", 0)
    assert run("--window=3", "--batch_tokens=20", stdin=lines(source).encode()[:-1]) == (lines(expected), "", 0)


def test_empty_input_has_empty_output(run):
    assert run(stdin=b"") == ("", "", 0)


def test_files_are_read_and_written(run, tmp_path):
    source, target = tmp_path / "source.txt", tmp_path / "target.txt"
    source.write_text(lines(SOURCES))
    assert run("--input", source, "--output", target) == ("", "", 0)
    assert target.read_text() == lines(TARGETS)
    assert {path.name for path in tmp_path.iterdir()} == {"source.txt", "target.txt", "target.txt.record"}


def n_best(folder, **settings):
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    return [translation.hypotheses for translation in translate(model, tokenizer, SOURCES, scores=True, **settings)]


def test_n_best_lines_have_their_lines_number_and_their_score(run, folder):
    output, _, status = run("--nbest=3", "--scores", stdin=lines(SOURCES).encode())
    expected = [
        f"{number}\t{hypothesis.score:.4f}\t{hypothesis.text}"
        for number, best in enumerate(n_best(folder, num_return_sequences=3), start=1)
        for hypothesis in best
    ]
    assert (output, status) == (lines(expected), 0)


def test_scores_stand_before_their_translations(run, folder):
    output, _, _ = run("--scores", stdin=lines(SOURCES).encode())
    assert output == lines(f"{best[0].score:.4f}\t{best[0].text}" for best in n_best(folder))


def test_json_lines_give_json_lines(run, folder):
    rows = [json.dumps({"id": number, "text": text}) for number, text in enumerate(SOURCES)]
    output, _, _ = run("--format=jsonl", stdin=lines([*rows, '{"text": ""}', ""]).encode())
    assert [json.loads(line) for line in output.splitlines()] == [{"translation": text} for text in [*TARGETS, "", ""]]
    output, _, _ = run("--format=jsonl", "--nbest=2", "--scores", stdin=lines(rows).encode())
    for line, best in zip(output.splitlines(), n_best(folder, num_return_sequences=2), strict=True):
        expected = [{"translation": each.text, "score": round(each.score, 4)} for each in best]
        assert json.loads(line) == expected[0] | {"nbest": expected}


@pytest.mark.parametrize(
    ("option", "row"),
    [
        ("--field=sentence", {"sentence": SOURCES[0], "text": "cat"}),
        ("--source=en", {"translation": {"en": SOURCES[0], "es": "gato"}}),
    ],
)
def test_text_is_read_from_the_field_of_the_option(run, option, row):
    output, _, _ = run("--format=jsonl", option, stdin=json.dumps(row).encode())
    assert json.loads(output) == {"translation": TARGETS[0]}


def test_search_is_the_models_unless_options_set_it(run, monkeypatch):
    calls, generate = [], VaswaniTransformerForConditionalGeneration.generate

    def watched(self, **arguments):
        calls.append({name: value for name, value in arguments.items() if name not in ("input_ids", "attention_mask")})
        return generate(self, **arguments)

    monkeypatch.setattr(VaswaniTransformerForConditionalGeneration, "generate", watched)
    run(stdin=b"hello world")
    run("--beams=2", "--length_penalty=1.5", "--max_length=3", "--nbest=2", stdin=b"hello world")
    saved = {"num_beams": 2, "length_penalty": 1.5, "max_new_tokens": 3, "num_return_sequences": 2}
    assert calls == [{"num_return_sequences": 1}, saved]


def test_translation_of_two_lines_is_written_as_one(run, monkeypatch):
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: TwoLines())
    output, _, _ = run(stdin=b"a\nb\n")
    assert output == "one two\none two\n"


class TwoLines:
    """A tokenizer that decodes every translation as two lines."""

    pad_token_id = 1

    def __len__(self):
        return 6

    def __call__(self, texts, **_):
        return {"input_ids": [[5, 2] for _ in texts]}

    def batch_decode(self, targets, **_):
        return ["one\ntwo" for _ in targets]


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
def test_model_on_a_cpu_is_prepared_in_the_requested_dtype(run, monkeypatch, option, expected):
    dtypes = []
    monkeypatch.setattr(
        loading, "prepare_for_inference", lambda *given: dtypes.append(given[1]) or prepare_for_inference(*given)
    )
    assert run("--device=cpu", option, stdin=lines(SOURCES).encode()) == (lines(TARGETS), "", 0)
    assert dtypes == expected


def test_prepared_model_finds_what_the_plain_one_finds(run, folder):
    """The lines have the learned words in orders that the model has never seen."""
    words = " ".join(SOURCES).split()
    texts = [" ".join(words[start::step]) for step in (3, 5, 7) for start in range(step)]
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    expected = [translation.text for translation in translate(model, tokenizer, texts)]
    assert run("--device=cpu", stdin=lines(texts).encode()) == (lines(expected), "", 0)


def test_int8_is_an_error_on_other_devices_and_for_other_models(run, folder, tmp_path):
    _, errors, status = run("--dtype=int8", "--device=meta", stdin=b"cat\n")
    assert (status, errors) == (
        2,
        f"--dtype=int8: is for models of this package on a CPU; got {folder} of type 'vaswani_transformer' on meta. "
        "Give --device=cpu, or another --dtype.\n",
    )
    MarianConfig(vocab_size=9, pad_token_id=1, decoder_start_token_id=1).save_pretrained(tmp_path)
    _, errors, status = run("--dtype=int8", "--device=cpu", stdin=b"cat\n", model=tmp_path)
    assert (status, errors.count("\n")) == (2, 1)
    assert errors.endswith("of type 'marian' on cpu. Give another --dtype.\n")


def test_tokenizer_of_another_model_ends_the_command_with_one_line(run, folder, tmp_path):
    tiny_model().save_pretrained(tmp_path)
    _, errors, status = run(stdin=b"cat\n", model=tmp_path)
    assert (status, errors.count("\n")) == (2, 1)
    assert errors.startswith(f"{tmp_path}: has no tokenizer; save the model's tokenizer there with save_pretrained.")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.save_pretrained(tmp_path)
    expected = f"{tmp_path}: its tokenizer has {len(tokenizer)} entries and the model 99; give a model with its own.\n"
    assert run(stdin=b"cat\n", model=tmp_path) == ("", expected, 2)


def test_model_is_digested_only_for_an_output_that_can_resume(run, monkeypatch, tmp_path):
    digested = []
    monkeypatch.setattr(loading, "digest_of_model", lambda folder: digested.append(folder) or "abc")
    run(stdin=b"cat\n")
    run("--interactive", stdin=b"cat\n")
    assert digested == []
    run("--output", tmp_path / "path", stdin=b"cat\n")
    assert len(digested) == 1


@pytest.mark.parametrize("name", ["input", "output"])
def test_closed_standard_stream_is_an_error_that_names_it(folder, monkeypatch, capsys, name):
    monkeypatch.setattr(sys, {"input": "stdin", "output": "stdout"}[name], None)
    with pytest.raises(SystemExit, match="2"):
        command.main([folder])
    assert capsys.readouterr().err == f"standard {name} is closed; give --{name}=FILE.\n"


def test_line_that_is_too_long_is_truncated_with_a_warning_or_kept_or_an_error(run):
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


def test_progress_bar_is_shown_on_request(run):
    assert "2line" in run("--progress", stdin=b"cat\ncat\n")[1]
    assert run(stdin=b"cat\ncat\n")[1] == ""


def test_progress_bar_counts_the_lines_of_a_file(run, tmp_path):
    (tmp_path / "source").write_text(lines(SOURCES))
    assert "6/6" in run("--progress", "--input", tmp_path / "source", stdin=b"")[1]


def test_join_lines_replaces_every_line_break():
    assert command.join_lines("a\nb\r\nc\rd") == "a b  c d"


def test_error_other_than_memory_is_not_reported_as_memory(run, monkeypatch):
    def generate(*_, **__):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(VaswaniTransformerForConditionalGeneration, "generate", generate)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        run(stdin=b"cat\n")


class Interrupted:
    """Ends the command, like a signal, before it writes result number `stop_at`."""

    def __init__(self, stop_at):
        self.stop_at, self.format_lines = stop_at, command.format_lines

    def __call__(self, translation, number, options):
        if number == self.stop_at:
            raise KeyboardInterrupt
        return self.format_lines(translation, number, options)


@pytest.mark.parametrize("options", [[], ["--nbest=2", "--scores"], ["--format=jsonl", "--nbest=2", "--scores"]])
@pytest.mark.parametrize(("stop_at", "cut_off"), [(1, 0), (2, 0), (4, 3), (6, 9)])
def test_interrupted_output_resumes_to_the_bytes_of_an_uninterrupted_one(
    run, tmp_path, monkeypatch, options, stop_at, cut_off
):
    source, uninterrupted, path = (tmp_path / name for name in ("source", "whole", "path"))
    rows = SOURCES if "--format=jsonl" not in options else [json.dumps({"text": text}) for text in SOURCES]
    source.write_text(lines(rows))
    arguments = [*options, "--window=4", "--batch_tokens=20", "--input", source]
    run(*arguments, "--output", uninterrupted)
    with monkeypatch.context() as patch:
        patch.setattr(command, "format_lines", Interrupted(stop_at))
        _, errors, status = run(*arguments, "--output", path)
    assert (errors, status) == ("Interrupted; the same command resumes it.\n", 130)
    path.write_bytes(path.read_bytes()[: path.stat().st_size - cut_off])
    _, errors, status = run(*arguments, "--output", path)
    assert status == 0
    assert ("resumes after line" in errors) == (path.stat().st_size > 0 and stop_at > 1)
    assert path.read_bytes() == uninterrupted.read_bytes()
    assert run(*arguments, "--output", path) == ("", f"{path}: is finished already and stays unchanged.\n", 0)


@pytest.fixture
def unfinished(run, tmp_path, monkeypatch):
    """Return an input, and the output of a command that was interrupted before line 5 of 6."""
    source, path = tmp_path / "source", tmp_path / "path"
    source.write_text(lines(SOURCES))
    with monkeypatch.context() as patch:
        patch.setattr(command, "format_lines", Interrupted(5))
        run("--input", source, "--output", path, "--window=4")
    assert path.read_text() == lines(TARGETS[:4])
    return source, path


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--beams=2", "without --beams, not with --beams=2"),
        ("--scores", "without --scores, not with --scores"),
        ("--too_long=keep", "with --too_long=truncate, not with --too_long=keep"),
    ],
)
def test_unfinished_output_with_other_settings_is_an_error(run, unfinished, option, message):
    source, path = unfinished
    _, errors, status = run("--input", source, "--output", path, option)
    assert (status, path.read_text()) == (2, lines(TARGETS[:4]))
    assert errors.startswith(f"{path}: was translated {message}; it stays unchanged: give the same command as then, an")


def test_unfinished_output_of_another_model_is_an_error(run, unfinished, folder, tmp_path):
    source, path = unfinished
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    model.generation_config = GenerationConfig(num_beams=1, bos_token_id=0, pad_token_id=1, eos_token_id=2)
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "model")
    _, errors, status = run("--input", source, "--output", path, model=tmp_path / "model")
    assert status == 2
    assert errors.startswith(f"{path}: was translated by another model; it stays unchanged")


def test_unfinished_output_of_another_text_is_an_error(run, unfinished):
    source, path = unfinished
    source.write_text(lines(["cat", *SOURCES[1:]]))
    _, errors, status = run("--input", source, "--output", path, "--window=4")
    assert (status, path.read_text()) == (2, lines(TARGETS[:4]))
    assert errors.splitlines()[-1].startswith(f"{source}: is not the text of the unfinished output, whose first 4")


def test_unfinished_output_resumes_with_other_batches_and_says_so(run, unfinished):
    source, path = unfinished
    _, errors, status = run("--input", source, "--output", path, "--batch_tokens=10")
    assert (status, path.read_text()) == (0, lines(TARGETS))
    assert "was started with other batches" in errors


@pytest.fixture
def finished(run, tmp_path):
    """Return an input, and its finished output."""
    source, path = tmp_path / "source", tmp_path / "path"
    source.write_text(lines(SOURCES))
    assert run("--input", source, "--output", path) == ("", "", 0)
    return source, path


def test_finished_output_is_not_translated_again(run, finished, monkeypatch):
    source, path = finished
    monkeypatch.setattr(command, "make_translator", lambda options: pytest.fail("the model is loaded"))
    expected = ("", f"{path}: is finished already and stays unchanged.\n", 0)
    assert run("--input", source, "--output", path) == expected
    assert run("--output", path, stdin=source.read_bytes()) == expected
    assert path.read_text() == lines(TARGETS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--beams=1"], "was translated without --beams, not with --beams=1; it stays unchanged"),
        (["--nbest=1"], "was translated without --nbest, not with --nbest=1; it stays unchanged"),
        (["--dtype=bfloat16"], "was translated with --dtype=auto, not with --dtype=bfloat16; it stays unchanged"),
    ],
)
def test_finished_output_with_other_settings_is_an_error(run, finished, options, message):
    source, path = finished
    _, errors, status = run("--input", source, "--output", path, *options)
    assert (status, errors.count("\n"), path.read_text()) == (2, 1, lines(TARGETS))
    assert errors.startswith(f"{path}: {message}")


def test_finished_output_of_another_model_is_an_error(run, finished, folder, tmp_path):
    source, path = finished
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    model.model.shared.weight.data[0] += 1
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "model")
    _, errors, status = run("--input", source, "--output", path, model=tmp_path / "model")
    assert (status, path.read_text()) == (2, lines(TARGETS))
    assert errors.startswith(f"{path}: was translated by another model; it stays unchanged")


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["cat", *SOURCES[1:]], "is another text than that of the finished"),
        ([*SOURCES, "cat"], "has more lines than the 6 of the finished"),
        (SOURCES[:-1], "is another text than that of the finished"),
    ],
)
def test_finished_output_of_another_text_is_an_error(run, finished, texts, message):
    source, path = finished
    source.write_text(lines(texts))
    _, errors, status = run("--input", source, "--output", path)
    assert (status, errors.count("\n"), path.read_text()) == (2, 1, lines(TARGETS))
    assert errors.startswith(f"{source}: {message}")


def test_finished_output_that_was_edited_is_an_error_and_unchanged(run, finished):
    source, path = finished
    path.write_text(lines("abcdef"))
    _, errors, status = run("--input", source, "--output", path)
    assert (status, path.read_text()) == (2, lines("abcdef"))
    assert errors.startswith(f"{path}: was changed after it was finished; it stays unchanged")


@pytest.mark.parametrize("text", ["abcde", "abcdef", "abcdefg"])
def test_file_that_is_no_output_of_the_command_is_unchanged(run, tmp_path, text):
    source, path = tmp_path / "source", tmp_path / "path"
    source.write_text(lines(SOURCES))
    path.write_text(lines(text))
    _, errors, status = run("--input", source, "--output", path)
    assert (status, path.read_text()) == (2, lines(text))
    assert errors.startswith(f"{path}: exists already, without the path.record of a translation; it stays")


def test_finished_output_that_was_removed_is_written_again(run, finished):
    source, path = finished
    path.unlink()
    assert run("--input", source, "--output", path, "--beams=1") == ("", "", 0)
    assert path.read_text() == lines(TARGETS)


def test_output_can_be_a_device(run):
    assert run("--output", "/dev/null", stdin=b"cat\n") == ("", "", 0)


def test_empty_output_file_is_filled_like_a_new_one(run, tmp_path):
    (tmp_path / "path").touch()
    assert run("--output", tmp_path / "path", stdin=lines(SOURCES).encode())[2] == 0
    assert (tmp_path / "path").read_text() == lines(TARGETS)


@pytest.mark.parametrize(
    ("arguments", "stdin", "message"),
    [
        ([], b"cat\n\xff\n", r"standard input, line 2: not UTF-8 (byte 0xff at byte 1 of the line); correct the line"),
        (["--format=jsonl"], b"cat\n", "standard input, line 1: not valid JSON"),
        (["--nbest=5"], b"cat\n", "--nbest=5: more than the 4 beams; give --beams=5 as well."),
        (["--device=nowhere"], b"cat\n", "--device=nowhere: the model cannot run there: "),
        (["--device=meta"], b"cat\n", "--device=meta: weights have no values there; give a device that computes."),
        (
            ["--output=/proc/x"],
            b"cat\n",
            "/proc/x: cannot be written: No such file or directory; name another --output",
        ),
        (
            ["--input=/proc/self/mem"],
            b"",
            "/proc/self/mem: cannot be read: Input/output error; name a file that can be",
        ),
    ],
)
def test_invalid_option_or_input_ends_the_command_with_one_line(run, arguments, stdin, message):
    output, errors, status = run(*arguments, stdin=stdin)
    assert (output, status) == ("", 2)
    assert errors.startswith(message)
    assert errors.count("\n") == 1


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("tried to allocate 9 GiB\nand more"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
        MemoryError(),
    ],
)
def test_batch_too_large_for_the_device_ends_the_command_with_the_way_out(run, monkeypatch, error):
    def generate(*_, **__):
        raise error

    monkeypatch.setattr(VaswaniTransformerForConditionalGeneration, "generate", generate)
    message = "The device has too little memory for a batch; give a smaller --batch_tokens.\n"
    assert run(stdin=b"cat\n") == ("", message, 1)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./nothing", "./nothing: there is no such folder; name one with a model, or a model on the Hub."),
        ("nobody/nothing", "nobody/nothing: cannot be loaded: "),
    ],
)
def test_missing_model_ends_the_command_with_one_line(run, name, message):
    output, errors, status = run(model=name)
    assert (output, status, errors.count("\n")) == ("", 2, 1)
    assert errors.startswith(message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--interactive", "--output=x"], "--interactive reads and writes lines of text; leave out --input"),
        (["--field=x"], "--field and --source are of JSON Lines; give --format=jsonl as well."),
        (["--format=jsonl", "--field=x", "--source=en"], "--field and --source both say where the text is"),
        (
            ["--beams=0"],
            "argument --beams: got '0', expected an integer of at least 1. See vaswani-translate --help.",
        ),
        (["--batch_tokens=-1"], "argument --batch_tokens: got '-1', expected an integer of at least 1"),
        (["--beams=nan"], "argument --beams: got 'nan', expected an integer"),
        (["--length_penalty=nan"], "argument --length_penalty: got 'nan', expected a finite number such as 0.6"),
        (["--length_penalty=-inf"], "argument --length_penalty: got '-inf', expected a finite number"),
        (["--length_penalty=x"], "argument --length_penalty: got 'x', expected a finite number"),
        (["--length_penalty=1e308"], "--length_penalty=1e+308: lengths to this power overflow; give a number from -50"),
        (["--max_length=99999999999999999999"], "got '99999999999999999999', expected an integer below 2^31"),
        ([f"--input={ROOT}"], f"--input={ROOT}: is a folder; name a file."),
        (["--format=jsonl", "--field=\udcff"], "argument --field: got '\\udcff', which is not UTF-8"),
        (["--input=/nothing", f"--output={__file__}"], "--input=/nothing: does not exist; name an existing file"),
        ([f"--output={ROOT}"], f"--output={ROOT}: is a folder; name a file."),
        (["--output=/nothing/path"], "--output=/nothing/path: /nothing is not a folder; make it first."),
        (["--beam=1"], "unrecognized arguments: --beam=1"),
        (["--engine=ctranslate2", "--iterations=4"], "--iterations and --length_beam: CTranslate2 runs no NAT, CMLM"),
        ([f"--input={__file__}", f"--output={__file__}"], "the input itself; name another file."),
    ],
)
def test_conflicting_arguments_are_an_error(run, arguments, message):
    _, errors, status = run(*arguments)
    assert (status, errors.count("\n")) == (2, 1)
    assert message in errors


def test_interactive_session_prints_a_line_for_a_line(run):
    typed = lines([SOURCES[0], "", SOURCES[1]]).encode()
    assert run("--interactive", stdin=typed) == (lines([TARGETS[0], "", TARGETS[1]]), "", 0)
    output, errors, _ = run(
        "--interactive", "--too_long=error", "--max_source_tokens=8", stdin=lines(SOURCES[:3]).encode()
    )
    assert (output, errors) == (lines(TARGETS[:2]), "9 tokens, more than 8; shorten the line.\n")
    output, errors, status = run("--interactive", stdin=b"hello world\n\xff\n")
    assert (output, status) == (lines(TARGETS[:1]), 2)
    assert errors.startswith("standard input, line 2: not UTF-8 (byte 0xff at byte 1 of the line)")


def test_interactive_session_asks_again_after_an_invalid_line(folder, monkeypatch, capsysbinary):
    no_text = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")
    typed = iter([SOURCES[0], "\udcff", no_text, SOURCES[1], EOFError()])

    def answer(_):
        if isinstance(line := next(typed), Exception):
            raise line
        return line

    terminal = io.TextIOWrapper(io.BytesIO())
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", terminal)
    monkeypatch.setattr("builtins.input", answer)
    command.main([folder, "--interactive"])
    output, errors = capsysbinary.readouterr()
    assert output.decode() == lines(TARGETS[:2])
    assert errors.decode() == 2 * "The line is not UTF-8; type it again.\n"


@pytest.mark.slow
def test_closed_pipe_ends_the_command_quietly(folder, tmp_path):
    (tmp_path / "source").write_text(lines(SOURCES * 50))
    arguments = ("--window=1", "--input", tmp_path / "source")
    process = start(folder, *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline().decode() == lines(TARGETS[:1])
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(60) == 141


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("arguments", [[], ["--interactive"]])
def test_full_output_device_ends_the_command_with_one_line(folder, arguments):
    with open("/dev/full", "wb") as full:
        process = start(folder, *arguments, stdin=subprocess.PIPE, stdout=full, stderr=subprocess.PIPE)
    _, errors = process.communicate(b"cat\n")
    assert (errors.decode(), process.returncode) == (
        "standard output: cannot be written: No space left on device; make room, or give another --output.\n",
        2,
    )


@pytest.mark.slow
def test_endless_input_is_translated_as_it_arrives(folder):
    process = start(folder, "--window=2", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    for pair in (0, 1), (2, 3):
        process.stdin.write(lines(SOURCES[index] for index in pair).encode())
        process.stdin.flush()
        assert [process.stdout.readline().decode() for _ in pair] == [f"{TARGETS[index]}\n" for index in pair]
    process.stdin.close()
    assert process.wait(60) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("sent", "status"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_signal_leaves_an_output_that_can_resume(run, folder, tmp_path, sent, status):
    source, uninterrupted, path = (tmp_path / name for name in ("source", "whole", "path"))
    source.write_text(lines(SOURCES * 20))
    arguments = ("--window=7", "--nbest=2", "--scores", "--input", source)
    heeds = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # also if these tests run in the background
    process = start(folder, *arguments, "--output", path, stderr=subprocess.PIPE, preexec_fn=heeds)
    while not path.exists() or path.stat().st_size < 300:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(sent)
    process.communicate()
    assert process.returncode == status
    assert 0 < path.read_text().count("\n") < 240
    assert run(*arguments, "--output", path)[2] == 0
    run(*arguments, "--output", uninterrupted)
    assert path.read_bytes() == uninterrupted.read_bytes()


def test_command_is_installed_under_its_name():
    project = Path(ROOT, "pyproject.toml").read_text()
    assert 'vaswani-translate = "vaswani_transformer.translate.command:main"' in project


@pytest.fixture(scope="module")
def engine_folder(folder, tmp_path_factory):
    pytest.importorskip("ctranslate2")
    converted = tmp_path_factory.mktemp("models") / "converted"
    convert(["ctranslate2", folder, str(converted)])
    return converted


def test_ctranslate2_translates_the_same_lines(run, engine_folder):
    source = lines([SOURCES[0], "", *SOURCES[1:]]).encode()
    expected = lines([TARGETS[0], "", *TARGETS[1:]])
    assert run("--engine=ctranslate2", stdin=source, model=engine_folder) == (expected, "", 0)
    output, _, _ = run("--engine=ctranslate2", "--scores", stdin=source, model=engine_folder)
    for line, torch_line in zip(output.splitlines(), run("--scores", stdin=source)[0].splitlines(), strict=True):
        (score, text), (own_score, own_text) = line.split("\t"), torch_line.split("\t")
        assert text == own_text
        assert float(score) == pytest.approx(float(own_score), abs=2e-4)  # the command prints four digits
    nbest, _, status = run("--engine=ctranslate2", "--nbest=2", "--format=text", stdin=source, model=engine_folder)
    assert (len(nbest.splitlines()), status) == (2 * len(SOURCES) + 2, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nbest=9"], "num_return_sequences (9) is not from 1 to num_beams (4)"),
        (["--max_length=2000"], "max_new_tokens (2000) is not from 1 to the table of 1024 positions"),
        (["--revision=main"], "--revision and --trust_remote_code are of the Hub"),
        (
            ["--device=nowhere"],
            ": CTranslate2 cannot load it on device 'nowhere' as 'default': unsupported device nowh",
        ),
    ],
)
def test_option_that_ctranslate2_lacks_ends_the_command_with_one_line(run, engine_folder, arguments, message):
    output, errors, status = run("--engine=ctranslate2", *arguments, stdin=b"a\n", model=engine_folder)
    assert (output, errors.count("\n"), status) == ("", 1, 2)
    assert message in errors


@pytest.mark.parametrize(
    ("removed", "message"),
    [
        (["tokenizer.json", "tokenizer_config.json"], "was converted without its tokenizer; convert it with its token"),
        (
            ["tokenizer.json"],
            "its tokenizer: cannot be loaded: Couldn't instantiate the backend tokenizer from one of: (",
        ),
    ],
)
def test_converted_model_without_its_tokenizer_ends_the_command_with_one_line(
    run, engine_folder, tmp_path, removed, message
):
    shutil.copytree(engine_folder, tmp_path / "copy")
    for name in removed:
        (tmp_path / "copy" / name).unlink()
    output, errors, status = run("--engine=ctranslate2", stdin=b"a\n", model=tmp_path / "copy")
    assert (output, errors.count("\n"), status) == ("", 1, 2)
    assert errors.startswith(f"{tmp_path / 'copy'}: {message}")


def test_converted_model_is_an_error_with_the_torch_engine(run, engine_folder):
    message = f"{engine_folder}: is a model of CTranslate2; vaswani-translate runs it with --engine=ctranslate2.\n"
    assert run(stdin=b"a\n", model=engine_folder) == ("", message, 2)


def test_ctranslate2_computes_in_the_requested_dtype(run, engine_folder, monkeypatch):
    import ctranslate2

    types, make = [], ctranslate2.Translator
    monkeypatch.setattr(
        ctranslate2, "Translator", lambda *given, **named: types.append(named["compute_type"]) or make(*given, **named)
    )
    for options in ([], ["--dtype=int8"]):
        output = run(
            "--engine=ctranslate2", "--device=cpu", *options, stdin=lines(SOURCES).encode(), model=engine_folder
        )
        assert output == (lines(TARGETS), "", 0)
    assert types == ["default", "int8"]


def test_unconverted_model_is_an_error_with_ctranslate2(run):
    _, errors, status = run("--engine=ctranslate2", stdin=b"a\n")
    assert status == 2
    assert 'no model that "vaswani-convert ctranslate2" wrote; convert one to this folder first' in errors
