"""A teacher chooses among a model's candidates by their texts, in Python and in the command."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.commands import command_runner, error_line, lines, user_error
from tests.models import SOURCES, TARGETS, family_of_pairs, model_of_pairs, save, tiny_model
from vaswani_transformer import VaswaniTransformerTokenizer, rerank, score_targets, translate
from vaswani_transformer.translation import command
from vaswani_transformer.translation.reranking import teacher_scores
from vaswani_transformer.translation.targets import TargetScorer

SEARCHES: dict[str, dict[str, Any]] = {
    "autoregressive": {"num_beams": 3, "max_new_tokens": 8},
    "nat": {"length_beam_size": 3},
    "iterative_vae": {"length_beam_size": 3},
    "cmlm": {"length_beam_size": 2, "num_iterations": 2},
    "flowseq": {"length_beam_size": 2},
    "ctc": {"num_beams": 3, "length_bonus": 0.5},
}
CANDIDATES = {"autoregressive": 3, "nat": 3, "iterative_vae": 3, "cmlm": 2, "flowseq": 2, "ctc": 3}


@pytest.mark.parametrize("family", SEARCHES)
def test_candidates_are_those_of_the_search_in_the_order_of_the_teachers_mean(family: str) -> None:
    model, tokenizer = family_of_pairs(family)
    vocabulary = VaswaniTransformerTokenizer.train_from_iterator(TARGETS, vocab_size=280)  # not the model's
    teacher = tiny_model(vocab_size=len(vocabulary)), vocabulary
    search = SEARCHES[family]
    count = CANDIDATES[family]
    texts = [*SOURCES, " "]
    found = list(rerank(model, tokenizer, *teacher, texts, num_return_sequences=count, window=4, **search))
    plain = list(translate(model, tokenizer, texts, num_return_sequences=count, window=4, **search))
    best = list(rerank(model, tokenizer, *teacher, texts, window=4, **search))
    for source, ranked, candidates, first in zip(texts[:-1], found, plain, best, strict=False):
        written = [candidate.text for candidate in candidates.hypotheses]
        assert sorted(hypothesis.text for hypothesis in ranked.hypotheses) == sorted(written)
        means = []
        for hypothesis in ranked.hypotheses:
            (score,) = score_targets(*teacher, [source], [hypothesis.text])
            means.append(score.log_probability / len(score.tokens) if hypothesis.text.strip() else -math.inf)
        assert [hypothesis.score for hypothesis in ranked.hypotheses] == pytest.approx(means, abs=1e-4)
        assert means == sorted(means, reverse=True)
        assert [hypothesis.score for hypothesis in first.hypotheses] == pytest.approx(means[:1], abs=1e-4)
    assert [(hypothesis.text, hypothesis.score) for hypothesis in best[-1].hypotheses] == [("", 0.0)]


def test_trained_teacher_chooses_the_right_translation_and_never_one_without_a_word() -> None:
    scorer = TargetScorer(*model_of_pairs())
    candidates = [[TARGETS[1 - number], TARGETS[number], ""] for number in (0, 1)]
    scores = teacher_scores(scorer, SOURCES[:2], candidates)
    assert [max(range(3), key=row.__getitem__) for row in scores] == [1, 1]
    assert [row[2] for row in scores] == [-math.inf] * 2


def test_candidate_that_is_too_long_for_the_teacher_is_not_chosen() -> None:
    tokenizer = model_of_pairs()[1]
    short = tiny_model(vocab_size=len(tokenizer), position_embedding="learned", max_position_embeddings=16)
    scorer = TargetScorer(short, tokenizer)
    longest = " ".join(TARGETS * 9)
    (scores,) = teacher_scores(scorer, SOURCES[:1], [[longest, TARGETS[0]]])
    assert scores[0] == -math.inf < scores[1]
    with user_error(r"^Target 1 \(the first is 1\): too long for the model's learned positions"):
        list(score_targets(short, tokenizer, SOURCES[:1], [longest]))


@pytest.mark.parametrize(
    ("family", "search", "message"),
    [
        ("nat", {}, "the search finds 1, expected at least 2. Set length_beam_size"),
        ("ctc", {}, "the search finds 1, expected at least 2. Set num_beams"),
        ("dag", {}, "the search finds 1, expected at least 2. Use a different model"),
        ("autoregressive", {}, "the search finds 1, expected at least 2. Set num_beams"),
        ("nat", {"length_beam_size": 2, "num_return_sequences": 3}, "finds 2, expected at least 3. Set length_beam"),
        ("autoregressive", {"do_sample": True}, "finds any number of samples, expected at least 2. Set num_beams"),
    ],
)
def test_search_with_a_single_candidate_is_an_error(family: str, search: dict[str, Any], message: str) -> None:
    with user_error(message):
        rerank(*family_of_pairs(family), *model_of_pairs(), SOURCES, **search)


@pytest.mark.parametrize("family", ["nat", "ctc"])
def test_command_writes_the_choice_of_the_teacher(
    family: str, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    student = save(tmp_path / "student", *family_of_pairs(family))
    teacher = save(tmp_path / "teacher", *model_of_pairs())
    run = command_runner(command.main, str(student), capsysbinary)
    search = ["--beams=3"] if family == "ctc" else ["--length_beam=3"]
    rows = lines(json.dumps({"text": text}) for text in SOURCES)
    output, errors, status = run(f"--rerank={teacher}", *search, "--nbest=3", "--format=jsonl", stdin=rows)
    assert status == 0, errors
    path = tmp_path / "candidates"
    for line, source in zip(output.splitlines(), SOURCES, strict=True):
        rows = json.loads(line)["nbest"]
        scores = [
            score.log_probability / len(score.tokens)
            for score in score_targets(*model_of_pairs(), [source] * 3, [row["translation"] for row in rows])
        ]
        assert [row["score"] for row in rows] == pytest.approx(scores, abs=1e-3)
    best = [json.loads(line)["translation"] for line in output.splitlines()]

    # A file can be resumed only with the same teacher.
    source = tmp_path / "source"
    source.write_text(lines(SOURCES))
    arguments = ["--input", source, "--output", path, *search]
    assert run(*arguments, f"--rerank={teacher}")[2] == 0
    assert path.read_text().splitlines() == best
    assert "rerank" in error_line(run(*arguments, f"--rerank={student}"))


def test_command_refuses_a_teacher_without_a_choice(tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    student = save(tmp_path / "student", *family_of_pairs("nat"))
    run = command_runner(command.main, str(student), capsysbinary)
    line = error_line(run(f"--rerank={student}", stdin="cat\n"))
    assert line.endswith("the search finds 1, expected at least 2. Set length_beam_size (--length_beam).\n")
