"""A teacher's encoder, and errors for folders and tokenizers that a kind of model cannot use."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from datasets import Dataset, DatasetDict

from tests.helpers import TINY, break_model, save, tiny_model, user_error
from tests.nar_models import FAMILY, tiny_nat
from tests.training.runs import begin_run
from training.data.vocabulary import make_tokenizer
from training.recipe.fields import Recipe, load_recipe, to_dict
from training.run.checks import check_model_trains, config_for_tokenizer
from training.run.folder import prepare_folder
from training.run.initial_weights import copy_weights, load_trained_models
from vaswani_transformer import VaswaniTransformerTokenizer

MakeRecipe = Callable[..., Recipe]  # of arguments
SHAPE = {name: value for name, value in TINY.items() if name != "vocab_size"}


def train_tokenizer(text: str = "one tree") -> VaswaniTransformerTokenizer:
    return VaswaniTransformerTokenizer.train_from_iterator([text], vocab_size=264)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save an autoregressive model with its tokenizer, which has fewer entries."""
    tokenizer = train_tokenizer()
    model = tiny_model(vocab_size=len(tokenizer))
    model.resize_token_embeddings(pad_to_multiple_of=64)
    return save(tmp_path_factory.mktemp("teacher"), model, tokenizer)


@pytest.fixture
def make_recipe(tmp_path: Path) -> MakeRecipe:
    def make(*arguments: str) -> Recipe:
        path = tmp_path / "own.yaml"
        path.write_text(yaml.safe_dump({"data": {"kind": "grammar"}, "model": SHAPE}), encoding="utf-8")
        return load_recipe(path, [f"--output_dir={tmp_path / 'run'}", *arguments])

    return make


@pytest.fixture
def pairs() -> DatasetDict:
    return DatasetDict({"train": Dataset.from_dict({"source": ["one tree"], "target": ["eert eno"]})})


@pytest.mark.parametrize(("kind", "layers"), [("autoregressive", 2), ("autoregressive", 3), ("nat", 2), ("cmlm", 2)])
def test_model_starts_with_its_teachers_encoder_and_embeddings(
    make_recipe: MakeRecipe, teacher: Path, pairs: DatasetDict, tmp_path: Path, kind: str, layers: int
) -> None:
    """A CMLM's `<mask>` has the next id and a random embedding; the other weights are the same without a teacher.

    The teacher's two encoder layers are the model's first ones.
    """
    given = [f"--model.kind={kind}", f"--training.encoder_from={teacher}", f"--tokenizer.path={teacher}"]
    recipe = make_recipe(*given, "--model.dropout=0.3", f"--model.encoder_layers={layers}")
    loaded = load_trained_models(recipe, tmp_path / "run")
    tokenizer = make_tokenizer(recipe, pairs)
    loaded["encoder_from"].fit_vocabulary(tokenizer)
    models = []
    for _ in range(2):
        torch.manual_seed(5)
        models.append(recipe.family.model_class(config_for_tokenizer(recipe, tokenizer)))
    copy_weights(loaded, models[0])
    weights, before = (model.state_dict() for model in models)
    taught, rows = tiny_model(vocab_size=len(train_tokenizer())).state_dict(), len(train_tokenizer())
    assert len(tokenizer) == rows + (kind == "cmlm")
    for name, weight in weights.items():
        if "embed" in name or "shared" in name or name == "lm_head.weight":
            assert torch.equal(weight[:rows], taught["model.shared.weight"])
            assert torch.equal(weight[rows:], before[name][rows:])
        else:
            is_taught = name.startswith("model.encoder.") and name in taught
            assert torch.equal(weight, taught[name] if is_taught else before[name]), name


@pytest.mark.parametrize("kind", ["autoregressive", *FAMILY])
def test_model_with_more_entries_than_its_tokenizer_gives_its_weights(
    make_recipe: MakeRecipe, pairs: DatasetDict, tmp_path: Path, kind: str
) -> None:
    """Padding of the vocabulary, as to a multiple of 64, is left out."""
    tokenizer, folder = train_tokenizer(), str(tmp_path / "start")
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    mask = {"mask_token_id": tokenizer.mask_token_id} if kind == "cmlm" else {}
    start = (FAMILY | {"autoregressive": tiny_model})[kind](vocab_size=len(tokenizer), **mask)
    expected = {name: weight.clone() for name, weight in start.state_dict().items()}
    start.resize_token_embeddings(pad_to_multiple_of=64)
    save(Path(folder), start, tokenizer)
    shape = {"cmlm": ["--model.max_target_length=20"], "flowseq": ["--model.flow_steps=1"]}.get(kind, [])
    recipe = make_recipe(
        f"--model.kind={kind}", f"--training.start_from={folder}", f"--tokenizer.path={folder}", *shape
    )
    loaded, ours = load_trained_models(recipe, tmp_path / "run"), make_tokenizer(recipe, pairs)
    loaded["start_from"].fit_vocabulary(ours)
    model = recipe.family.model_class(config_for_tokenizer(recipe, ours))
    copy_weights(loaded, model)
    torch.testing.assert_close(dict(model.state_dict()), expected, rtol=0, atol=0)


def test_teacher_with_sinusoids_may_have_another_size_of_the_unused_table(
    make_recipe: MakeRecipe, teacher: Path, tmp_path: Path
) -> None:
    recipe = make_recipe("--model.kind=nat", f"--training.encoder_from={teacher}", "--model.max_position_embeddings=64")
    assert [*load_trained_models(recipe, tmp_path / "run")] == ["encoder_from"]


@pytest.mark.parametrize("field", ["encoder_from", "start_from"])
def test_run_with_a_checkpoint_needs_no_teacher_and_no_start(
    make_recipe: MakeRecipe, tmp_path: Path, field: str
) -> None:
    recipe, folder = make_recipe("--model.kind=nat", f"--training.{field}=/nowhere/teacher"), tmp_path / "run"
    with user_error(r"^/nowhere/teacher: there is no such folder"):
        load_trained_models(recipe, folder)
    folder.mkdir()
    (folder / "trainer_state.json").write_text("{}")
    assert load_trained_models(recipe, folder) == {}


def test_teacher_of_another_kind_or_shape_is_an_error_of_one_line(
    make_recipe: MakeRecipe, teacher: Path, tmp_path: Path
) -> None:
    other, window, learned = tmp_path / "nat", tmp_path / "window", tmp_path / "learned"
    tiny_nat().save_pretrained(other)
    tiny_model(attention_window=3).save_pretrained(window)
    tiny_model(position_embedding="learned", max_position_embeddings=32).save_pretrained(learned)
    (tmp_path / "bart").mkdir()
    (tmp_path / "bart" / "config.json").write_text('{"model_type": "bart"}')
    table = ["--model.position_embedding=learned", "--model.max_position_embeddings=64"]
    field = r"^training\.encoder_from: "
    for name, arguments, message in (
        (other, [], rf"{field}.*nat: is a model of another type; got 'vaswani_nat', expected 'vaswani_transformer'"),
        (tmp_path / "bart", [], rf"{field}.*bart: .* got 'bart', expected 'vaswani_transformer'\. N"),
        (teacher, ["--model.d_ff=32"], rf"{field}.* has d_ff 64, and the recipe 32; set model\.d_ff"),
        (teacher, ["--model.encoder_layers=1"], rf"{field}.* has 2 encoder layers, .* only 1; set model"),
        (window, [], rf"{field}.* has attention_window 3, and the recipe None; set model\.att"),
        (learned, table, rf"{field}.* has max_position_embeddings 32, and the recipe 64; set"),
        (teacher, ["--model.d_k=9"], rf"{field}.* has head_dim 8, and the recipe 9"),
        (break_model(teacher, tmp_path / "nan", "nan"), [], r"^.*nan: NaN or infinite numbers in model\.encoder"),
    ):
        recipe = make_recipe("--model.kind=nat", f"--training.encoder_from={name}", *arguments)
        with user_error(message):
            load_trained_models(recipe, tmp_path / "run")


def test_teacher_of_another_vocabulary_is_an_error_of_one_line(
    make_recipe: MakeRecipe, teacher: Path, tmp_path: Path
) -> None:
    recipe = make_recipe("--model.kind=nat", f"--training.encoder_from={teacher}")
    model = load_trained_models(recipe, tmp_path / "run")["encoder_from"]
    with user_error(r"^training\.encoder_from: the vocabulary of .* give --tokenizer\.path="):
        model.fit_vocabulary(train_tokenizer("four dogs"))


@pytest.mark.parametrize("kind", ["autoregressive", "nat"])
def test_tokenizer_with_left_padding_is_an_error(
    make_recipe: MakeRecipe, pairs: DatasetDict, tmp_path: Path, kind: str
) -> None:
    """Training gives a decoder no mask of its targets, so it would learn to begin them after padding."""
    train_tokenizer().save_pretrained(tmp_path / "tokenizer")
    settings = tmp_path / "tokenizer" / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"padding_side": "left"}))
    recipe = make_recipe(f"--model.kind={kind}", f"--tokenizer.path={tmp_path / 'tokenizer'}")
    with user_error(rf"^tokenizer\.path: .* pads on the left, .* model\.kind {kind} must begin at the"):
        make_tokenizer(recipe, pairs)


def test_cmlm_needs_a_tokenizer_with_a_mask(make_recipe: MakeRecipe) -> None:
    with user_error(r"^tokenizer: has no <mask>, expected one for model\.kind cmlm; add it by"):
        config_for_tokenizer(make_recipe("--model.kind=cmlm"), train_tokenizer())


@pytest.mark.parametrize(("kind", "count"), [("nat", 41), ("cmlm", 256)])
def test_length_beam_above_the_classes_is_an_error_before_any_work(
    make_recipe: MakeRecipe, kind: str, count: int
) -> None:
    check_model_trains(make_recipe(f"--model.kind={kind}", f"--decoding.length_beam_size={count}"))
    with user_error(rf"^decoding\.length_beam_size: got {count + 1}, .* has {count} length classes"):
        check_model_trains(make_recipe(f"--model.kind={kind}", f"--decoding.length_beam_size={count + 1}"))


def test_run_of_another_kind_is_an_error_that_names_the_kind(make_recipe: MakeRecipe) -> None:
    begin_run(make_recipe("--model.kind=nat"))
    prepare_folder(make_recipe("--model.kind=nat"))
    with user_error(r"run of another recipe, model\.kind differs; give the same command to resume"):
        prepare_folder(make_recipe("--model.kind=cmlm"))


def test_run_saved_without_a_field_resumes_with_its_default(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    tree = to_dict(make_recipe())
    del tree["training"]["optimizer"], tree["training"]["encoder_from"]
    (tmp_path / "run" / "recipe.yaml").write_text(yaml.safe_dump(tree))
    prepare_folder(make_recipe())
    with user_error(r"run of another recipe, training\.optimizer differs"):
        prepare_folder(make_recipe("--training.optimizer=radam"))


def test_glat_run_keeps_its_schedule_when_it_gets_more_steps(make_recipe: MakeRecipe) -> None:
    glat = ["--model.kind=nat", "--training.glancing=[0.5, 0.3]"]
    begin_run(make_recipe(*glat, "--training.steps=7"))
    prepare_folder(make_recipe(*glat, "--training.steps=7"))
    with user_error(r"^training\.glancing_steps: .* got 9, expected 7\. Give --training\.glancing_st"):
        prepare_folder(make_recipe(*glat, "--training.steps=9"))
    prepare_folder(make_recipe(*glat, "--training.steps=9", "--training.glancing_steps=7"))
