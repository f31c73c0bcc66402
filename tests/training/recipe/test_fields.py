"""Recipes: read from YAML and arguments, and checked before any work."""

import dataclasses
import errno
import platform
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from tests.helpers import ROOT, run_python, user_error
from training import score, train
from training.recipe import fields as recipe_module
from training.recipe import machine
from training.recipe.families import FAMILIES
from training.recipe.fields import (
    DataRecipe,
    DecodingRecipe,
    Recipe,
    ScoreRecipe,
    TokenizerRecipe,
    TrainingRecipe,
    load_recipe,
)
from training.recipe.help import field_descriptions, recipe_help
from training.recipe.machine import trains_slowly_in_bf16
from training.run import preparation
from training.run.folder import prepare_folder
from training.run.preparation import load_inputs, write_recipe

WriteRecipe = Callable[[str], Path]  # of a text; returns its file
RECIPES = sorted((ROOT / "training" / "recipes").glob("*.yaml"))


@pytest.fixture
def recipe_file(tmp_path: Path) -> WriteRecipe:
    def write(text: str) -> Path:
        path = tmp_path / "own.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_of_the_project_is_valid(path: Path) -> None:
    of_file = yaml.safe_load(path.read_text(encoding="utf-8"))
    more = ["--training.energy_from=teacher"] if "energy_inputs" in of_file["training"] else []
    recipe = load_recipe(path, more if of_file["data"]["kind"] == "grammar" else [*more, "--data.path=somewhere"])
    assert recipe.name == path.stem
    assert recipe.expected
    config = recipe.model_config(vocab_size=recipe.tokenizer.vocab_size)
    assert config.vocab_size == recipe.tokenizer.vocab_size


def test_wmt_recipes_have_the_papers_regime() -> None:
    base = load_recipe(RECIPES[0].parent / "wmt14-en-de-base.yaml", [])
    assert base.model_config() == type(base.model_config()).from_paper("base")
    assert (base.training.steps, base.training.warmup_steps, base.training.learning_rate_scale) == (100_000, 4000, 1.0)
    assert (base.training.source_tokens, base.training.target_tokens) == (25_000, 25_000)
    search = base.decoding
    assert (search.num_beams, search.length_penalty, search.max_source_relative_length) == (4, 0.6, 50)
    french = load_recipe(RECIPES[0].parent / "wmt14-en-fr-big.yaml", [])
    assert (french.tokenizer.algorithm, french.tokenizer.vocab_size) == ("wordpiece", 32_000)
    assert french.model_config().dropout == 0.1
    assert french.data.streaming


def test_arguments_override_the_file(recipe_file: WriteRecipe) -> None:
    path = recipe_file("data: {kind: grammar}\ntraining: {steps: 5}\n")
    recipe = load_recipe(
        path, ["--training.steps=7", "--training.minutes=1.5", "--model.d_model=64", "--output_dir=x", "--model.d_k=8"]
    )
    assert (recipe.training.steps, recipe.training.minutes) == (7, 1.5)
    assert recipe.model == {"d_model": 64, "d_k": 8}
    assert recipe.output_dir == "x"


def test_home_is_expanded_in_every_path_and_in_no_other_text(
    recipe_file: WriteRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = recipe_file("name: ~/run\nmodel: {kind: cmlm}\ndata: {kind: json, path: ~/data, source: ~/en}\n")
    fields = ("output_dir", "tokenizer.path", "training.start_from", "training.energy_from", "data.distilled")
    recipe = load_recipe(path, [f"--{name}=~/{name}" for name in fields])
    expanded = (recipe.output_dir, recipe.tokenizer.path, recipe.training.start_from, recipe.training.energy_from)
    assert (*expanded, recipe.data.distilled) == tuple(str(tmp_path / name) for name in fields)
    assert (recipe.name, recipe.data.path, recipe.data.source) == ("~/run", str(tmp_path / "data"), "~/en")
    assert load_recipe(path, ["--training.energy_from=a/b~"]).training.energy_from == "a/b~"


@pytest.mark.parametrize(
    ("given", "is_slow", "taken"),
    [("auto", True, "fp32"), ("auto", False, "bf16"), ("bf16", True, "bf16"), ("fp32", False, "fp32")],
)
def test_recipe_that_leaves_its_precision_open_gets_the_faster_one(
    recipe_file: WriteRecipe,
    tmp_path: Path,
    given: str,
    is_slow: bool,
    taken: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for module in (recipe_module, preparation):
        monkeypatch.setattr(module, "trains_slowly_in_bf16", lambda: is_slow)
    recipe = load_recipe(recipe_file(f"data: {{kind: grammar}}\ntraining: {{precision: {given}}}\n"), [])
    assert recipe.training.precision == taken
    load_inputs(recipe, tmp_path)
    has_warning = "this machine trains faster in fp32" in caplog.text and "--training.precision=fp32" in caplog.text
    assert has_warning == (given == "bf16")


def test_run_keeps_its_precision_on_another_machine(
    recipe_file: WriteRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = recipe_file("data: {kind: grammar}\ntraining: {precision: auto}\n")
    given = [f"--output_dir={tmp_path / 'run'}"]
    monkeypatch.setattr(recipe_module, "trains_slowly_in_bf16", lambda: False)
    (tmp_path / "run").mkdir()
    write_recipe(load_recipe(path, given), tmp_path / "run")
    monkeypatch.setattr(recipe_module, "trains_slowly_in_bf16", lambda: True)
    with user_error(r"^training\.precision: .* got fp32, expected bf16\. Give --training\.prec"):
        prepare_folder(load_recipe(path, given))
    prepare_folder(load_recipe(path, [*given, "--training.precision=bf16"]))


@pytest.mark.parametrize(
    ("cpu_name", "amx_bf16", "is_slow"),
    [("Intel Xeon", False, True), ("Intel Xeon", True, False), ("AMD EPYC", False, False)],
)
def test_instructions_for_bf16_are_no_gain_on_intel_without_a_matrix_unit(
    cpu_name: str, amx_bf16: bool, is_slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    capabilities = {"cpu_name": cpu_name, "amx_bf16": amx_bf16}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    assert trains_slowly_in_bf16() == is_slow


@pytest.mark.parametrize("has_instructions", [True, False])
def test_gpu_that_only_emulates_bf16_trains_in_fp32(has_instructions: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_supported(including_emulation: bool = True) -> bool:
        return including_emulation or has_instructions

    monkeypatch.setattr(machine, "uses_cpu", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_supported)
    assert trains_slowly_in_bf16() != has_instructions


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the variable is for instructions of x86")
def test_cpu_without_instructions_for_bf16_is_known() -> None:
    code = "from training.recipe.machine import trains_slowly_in_bf16; print(trains_slowly_in_bf16())"
    assert run_python(code, ONEDNN_MAX_CPU_ISA="AVX2", ACCELERATE_USE_CPU="true").strip() == "True"


def test_number_that_yaml_reads_as_a_word_is_a_number(recipe_file: WriteRecipe) -> None:
    model = "{kind: iterative_vae, decoder_layers: 3, layer_norm_eps: 1e-5}"
    path = recipe_file(f"data: {{kind: grammar}}\ntraining: {{learning_rate_scale: 1e-1}}\nmodel: {model}\n")
    recipe = load_recipe(path, ["--model.kl_weights=[2e0, 5e-1]"])
    assert recipe.training.learning_rate_scale == 0.1
    assert (recipe.model_config().layer_norm_eps, recipe.model_config().kl_weights) == (1e-5, [2.0, 0.5])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("training: {step: 3}", r"training\.step: no such key; training has steps,"),
        ("colour: red", r"colour: no such key; a recipe has name,"),
        ("training: {steps: many}", r"training\.steps: expected int, got 'many'"),
        ("training: {steps: true}", r"training\.steps: expected int, got True"),
        ("training: {steps: 0}", r"steps: 0 is not positive"),
        ("training: {steps: 9999999999999999999}", r"steps: a number of 19 digits is too large"),
        ("training: 3", r"training: expected a group of fields, got 3"),
        ("data: {kind: csv}", r"data\.kind: 'csv' is not one of grammar, json, text, hub"),
        ("data: {kind: jsn}", r"^data\.kind: 'jsn' is not one of .* Did you mean json\?$"),
        ("data: {kind: json}", r"data\.path: .* needs the folder of its data; give --data\.path="),
        ("data: {kind: hub}", r"data\.path: .* needs the name of a data set"),
        ("data: {kind: json, path: x, teacher: y}", r"^data\.teacher: without effect, since data\.distilled is null"),
        ("data: {kind: json, path: x, buffer: 5}", r"^data\.buffer: without effect, since data\.streaming is false"),
        ("data: {kind: json, path: x, subset: y}", r"^data\.subset: .*\(--data\.subset=null\), or set data\.kind"),
        ("data: {kind: trees, path: x}\ntask: dialogue", r"^task: without effect, since data\.kind is trees"),
        (f"a: {'[' * 9999}", r"not YAML: nested too deeply"),
        ("a: &a [*a]", r"own\.yaml, line 1: an alias, \*a; write its value there\.$"),
        ("a: &a [x]\nb: [*a, *a]", r"own\.yaml, line 2: an alias, \*a; write its value there\.$"),
        ("? [a, b]\n: c", r"own\.yaml: not YAML: .*unhashable key"),
        ("seed: 2020-13-45", r"own\.yaml: not YAML: month must be in"),
        ("- a\n- b", r"a recipe is a mapping of keys to values, not list"),
        ("a: [", r"own\.yaml: not YAML"),
        ("seed: 1\ndata: {kind: grammar}\nseed: 2", r"own\.yaml, line 3: 'seed' is already in line 1; keep one"),
        ("training:\n  steps: 1\n  # more\n  steps: 1\n", r"own\.yaml, line 4: 'steps' is already in line 2"),
        ("data: {kind: grammar}\nmodel: {kind: [nat]}", r"^model\.kind: \['nat'\] is not one of autoregressive, nat"),
        ("data: {kind: grammar}\nmodel: {2: 64}", r"^model\.2: no such key; a model has "),
        ("model: {d_model: 4, d_model: 8}", r"own\.yaml, line 1: 'd_model' is already in line 1"),
    ],
)
def test_invalid_file_is_an_error_of_one_line(recipe_file: WriteRecipe, text: str, message: str) -> None:
    with user_error(message):
        load_recipe(recipe_file(text), [])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model.width=3"], r"model\.width: no such key; a model has"),
        (["--model.dmodel=8"], r"^model\.dmodel: no such key; .* Did you mean d_model\?$"),
        (["--steps=3"], r"^steps: no such key; .* Did you mean training\.steps\?$"),
        (["--model.paper=huge"], r"model\.paper: 'huge' is not one of base, big"),
        (["--model.dropout=1.0"], r"model: .*dropout.*1\.0 is outside \[0, 1\)"),
        (["--training.average_last=2"], r"training\.keep_checkpoints: 2 are too few to average the last 2 .*; give 3"),
        (["--data.streaming=true"], r"data\.streaming: .* is grammar, not json, text, hub or trees"),
        (["--data.path=x"], r"^data\.path: without effect, since data\.kind is grammar"),
        (["--training.skip_limit=3"], r"^training\.skip_limit: .*on_divergence is stop, not skip"),
        (["--training.skip_limit=-1"], r"skip_limit: -1 is negative"),
        (["--training.on_divergence=ignore"], r"'ignore' is not one of stop, skip"),
        (["--data.buffer=0"], r"data\.buffer: 0 is not positive"),
        (["--tokenizer.sample=0"], r"tokenizer\.sample: 0 is not positive"),
        (["--data.source=en", "--data.target=en"], r"data\.target: 'en' is also the source, so"),
        (["--seed=4294967296"], r"seed: 4294967296 is too large; give one below 4294967296"),
        (["--decoding.max_source_relative_length=1000001"], r"h: 1000001 is too large; give 1000000 or less\.$"),
        (["--decoding.length_penalty=-51"], r"^decoding\.length_penalty: -51.* is too small"),
        (["--output_dir="], r"^output_dir: the text is empty; name something, or give null"),
        (["--data.path="], r"^data\.path: the text is empty"),
        (["--name="], r"^name: the text is empty; name something, or leave it out"),
        (["--training.steps="], r"^--training\.steps=: the value is empty; give one, or null"),
        (["--data.validation=null"], r"^data\.validation: every run needs one; got null"),
        ([f"--model={'[' * 9999}"], r"^--model=\[.* is not a value \(nested too deeply\)"),
        (["--seed=2020-13-45"], r"--seed=2020-13-45: '2020-13-45' is not a value"),
        (["--seed=3", "--seed.x=3"], r"--seed\.x=3: seed is a value, not a group"),
        (["training.steps=3"], r"training\.steps=3: not an argument; write --any\.field=value"),
        (["--training.steps", "3"], r"--training\.steps: has no value; write --training\.steps=VALUE"),
        (["--training.steps=1", "--training.steps=2"], r"^--training\.steps: is given twice, .*; give it once\.$"),
        (["--model={d_ff: 4, d_ff: 8}"], r"^--model=\{d_ff: 4, d_ff: 8\}: line 1: 'd_ff' is already in line 1"),
    ],
)
def test_invalid_argument_is_an_error_of_one_line(recipe_file: WriteRecipe, arguments: list[str], message: str) -> None:
    with user_error(message):
        load_recipe(recipe_file("data: {kind: grammar}"), arguments)


NUMBERS = (
    "training.learning_rate_scale",
    "training.minutes",
    "training.max_grad_norm",
    "training.checkpoint_minutes",
    "training.steps",
    "decoding.length_penalty",
    "model.dropout",
    "model.layer_norm_eps",
)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e999", ".nan", ".inf", "-.inf", "'nan'"])
@pytest.mark.parametrize("name", NUMBERS)
def test_number_that_is_not_finite_is_an_error_in_arguments_and_in_files(
    recipe_file: WriteRecipe, name: str, value: str
) -> None:
    path = recipe_file("data: {kind: grammar}")
    group, _, field = name.partition(".")
    in_file = path.with_name("other.yaml")
    in_file.write_text(f"data: {{kind: grammar}}\n{group}: {{{field}: {value}}}")
    for file, arguments in ((path, [f"--{name}={value}"]), (in_file, [])):
        with user_error(rf"^({name}: expected|model: )"):
            load_recipe(file, arguments)


def test_keys_that_yaml_merges_may_be_overridden(recipe_file: WriteRecipe) -> None:
    path = recipe_file("data:\n  <<: {kind: grammar, max_length: 5}\n  max_length: 6\n")
    assert load_recipe(path, []).data.max_length == 6


def test_null_is_none_where_a_field_may_have_none_and_the_default_of_any_other(recipe_file: WriteRecipe) -> None:
    path = recipe_file(
        "name: own\nnote: n\ndata: {kind: grammar, test: x}\ntraining: {steps: 5, minutes: 5}\n"
        "model: {kind: nat, paper: B-dk16, d_model: 64}\ndecoding: {num_beams: 2}\n"
    )
    names = ("name", "note", "data.test", "training.steps", "training.minutes")
    names += ("decoding", "model.d_k", "model.d_model")
    recipe = load_recipe(path, [f"--{name}=null" for name in names])
    assert (recipe.name, recipe.note, recipe.data.test) == ("run", "", None)
    assert (recipe.training.steps, recipe.training.minutes) == (100_000, None)
    assert recipe.model == {"kind": "nat", "paper": "B-dk16", "d_k": None}
    assert load_recipe(path, ["--decoding=null", "--data.test=null", "--model=null"]).model == {}


def test_recipe_of_a_run_that_is_only_scored_needs_no_switch_of_training(recipe_file: WriteRecipe) -> None:
    path = recipe_file("data: {kind: grammar}\nmodel: {kind: cmlm}\ntraining: {energy_inputs: softmax}\n")
    assert load_recipe(path, [], is_trained=False).training.energy_inputs == "softmax"


@pytest.mark.parametrize("tokenize", ["ja-mecab", "ko-mecab"])
def test_score_whose_packages_are_missing_is_an_error(
    recipe_file: WriteRecipe, monkeypatch: pytest.MonkeyPatch, tokenize: str
) -> None:
    tokenizers = [f"sacrebleu.tokenizers.tokenizer_{language}_mecab" for language in ("ja", "ko")]
    for name in ("MeCab", "mecab_ko", *tokenizers):
        monkeypatch.setitem(sys.modules, name, None)
    with user_error(rf'^score\.tokenize: .*run `pip install "sacrebleu\[{tokenize[:2]}\]"`\.$'):
        load_recipe(recipe_file("data: {kind: grammar}"), [f"--score.tokenize={tokenize}"])


def test_help_lists_every_field_with_its_default_and_its_meaning() -> None:
    text = recipe_help()
    groups = {"": Recipe, "data.": DataRecipe, "tokenizer.": TokenizerRecipe, "training.": TrainingRecipe}
    for prefix, group in (groups | {"decoding.": DecodingRecipe, "score.": ScoreRecipe}).items():
        for field in dataclasses.fields(group):
            if field.default is not dataclasses.MISSING:
                default = (
                    {None: "null", True: "true", False: "false"}[field.default]
                    if isinstance(field.default, bool | None)
                    else field.default
                )
                assert f"  --{prefix}{field.name}={default}\n      " in text
                assert len(field_descriptions(group)[field.name]) > 10
    assert "--model.d_model=512\n      width of every" in text
    for name in {"kind", "paper"}.union(*(kind.model_fields for kind in FAMILIES.values())):
        assert f"--model.{name}=" in text


@pytest.mark.parametrize("arguments", [["--help"], ["quickstart.yaml", "-h"]])
@pytest.mark.parametrize("command", [train.main, score.main])
def test_commands_help_lists_the_fields(
    command: Callable[[list[str]], None], arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        command(arguments)
    assert end.value.code == 0
    assert "--training.skip_limit=10\n      the steps in a row" in capsys.readouterr().out


def test_recipe_that_the_disk_does_not_give_is_an_error_of_one_line(
    recipe_file: WriteRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, encoding: str) -> str:
        raise OSError(errno.EIO, "Input/output error", str(path))

    path = recipe_file("data: {kind: grammar}")
    monkeypatch.setattr(Path, "read_text", fail)
    with user_error(r"own\.yaml: cannot be read \(Input/output error\); give a recipe that can be\.$"):
        load_recipe(path, [])
