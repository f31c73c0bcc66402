"""`vaswani-convert ctranslate2` writes a folder completely or not at all, and ends with one line for a fault."""

import sys
from pathlib import Path

import pytest

from tests.builders import uneven_model
from tests.helpers import PAIRS, error_line, run_main, save, tiny_model
from vaswani_transformer import VaswaniTransformerTokenizer
from vaswani_transformer.convert.command import main
from vaswani_transformer.convert.ctranslate2_exporter import to_ctranslate2

pytest.importorskip("ctranslate2")


def test_command_converts_a_folder_and_never_overwrites_one_without_force(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = VaswaniTransformerTokenizer.train_from_iterator([*PAIRS], vocab_size=300)
    model = uneven_model(vocab_size=len(tokenizer))
    model.use_paper_decoding()
    save(tmp_path / "model", model, tokenizer)
    call = ["ctranslate2", str(tmp_path / "model"), str(tmp_path / "converted"), "--quantization=int8"]
    main(call)
    assert capsys.readouterr().out.endswith("for CTranslate2, int8\n")
    before = (tmp_path / "converted" / "model.bin").read_bytes()
    used = error_line(run_main(main, call, capsys))
    assert "the folder is in use; name another, or replace the model in it with --force" in used
    main([*call[:-1], "--force"])
    assert (tmp_path / "converted" / "model.bin").read_bytes() != before
    capsys.readouterr()  # of the conversion
    (tmp_path / "config.json").write_text("{}")  # as a folder of fairseq's files may have
    for output, problem in ((tmp_path / "model", "is"), (tmp_path, "holds")):
        given = ["ctranslate2", tmp_path / "model", output, "--force"]
        expected = f"{output}: {problem} the model itself; name another folder.\n"
        assert error_line(run_main(main, given, capsys)) == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "converted", "model"]


def test_command_without_ctranslate2_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    with pytest.raises(ImportError, match='CTranslate2 is not installed; install it with "pip install ctranslate2"'):
        to_ctranslate2(tiny_model(), None, tmp_path / "converted")
    assert list(tmp_path.iterdir()) == []
