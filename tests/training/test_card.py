"""`model_card.md` is the card of the shipped model; any run has a card with its facts that the Hub accepts."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from tests import ROOT
from tests.commands import error_line, run_main
from tests.training.invented_results import DATA, REPOSITORY, SIGNATURE, results_of
from training.card import EXAMPLE, main, make_card
from training.families import GlancingTraining
from training.models import start_licenses
from training.recipe import BeamTraining, FileData, HubData, Recipe, TokenizerRecipe
from vaswani_transformer.registration import FAMILIES


@pytest.mark.parametrize("name", ["tatoeba-en-de", "tatoeba-en-de-ctc"])
def test_card_of_a_shipped_model_has_the_metadata_that_the_code_makes_of_its_results(name: str, tmp_path: Path) -> None:
    shipped = ROOT / "models" / name
    made = tmp_path / "card.md"
    main([str(shipped / "results.json"), f"OWNER/{name}", "--license=apache-2.0", f"--output={made}"])
    assert ModelCard.load(shipped / "README.md").data.to_dict() == ModelCard.load(made).data.to_dict()


def test_model_card_is_that_of_the_shipped_model() -> None:
    assert (ROOT / "model_card.md").read_bytes() == (ROOT / "models" / "tatoeba-en-de" / "README.md").read_bytes()


@pytest.mark.parametrize(("kind", "test"), [*((kind, 28.456) for kind in DATA), ("json", None)])
def test_model_index_holds_every_score_with_its_signature(kind: str, test: float | None) -> None:
    results = results_of(kind, test) | {"source": "multi30k"}
    card = ModelCard(str(make_card(results, REPOSITORY)))  # parsed by the Hub's library
    found = {(one.dataset_split, one.metric_type): one for one in card.data.get("eval_results")}
    of_test = {} if test is None else {("test", "bleu"): 28.46, ("test", "chrf"): 50.0}
    assert {where: one.metric_value for where, one in found.items()} == {("validation", "bleu"): 30.12} | of_test
    assert found["validation", "bleu"].metric_args == {"signature": SIGNATURE}
    assert f"BLEU 30.12, `{SIGNATURE}`" in card.text
    assert {one.dataset_type for one in found.values()} == {"wmt/wmt14" if kind == "hub" else "bentrevett/multi30k"}


def test_card_of_own_data_has_their_name_and_scores_in_prose_alone_and_no_license_that_nobody_chose() -> None:
    for data in (FileData(path="pairs"), HubData(kind="hub", path="pairs", train="train")):
        card = ModelCard(str(make_card(results_of(data=data), REPOSITORY)))
        assert not {"license", "datasets", "base_model", "model-index", "eval_results"} & card.data.to_dict().keys()
        assert "| Data | pairs |" in card.text
        assert "| License | the model's code in this repository: Apache-2.0; the data: its owners' |" in card.text
        assert f"BLEU 28.46, `{SIGNATURE}`" in card.text


def test_card_without_an_example_has_no_sentence_of_the_test_set() -> None:
    card = make_card(results_of(), REPOSITORY, has_example=False)
    assert EXAMPLE in card.text
    assert "the first test sentence" in str(make_card(results_of(), REPOSITORY))
    assert not re.search("the first test sentence|say ", card.text)


def test_card_has_languages_data_license_size_time_hardware_and_code() -> None:
    text = str(make_card(results_of(published="41.02 BLEU by somebody"), REPOSITORY, "cc-by-nc-4.0"))
    for fact in (
        *("language:\n- en\n- de\n", "license: cc-by-nc-4.0", "| Data | multi30k |", "the data: its owners' |"),
        *("1,234,567 parameters: the paper's base", "4 a GPU, 62 minutes"),
        *("a" * 40 + " with changes", "--data.path=FOLDER"),
        *("num_beams 4, length_penalty 0.6: BLEU 28.46", "- published on the same test set: 41.02 BLEU by somebody"),
    ):
        assert fact in text
    hub = make_card(results_of("hub"), REPOSITORY)
    assert hub.data.get("datasets") == ["wmt/wmt14"]
    assert "the data: on its page on the Hub |" in hub.text
    assert "--data.path" not in hub.text


def test_card_says_which_checkpoints_are_the_weights() -> None:
    weights = {(10, 20): "the mean of the checkpoints of steps 10, 20", (20,): "the checkpoint of step 20"}
    for steps, described in weights.items():
        card = make_card(results_of() | {"averaged_steps": list(steps)}, REPOSITORY)
        assert f"| Weights | {described} |" in card.text


def test_card_of_a_prepared_public_set_names_its_page_its_license_and_its_place_on_the_hub() -> None:
    card = make_card(results_of() | {"source": "multi30k"}, REPOSITORY)
    assert "| Data | multi30k, from https://github.com/multi30k/dataset |" in card.text
    assert "the data: its page names none; the images are for non-commercial research |" in card.text
    assert card.data.get("datasets") == ["bentrevett/multi30k"]
    licenses = {"gum": "annotations CC-BY 4.0", "quickstart": "Apache-2.0 |", "a set of a later version": "its owners'"}
    for source, license in licenses.items():
        assert f"the data: {license}" in make_card(results_of() | {"source": source}, REPOSITORY).text


def test_card_of_a_parser_speaks_of_trees_and_says_what_f1_is_of() -> None:
    data, note = FileData(kind="trees", path="gum", target="trees"), "F1 is agreement with a parser."
    results = json.loads(json.dumps(results_of(data=data, note=note)).replace('bleu"', 'f1"'))
    results["test"] |= {"precision": 71.0, "recall": 69.0, "exact_match": 20.0, "tagging_accuracy": 90.0}
    card = make_card(results, REPOSITORY)
    assert "to parse English sentences into constituency trees." in card.text
    assert f"- {note}" in card.text
    assert f"F1 28.46, `{SIGNATURE}`" in card.text
    assert not re.search("translat|BLEU", card.text)
    assert card.data.get("language") == ["en"]


@pytest.mark.parametrize(
    ("data", "purpose", "languages"),
    [
        ({}, "translate English into German.", ["en", "de"]),
        ({"source": "pt_BR", "target": "zh-Hans"}, "translate Portuguese into Chinese.", ["pt", "zh"]),
        ({"source": "ga", "target": "fr"}, "translate `ga` into French.", ["ga", "fr"]),
        ({"source": "source", "target": "target"}, "translate. Its recipe names no languages.", None),
        ({"source": "q1", "target": "src"}, "translate. Its recipe names no languages.", None),
        ({"target": "target"}, "translate English into a language that its recipe does not name.", ["en"]),
        (
            {"source": "src", "target": "tgt", "source_language": "haw", "target_language": "ja-JP"},
            "translate Hawaiian into Japanese.",
            ["haw", "ja"],
        ),
        ({"source": "prompt", "target": "reply"}, "reply to prompts.", None),
        ({"source": "en", "target": "reply"}, "reply to prompts in English.", ["en"]),
        ({"kind": "trees"}, "parse English sentences into constituency trees.", ["en"]),
        ({"kind": "trees", "source": "text"}, "parse sentences into constituency trees.", None),
    ],
)
def test_card_says_what_the_model_does_and_names_only_languages_that_the_recipe_tells(
    data: dict[str, Any], purpose: str, languages: list[str] | None
) -> None:
    task = "dialogue" if data.get("target") == "reply" else "translation"
    results = results_of(test=None, data=FileData(path="pairs", **data), task=task)
    results["source"] = "multi30k"
    results["validation"] |= {"f1": 70.0, "bleu_2": 5.0, "bleu_2_signature": SIGNATURE}
    card = make_card(results, REPOSITORY)
    assert f"trained with vaswani-transformer to {purpose}\n" in card.text
    assert card.data.get("language") == languages
    assert {one.task_name.partition(" ")[2] for one in card.data.get("eval_results")} == {"-".join(languages or [])}


def test_command_reads_the_folder_of_a_run_and_replaces_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "results.json").write_text(json.dumps(results_of()), encoding="utf-8")
    for number, run in enumerate((tmp_path, tmp_path / "results.json")):
        main([str(run), REPOSITORY, f"--output={tmp_path / f'{number}.md'}"])
    assert (tmp_path / "0.md").read_text(encoding="utf-8") == (tmp_path / "1.md").read_text(encoding="utf-8")
    (tmp_path / "0.md").write_text("of somebody", encoding="utf-8")
    given = [str(tmp_path), REPOSITORY, f"--output={tmp_path / '0.md'}"]
    assert "0.md: the file exists" in error_line(run_main(main, given, capsys))
    assert (tmp_path / "0.md").read_text(encoding="utf-8") == "of somebody"


def test_card_says_that_test_pairs_are_in_the_training_data() -> None:
    seen = {"validation": {"pairs": 0, "sources": 0}, "test": {"pairs": 1, "sources": 2}}
    text = str(make_card(results_of() | {"seen_in_training": seen}, REPOSITORY))
    assert "- test set: the training data contain 1 of its 16 pairs, and 2 of its sources, so its" in text
    seen["test"] = seen["validation"]
    assert "training sources" not in str(make_card(results_of() | {"seen_in_training": seen}, REPOSITORY))


def test_card_of_a_fine_tuned_model_names_the_model_that_it_started_from_and_its_license() -> None:
    training = BeamTraining(start_from="tatoeba-en-de")
    results = results_of(training=training) | {"start_licenses": {"start_from": "the data: CC BY 2.0 FR"}}
    card = make_card(results, REPOSITORY)
    assert card.data.get("base_model") is None  # that of a folder
    assert "| Started from | the weights of tatoeba-en-de, whose data and license apply too |" in card.text
    assert "the data: its owners'; for tatoeba-en-de: the data: CC BY 2.0 FR |" in card.text
    assert "| Training | 300 further steps of" in card.text

    unlicensed = make_card(results_of(training=training), REPOSITORY)
    assert "whose data and license apply too |" in unlicensed.text
    assert "the data: its owners' |" in unlicensed.text


def test_card_names_the_teacher_of_an_encoder_and_no_base_model_that_the_hub_would_refuse() -> None:
    card = make_card(results_of(training=BeamTraining(encoder_from="somebody/teacher")), REPOSITORY)
    assert card.data.get("base_model") == "somebody/teacher"
    assert "| Started from | the encoder and embeddings of somebody/teacher, whose" in card.text
    assert "| Training | 300 steps of" in card.text
    spaced = make_card(results_of(training=BeamTraining(start_from="my model")), REPOSITORY)
    assert spaced.data.get("base_model") is None
    scratch = make_card(results_of(), REPOSITORY)
    assert scratch.data.get("base_model") is None
    assert "Started from" not in scratch.text


@pytest.mark.parametrize(
    ("card", "license"),
    [
        ("---\nlicense: mit\n---\n| License | weights: mit; the data: x |\n", "weights: mit; the data: x"),
        ("---\nlicense: mit\n---\n", "mit"),
        ("---\n---\n", None),
        (None, None),
    ],
)
def test_licenses_of_start_models_are_those_of_their_cards(
    tmp_path: Path, card: str | None, license: str | None
) -> None:
    if card is not None:
        (tmp_path / "README.md").write_text(card, encoding="utf-8")
    recipe = Recipe(training=BeamTraining(start_from=str(tmp_path)))
    assert start_licenses(recipe) == ({} if license is None else {"start_from": license})


def test_command_of_the_card_asks_for_each_folder_that_the_recipe_names_and_for_no_model_on_the_hub() -> None:
    data = FileData(path="pairs", distilled="teacher")
    training = BeamTraining(start_from="tatoeba-en-de", encoder_from="somebody/teacher")
    text = make_card(results_of(data=data, training=training, tokenizer=TokenizerRecipe(path="own")), REPOSITORY).text
    (command,) = re.findall(r"```bash\n(.*?)\n```", text, flags=re.DOTALL)
    assert shlex.split(command)[3:] == [
        *("recipe.yaml", "--data.path=FOLDER", "--data.distilled=FOLDER", "--tokenizer.path=FOLDER"),
        *("--training.start_from=FOLDER", "--output_dir=runs/own"),
    ]


def test_run_without_a_metric_has_a_card() -> None:
    results = results_of()
    del results["test"]["bleu"]
    text = str(make_card(results, REPOSITORY))
    assert "BLEU 28.46" not in text
    assert "chrF 50.00" in text
    assert "on that set.\n\n## Use" in text
    del results["test"], results["validation"]
    assert "## Scores\n\n- not measured\n\n## Use" in str(make_card(results, REPOSITORY))


@pytest.mark.parametrize("variant", [*FAMILIES, "glat"])
def test_every_kind_of_model_has_a_first_sentence_and_a_tag(variant: str) -> None:
    kind = "nat" if variant == "glat" else variant
    family = FAMILIES[kind]
    training = GlancingTraining(glancing=(0.5, 0.3)) if variant == "glat" else family.recipe.training()
    recipe: dict[str, Any] = {"model": {"kind": kind}, "training": training, "decoding": family.recipe.decoding()}
    card = make_card(results_of(**recipe), REPOSITORY)
    name = {
        "autoregressive": "original Transformer",
        "iterative_vae": "IterativeVAE",
        "flowseq": "FlowSeq",
        "dag": "(DA-",
    }
    assert card.text.count(name.get(variant, f"({variant.upper()},")) == 1
    assert {variant.replace("_", "-"), family.model_class.config_class.model_type} <= set(card.data.get("tags"))


def test_example_of_the_card_has_the_sentence_that_was_translated() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", make_card(results_of(), REPOSITORY).text, flags=re.DOTALL)
    (text,) = re.findall(r"tokenizer\(\[(.*)\], return", block)
    assert json.loads(text) == 'say "\u00e4"\n'
    assert EXAMPLE in make_card(results_of(test=None), REPOSITORY).text
