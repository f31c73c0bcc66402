"""The directed acyclic Transformer: loss, best paths and `generate()` against plain Python over all paths.

B batch, T target, U vertices, V vocabulary.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.batches import END, labels_of, padded_batch, random_tokens, source_batch, targets
from tests.models import tiny_dag, with_normal_weights
from vaswani_transformer import dag, slots
from vaswani_transformer.dag import best_vertices, path_posteriors
from vaswani_transformer.slots import words_of

START, BLANK = 0, 1


def sharp(seed: int = 3, **fields: Any) -> Any:
    """Return a model in float64 with probabilities far from uniform."""
    return with_normal_weights(tiny_dag(d_model=8, d_ff=8, num_heads=2, dropout=0.0, **fields).double(), seed)


def paths_of(size: int) -> Iterator[tuple[int, ...]]:
    """Yield all paths from the first of `size` vertices to the last: the vertices between them."""
    between = range(1, size - 1)
    return itertools.chain.from_iterable(itertools.combinations(between, count) for count in range(size - 1))


def path_score(transitions: Tensor, path: Sequence[int], size: int) -> float:
    """Return the log-probability of the transitions of a path."""
    vertices = [0, *path, size - 1]
    return sum(float(transitions[i, j]) for i, j in itertools.pairwise(vertices))


def graph_of(model: Any, **batch: Any) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities of words (B, U, V) and transitions (B, U, U) of a model in evaluation mode."""
    with torch.no_grad():
        source = model.read_source(model.encode(**batch)[0], batch["attention_mask"])
        mask = model.slot_mask(source)
        states = model.slot_states(source, mask)
        return model.lm_head(states).log_softmax(-1), model.transitions(states, mask)


def likelihoods(log_probs: Tensor, transitions: Tensor, size: int) -> dict[tuple[int, ...], float]:
    """Return the probability of every target of a graph with `size` vertices, a sum over all paths."""
    sums: dict[tuple[int, ...], float] = {}
    rows = log_probs.tolist()
    for path in paths_of(size):
        moves = path_score(transitions, path, size)
        for words in itertools.product(range(log_probs.shape[-1]), repeat=len(path)):
            score = moves + sum(rows[vertex][word] for vertex, word in zip(path, words, strict=True))
            sums[words] = sums.get(words, 0.0) + math.exp(score)
    return sums


def three_sources() -> dict[str, Tensor]:
    """Return sources of one, three and two tokens, padded on the left, from a vocabulary of six."""
    tokens, mask = padded_batch([1, 3, 2], "left")
    return {"input_ids": tokens.clamp(max=5), "attention_mask": mask}


def test_probabilities_of_all_targets_add_up_to_one_and_the_loss_is_theirs() -> None:
    """With two vertices per source token, on paths of at most four words."""
    model, batch = sharp(vocab_size=6, upsampling=2), three_sources()
    log_probs, transitions = graph_of(model, **batch)
    labels = labels_of([], [3, 4, 3], [5, 5])
    outputs = model(**batch, labels=labels)
    expected = []
    for row, size in enumerate((2, 6, 4)):
        sums = likelihoods(log_probs[row], transitions[row], size)
        assert sum(sums.values()) == pytest.approx(1)
        words = tuple(word for word in labels[row].tolist() if word not in (END, -100))
        expected.append(-math.log(sums[words]))
    assert outputs.sentence_losses.tolist() == pytest.approx(expected, rel=1e-9)
    assert outputs.loss.item() == pytest.approx(sum(expected) / 8, rel=1e-9)
    without_logits = model(**batch, labels=labels, skip_logits=True)
    assert without_logits.logits is None
    torch.testing.assert_close(without_logits.loss, outputs.loss)


def test_transitions_of_each_vertex_are_a_distribution_over_later_vertices() -> None:
    _, transitions = graph_of(sharp(vocab_size=6), **three_sources())
    for row, size in enumerate((4, 12, 8)):
        probabilities = transitions[row].exp()
        torch.testing.assert_close(probabilities[: size - 1].sum(1), torch.ones(size - 1).double())
        assert not bool(probabilities.tril().any())
        assert not bool(probabilities[size - 1 :].any())
        assert not bool(probabilities[:, size:].any())


def test_posteriors_are_the_derivatives_of_the_log_likelihood() -> None:
    torch.manual_seed(0)
    scores = torch.randn(3, 6, 4, dtype=torch.float64, requires_grad=True)
    counts, last = torch.tensor([4, 0, 2]), torch.tensor([5, 3, 4])
    is_later = torch.ones(6, 6).triu(1).bool() & (torch.arange(6) <= last[:, None, None])
    free = torch.randn(3, 6, 6, dtype=torch.float64, requires_grad=True)
    log_p, words, used = path_posteriors(free.masked_fill(~is_later, -math.inf).detach(), scores.detach(), counts, last)

    total = torch.zeros((), dtype=torch.float64)
    for row in range(3):
        terms: list[Tensor] = []
        for path in paths_of(int(last[row]) + 1):
            if len(path) == counts[row]:
                vertices = [0, *path, int(last[row])]
                moves = [free[row, i, j] for i, j in itertools.pairwise(vertices)]
                values = [*moves, *(scores[row, vertex, word] for word, vertex in enumerate(path))]
                terms.append(torch.stack(values).sum())
        summed = torch.stack(terms).logsumexp(0)
        torch.testing.assert_close(log_p[row], summed.detach())
        total = total + summed
    expected = torch.autograd.grad(total, [scores, free])
    torch.testing.assert_close([words, used], list(expected))


def test_best_vertices_are_those_of_the_best_of_all_paths() -> None:
    torch.manual_seed(1)
    scores = torch.randn(3, 6, 4, dtype=torch.float64)
    counts, last = torch.tensor([4, 0, 2]), torch.tensor([5, 3, 4])
    is_later = torch.ones(6, 6).triu(1).bool() & (torch.arange(6) <= last[:, None, None])
    transitions = torch.randn(3, 6, 6, dtype=torch.float64).masked_fill(~is_later, -math.inf)
    found = best_vertices(transitions, scores, counts, last)
    for row in range(3):
        size, count = int(last[row]) + 1, int(counts[row])

        def score(path: Sequence[int], row: int = row, size: int = size) -> float:
            words = sum(float(scores[row, vertex, word]) for word, vertex in enumerate(path))
            return path_score(transitions[row], path, size) + words

        best = max((path for path in paths_of(size) if len(path) == count), key=score)
        assert found[row].tolist() == [*best, *[0] * (4 - count)]


def best_words(log_probs: Tensor) -> tuple[list[int], list[float]]:
    """Return the best word of each vertex (U, V), never a special token, and its log-probability."""
    allowed = log_probs.index_fill(1, torch.tensor([START, BLANK, END]), -math.inf)
    return allowed.argmax(1).tolist(), allowed.amax(1).tolist()


def expected_path(strategy: str, transitions: Tensor, scores: list[float], size: int, alpha: float) -> tuple[int, ...]:
    """Return the vertices between the first and the last that a strategy chooses."""
    if strategy == "viterbi":

        def quality(path: tuple[int, ...]) -> float:
            score = path_score(transitions, path, size) + sum(scores[vertex] for vertex in path)
            return score / (len(path) + 1) ** alpha

        return max(paths_of(size), key=quality)

    path, vertex = [], 0
    while True:
        ahead = {}
        for later in range(vertex + 1, size):
            word = scores[later] if strategy == "lookahead" and later < size - 1 else 0.0
            ahead[later] = float(transitions[vertex, later]) + word
        vertex = max(ahead, key=lambda later: ahead[later])
        if vertex == size - 1:
            return tuple(path)
        path.append(vertex)


@pytest.mark.parametrize(
    ("strategy", "alpha"), [("greedy", 1.0), ("lookahead", 1.0), ("viterbi", 1.0), ("viterbi", 0.0), ("viterbi", 2.5)]
)
@pytest.mark.parametrize("seed", range(3))
def test_decoding_follows_the_path_of_its_strategy(seed: int, strategy: str, alpha: float) -> None:
    """Scores of the tokens add up to the log-probability of the path."""
    model, batch = sharp(seed, vocab_size=6, upsampling=3), three_sources()
    log_probs, transitions = graph_of(model, **batch)
    settings: dict[str, Any] = {"decoding_strategy": strategy, "length_penalty": alpha}
    generated = model.generate(**batch, **settings, return_dict_in_generate=True, return_history=True)
    assert torch.equal(generated.sequences, model.generate(**batch, **settings))
    assert torch.equal(generated.history[0], generated.sequences)
    for row, size in enumerate((3, 9, 6)):
        words, scores = best_words(log_probs[row])
        path = expected_path(strategy, transitions[row], scores, size, alpha)
        target = [*(words[vertex] for vertex in path), END]
        assert generated.lengths[row] == len(target)
        padding = [BLANK] * (generated.sequences.shape[1] - 1 - len(target))
        assert generated.sequences[row].tolist() == [START, *target, *padding]
        tokens = dict(zip(path, target, strict=False)) | {0: START, size - 1: END}
        assert generated.path[row].tolist() == [tokens.get(vertex, BLANK) for vertex in range(9)]
        vertices = [0, *path, size - 1]
        parts = [float(transitions[row, i, j]) for i, j in itertools.pairwise(vertices)]
        for index, vertex in enumerate(path):
            parts[index] += scores[vertex]
        assert generated.token_scores[row].tolist() == pytest.approx([*parts, *[0.0] * len(padding)])
        assert float(generated.sequences_scores[row]) == pytest.approx(sum(parts))


@pytest.mark.parametrize("strategy", ["greedy", "lookahead"])
def test_saved_length_penalty_is_that_of_the_saved_strategy(strategy: str) -> None:
    model, tokens = tiny_dag(), random_tokens(2, 4)
    expected = model.generate(tokens, decoding_strategy=strategy)
    model.generation_config = model.config.make_generation_config(decoding_strategy="viterbi", length_penalty=1.5)
    assert torch.equal(model.generate(tokens, decoding_strategy=strategy), expected)
    with pytest.raises(ValueError, match=r"length_penalty: only Viterbi decoding has one; got 2\.0"):
        model.generate(tokens, decoding_strategy=strategy, length_penalty=2.0)


@pytest.mark.parametrize("strategy", ["greedy", "lookahead", "viterbi"])
def test_limit_drops_later_words_and_viterbi_keeps_to_it(strategy: str) -> None:
    model, batch = sharp(vocab_size=6, upsampling=3), three_sources()
    settings: dict[str, Any] = {"decoding_strategy": strategy, "return_dict_in_generate": True}
    whole = model.generate(**batch, **settings)
    limited = model.generate(**batch, **settings, max_new_tokens=2)
    assert limited.lengths.max() <= 2
    torch.testing.assert_close(limited.token_scores.sum(1), limited.sequences_scores)
    if strategy != "viterbi":
        assert torch.equal(limited.sequences[:, 1], whole.sequences[:, 1])
        torch.testing.assert_close(limited.sequences_scores, whole.sequences_scores)


def test_target_that_needs_more_vertices_has_no_loss() -> None:
    """Three words need five vertices, and two source tokens have four."""
    model, source = sharp(upsampling=2).train(), random_tokens(2, 2)
    labels = labels_of([7, 8], [7, 7, 7])
    alone = model(input_ids=source[:1], labels=labels[:1, :3]).loss
    together = model(input_ids=source, labels=labels)
    torch.testing.assert_close(together.loss, alone)
    assert together.sentence_losses[1] == math.inf
    together.loss.backward()
    assert all(bool(weight.grad.isfinite().all()) for weight in model.parameters())
    assert model.eval()(input_ids=source[1:], labels=labels[1:]).loss.item() == 0


@pytest.mark.parametrize("token", [-1, 30, 10**6])
def test_label_outside_the_vocabulary_is_an_error(token: int) -> None:
    model = tiny_dag(vocab_size=30)
    with pytest.raises(IndexError, match="out of range"):
        model(random_tokens(2, 6, vocab_size=30), labels=labels_of([3, 4], [token, 5]))


def test_single_vertex_has_the_empty_target_only() -> None:
    model, source = tiny_dag(upsampling=1), random_tokens(1, 1)
    for strategy in ("greedy", "lookahead", "viterbi"):
        generated = model.generate(source, decoding_strategy=strategy, return_dict_in_generate=True)
        assert generated.sequences.tolist() == [[START, END]]
        assert generated.sequences_scores.tolist() == [0]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("upsampling", [1, 3])
def test_loss_without_logits_has_the_gradient_of_that_with_logits(smoothing: float, upsampling: int) -> None:
    """With one vertex per source token some targets do not fit."""
    model = sharp(vocab_size=12, upsampling=upsampling, label_smoothing=smoothing).train()
    labels = labels_of([5, 5, 6], [], [7, 8, 9, 7], [7], [4, 4, 4, 4, 4])
    tokens, mask = padded_batch([4, 2, 6, 1, 5])
    batch = {"input_ids": tokens.clamp(max=11), "attention_mask": mask, "labels": labels}
    results = []
    for skip_logits in (False, True):
        outputs = model(**batch, skip_logits=skip_logits)
        assert (outputs.logits is None) == skip_logits
        gradients = torch.autograd.grad(outputs.loss, list(model.parameters()))
        results.append([outputs.loss.detach(), outputs.sentence_losses.detach(), *gradients])
    assert bool(results[0][1].isinf().any()) == (upsampling == 1)
    torch.testing.assert_close(*results)


def test_chunks_of_sentences_give_the_same_loss_and_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sentence alone, and two at a time for the transitions."""
    model = tiny_dag(dropout=0.0, label_smoothing=0.1).double().train()
    batch = source_batch([6, 3, 5, 4], labels=targets(5, 2, 7, 3))

    def gradients() -> list[Tensor]:
        return [*torch.autograd.grad(model(**batch).loss, list(model.parameters()))]

    expected = gradients()
    monkeypatch.setattr(slots, "chunk_size", lambda device: 1)
    monkeypatch.setattr(dag, "CHUNK_SCORES", 2 * model.config.num_heads * (6 * model.config.upsampling) ** 2)
    torch.testing.assert_close(gradients(), expected)


def test_label_smoothing_is_that_of_an_autoregressive_model_on_each_path() -> None:
    """With three vertices and one word there is a single path."""
    model = sharp(vocab_size=6, upsampling=3, label_smoothing=0.1).train()
    batch = {"input_ids": torch.tensor([[4]]), "attention_mask": torch.tensor([[1]])}
    log_probs, transitions = graph_of(model, **batch)
    word = 0.9 * log_probs[0, 1, 5] + 0.1 * log_probs[0, 1].mean()
    expected = -(word + transitions[0, 0, 1] + transitions[0, 1, 2]) / 2
    torch.testing.assert_close(model(**batch, labels=labels_of([5])).loss.detach(), expected)


def test_glancing_shows_words_of_the_best_path_where_the_first_pass_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first pass predicts 7 at every vertex, and the best paths are known; the last target does not fit."""
    model, (source, mask) = tiny_dag(upsampling=2).train(), padded_batch([3, 2, 2], "right")
    seven = torch.nn.Linear(32, 99)
    torch.nn.init.zeros_(seven.weight)
    seven.bias.data = torch.eye(99)[7]
    monkeypatch.setattr(model, "lm_head", seven)
    vertices = torch.tensor([[1, 3, 4], [2, 0, 0], [1, 2, 3]])
    monkeypatch.setattr("vaswani_transformer.dag.best_vertices", lambda *_: vertices)
    words = words_of(labels_of([7, 8, 9], [8], [8, 8, 8])[:, :3], [END], BLANK)
    encoded = model.read_source(model.encode(source, mask)[0], mask)
    slot_mask = model.slot_mask(encoded)
    for ratio, counts in ((0.4, [0, 0, 0]), (0.5, [1, 0, 0]), (1.0, [2, 1, 0])):
        model.glancing_ratio = ratio
        seen, tokens, accuracy = model.glance(encoded, torch.zeros(3, 6, 32), slot_mask, words)
        assert seen.sum(1).tolist() == counts
        assert tokens[0].tolist() == [BLANK, 7, BLANK, 8, 9, BLANK]
        assert not bool((seen & tokens.eq(BLANK)).any())
        torch.testing.assert_close(accuracy, torch.tensor(1 - 3 / 4))


@pytest.mark.parametrize("strategy", ["lookahead", "viterbi"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_and_order_of_a_batch_change_nothing(side: str, strategy: str) -> None:
    model = sharp(vocab_size=12)
    tokens, mask = padded_batch([6, 2, 4], side)
    batch = {"input_ids": tokens.clamp(max=11), "attention_mask": mask}
    labels = labels_of([5, 6, 7], [8], [9, 9])
    settings: dict[str, Any] = {"decoding_strategy": strategy, "return_dict_in_generate": True}
    losses, generated = model(**batch, labels=labels).sentence_losses, model.generate(**batch, **settings)
    for row in range(3):
        source = batch["input_ids"][row : row + 1, mask[row].bool()]
        torch.testing.assert_close(model(source, labels=labels[row : row + 1]).sentence_losses[0], losses[row])
        alone = model.generate(source, **settings)
        length = int(alone.lengths[0])
        assert generated.sequences[row, : length + 1].tolist() == alone.sequences[0].tolist()
        torch.testing.assert_close(alone.sequences_scores[0], generated.sequences_scores[row])


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"decoding_strategy": "beam"}, "decoding_strategy: unknown; got 'beam', expected one of greedy, lookahead"),
        ({"length_penalty": 0.6}, r"length_penalty: only Viterbi decoding has one; got 0\.6, expected 1\.0, or"),
        ({"length_beam_size": 2}, "length_beam_size: not supported by VaswaniDagForConditionalGeneration"),
        ({"num_beams": 2}, "num_beams: not supported by VaswaniDagForConditionalGeneration"),
    ],
)
def test_setting_that_has_no_meaning_is_an_error(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        tiny_dag().generate(random_tokens(1, 4), **settings)
