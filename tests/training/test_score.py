"""The score command: every score has its name and signature, and equals one computed by hand."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import GenerationConfig, PreTrainedTokenizerFast

from tests.commands import Finished, Run, error_line, no_space, run_main, user_error, write_pairs
from tests.models import (
    EVERY_FAMILY,
    LENGTH_FAMILY,
    PAIRS,
    family_of_pairs,
    model_of_pairs,
    paper_model_of_pairs,
    save,
    tiny_marian,
)
from training.data import fingerprint, load_pairs
from training.evaluation import Evaluator, TokenizedPair
from training.machine import commit, hardware, versions
from training.recipe import FileData, Recipe, ScoreRecipe, load_recipe, to_dict
from training.score import SEARCHED, main
from training.tasks import bleu, chrf, lm_scores, make_task, text_statistics, tokenized_bleu
from vaswani_transformer.settings import CallSettings
from vaswani_transformer.support.loading import LoadOptions, load_model

Score = Callable[..., tuple[dict[str, Any], str]]  # runs the command; returns what it wrote and what it printed
SOURCES = list(PAIRS)
REFERENCES = ["hola, mundo", "te amo", "el gato-perro es negro", "buenos dias", "este es un libro", "como te llamas"]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """Write a recipe with a test set of the pairs, with slightly wrong references, and a validation set of two."""
    write_pairs(tmp_path / "test.jsonl", zip(SOURCES, REFERENCES, strict=True))
    write_pairs(tmp_path / "validation.jsonl", list(PAIRS.items())[:2])
    data = {"kind": "json", "path": str(tmp_path), "test": "test.jsonl", "validation": "validation.jsonl"}
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump({"name": "own", "data": data}))
    return path


@pytest.fixture
def run(saved: Path, recipe: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs the command and returns its output, errors and status."""

    def run(*arguments: object, model: object = saved, recipe: object = recipe) -> Finished:
        return run_main(main, [model, recipe, *arguments], capsys)

    return run


@pytest.fixture
def score(run: Run, tmp_path: Path) -> Score:
    """Return a function that runs the command, which must succeed without a word on standard error."""

    def score(*arguments: object, **given: object) -> tuple[dict[str, Any], str]:
        path = tmp_path / "scores.json"
        path.unlink(missing_ok=True)
        output, errors, status = run("--output", path, *arguments, **given)
        assert (errors, status) == ("", 0)
        return json.loads(path.read_text()), output

    return score


def test_scores_are_printed_and_written_each_with_its_signature(score: Score) -> None:
    scores, output = score()
    translations = list(PAIRS.values())
    expected = {
        "sacrebleu": bleu(translations, REFERENCES),
        "chrf": chrf(translations, REFERENCES),
        "tokenized_bleu": tokenized_bleu(translations, REFERENCES, "de"),
        "compound_split_bleu": tokenized_bleu(translations, REFERENCES, "de", compounds=True),
    }
    for name, single in expected.items():
        assert scores[name]["score"] == single["score"]
        assert scores[name]["signature"] == single["signature"]
        assert f"{name:<24} {scores[name]['score']:>10.2f}  {scores[name]['signature']}" in output
    assert f"  BP {scores['sacrebleu']['brevity_penalty']:.3f}\n" in output
    assert len({single["signature"] for single in expected.values()}) == 4
    assert (scores["split"], scores["sentences"], scores["recipe"]) == ("test", 6, "own")
    assert f"{'perplexity':<24} {scores['perplexity']:>10.3f}\n" in output
    assert scores["sentences_per_second"] == pytest.approx(6 / scores["seconds"])
    assert scores["output_tokens_per_second"] == pytest.approx(scores["output_tokens"] / scores["seconds"])
    assert scores["output_tokens"] == sum(map(len, model_of_pairs()[1](translations)["input_ids"]))
    assert "lm" not in scores


def test_scores_name_model_data_commit_and_machine_and_define_the_statistics(
    score: Score, saved: Path, recipe: Path
) -> None:
    scores, output = score()
    assert scores["data"]["fingerprint"] == fingerprint(load_pairs(load_recipe(recipe, []), ["test"])["test"])
    assert scores["digest"] == LoadOptions(str(saved)).digest()
    assert (scores["commit"], scores["versions"]) == (commit(), versions())
    assert scores["hardware"] == hardware(torch.device("cpu"))
    expected = text_statistics(list(PAIRS.values()), REFERENCES)
    assert {name: scores[name] for name in expected} == expected
    assert f"{'length_ratio':<24} {scores['length_ratio']:>10.3f}\n" in output


def test_pairs_of_the_training_data_that_the_record_of_the_run_names_are_a_warning(
    score: Score, saved: Path, recipe: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(saved, folder)
    tree = to_dict(load_recipe(recipe, ["--data.train=train.jsonl"]))
    (folder / "recipe.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    write_pairs(tmp_path / "train.jsonl", [("unseen", "unseen"), ("unheard", "unheard"), ("new", "new")])
    scores, output = score(model=folder)
    assert scores["seen_in_training"] == {"pairs": 0, "sources": 0}
    assert "training pairs" not in output

    test = list(zip(SOURCES, REFERENCES, strict=True))
    seen = [*test[:2], test[0], (SOURCES[2], "un gato"), (SOURCES[3], "un gato"), ("un perro", REFERENCES[4])]
    write_pairs(tmp_path / "train.jsonl", seen)
    scores, output = score("--split=test", model=folder)
    assert scores["seen_in_training"] == {"pairs": 2, "sources": 4}
    assert output.endswith(
        "test set: the training data contain 2 of its 6 pairs, and 4 of its sources, so its scores may be too high.\n"
    )
    checkpoint = folder / "checkpoints" / "checkpoint-1"
    shutil.copytree(saved, checkpoint)
    assert score(model=checkpoint)[0]["seen_in_training"] == scores["seen_in_training"]
    assert "seen_in_training" not in score(model=saved)[0]


@pytest.mark.parametrize("change", ["more", "missing", "start"])
def test_training_pairs_that_changed_since_the_run_or_are_missing_are_said_not_to_be_known(
    score: Score, saved: Path, recipe: Path, tmp_path: Path, change: str
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(saved, folder)
    start = [f"--training.start_from={saved}"] if change == "start" else []  # a model without a recipe
    run = load_recipe(recipe, ["--data.train=train.jsonl", *start])
    (folder / "recipe.yaml").write_text(yaml.safe_dump(to_dict(run)), encoding="utf-8")
    train = [(SOURCES[0], REFERENCES[0]), ("new", "new")]
    write_pairs(tmp_path / "train.jsonl", train)
    (folder / "data.json").write_text(json.dumps({"train": fingerprint(load_pairs(run, ["train"])["train"])}))
    if change == "more":
        write_pairs(tmp_path / "train.jsonl", [*train, ("newer", "newer")])
    if change == "missing":
        (tmp_path / "train.jsonl").unlink()
    scores, output = score(model=folder)
    known = {"pairs": 1, "sources": 1, "not_known": True} if change == "start" else None
    assert scores["seen_in_training"] == known
    assert (
        "it is not known whether missing or changed training data contain its pairs, so its scores may be too high.\n"
        in output
    )
    assert ("contain 1 of its 6 pairs" in output) == (change == "start")


def test_text_that_would_take_very_long_is_an_error(run: Run, tmp_path: Path) -> None:
    write_pairs(tmp_path / "test.jsonl", [("hello " * 20, "hola")])
    _, errors, status = run("--data.max_length=1")
    assert errors.startswith(
        "data.test: pairs with more than 16 tokens, 16 times data.max_length: 1, the longest has 60"
    )
    assert status == 2


def test_language_model_learns_from_the_recipes_training_targets(score: Score, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text((tmp_path / "test.jsonl").read_text())
    scores, output = score("--lm_score", "--data.train=train.jsonl")
    assert (lm := scores["lm"]) == lm_scores(REFERENCES, list(PAIRS.values()), REFERENCES)
    assert f"{lm['score']:.2f}  {lm['definition']}\n" in output
    assert f"{'lm of the references':<24} {lm['reference']:>10.2f}\n" in output


def mean_loss(model: Any, tokenizer: Any, name: str) -> tuple[float, int]:
    """Return the mean of a loss over the tokens of all pairs, each pair by itself, and the number of tokens."""
    total = count = 0
    for source, reference in zip(SOURCES, REFERENCES, strict=True):
        pair = tokenizer([source], text_target=[reference], return_tensors="pt")
        total += model(**pair)[name].item() * pair["labels"].shape[1]
        count += pair["labels"].shape[1]
    return total / count, count


@pytest.mark.parametrize("family", LENGTH_FAMILY)
def test_model_that_predicts_a_length_has_no_perplexity(score: Score, tmp_path: Path, family: str) -> None:
    model, tokenizer = family_of_pairs(family)
    model.generation_config = GenerationConfig(pad_token_id=1, eos_token_id=2, bos_token_id=0)
    scores, output = score(model=save(tmp_path / "model", model, tokenizer))
    assert not {"perplexity", "loss"} & set(scores)
    assert scores["nll_at_gold_length"] == pytest.approx(mean_loss(model, tokenizer, "token_loss")[0], rel=1e-4)
    assert f"{'nll_at_gold_length':<24} {scores['nll_at_gold_length']:>10.3f}\n" in output


def test_likelihood_of_ctc_leaves_out_impossible_targets_and_counts_them(score: Score, tmp_path: Path) -> None:
    model, tokenizer = family_of_pairs("ctc", upsampling=1)
    scores, _ = score(model=save(tmp_path / "model", model, tokenizer))
    total = count = impossible = 0
    for source, reference in zip(SOURCES, REFERENCES, strict=True):
        pair = tokenizer([source], text_target=[reference], return_tensors="pt")
        loss, tokens = model(**pair).sentence_losses.item(), pair["labels"].shape[1]
        if math.isinf(loss):
            impossible += 1
        else:
            total, count = total + loss, count + tokens
    assert impossible > 0
    assert (scores["impossible_targets"], scores["target_tokens"]) == (impossible, count)
    assert scores["loss"] == pytest.approx(total / count, rel=1e-4)
    assert scores["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-3)


def test_perplexity_is_per_target_token_including_the_end(score: Score) -> None:
    scores, _ = score("--batch_tokens=20")
    loss, count = mean_loss(*model_of_pairs(), "loss")
    assert scores["target_tokens"] == count
    assert scores["loss"] == pytest.approx(loss, rel=1e-4)
    assert scores["perplexity"] == pytest.approx(math.exp(loss), rel=1e-3)


def test_recorded_search_has_the_saved_settings_that_the_recipe_leaves_open(score: Score, tmp_path: Path) -> None:
    model, tokenizer = paper_model_of_pairs()
    kept = {"bad_words_ids": [[1]], "renormalize_logits": True, "no_repeat_ngram_size": 2}
    marian: dict[str, Any] = {"num_beams": 6, "max_length": 512, "forced_eos_token_id": 2}
    model.generation_config = model.config.make_generation_config(**kept, **marian)
    save(tmp_path / "model", model, tokenizer)
    scores, output = score(model=tmp_path / "model")
    paper = {"num_beams": 4, "length_penalty": 0.6, "length_penalty_type": "gnmt", "max_source_relative_length": 50}
    assert scores["search"] == paper | kept | {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
    assert "search: bad_words_ids [[1]], " in output
    assert "length_penalty 0.6, length_penalty_type gnmt, max_source_relative_length 50, " in output
    assert "no_repeat_ngram_size 2" in output
    assert score("--decoding.num_beams=1", model=tmp_path / "model")[0]["search"]["num_beams"] == 1


def test_another_split_and_other_fields_of_the_recipe_can_be_given(run: Run, tmp_path: Path) -> None:
    output, _, _ = run("--split=validation", "--data.target=en", "--data.source=de")
    assert "2 sentences of the validation set on" in output
    assert "compound_split_bleu" not in output


def test_scores_depend_on_the_language_and_the_tokenization() -> None:
    pair = (["a b c d e-f g"], ["a b c d e-f h"])
    names: dict[tuple[str, Any], set[str]] = {
        ("de", "13a"): {"sacrebleu", "chrf", "tokenized_bleu", "compound_split_bleu"},
        ("fr", "13a"): {"sacrebleu", "chrf", "tokenized_bleu"},
        ("de", "none"): {"chrf", "tokenized_bleu", "compound_split_bleu"},
        ("fr", "auto"): {"sacrebleu", "chrf", "tokenized_bleu"},
        ("zh-CN", "auto"): {"sacrebleu", "chrf"},
    }
    for (target, tokenize), expected in names.items():
        recipe = Recipe(data=FileData(target=target), score=ScoreRecipe(tokenize=tokenize))
        scores = make_task(recipe).all_scores(*pair)
        assert set(scores) == expected | {"bleu_1", "bleu_2"}
        assert len({score["signature"] for score in scores.values()}) == len(scores)
        assert tokenize != "none" or scores["tokenized_bleu"]["signature"].endswith("|text:tokens")
        named = Recipe(data=FileData(target="target", target_language=target), score=ScoreRecipe(tokenize=tokenize))
        assert make_task(named).all_scores(*pair) == scores

    # The rules of Moses are those of the language without its region, and for an unknown one those of English.
    for data, language in ((FileData(target_language="pt-BR"), "pt"), (FileData(target="target"), "en")):
        task = make_task(Recipe(data=data, score=ScoreRecipe(tokenize="13a")))
        assert f"|text:moses-{language}-" in task.all_scores(*pair)["tokenized_bleu"]["signature"]
    austrian = Recipe(data=FileData(target_language="de-AT"), score=ScoreRecipe(tokenize="13a"))
    assert "compound_split_bleu" in make_task(austrian).all_scores(*pair)


def test_model_of_another_kind_is_scored_by_its_own_search(score: Score, tmp_path: Path) -> None:
    _, tokenizer = model_of_pairs()
    model = tiny_marian(vocab_size=len(tokenizer))
    model.generation_config = GenerationConfig(
        num_beams=2, max_new_tokens=3, pad_token_id=1, eos_token_id=2, decoder_start_token_id=1
    )
    model.save_pretrained(tmp_path / "marian")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, pad_token="<pad>", eos_token="</s>", bos_token="<s>"
    ).save_pretrained(tmp_path / "marian")
    scores, _ = score(model=tmp_path / "marian")
    assert (scores["search"]["num_beams"], scores["output_tokens"] <= 18) == (2, True)


def test_first_line_is_the_score_to_read(score: Score) -> None:
    scores, output = score()
    assert output.startswith(f"BLEU {scores['sacrebleu']['score']:.2f} on 6 sentences of the test set\n\n")
    scores, output = score("--score.tokenize=none", "--num_beams=2")
    assert output.startswith(f"BLEU {scores['tokenized_bleu']['score']:.2f} on 6 sentences of the test set\n")
    assert scores["search"]["num_beams"] == 2


def test_several_searches_give_a_table_whose_rows_are_the_scores_of_each(score: Score) -> None:
    """Greedy search has no length penalty, so it is one row."""
    searches = ["--num_beams", 1, 3, "--length_penalty", 0, 1.5]
    scores, output = score(*searches)
    rows = scores["searches"]
    assert [row["search"]["num_beams"] for row in rows] == [1, 3, 3]
    assert [row["search"].get("length_penalty") for row in rows] == [None, 0, 1.5]
    lines = output.splitlines()
    assert lines[0].split() == ["num_beams", "length_penalty", "BLEU", "chrF", "BP", "seconds"]
    assert len(lines) == 1 + len(rows) + 1  # the test set, on which nothing is chosen
    for row, line in zip(rows, lines[1:], strict=False):
        search = [f"--decoding.{name}={value}" for name, value in row["search"].items() if name in SEARCHED]
        single, _ = score(*search)
        assert (single["sacrebleu"], single["chrf"]) == (row["sacrebleu"], row["chrf"])
        assert single["search"] == row["search"]
        numbers = [f"{row[name]['score']:.2f}" for name in ("sacrebleu", "chrf")]
        assert line.split()[-4:-1] == [*numbers, f"{row['sacrebleu']['brevity_penalty']:.3f}"]


def test_best_search_on_the_validation_set_becomes_that_of_the_model_and_its_results(run: Run, tmp_path: Path) -> None:
    model, tokenizer = paper_model_of_pairs()
    folder = save(tmp_path / "model", model, tokenizer)
    (folder / "results.json").write_text(json.dumps({"name": "own"}))
    arguments = ["--split=validation", "--num_beams", 2, 1, "--decoding.max_source_relative_length=7", "--save"]
    output, errors, status = run(*arguments, model=folder)
    assert (errors, status) == ("", 0)
    *_, best, saved = output.splitlines()
    chosen = "--decoding.num_beams=2 --decoding.length_penalty=0.6 --decoding.length_penalty_type=gnmt"
    assert best == f"best: {chosen}"  # the first of equals
    assert saved == f"{folder / 'generation_config.json'} has the best search."
    loaded = load_model(str(folder))
    search = CallSettings(None, loaded, {}).search()
    expected = {"num_beams": 2, "length_penalty": 0.6, "length_penalty_type": "gnmt", "max_source_relative_length": 7}
    assert search == expected | {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
    assert json.loads((folder / "results.json").read_text()) == {"name": "own", "chosen_search": search}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--save"], "--save: a search scores too high on the set where it was chosen; got --split=test, exp"),
        (["--save", "--split=validation", "MODEL"], "--save: somebody/model: has no generation_config.json to change."),
        (["--num_beams", "1", "2", "--translations=new"], "--translations: is for a single search; leave it out, or"),
        (["--num_beams", "1", "2", "--lm_score"], "--lm_score: is for a single search; leave it out, or give one"),
        (["--num_beams", "0"], "argument --num_beams: got '0', expected an integer of at least 1"),
        (["--length_penalty", "1e4"], "argument --length_penalty: got '1e4', expected a number from -10 to 10"),
    ],
)
def test_searches_that_cannot_be_compared_or_saved_are_an_error(
    run: Run, saved: Path, arguments: list[str], message: str
) -> None:
    given = [argument for argument in arguments if argument != "MODEL"]
    model = "somebody/model" if "MODEL" in arguments else saved
    assert message in error_line(run(*given, model=model))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data.test=null"], "data.test: not in the recipe own; set it, or choose a different --split."),
        (
            ["--output=/nothing/scores.json"],
            "--output=/nothing/scores.json: the file exists, or its folder does not",
        ),
        (["--output={recipe}"], "--output={recipe}: the file exists, or its folder does not; choose a new file.\n"),
        (["--output=new", "--translations=new"], "--translations: the file of --output; got new for both. Name two"),
        (["--translations={recipe}"], "--translations={recipe}: the file exists, or its folder does not; choose"),
        (["--translation=new"], "unrecognized arguments: --translation=new; did you mean --translations? --help lists"),
        (
            ["--decoding.num_beam=2"],
            "unrecognized arguments: --decoding.num_beam=2; did you mean --decoding.num_beams",
        ),
        (["--device=nowhere"], "--device=nowhere: cannot be loaded"),
        (["--score.tokenize=ko-mecab"], "score.tokenize: ko-mecab cannot be used; Korean tokenization requires extra"),
        (["--decoding.length_penalty=.inf"], "decoding.length_penalty: out of range; got inf, expected a finite"),
    ],
)
def test_invalid_option_or_data_ends_the_command_with_one_line(
    run: Run, recipe: Path, arguments: list[str], message: str
) -> None:
    before = recipe.read_text()
    given = [argument.format(recipe=recipe) for argument in arguments]
    assert message.format(recipe=recipe) in error_line(run(*given))
    assert recipe.read_text() == before


def test_translations_are_written_with_sources_references_and_log_probabilities(score: Score, tmp_path: Path) -> None:
    path = tmp_path / "translations.jsonl"
    score("--translations", path)
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    model, tokenizer = model_of_pairs()
    for row, (source, translation), reference in zip(rows, PAIRS.items(), REFERENCES, strict=True):
        assert (row["source"], row["translation"], row["reference"]) == (source, translation, reference)
        pair = tokenizer([source], text_target=[translation], return_tensors="pt")
        log_probs = model(**pair).logits.log_softmax(-1).gather(-1, pair["labels"][..., None])
        assert row["log_probability"] == pytest.approx(log_probs.sum().item(), rel=1e-3)


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_log_probability_is_not_divided_by_the_length_penalty(family: str) -> None:
    model, tokenizer = family_of_pairs(family)
    search: dict[str, Any] = {"pad_token_id": 1, "eos_token_id": 2, "bos_token_id": 0, "max_new_tokens": 9}
    if family == "autoregressive":
        search |= {"num_beams": 2, "length_penalty": 1.5}
    elif family in LENGTH_FAMILY:
        search |= {"length_beam_size": 2, "length_penalty": 1.5}
    elif family == "ctc":
        search |= {"num_beams": 3, "length_bonus": 2.0}
    inputs = tokenizer(SOURCES[:1], text_target=REFERENCES[:1], return_tensors="pt")
    pair = TokenizedPair(inputs["input_ids"][0].tolist(), inputs["labels"][0].tolist(), SOURCES[0])
    result = Evaluator(model, tokenizer, scores=True, **search)([pair])[0]

    output = model.generate(inputs["input_ids"], **search, return_dict_in_generate=True)
    if family == "autoregressive":
        logits = model(inputs["input_ids"], decoder_input_ids=output.sequences[:, :-1]).logits
        expected = logits.log_softmax(-1).gather(-1, output.sequences[:, 1:, None]).sum()
    else:
        expected = output.sequences_scores[0] * (output.lengths[0] ** 1.5 if family in LENGTH_FAMILY else 1)
    if family == "ctc":
        expected = -model(inputs["input_ids"], labels=output.sequences[:, 1:]).sentence_losses[0]
    assert result.log_probability == pytest.approx(expected.item(), rel=1e-4)
    assert Evaluator(model, tokenizer, **search)([pair])[0].log_probability is None


def test_scores_that_cannot_be_written_are_still_printed(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.score.Path.write_text", no_space)
    output, errors, status = run("--output", tmp_path / "scores.json")
    assert errors.endswith("scores.json: cannot be written: No space left on device; the scores are printed above.\n")
    assert status == 2
    assert "perplexity" in output


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_scores_of_nan_are_an_error_with_the_source(family: str) -> None:
    model, tokenizer = family_of_pairs(family)
    pairs = [TokenizedPair(tokenizer(text).input_ids, tokenizer(text).input_ids, text) for text in SOURCES[:2]]
    evaluator = Evaluator(model, tokenizer, max_new_tokens=4)
    assert len(evaluator(pairs)) == 2
    model.lm_head.register_forward_hook(lambda module, inputs, logits: logits * math.nan)
    with user_error(r"Evaluation: the scores of the translation of 'hello world' are NaN; use float32, and check"):
        evaluator(pairs)
