"""Orders and tokens of BLEU, statistics of texts, and the trigram model against plain Python."""

import itertools
import math
import random
import unicodedata
from fractions import Fraction
from pathlib import Path

import pytest
import sacremoses

from training.recipe import Recipe
from training.tasks import (
    TrigramModel,
    bleu,
    chrf,
    lm_scores,
    make_task,
    split_compounds,
    text_statistics,
    tokenized_bleu,
)

WORDS = ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rich-text format", "rich ##AT##-##AT## text format"),
        ("well-to-do", "well ##AT##-##AT## to ##AT##-##AT## do"),
        ("a-b-c", "a ##AT##-##AT## b-c"),  # as perl's s///g, which reads no letter twice
        ("1990 - 2000 -x x-", "1990 - 2000 -x x-"),
    ],
)
def test_compounds_are_split_at_hyphens_within_words(text: str, expected: str) -> None:
    assert split_compounds(text) == expected


def test_tokenized_bleu_counts_the_tokens_of_moses() -> None:
    actual = tokenized_bleu(['Er sagt, "z.B." & so.'], ["Er sagt : & so ."], "de")
    expected = bleu(["Er sagt , &quot; z.B. &quot; &amp; so ."], ["Er sagt : &amp; so ."], tokenize="none")
    assert actual["score"] == pytest.approx(expected["score"])
    assert actual["signature"] == f"{expected['signature']}|text:moses-de-sacremoses-{sacremoses.__version__}"


def test_splitting_compounds_raises_bleu_if_their_parts_are_right() -> None:
    """5 of 6 unigrams, 4 of 5 bigrams, 3 of 4 and 2 of 3 match, in place of 2 of 3, 1 of 2 and none."""
    pair = ["das rich-text format da"], ["das rich-text format dort"]
    split = tokenized_bleu(*pair, None, compounds=True)
    assert split["score"] == pytest.approx(100 * (5 / 6 * 4 / 5 * 3 / 4 * 2 / 3) ** 0.25)
    assert split["score"] > tokenized_bleu(*pair, None)["score"]
    assert split["signature"].endswith("|text:tokens|compounds:split")


def test_bleu_of_a_lower_order_counts_shorter_n_grams_and_says_so() -> None:
    predictions, references = ["a b c d e"], ["a b x d e"]  # 4 of 5 words and 2 of 4 bigrams
    one, two = (bleu(predictions, references, "none", order) for order in (1, 2))
    assert one["score"] == pytest.approx(100 * 4 / 5)
    assert two["score"] == pytest.approx(100 * math.sqrt(4 / 5 * 2 / 4))
    assert one["signature"].endswith("|order:1")
    assert "order" not in bleu(predictions, references, "none")["signature"]


@pytest.mark.parametrize(
    "text",
    [
        "Das ist schön, Jürgen, und größer.",
        "ल\u095cका बहुत ब\u095cा है",
        "나는 오늘 학교에 갑니다",
        "a 5 k\u2126 resistor",
    ],
)
def test_scores_do_not_depend_on_the_normal_form(text: str) -> None:
    """The translations of a tokenizer that normalizes to NFC have the scores of texts in one form."""
    written, texts = (unicodedata.normalize(form, text) for form in ("NFC", "NFD"))
    task = make_task(Recipe())
    for references in ([written, written], [texts, text]):
        assert task.scores([written, written], references, *task.metrics, *task.more_metrics) == task.scores(
            [written] * 2, [written] * 2, *task.metrics, *task.more_metrics
        )
        assert all(
            score["score"] == pytest.approx(100) for score in task.all_scores([written] * 2, references).values()
        )
    assert task.statistics([f"{written} {texts}"], [text]) == task.statistics([f"{written} {written}"], [written])
    assert lm_scores([texts], [written], [text]) == lm_scores([written], [written], [written])


def test_metrics_need_no_cache_folder_of_hugging_face(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()  # no folder can be made below it
    monkeypatch.setattr("evaluate.config.HF_METRICS_CACHE", str(tmp_path / "file" / "cache"))
    assert bleu(["a b c d"], ["a b c d"])["score"] == pytest.approx(100)
    assert chrf(["a b c d"], ["a b c d"])["score"] == pytest.approx(100)


def test_statistics_are_over_the_corpus() -> None:
    """Counted by hand: 10 words, 4 of them different; 7 bigrams, 5 different; 3 words equal their neighbor."""
    predictions = ["a a b", "a b b b", "c b d"]
    statistics = text_statistics(predictions, ["x x", "y", "z z z z"])
    assert statistics == {
        "distinct_1": 4 / 10,
        "distinct_2": 5 / 7,
        "repeats": 3 / 10,
        "reference_repeats": 4 / 7,
        "length_ratio": 10 / 7,
    }


def kneser_ney(texts: list[str], first: str, second: str, word: str) -> Fraction:
    """P(word | first second) from the definition, by loops over all n-grams, in exact arithmetic."""
    rows = [["<s>", "<s>", *text.split(), "</s>"] for text in texts]
    tokens = [tuple(row[i : i + 3]) for row in rows for i in range(len(row) - 2)]
    vocabulary = {gram[2] for gram in tokens} | {"<unk>"}
    counts = {3: {gram: tokens.count(gram) for gram in tokens}}
    for order in (2, 1):
        longer = set(counts[order + 1])
        tails = {gram[1:] for gram in longer}
        counts[order] = {tail: sum(gram[1:] == tail for gram in longer) for tail in tails}

    def probability(gram: tuple[str, ...]) -> Fraction:
        if not gram:
            return Fraction(1, len(vocabulary))
        known = counts[len(gram)]
        once, twice = (sum(count == n for count in known.values()) for n in (1, 2))
        discount = Fraction(once, once + 2 * twice) if once and twice else Fraction(1, 2)
        after = [count for other, count in known.items() if other[:-1] == gram[:-1]]
        if not after:
            return probability(gram[1:])
        kept = max(known.get(gram, 0) - discount, Fraction(0))
        return kept / sum(after) + discount * len(after) / sum(after) * probability(gram[1:])

    return probability((first, second, word))


@pytest.mark.parametrize("seed", [0, 3, 7])
def test_trigram_probabilities_equal_the_definition(seed: int) -> None:
    generator = random.Random(seed)
    texts = [" ".join(generator.choices(WORDS[:3], k=generator.randint(0, 5))) for _ in range(seed + 1)]
    model = TrigramModel(texts)
    for gram in itertools.product(["<s>", *WORDS], ["<s>", *WORDS], ["a", "c", "</s>", "<unk>"]):
        if gram[2] in model.words | {"<unk>"}:
            assert model.probability(*gram) == pytest.approx(float(kneser_ney(texts, *gram)), rel=1e-12), gram


def test_language_model_prefers_the_order_of_its_texts_and_takes_unknown_words() -> None:
    targets = ["the old man sees a house", "the old woman sees a dog", "a dog sees the man"] * 2
    scores = lm_scores(targets, ["the old dog sees a man"], ["dog the a man old sees"])
    assert scores["score"] < scores["reference"]
    assert "6 training targets" in scores["definition"]
    model = TrigramModel(targets)
    assert model.mean_nll(["the unseen man"]) == model.mean_nll(["the neverseen man"])
    assert model.mean_nll(["the unseen man"]) > model.mean_nll(["the old man"])
    nll = -sum(
        math.log(model.probability(*gram))
        for gram in [("<s>", "<s>", "the"), ("<s>", "the", "<unk>"), ("the", "<unk>", "</s>")]
    )
    assert model.mean_nll(["the unseen"]) == pytest.approx(nll / 3)
