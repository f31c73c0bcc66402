"""`--engine=ctranslate2` translates as the torch engine does, and names the options that it lacks."""

import shutil
from pathlib import Path

import pytest

from tests.helpers import Run, error_line
from tests.translation.commands import SOURCES, TARGETS, lines
from vaswani_transformer.convert.command import main as convert


@pytest.fixture(scope="module")
def engine_folder(folder: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("ctranslate2")
    converted = tmp_path_factory.mktemp("models") / "converted"
    convert(["ctranslate2", folder, str(converted)])
    return converted


def test_ctranslate2_translates_the_same_lines(run: Run, engine_folder: Path) -> None:
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
        (["--max_source_tokens=2000"], "max_source_tokens (2000) is more than the model's table of positions has room"),
        (["--revision=main"], "--revision and --trust_remote_code are of the Hub"),
        (
            ["--device=nowhere"],
            ": CTranslate2 cannot load it on device 'nowhere' as 'default': unsupported device nowh",
        ),
    ],
)
def test_option_that_ctranslate2_lacks_ends_the_command_with_one_line(
    run: Run, engine_folder: Path, arguments: list[str], message: str
) -> None:
    assert message in error_line(run("--engine=ctranslate2", *arguments, stdin=b"a\n", model=engine_folder))


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
    run: Run, engine_folder: Path, tmp_path: Path, removed: list[str], message: str
) -> None:
    shutil.copytree(engine_folder, tmp_path / "copy")
    for name in removed:
        (tmp_path / "copy" / name).unlink()
    assert error_line(run("--engine=ctranslate2", stdin=b"a\n", model=tmp_path / "copy")).startswith(
        f"{tmp_path / 'copy'}: {message}"
    )


def test_converted_model_is_an_error_with_the_torch_engine(run: Run, engine_folder: Path) -> None:
    message = f"{engine_folder}: is a model of CTranslate2; vaswani-translate runs it with --engine=ctranslate2.\n"
    assert run(stdin=b"a\n", model=engine_folder) == ("", message, 2)


def test_ctranslate2_computes_in_the_requested_dtype(
    run: Run, engine_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_unconverted_model_is_an_error_with_ctranslate2(run: Run) -> None:
    _, errors, status = run("--engine=ctranslate2", stdin=b"a\n")
    assert status == 2
    assert 'no model that "vaswani-convert ctranslate2" wrote; convert one to this folder first' in errors
