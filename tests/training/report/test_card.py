"""`model_card.md` is the valid card of the reference model, made by the code from its results."""

import json
import re
from pathlib import Path

import pytest
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from tests.helpers import ROOT, error_line, run_main
from tests.hub_state import metadata_errors
from training.recipe.fields import Recipe, load_recipe
from training.recipe.reading import build
from training.report.card import main, make_card, training_command
from training.report.results import strip_local_paths

CARD = ROOT / "model_card.md"
RESULTS = ROOT / "training" / "recipes" / "results" / "multi30k.json"
REPOSITORY = "OWNER/multi30k-en-de"


def test_card_is_what_the_code_makes_of_the_results(tmp_path: Path) -> None:
    main([str(RESULTS), REPOSITORY, f"--output={tmp_path / 'card.md'}"])
    assert CARD.read_bytes() == (tmp_path / "card.md").read_bytes()


@pytest.mark.parametrize(
    ("results", "more", "message"),
    [
        ("own.json", [], r"own\.json: lacks commit, curve, .*; train again with this version"),
        ("list.json", [], r"list\.json: is damaged; got list, expected dict; restore it"),
        ("text.json", [], r"text\.json: cannot be read \("),
        ("nothing.json", [], r"nothing\.json: cannot be read \(No such file or directory\); restore it"),
        (str(RESULTS), ["--license=bogus"], r"--license: the Hub knows no 'bogus'; give one of its names"),
        (str(RESULTS), ["--output=mine.md"], r"--output=mine\.md: exists already; give a new file\."),
        (str(RESULTS), ["--output=mine.md/card.md"], r"--output=mine\.md/card\.md: cannot be written: "),
    ],
)
def test_card_that_cannot_be_made_is_an_error_of_one_line_and_changes_nothing(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    results: str,
    more: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in (("own.json", "{}"), ("list.json", "[1]"), ("text.json", "{"), ("mine.md", "mine")):
        Path(name).write_text(text)
    assert re.match(message, error_line(run_main(main, [results, REPOSITORY, *more], capsys)))
    assert Path("mine.md").read_text() == "mine"
    assert not Path("model_card.md").exists()


@pytest.mark.parametrize("field", ["name", "note", "published"])
def test_text_of_a_recipe_adds_neither_lines_nor_html_to_the_card(field: str) -> None:
    results, hostile = json.loads(RESULTS.read_text(encoding="utf-8")), "a\n# b\n<script>c</script>\x1b[2J"
    results["recipe"][field] = hostile
    results["name"] = hostile if field == "name" else results["name"]
    text = make_card(results, REPOSITORY).text
    assert "a # b &lt;script&gt;c&lt;/script&gt;\\x1b[2J" in text
    assert "<script>" not in text
    assert "\x1b" not in text
    assert "\n# b" not in text


def test_card_has_every_field_filled_in() -> None:
    text = CARD.read_text(encoding="utf-8")
    assert not re.search(r"\{\{|\}\}|\{%|None|nan", text)
    assert f'repository = "{REPOSITORY}"' in text
    assert f"{json.loads(RESULTS.read_text(encoding='utf-8'))['test']['bleu']:.2f}" in text


def test_card_of_a_parser_speaks_of_trees_and_says_what_f1_is_of(tmp_path: Path) -> None:
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    scores = {"f1": 70.0, "precision": 71.0, "recall": 69.0, "exact_match": 20.0, "tagging_accuracy": 90.0}
    for split in ("validation", "test"):
        results[split] |= scores | {"signature": "evalb:COLLINS.prm"}
    results["curve"] = [entry | {"eval_f1": 1.0} if "eval_loss" in entry else entry for entry in results["curve"]]
    results["recipe"]["data"] |= {"kind": "trees", "source": "en", "target": "trees"}
    results["recipe"]["note"] = "F1 is agreement with a parser."
    (tmp_path / "results.json").write_text(json.dumps(results), encoding="utf-8")
    main([str(tmp_path / "results.json"), "owner/parser", f"--output={tmp_path / 'card.md'}"])
    text = (tmp_path / "card.md").read_text(encoding="utf-8")
    assert "to parse `en` into constituency trees" in text
    assert "- F1 is agreement with a parser." in text
    assert "F1 70.00, `evalb:COLLINS.prm`" in text
    assert "vaswani-parse" in text
    assert not re.search("translat|BLEU", text.partition("## Training")[0])
    assert metadata_errors(text) == []
    assert ModelCard(text).data.get("language") == ["en"]


def test_card_s_metadata_are_valid() -> None:
    """The classes of huggingface_hub read them, and write them again, without the Hub."""
    assert metadata_errors(CARD.read_text(encoding="utf-8")) == []
    card = ModelCard.load(CARD)
    assert isinstance(card.data, ModelCardData)
    assert (card.data.language, card.data.license, card.data.pipeline_tag) == (
        ["en", "de"],
        "apache-2.0",
        "translation",
    )
    assert all(isinstance(result, EvalResult) for result in card.data.eval_results)
    values = {(result.dataset_split, result.metric_type): result.metric_value for result in card.data.eval_results}
    assert values == {("validation", "bleu"): 36.25, ("test", "bleu"): 36.71, ("test", "chrf"): 60.4}
    assert ModelCardData(**card.data.__dict__).to_dict() == card.data.to_dict()


@pytest.mark.parametrize(
    ("arguments", "more"),
    [
        ([], ""),
        (["--training.encoder_from=/a/teacher"], " --training.encoder_from=TEACHER"),
        (
            ["--data.distilled=/a/pairs", "--data.teacher=/a/teacher"],
            " --data.distilled=DISTILLED --data.teacher=TEACHER",
        ),
    ],
)
def test_command_of_a_card_has_a_placeholder_for_each_local_model(
    tmp_path: Path, arguments: list[str], more: str
) -> None:
    (tmp_path / "own.yaml").write_text("data: {kind: json, path: /a/data}\ntokenizer: {path: /a/tokenizer}")
    recipe = build(Recipe, strip_local_paths(load_recipe(tmp_path / "own.yaml", arguments)))
    assert "/a/" not in str(recipe)
    assert training_command(recipe, "owner/name") == (
        "python -m training.train recipe.yaml --output_dir=runs/again --data.path=FOLDER --tokenizer.path=owner/name"
        + more
    )
