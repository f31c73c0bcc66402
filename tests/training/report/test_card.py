"""`model_card.md` is the valid card of the reference model; any run has a card with its facts that the Hub accepts."""

import json
import re
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta
import pytest
from huggingface_hub import ModelCard, ModelCardData
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import ROOT, error_line, run_main
from tests.hub_state import metadata_errors
from tests.training.invented_results import CHRF_SIGNATURE, REPOSITORY, SIGNATURE, results_of
from tests.training.runs import FinishedRun
from training.recipe.families import FAMILIES
from training.recipe.fields import DataRecipe, Recipe, TrainingRecipe, load_recipe, to_dict
from training.recipe.reading import build
from training.report import card as card_module
from training.report.card import CURVE_ROWS, main, make_card, sample_entries, training_command
from training.report.results import strip_local_paths

CARD = ROOT / "model_card.md"
RESULTS = ROOT / "training" / "recipes" / "results" / "multi30k.json"
REFERENCE = "OWNER/multi30k-en-de"


def test_card_is_what_the_code_makes_of_the_results(tmp_path: Path) -> None:
    main([str(RESULTS), REFERENCE, f"--output={tmp_path / 'card.md'}"])
    assert CARD.read_bytes() == (tmp_path / "card.md").read_bytes()
    assert metadata_errors(CARD.read_text(encoding="utf-8")) == []


@pytest.mark.slow
def test_card_gives_the_share_of_unknown_tokens(finished_run: FinishedRun) -> None:
    lines = str(make_card(finished_run.results, REFERENCE)).splitlines()
    share = "0.00% of source, 0.00% of target"
    assert f"Unknown tokens: train {share}; validation {share}; test {share}." in lines


def test_card_of_a_mean_claims_no_checkpoints_that_a_short_run_did_not_write() -> None:
    """A run takes the mean of those that there are."""
    recipe = Recipe(training=TrainingRecipe(steps=9, evaluation_steps=3, keep_checkpoints=6, average_last=5))
    assert card_module.describe_weights({}, recipe) == "the mean of the last checkpoints, at most 5"
    described = card_module.describe_weights({"averaged_steps": [3, 6, 9]}, recipe)
    assert described == "the mean of the last 3 checkpoints, of steps 3 to 9"


@pytest.mark.parametrize(
    ("results", "more", "message"),
    [
        ("own.json", [], r"own\.json: lacks commit, curve, .*; train again with this version"),
        ("list.json", [], r"list\.json: is damaged; got list, expected dict; restore it"),
        ("text.json", [], r"text\.json: cannot be read \("),
        ("nothing.json", [], r"nothing\.json: cannot be read \(No such file or directory\); restore it"),
        (str(RESULTS), ["--license=bogus"], r"--license: the Hub knows no 'bogus'; give one of its names"),
        (str(RESULTS), ["--output=mine.md"], r"--output=mine\.md: exists already; give a new file\."),
        (str(RESULTS), [f"--output={'x' * 256}"], "x{256}: File name too long"),
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
    assert re.match(message, error_line(run_main(main, [results, REFERENCE, *more], capsys)))
    assert Path("mine.md").read_text() == "mine"
    assert not Path("model_card.md").exists()


@pytest.mark.parametrize("field", ["name", "note", "published"])
def test_text_of_a_recipe_adds_neither_lines_nor_html_to_the_card(field: str) -> None:
    results, hostile = json.loads(RESULTS.read_text(encoding="utf-8")), "a\n# b\n<script>c</script>\x1b[2J"
    results["recipe"][field] = hostile
    results["name"] = hostile if field == "name" else results["name"]
    text = make_card(results, REFERENCE).text
    assert "a # b &lt;script&gt;c&lt;/script&gt;\\x1b[2J" in text
    assert "<script>" not in text
    assert "\x1b" not in text
    assert "\n# b" not in text


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


# Cards of any run

scores = st.none() | st.floats(0, 100)


@settings(max_examples=12)
@given(st.tuples(scores, scores), st.sampled_from([("json", "own"), ("hub", "wmt/wmt14"), ("grammar", None)]))
def test_model_index_holds_every_bleu_with_its_signature(
    fields: tuple[float | None, float | None], data: tuple[str, Any]
) -> None:
    results = results_of(*data, scores=fields)
    card = ModelCard(str(make_card(results, REPOSITORY)))  # parsed by the Hub's library
    read_back = {
        (one.dataset_split, one.metric_type): (one.metric_value, one.metric_args)
        for one in card.data.get("eval_results") or []
    }
    expected = {}
    for split, score in zip(("validation", "test"), fields, strict=True):
        if score is not None:
            name = split if data[0] != "hub" else results["recipe"]["data"][split]
            expected[name, "bleu"] = (round(score, 2), {"signature": SIGNATURE})
            assert f"BLEU {score:.2f}, `{SIGNATURE}`" in card.text
    if fields[1] is not None:
        name = "test" if data[0] != "hub" else results["recipe"]["data"]["test"]
        expected[name, "chrf"] = (50.0, {"signature": CHRF_SIGNATURE})
    assert read_back == expected
    assert metadata_errors(str(card)) == []


def test_template_has_no_field_without_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = jinja2.meta.find_undeclared_variables(
        jinja2.Environment().parse(card_module.TEMPLATE.read_text(encoding="utf-8"))
    )
    given_fields = {}

    def watched(*_: ModelCardData, template_path: str, **fields: str) -> None:
        given_fields.update(fields)

    monkeypatch.setattr(card_module.ModelCard, "from_template", watched)
    make_card(results_of(), REPOSITORY)
    assert asked == given_fields.keys() | {"card_data"}
    assert all(str(value).strip() for value in given_fields.values())


def test_card_has_languages_data_license_size_time_hardware_and_code() -> None:
    commit = {"hash": "a" * 40, "dirty": True}
    text = str(make_card(results_of(commit=commit), REPOSITORY, "cc-by-nc-4.0"))
    for fact in (
        "language:\n- en\n- de\n",
        "license: cc-by-nc-4.0",
        "| Data | multi30k |",
        "| Parameters | 1,234,567 |",
        "1 h 2 min 5 s in all: forward 100%",
        "2 cores of a CPU, 8.0 GiB; 1 process",
        "a" * 40 + ", with uncommitted changes",
        "| 300 | 1.667 | 1.333 | 2.00 | 30.00 |",
        "--data.path=FOLDER",
        "the data: its owners' |",
    ):
        assert fact in text
    streamed = results_of("hub", "wmt/wmt14")
    streamed["data"]["train"]["first_of_stream"] = True
    hub = make_card(streamed, REPOSITORY)
    assert "| train, the first of a stream | 16 |" in hub.text
    assert hub.data.get("datasets") == ["wmt/wmt14"]
    assert "the data: on its page on the Hub |" in hub.text
    assert "--data.path" not in hub.text


def test_card_of_a_prepared_public_set_names_its_page_its_license_and_its_place_on_the_hub() -> None:
    card = make_card(results_of() | {"source": "multi30k"}, REPOSITORY)
    assert "| Data | multi30k, from https://github.com/multi30k/dataset |" in card.text
    assert "the data: its page names none; the images are for non-commercial research |" in card.text
    assert card.data.get("datasets") == ["bentrevett/multi30k"]
    for source, license in (("gum", "annotations CC-BY 4.0"), ("a set of a later version", "its owners'")):
        card = make_card(results_of() | {"source": source}, REPOSITORY)
        assert f"the data: {license}" in card.text
        assert card.data.get("datasets") is None
    assert "the data: Apache-2.0 |" in make_card(results_of("grammar"), REPOSITORY).text


NAR_CARDS: dict[str, tuple[dict[str, Any], str, set[str], str]] = {
    "nat": ({}, "A non-autoregressive Transformer (NAT, ", {"vaswani_nat", "nat"}, "1 pass over the predicted length"),
    "glat": ({"glancing": [0.5, 0.3]}, "A Glancing Transformer (GLAT, ", {"vaswani_nat", "glat"}, "1 pass over the "),
    "cmlm": ({}, "A conditional masked language model (CMLM, ", {"vaswani_cmlm", "cmlm"}, "10 passes over the predict"),
}


@pytest.mark.parametrize("variant", NAR_CARDS)
def test_model_that_predicts_all_words_at_once_has_a_card_of_its_own(variant: str) -> None:
    training, first, tags, search = NAR_CARDS[variant]
    recipe = Recipe(
        name="own",
        model={"kind": "cmlm" if variant == "cmlm" else "nat", "d_model": 256},
        data=DataRecipe(path="multi30k", distilled="runs/distilled"),
        training=TrainingRecipe(encoder_from="runs/teacher", **training),
    )
    results: dict[str, Any] = results_of() | {"recipe": to_dict(recipe)}
    for entry in results["curve"]:
        entry.pop("eval_perplexity", None)
    card = make_card(results, REPOSITORY)
    (opening,) = [line for line in card.text.splitlines() if line.endswith("trained with")]
    assert opening.startswith(first)
    assert card_module.AT_ONCE in opening
    assert {*tags, "non-autoregressive"} <= set(card.data.get("tags"))
    assert not {"attention-is-all-you-need", "vaswani_transformer"} & set(card.data.get("tags"))
    for fact in (
        f"| Model | {variant.upper()} in the shape of the paper's base with d_model 256; encoder and embeddings began",
        "| Data | multi30k; training targets replaced by a teacher's outputs |",
        "| step | loss | validation loss | BLEU |",
        "| 300 | 1.667 | 1.333 | 30.00 |",
        f"`generation_config.json`: {search}",
        "each predicted without the others; it is no perplexity",
    ):
        assert fact in card.text
    assert "The original Transformer" not in card.text


def test_card_of_engine_names_the_start_the_loss_and_the_rate() -> None:
    models: dict[str, Any] = {"energy_from": "runs/teacher", "start_from": "runs/cmlm"}
    training = TrainingRecipe(optimizer="radam", learning_rate=0.0005, learning_rate_decay=1.0, **models)
    recipe = to_dict(Recipe(model={"kind": "cmlm"}, data=DataRecipe(path="multi30k"), training=training))
    text = make_card(results_of() | {"recipe": recipe}, REPOSITORY).text
    assert "| Model | CMLM in the shape of the paper's base; all weights began as another trained model's |" in text
    assert "RAdam, constant learning rate 0.0005; the loss is the energy under a teacher, ENGINE" in text
    recipe["training"] |= {"energy_from": None, "learning_rate_decay": 0.8}
    text = make_card(results_of() | {"recipe": recipe}, REPOSITORY).text
    assert "learning rate 0.0005 decaying exponentially; fp32" in text


def test_every_kind_of_model_has_a_first_sentence() -> None:
    assert set(FAMILIES) <= set(card_module.INTRODUCTIONS)
    assert set(card_module.INTRODUCTIONS) == {"autoregressive", *card_module.NAMES}


def test_example_of_the_card_has_the_sentence_that_was_translated() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", make_card(results_of(), REPOSITORY).text, flags=re.DOTALL)
    (text,) = re.findall(r"tokenizer\(\[(.*)\], return", block)
    assert json.loads(text) == 'say "\u00e4"\n'
    assert card_module.FALLBACK_EXAMPLE in make_card(results_of(scores=(1.0, None)), REPOSITORY).text


def test_card_has_the_first_test_sentence_with_its_output() -> None:
    expected = '```text\n"say \\"\u00e4\\"\\n"\n"x"\n```'
    assert expected in make_card(results_of(), REPOSITORY).text
    assert "```text" not in make_card(results_of(scores=(1.0, None)), REPOSITORY).text


def test_card_shows_published_scores_next_to_those_of_the_test_set() -> None:
    results = results_of()
    results["recipe"]["published"] = "41.02 tokenized BLEU by somebody"
    line = "- published on the same test set: 41.02 tokenized BLEU by somebody"
    assert line in make_card(results, REPOSITORY).text.splitlines()
    del results["test"]
    assert line not in make_card(results, REPOSITORY).text
    assert "published on" not in make_card(results_of(), REPOSITORY).text


@given(st.lists(st.floats(0, 100), max_size=60))
def test_curve_shows_its_first_its_last_and_its_best_evaluation(bleus: list[float]) -> None:
    entries = [{"eval_bleu": bleu, "step": step} for step, bleu in enumerate(bleus)]
    shown = sample_entries(entries, "eval_bleu")
    assert len(shown) <= CURVE_ROWS + 1
    assert [entry["step"] for entry in shown] == sorted({entry["step"] for entry in shown})
    if entries:
        assert (shown[0], shown[-1]) == (entries[0], entries[-1])
        assert max(bleus) == max(entry["eval_bleu"] for entry in shown)
