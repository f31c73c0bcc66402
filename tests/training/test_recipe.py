"""Recipes: read from YAML and arguments, and checked before any work."""

from pathlib import Path

import pytest

from training.recipe import RecipeError, load_recipe

RECIPES = sorted((Path(__file__).parents[2] / "training" / "recipes").glob("*.yaml"))


@pytest.fixture
def recipe_file(tmp_path):
    def write(text):
        path = tmp_path / "own.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_of_the_project_is_valid(path):
    recipe = load_recipe(path, ["--data.path=somewhere"])
    assert recipe.name == path.stem
    assert recipe.expected
    config = recipe.model_config(vocab_size=recipe.tokenizer.vocab_size)
    assert config.vocab_size == recipe.tokenizer.vocab_size


def test_the_project_has_the_recipes_it_promises():
    assert {path.stem for path in RECIPES} >= {
        "quickstart",
        "multi30k-tiny",
        "wmt14-en-de-base",
        "wmt14-en-de-big",
        "wmt14-en-fr-big",
    }


def test_the_wmt_recipes_have_the_papers_regime():
    base = load_recipe(RECIPES[0].parent / "wmt14-en-de-base.yaml", [])
    assert base.model_config() == type(base.model_config()).from_paper("base")
    assert (base.training.steps, base.training.warmup_steps, base.training.learning_rate_scale) == (100_000, 4000, 1.0)
    assert (base.training.source_tokens, base.training.target_tokens) == (25_000, 25_000)
    assert (base.decoding.num_beams, base.decoding.length_penalty, base.decoding.max_source_relative_length) == (
        4,
        0.6,
        50,
    )
    french = load_recipe(RECIPES[0].parent / "wmt14-en-fr-big.yaml", [])
    assert (french.tokenizer.algorithm, french.tokenizer.vocab_size) == ("wordpiece", 32_000)
    assert french.model_config().dropout == 0.1
    assert french.data.streaming


def test_arguments_are_laid_over_the_file(recipe_file):
    path = recipe_file("data: {kind: grammar}\ntraining: {steps: 5}\n")
    recipe = load_recipe(
        path, ["--training.steps=7", "--training.minutes=1.5", "--model.d_model=64", "--output_dir=x", "--model.d_k=8"]
    )
    assert (recipe.training.steps, recipe.training.minutes) == (7, 1.5)
    assert recipe.model == {"d_model": 64, "d_k": 8}
    assert recipe.output_dir == "x"


def test_a_number_in_the_form_yaml_takes_for_a_word_is_a_number(recipe_file):
    path = recipe_file("data: {kind: grammar}\ntraining: {learning_rate_scale: 1e-1}\n")
    assert load_recipe(path, []).training.learning_rate_scale == 0.1


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        ("training: {step: 3}", [], r"training\.step: no such key; training has steps,"),
        ("colour: red", [], r"colour: no such key; a recipe has name,"),
        ("training: {steps: many}", [], r"training\.steps: expected int, got 'many'"),
        ("training: {steps: true}", [], r"training\.steps: expected int, got True"),
        ("training: {steps: 0}", [], r"steps: 0 is not positive"),
        ("training: 3", [], r"training: expected a group of fields, got 3"),
        ("data: {kind: csv}", [], r"data\.kind: 'csv' is not one of grammar, json, text, hub"),
        ("data: {kind: json}", [], r"data\.path: .* needs the folder of its data; give --data\.path="),
        ("data: {kind: hub}", [], r"data\.path: .* needs the name of a data set"),
        ("data: {kind: grammar}\nmodel: {width: 3}", [], r"model\.width: no such key; a model has"),
        ("data: {kind: grammar}\nmodel: {paper: huge}", [], r"model\.paper: 'huge' is not one of base, big"),
        ("data: {kind: grammar}\nmodel: {dropout: 1.0}", [], r"model: .*dropout.*1\.0 is outside \[0, 1\)"),
        (
            "data: {kind: grammar}\ntraining: {average_last: 2}",
            [],
            r"training\.keep_checkpoints: 2 are too few to average the last 2 and keep the best; give 3",
        ),
        ("data: {kind: grammar, streaming: true}", [], r"data\.streaming: the shipped task is made in memory"),
        ("data: {kind: grammar, pool: 0}", [], r"data\.pool: 0 is not positive"),
        ("data: {kind: grammar}\ntokenizer: {sample: 0}", [], r"tokenizer\.sample: 0 is not positive"),
        ("- a\n- b", [], r"a recipe is a mapping of keys to values, not list"),
        ("a: [", [], r"own\.yaml: not YAML"),
        ("", ["training.steps=3"], r"training\.steps=3: not an argument; write --any\.field=value"),
        ("", ["--training.steps"], r"--training\.steps: not an argument"),
        ("seed: 3", ["--seed.x=3"], r"--seed\.x=3: seed is a value, not a group"),
    ],
)
def test_a_recipe_that_cannot_be_used_is_refused_in_one_line(recipe_file, text, arguments, message):
    with pytest.raises(RecipeError, match=message) as refusal:
        load_recipe(recipe_file(text), arguments)
    assert "\n" not in str(refusal.value)


def test_an_unknown_recipe_is_answered_with_those_there_are():
    with pytest.raises(RecipeError, match=r"nope\.yaml: there is no such recipe; .*quickstart\.yaml"):
        load_recipe("nope.yaml", [])
