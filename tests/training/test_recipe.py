"""Recipes: read from YAML and arguments, with exactly the fields that their kinds have."""

import dataclasses
from pathlib import Path, PureWindowsPath
from typing import Any

import pytest
import torch
import yaml

from tests.commands import error_line, run_main, user_error
from training import machine, train
from training import recipe as recipe_module
from training.machine import trains_slowly_in_bf16
from training.recipe import RECIPES, BeamSearch, load_recipe, recipe_of, to_dict, to_yaml
from vaswani_transformer.registration import FAMILIES

ALL = sorted(RECIPES.glob("*.yaml"))
QUICKSTART = RECIPES / "quickstart.yaml"


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_every_recipe_of_the_project_is_valid_and_saved_as_the_same(path: Path) -> None:
    of_file = yaml.safe_load(path.read_text(encoding="utf-8"))
    recipe = load_recipe(path, ["--data.path=somewhere"])
    assert recipe.name == path.stem
    for group in ("data", "tokenizer", "training", "decoding", "score"):
        for name, value in of_file.get(group, {}).items():
            known = getattr(getattr(recipe, group), name)
            known = dataclasses.asdict(known) if dataclasses.is_dataclass(known) else known
            assert known == (tuple(value) if isinstance(value, list) else value) or name in ("path", "precision")
    saved = to_dict(recipe)
    assert yaml.safe_load(yaml.safe_dump(saved)) == saved
    assert to_dict(recipe_of(saved)) == saved
    assert "output_dir" not in saved


@pytest.mark.parametrize("name", ["1e3", "12E-4", "1_0e5", "no", "007", "2009-03-01", "null", "0x10", "12:30", "1.5"])
def test_text_that_looks_like_a_different_value_is_saved_as_the_same(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(QUICKSTART, [f"--name={name}", f"--data.source={name}"])
    (tmp_path / "saved.yaml").write_text(to_yaml(to_dict(recipe)), encoding="utf-8")
    saved = load_recipe(tmp_path / "saved.yaml", [])
    assert (saved.name, saved.data.source) == (name, name)


def test_wmt_recipes_have_the_papers_regime() -> None:
    base, big = (load_recipe(RECIPES / f"wmt14-en-de-{name}.yaml", []) for name in ("base", "big"))
    regime = {"source_tokens": 25_000, "target_tokens": 25_000, "warmup_steps": 4000, "checkpoint_minutes": 10}
    for recipe, steps, averaged in ((base, 100_000, 5), (big, 300_000, 20)):
        expected = regime | {"steps": steps, "average_last": averaged}
        assert expected.items() <= dataclasses.asdict(recipe.training).items()
        assert recipe.decoding == BeamSearch(4, 0.6, "gnmt", max_source_relative_length=50)
    assert big.model_config(vocab_size=37_000).d_model == 1024


def test_arguments_override_the_file() -> None:
    before, recipe = (
        load_recipe(QUICKSTART, given) for given in ([], ["--training.steps=7", "--model.d_model=32", "--name=2024"])
    )
    assert (recipe.training.steps, recipe.name) == (7, "2024")
    assert recipe.model == before.model | {"d_model": 32}


def test_kind_may_stand_after_a_blank() -> None:
    recipe = load_recipe(QUICKSTART, ["--model.kind", "nat", "--training.glancing", "[0.5,0.3]"])
    assert recipe.kind == "nat"
    assert to_dict(recipe)["training"]["glancing"] == [0.5, 0.3]


def test_home_is_expanded_in_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    recipe = load_recipe(QUICKSTART, ["--output_dir=~/runs/a", "--note=~ 2 minutes"])
    assert (recipe.output_dir, recipe.note) == ("/home/somebody/runs/a", "~ 2 minutes")


def test_home_with_backslashes_is_expanded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: PureWindowsPath(r"C:\Users\somebody"))
    recipe = load_recipe(QUICKSTART, ["--output_dir=~/runs/a", "--note=runs"])
    assert (recipe.output_dir, recipe.note) == (r"C:\Users\somebody/runs/a", "runs")


@pytest.mark.parametrize(
    ("given", "is_slow", "taken"),
    [("auto", True, "fp32"), ("auto", False, "bf16"), ("bf16", True, "bf16"), ("fp32", False, "fp32")],
)
def test_recipe_that_leaves_its_precision_open_gets_the_faster_one(
    given: str, is_slow: bool, taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe_module, "trains_slowly_in_bf16", lambda: is_slow)
    assert load_recipe(QUICKSTART, [f"--training.precision={given}"]).training.precision == taken


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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data: [", r"own\.yaml: cannot be read as YAML \(while parsing"),
        ("[1, 2]", r"own\.yaml: a recipe is a mapping of keys to values; got list"),
        ("data: {kind: xml}", r"data\.kind: got 'xml', expected one of json, csv, parquet"),
        ("model: {kind: lstm}", r"model\.kind: got 'lstm', expected one of autoregressive, nat, ctc, dag, cmlm"),
        ("data: {kind: json}", r"data\.path: the recipe 'run' needs the folder of its data; give --data\.path="),
        (
            "data: {path: x}\nmodel: # all fields are comments",
            r"^model: got null, expected a value; leave the line out",
        ),
        ("data: {path: x}\ntraining:", r"^training: got null, expected a value; leave the line out for the default"),
        ("data: {path: x}\ntraining: {steps: null}", r"^training\.steps: got null, expected a value; leave the line"),
        ("data: {path: x, kind: null}", r"^data\.kind: got None, expected one of json, csv"),
        ("data: {path: x, source: no}", r"^data\.source: .*Got value: False; write a text in quotation marks"),
        ("data: {path: 007}", r"^data\.path: .*, got 7; write a text in quotation marks"),
        ("data: {path: x, validation: 0.1}", r"^data\.validation: got 0\.1, expected a number of pairs, such as 1000"),
        ("data: {path: x}\nmodel: {vocab_size: 9}", r"model\.vocab_size: the tokenizer sets it; see tokenizer"),
        (
            "data: {path: x}\ntraining: {lerning_rate_scal: 1}",
            r"own\.yaml: Group .* 'lerning_rate_scal'; did you mean training\.learning",
        ),
        ("data: {path: x}\ntrainin: {steps: 1}", r"'trainin\.steps' is not accepted; did you mean training\.steps\?"),
        ("data: {path: x}\nsteps: 1", r"'steps' is not accepted; did you mean training\.steps\? --help lists"),
        ("data: {path: x}\nfoo: 1", r"own\.yaml: Option 'foo' is not accepted\. --help lists"),
        (
            "data: {path: x}\nmodel: {d_modl: 9}",
            r"own\.yaml: model: d_modl: not a field of VaswaniTransformerConfig; did you mean d_model\?$",
        ),
        ("data: {path: x}\nmodel: {foo: 9}", r"own\.yaml: model: foo: .*; choose one of activation_dropout, "),
    ],
)
def test_invalid_file_is_an_error_of_one_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "own.yaml").write_text(text, encoding="utf-8")
    with user_error(message):
        load_recipe(tmp_path / "own.yaml", [])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--training.steps=0"], r"^training\.steps: Not of type PositiveInt: 0 does not conform to restriction v>0"),
        (["--training.minutes=-1"], r"^training\.minutes: .* v>0, got -1\. --help lists the fields"),
        (["--training.step=100"], r"arguments: --training\.step=100; did you mean --training\.steps\? --help lists"),
        (["--trainin.steps", "9"], r"arguments: --trainin\.steps 9; did you mean --training\.steps\? --help lists"),
        (["--output-dir=x"], r"arguments: --output-dir=x; did you mean --output_dir\? --help lists"),
        (["--steps=9", "--foo=1"], r"arguments: --steps=9 --foo=1; did you mean --training\.steps\? --help lists"),
        (["--foo=1"], r"arguments: --foo=1\. --help lists"),
        (
            ["--data.source_language=English"],
            r"^data\.source_language: Not of type LanguageCode: .*, got English\. --help",
        ),
        (["--training.dropout=0.1"], r"; did you mean --model\.dropout\?"),
        (["--training.label_smoothing=0.1"], r"; did you mean --model\.label_smoothing\?"),
        (["--training.lr=1"], r"; did you mean --training\.learning_rate_scale\?"),
        (
            ["--training.optimizer=radam", "--training.lr=1"],
            r"did you mean (--)?training\.(learning_rate|optimizer=paper)\?",
        ),
        (["--training.fp16=true"], r"; did you mean --training\.precision\?"),
        (["--lr=1"], r"; did you mean --training\.learning_rate_scale\?"),
        (["--batch-size=9"], r"; did you mean --training\.source_tokens\?"),
        (["--training.save_total_limit=2"], r"; did you mean --training\.keep_checkpoints\?"),
        (["--training.num_train_epochs=2"], r"; did you mean --training\.steps\?"),
        (["--training.weight_decay=0.1"], r"; did you mean --training\.optimizer=radam\?"),
        (["--training.max_length=9"], r"; did you mean --data\.max_length\?"),
        (["--decoding.max_length=9"], r"; did you mean --decoding\.max_source_relative_length\?"),
        (["--training.gradient_clipping=1"], r"; did you mean --training\.max_grad_norm\?"),
        (["--training.num_workers=1"], r"unrecognized arguments: --training\.num_workers=1\. --help"),
        (["--model.lr=1"], r"^model: lr: not a field of .*; did you mean training\.learning_rate_scale\?$"),
        (
            ["--data.validation=0.1"],
            r"^data\.validation: got 0\.1, expected a number of pairs, such as 1000, or the name",
        ),
        (["--data.test=10%"], r"^data\.test: got 10%, expected a number of pairs"),
        (["--data.test=0"], r"^data\.test: got 0, expected a number of pairs"),
        (["--data.delimiter=ab"], r"^data\.delimiter: Not of type Delimiter: .*, got ab\. --help"),
        (["--data.train=[]"], r"^data\.train: names no file; got \[\]\. Name at least one"),
        (["--model.kind="], r"^model\.kind: got '', expected one of autoregressive, "),
        (["--training.optimizer=radam"], r"does not accept option 'warmup_steps'"),
        (["--seed=4294967296"], r"^seed: Not of type Seed: 4294967296 does not conform to restriction v>=0 and v<42"),
        (
            ["--decoding.length_penalty=.nan"],
            r"^decoding\.length_penalty: .*got nan, expected a finite number; correct",
        ),
        (["--model.d_modl=7"], r"^model: d_modl: not a field of .*; did you mean d_model\?$"),
        (["--model.d_model=7"], r"^model: .*d_model \(7\) must be even"),
    ],
)
def test_invalid_argument_is_an_error_of_one_line(arguments: list[str], message: str) -> None:
    with user_error(message):
        load_recipe(QUICKSTART, arguments)


def test_missing_recipe_is_an_error_that_lists_those_there_are() -> None:
    with user_error(r"quick\.yaml: there is no such recipe; those of training/recipes are .*quickstart\.yaml"):
        load_recipe("quick.yaml", [])


def test_command_without_a_recipe_prints_its_fields(capsys: pytest.CaptureFixture[str]) -> None:
    output, _, status = run_main(train.main, ["--help"], capsys)
    assert (status, "--training.steps" in output) == (0, True)
    recipe = str(RECIPES / "multi30k-glat.yaml")
    assert "--training.glancing" in run_main(train.main, [recipe, "--help"], capsys)[0]
    assert run_main(train.main, [], capsys)[2] == 2
    assert "there is no such recipe" in error_line(run_main(train.main, ["quick.yaml", "--help"], capsys))


@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if kind != "autoregressive"])
def test_model_that_predicts_all_words_at_once_never_predicts_the_unknown_word(kind: str) -> None:
    recipe = load_recipe(QUICKSTART, [f"--model.kind={kind}"])
    tokenizer: Any = type("Tokenizer", (), {"unk_token_id": 3})
    ids = {"mask_token_id": 4} if recipe.family.recipe.needs_mask else {}
    generation = recipe.generation_config(recipe.model_config(vocab_size=30, **ids), tokenizer)
    assert generation.suppress_tokens == [3]
    assert all(getattr(generation, name) == value for name, value in dataclasses.asdict(recipe.decoding).items())
