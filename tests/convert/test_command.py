"""`vaswani-convert ctranslate2` writes a folder completely or not at all, and ends with one line for a fault."""

import sys
from pathlib import Path

import pytest

from tests.builders import uneven_model
from tests.helpers import PAIRS, run_python, tiny_model
from vaswani_transformer import VaswaniTransformerTokenizer
from vaswani_transformer.convert.command import main
from vaswani_transformer.convert.ctranslate2_exporter import to_ctranslate2
from vaswani_transformer.translation.ctranslate2_engine import CTranslate2Engine

pytest.importorskip("ctranslate2")


def test_command_converts_a_folder_and_never_overwrites_one_without_force(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = VaswaniTransformerTokenizer.train_from_iterator([*PAIRS], vocab_size=300)
    model = uneven_model(vocab_size=len(tokenizer))
    model.use_paper_decoding()
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    call = ["ctranslate2", str(tmp_path / "model"), str(tmp_path / "converted"), "--quantization=int8"]
    main(call)
    assert capsys.readouterr().out.endswith("for CTranslate2, int8\n")
    assert len(CTranslate2Engine(tmp_path / "converted", max_new_tokens=4).translate(list(PAIRS))) == len(PAIRS)
    before = (tmp_path / "converted" / "model.bin").read_bytes()
    with pytest.raises(SystemExit):
        main(call)
    assert "the folder is in use; name another, or replace the model in it with --force" in capsys.readouterr().err
    main([*call[:-1], "--force"])
    assert (tmp_path / "converted" / "model.bin").read_bytes() != before
    with pytest.raises(SystemExit):
        main(["ctranslate2", str(tmp_path / "model"), str(tmp_path / "model"), "--force"])
    assert "the model itself; name another folder" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["converted", "model"]


def test_command_ends_with_one_line_for_models_of_other_types(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bart").mkdir()
    (tmp_path / "bart" / "config.json").write_text('{"model_type": "bart"}')
    for model, message in [
        (tmp_path / "none", "there is no such folder; name one with a model"),
        (tmp_path / "bart", "is a model of another type; got 'bart', expected 'vaswani_transformer'"),
    ]:
        with pytest.raises(SystemExit) as stop:
            main(["ctranslate2", str(model), str(tmp_path / "converted")])
        assert stop.value.code == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


def test_command_without_ctranslate2_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    with pytest.raises(ImportError, match='CTranslate2 is not installed; install it with "pip install ctranslate2"'):
        to_ctranslate2(tiny_model(), None, tmp_path / "converted")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_convert_command_does_not_import_ctranslate2() -> None:
    run_python("import sys, vaswani_transformer.convert.command; assert 'ctranslate2' not in sys.modules")
