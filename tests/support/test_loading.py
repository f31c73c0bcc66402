"""Broken, damaged and hostile model folders: no command runs their code, and each fault is one line at once."""

import ast
import contextlib
import io
import json
import logging
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM

from tests import ROOT
from tests.commands import user_error
from tests.models import EVERY_FAMILY, tiny_marian, tiny_model
from tests.training.invented_results import results_of
from tests.training.runs import SHORT, make_arguments
from training import average, distill, publish, score, train
from vaswani_transformer import VaswaniFlowSeqConfig, VaswaniTransformerForConditionalGeneration
from vaswani_transformer.convert import command as convert
from vaswani_transformer.parsing import command as parse
from vaswani_transformer.support.command import UserError
from vaswani_transformer.support.loading import (
    KERNELS,
    LoadOptions,
    load_errors,
    load_model,
    load_model_and_tokenizer,
    load_tokenizer,
)
from vaswani_transformer.tokenizer import check_vocabulary
from vaswani_transformer.translation import command as translate

SEARCH, CONFIG, WEIGHTS = "generation_config.json", "config.json", "model.safetensors"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


def change(path: Path, **fields: Any) -> None:
    """Set fields of the object in a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


class Payload:
    """A pickle of it writes the marker when it is read."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


@pytest.fixture
def hostile(copy: Path, tmp_path: Path) -> Path:
    """Return the folder of a model that only its own code loads; the code and a pickle write the file `marker`."""
    (copy / "own.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w').close()")
    code = dict.fromkeys(("AutoConfig", "AutoModel", "AutoModelForSeq2SeqLM"), "own.Code")
    change(copy / CONFIG, model_type="own", auto_map=code)
    change(copy / TOKENIZER_CONFIG, tokenizer_class="OwnTokenizer", auto_map={"AutoTokenizer": ["own.Code"] * 2})
    (copy / "results.json").write_text(json.dumps(results_of()))
    torch.save(Payload(tmp_path / "marker"), copy / "own.pt")
    return copy


LOADS = "trust_remote_code=True"
COMMANDS: dict[str, tuple[Callable[[list[str]], None], str, str]] = {
    "translate": (translate.main, "{model} --input={text}", LOADS),
    "interactive": (translate.main, "{model} --interactive", LOADS),
    "parse": (parse.main, "{model} --input={text}", LOADS),
    "ctranslate2": (convert.main, "ctranslate2 {model} {out}", LOADS),
    "onnx": (convert.main, "onnx {model} {out}", LOADS),
    "fsmt": (convert.main, "fsmt {model} {out}", LOADS),
    "marian": (convert.main, "marian {model} {out}", LOADS),
    "fairseq": (convert.main, "fairseq {model}/own.pt {out}", "own.pt"),
    "publish": (publish.main, "{model} owner/name --dry_run={out}", LOADS),
    "score": (score.main, "{model} {recipe}", LOADS),
    "distill": (distill.main, "{model} {recipe} --output_dir={out}", LOADS),
    "average": (average.main, "{model} --output_dir={out}", "has 0 complete checkpoints"),
    "encoder_from": (train.main, "{recipe} --output_dir={out} --training.encoder_from={model}", LOADS),
    "start_from": (train.main, "{recipe} --output_dir={out} --training.start_from={model}", LOADS),
    "energy_from": (train.main, "{recipe} --output_dir={out} --model.kind=cmlm --training.energy_from={model}", LOADS),
    "tokenizer": (train.main, "{recipe} --output_dir={out} --tokenizer.path={model}", LOADS),
}
"""The main function of every command that loads a model, its arguments, and a part of its error."""


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_runs_a_models_code_or_asks_for_it(
    hostile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    main, arguments, message = COMMANDS[command]
    (tmp_path / "text").write_text("one tree\n")
    recipe = [argument for argument in make_arguments(tmp_path) if argument != SHORT]  # a CMLM has no such field
    names = {"model": hostile, "out": tmp_path / "out", "text": tmp_path / "text", "recipe": " ".join(recipe)}
    monkeypatch.setattr("sys.stdin", answers := io.StringIO("y\n" * 9))
    with pytest.raises(SystemExit, match="2"):
        main(arguments.format(**names).split())
    output, errors = capsys.readouterr()
    assert message in errors.splitlines()[-1]
    assert "Traceback" not in errors
    assert (output, answers.tell()) == ("", 0)
    assert not (tmp_path / "marker").exists()
    written = {path.name for path in (tmp_path / "out").rglob("*") if path.stat().st_size}  # a run has begun its folder
    assert written <= {".lock", "checkpoints", "data.json", "recipe.yaml", TOKENIZER, TOKENIZER_CONFIG}
    assert not (tmp_path / "out").is_file()


SOURCES = [path for folder in ("vaswani_transformer", "training") for path in (ROOT / folder).rglob("*.py")]


def test_only_loading_calls_from_pretrained() -> None:
    """So no other load can forget `trust_remote_code`, without which Transformers asks and reads standard input."""
    files = set()
    for path in SOURCES:
        nodes = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
        names = [getattr(node.func, "attr", getattr(node.func, "id", "")) for node in nodes]
        if {"from_pretrained", "pipeline"} & set(names):
            files.add(path.relative_to(ROOT).as_posix())
    assert files == {"vaswani_transformer/support/loading.py"}


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=9)


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    file=st.sampled_from([SEARCH, CONFIG, TOKENIZER, TOKENIZER_CONFIG]),
    content=st.binary() | st.builds(lambda value: json.dumps(value).encode(), JSON | st.dictionaries(st.text(), JSON)),
)
def test_damaged_file_of_a_model_is_an_error_of_one_line_or_none(saved: Path, file: str, content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(saved, folder, dirs_exist_ok=True)
        Path(folder, file).write_bytes(content)
        with contextlib.suppress(UserError):
            load_tokenizer(folder) if "tokenizer" in file else load_model(folder)


BIAS = "model.encoder.layers.0.feed_forward.fc1.bias"
UNFIT = "its weights do not fit its config.json; "
NOT_FINITE = f"NaN or infinite numbers in {BIAS} (float32); use a checkpoint"
BROKEN: dict[str, tuple[dict[str, int], Callable[[Tensor], Tensor], str]] = {
    "layer more": (
        {"encoder_layers": 3},
        torch.clone,
        f"{UNFIT}missing: model.encoder.layers.2.feed_forward.fc1.bias, ",
    ),
    "layer less": ({"decoder_layers": 1}, torch.clone, f"{UNFIT}unexpected: model.decoder.layers.1.cross_attn.k_proj."),
    "shape": ({}, lambda bias: bias[:-1].clone(), f"{UNFIT}of a different shape: {BIAS} "),
    "nan": ({}, lambda bias: bias.index_fill(0, torch.tensor([3]), math.nan), NOT_FINITE),
    "inf": ({}, lambda bias: bias.index_fill(0, torch.tensor([3]), math.inf), NOT_FINITE),
}
"""Fields of the configuration, what becomes of a bias, and the beginning of the error after the folder's name."""


@pytest.mark.parametrize("way", BROKEN)
def test_weights_that_do_not_fit_or_are_not_finite_are_an_error_of_one_line(copy: Path, way: str) -> None:
    fields, damage, message = BROKEN[way]
    change(copy / CONFIG, **fields)
    weights = load_file(copy / WEIGHTS)
    save_file(weights | {BIAS: damage(weights[BIAS])}, copy / WEIGHTS, {"format": "pt"})
    for model_class in (AutoModelForSeq2SeqLM, VaswaniTransformerForConditionalGeneration):
        with user_error(f"^{re.escape(f'{copy}: {message}')}"):
            load_model(str(copy), model_class)


def test_commands_limit_the_cached_kernels(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in KERNELS:
        monkeypatch.setenv(name, "7")
        monkeypatch.delenv(name)
    load_model_and_tokenizer(LoadOptions(str(copy), device="cpu"))
    assert {name: os.environ[name] for name in KERNELS} == KERNELS


def test_folder_of_a_family_that_is_not_registered_names_the_class_whose_file_to_import(copy: Path) -> None:
    fields = json.loads((copy / CONFIG).read_text())
    fields |= {"model_type": "mirror_nat", "architectures": ["MirrorForConditionalGeneration"]}
    (copy / CONFIG).write_text(json.dumps(fields))
    problem = r"its family is not registered; got model_type 'mirror_nat', expected a known one\. First import the file"
    with user_error(f"{problem} that defines MirrorForConditionalGeneration and calls register_family, or upgrade"):
        load_model_and_tokenizer(LoadOptions(str(copy), device="cpu"))


def test_folder_without_a_model_is_an_error_of_one_line(tmp_path: Path) -> None:
    for name, message in (
        (str(tmp_path), "cannot be loaded: Unrecognized model"),
        (str(tmp_path / "none"), "no folder here, so a name on the Hub: cannot be loaded: Repo id must be"),
    ):
        with user_error(f"^{name}: {message}"):
            load_model(name)
    tiny_model().save_pretrained(tmp_path)
    with user_error("does not contain a tokenizer; save the model's tokenizer there with save_pretrained"):
        load_tokenizer(str(tmp_path))


def test_any_failure_to_load_is_an_error_of_one_line() -> None:
    with user_error(r"^some/model: cannot be loaded: KeyError$"), load_errors("some/model"):
        raise KeyError


def test_torn_search_is_an_error(copy: Path) -> None:
    (copy / SEARCH).write_bytes(b'{"num_beams": 4, "len')
    with user_error(r"generation_config\.json: cannot be read \(.*\); restore it, or save the model again\.$"):
        load_model(str(copy))


OUT_OF_RANGE: dict[str, Any] = {
    "eos_token_id": 100_000,
    "bad_words_ids": [[5, -1]],
    "pad_token_id": [1],
    "decoder_start_token_id": True,
    "suppress_tokens": [3.0],
    "num_beams": "4",
    "num_return_sequences": 0,
    "length_penalty": math.nan,
    "length_penalty_type": "paper",
    "num_iterations": 2.5,
    "length_beam_size": False,
    "num_latent_samples": -1,
    "latent_temperature": math.inf,
    "length_weight": [1.0],
    "max_source_relative_length": -1,
}


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_saved_setting_of_another_type_or_out_of_range_is_an_error_that_names_it(copy: Path, name: str) -> None:
    change(copy / SEARCH, **{name: OUT_OF_RANGE[name]})
    with user_error(rf"generation_config\.json: {name}: .*; got .*, expected .*; restore it, or save the"):
        load_model(str(copy))


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_search_that_a_family_saves_is_in_range(family: str, tmp_path: Path) -> None:
    model = EVERY_FAMILY[family]()
    model.generation_config.update(eos_token_id=[2, 98], max_source_relative_length=0, suppress_tokens=[3])
    model.save_pretrained(tmp_path)
    assert load_model(str(tmp_path)).generation_config.eos_token_id == [2, 98]


def test_tokens_of_a_larger_target_vocabulary_are_in_range(tmp_path: Path) -> None:
    fields = {"vocab_size": 30, "decoder_vocab_size": 40, "share_encoder_decoder_embeddings": False}
    tiny_marian(**fields, tie_word_embeddings=False, eos_token_id=39).save_pretrained(tmp_path)
    assert load_model(str(tmp_path)).generation_config.eos_token_id == 39


def test_lost_search_is_an_error_for_a_model_that_is_saved_with_one(copy: Path) -> None:
    (copy / SEARCH).unlink()
    with user_error(r"model: generation_config\.json is missing, which this package saves with every"):
        load_model(str(copy))


def test_model_of_others_without_a_search_decodes_greedily_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny_marian(vocab_size=40).save_pretrained(tmp_path)
    (tmp_path / SEARCH).unlink()
    load_model(str(tmp_path))
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warnings == [f"{tmp_path}: generation_config.json is missing, so the model decodes greedily."]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"encoder_layers": 999}, r"do not fit encoder_layers; got [\d,]+ bytes for 999 layers\. Restore"),
        ({"d_ff": 10**10}, r"do not fit its config\.json; got [\d,]+ bytes for 1?[\d,]{13,} numbers\. Restore"),
    ],
)
@pytest.mark.parametrize("is_pickle", [False, True])
def test_configuration_of_a_larger_model_than_its_weights_is_an_error_before_memory_is_taken(
    copy: Path, fields: dict[str, Any], message: str, is_pickle: bool
) -> None:
    if is_pickle:
        torch.save(load_model(str(copy)).state_dict(), copy / "pytorch_model.bin")
        (copy / WEIGHTS).unlink()
    change(copy / CONFIG, **fields)
    with user_error(rf"^[^\n]*model: its weights {message}"):
        load_model(str(copy))


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 19000000\n"
NO_WEIGHTS: dict[bytes, str] = {
    POINTER: "contains no weights; got a pointer of Git LFS. Run `git lfs pull` there, or download it again",
    b"": "contains no weights; got an empty file. Run",
    b"<!DOCTYPE html><html></html>": "contains no weights; got a web page. Run",
    b"no weights": "cannot be loaded: .*header",
}


@pytest.mark.parametrize("is_shard", [False, True])
@pytest.mark.parametrize("content", NO_WEIGHTS, ids=range(len(NO_WEIGHTS)))
def test_file_of_weights_that_contains_none_is_named_as_that(copy: Path, content: bytes, is_shard: bool) -> None:
    if is_shard:
        load_model(str(copy)).save_pretrained(copy, max_shard_size="100KB")
        (copy / WEIGHTS).unlink(missing_ok=True)
    (next(copy.glob("model-*.safetensors")) if is_shard else copy / WEIGHTS).write_bytes(content)
    with user_error(rf"^(?!.*{CONFIG}).*{NO_WEIGHTS[content]}"):
        load_model(str(copy))


@pytest.mark.parametrize("file", [CONFIG, "generation_config.json", "tokenizer.json"])
def test_pointer_in_place_of_a_file_of_settings_is_named_as_that(copy: Path, file: str) -> None:
    (copy / file).write_bytes(POINTER)
    with user_error(rf"^[^\n]*{file}: contains no JSON; got a pointer of Git LFS\. Run `git lfs pull` there"):
        (load_tokenizer if file == "tokenizer.json" else load_model)(str(copy))


def test_truncated_weights_are_an_error_of_the_file(copy: Path) -> None:
    (copy / WEIGHTS).write_bytes((copy / WEIGHTS).read_bytes()[:-100])
    with user_error(rf"^(?!.*{CONFIG}).*model: cannot be loaded: .*[Mm]etadata"):
        load_model(str(copy))


@pytest.mark.parametrize("shard", ["../outside.safetensors", "/outside.safetensors", "in/../../outside.safetensors"])
def test_shard_outside_of_the_models_folder_is_an_error(copy: Path, shard: str) -> None:
    (copy / WEIGHTS).rename(copy.parent / "outside.safetensors")
    (copy / f"{WEIGHTS}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": {BIAS: shard}}))
    with user_error(r"index\.json: names a file outside of its folder; got '.*outside"):
        load_model(str(copy))


def test_sharded_weights_are_counted_together(copy: Path) -> None:
    load_model(str(copy)).save_pretrained(copy, max_shard_size="100KB")
    (copy / WEIGHTS).unlink(missing_ok=True)
    assert len(list(copy.glob("model-*.safetensors"))) > 1
    load_model(str(copy))
    change(copy / CONFIG, decoder_layers=1000)
    with user_error(r"do not fit decoder_layers; got [\d,]+ bytes for 1,000 layers"):
        load_model(str(copy))


def test_token_beyond_the_models_embeddings_is_an_error(copy: Path) -> None:
    fields = json.loads((copy / TOKENIZER).read_text())
    fields["post_processor"]["special_tokens"]["</s>"]["ids"] = [1_000_000]
    change(copy / TOKENIZER, **fields)
    with pytest.raises(ValueError, match="its tokenizer has 1000001 entries, the model only 300"):
        check_vocabulary(load_model(str(copy)), load_tokenizer(str(copy)))


@pytest.mark.parametrize("field", ["encoder_layers", "decoder_layers", "flow_steps"])
def test_configuration_of_a_million_layers_is_an_error(field: str) -> None:
    fields: dict[str, Any] = {field: 1_000_000}
    with pytest.raises(StrictDataclassError, match=r"1000000 is not a valid number of layers; expected 1 to"):
        VaswaniFlowSeqConfig(**fields)


FORBIDDEN = {"eval", "exec", "system", "pickle", "marshal", "shelve", "dill", "unsafe_load", "full_load"}


def test_no_source_unpickles_or_runs_what_it_reads() -> None:
    """`load` of a module is json's, torch's with `weights_only=True`, and yaml's is `safe_load`."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = {alias.name for alias in node.names} if isinstance(node, ast.Import | ast.ImportFrom) else set()
            if isinstance(node, ast.ImportFrom):
                names.add(node.module or "")
            if isinstance(node, ast.Call):
                keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                name = ast.unparse(node.func)
                names = {name.removeprefix("os.")}
                assert name != "torch.load" or keywords["weights_only"] == "True", path
                assert name != "yaml.load", path
                assert keywords.get("trust_remote_code") != "True", path
                assert keywords.get("shell") != "True", path
            assert not names & FORBIDDEN, path
