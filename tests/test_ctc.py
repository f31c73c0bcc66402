"""CTC: loss, best alignment and `generate()` against plain Python over all paths, slots, glancing.

B batch, S source, T target, U slots, V vocabulary.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.batches import END, FLOAT32, labels_of, padded_batch, random_tokens, source_batch, targets
from tests.models import tiny_ctc, tiny_dag, with_normal_weights
from vaswani_transformer import ctc
from vaswani_transformer.ctc import best_alignment, state_tokens
from vaswani_transformer.prefix_search import prefix_beam_search
from vaswani_transformer.slots import words_of

BLANK = 1


def collapse(path: Sequence[int]) -> tuple[int, ...]:
    """Return the words of a path: one token for equal neighbors, without blanks."""
    return tuple(token for i, token in enumerate(path) if token != BLANK and (i == 0 or token != path[i - 1]))


def likelihoods(log_probs: Tensor) -> dict[tuple[int, ...], float]:
    """Return the probability of every target under log-probabilities (U, V), a sum over all paths."""
    sums: dict[tuple[int, ...], float] = {}
    rows = log_probs.tolist()
    for path in itertools.product(range(log_probs.shape[1]), repeat=len(rows)):
        target = collapse(path)
        score = sum(row[token] for row, token in zip(rows, path, strict=True))
        sums[target] = sums.get(target, 0.0) + math.exp(score)
    return sums


def sharp(seed: int = 3, **fields: Any) -> Any:
    """Return a model in float64 with probabilities far from uniform."""
    return with_normal_weights(tiny_ctc(d_model=8, d_ff=8, num_heads=2, dropout=0.0, **fields).double(), seed)


TARGETS: list[list[int]] = [[3], [], [4, 4], [3, 4, 3], [4, 3, 3], [3, 4, 5, 3]]


@pytest.mark.parametrize("words", TARGETS, ids=str)
def test_loss_is_the_likelihood_summed_over_all_paths(words: list[int]) -> None:
    """Two source tokens have four slots, in a batch whose other source has two."""
    model = sharp(vocab_size=6)
    tokens, mask = padded_batch([1, 2], "left")
    tokens = tokens.clamp(max=5)
    batch = {"input_ids": tokens, "attention_mask": mask, "labels": labels_of([4], words)}
    outputs = model(**batch)
    log_probs = outputs.logits.detach().log_softmax(-1)
    expected = likelihoods(log_probs[1, :4])
    assert sum(expected.values()) == pytest.approx(1)
    summed = -math.log(likelihoods(log_probs[0, :2])[4,]) - math.log(expected[tuple(words)])
    assert outputs.loss.item() == pytest.approx(summed / (2 + len(words) + 1), rel=1e-9)
    torch.testing.assert_close(model(**batch, skip_logits=True).token_loss, outputs.loss)


def test_target_that_needs_more_slots_has_no_loss() -> None:
    """Three equal words need five slots, and two source tokens have four."""
    model, source = sharp().train(), random_tokens(2, 2)
    labels = labels_of([7, 8], [7, 7, 7])
    alone = model(input_ids=source[:1], labels=labels[:1, :3]).loss
    together = model(input_ids=source, labels=labels).loss
    torch.testing.assert_close(together, alone)
    together.backward()
    assert all(bool(weight.grad.isfinite().all()) for weight in model.parameters())
    torch.testing.assert_close(model(input_ids=source, labels=labels, num_items_in_batch=7).loss, alone * 3 / 7)
    assert float(model.eval()(input_ids=source[1:], labels=labels[1:]).loss) == 0


@pytest.mark.parametrize("token", [-1, 30, 10**6])
def test_label_outside_the_vocabulary_is_an_error(token: int) -> None:
    """torch's loss on a CPU would read other memory."""
    model = tiny_ctc(vocab_size=30)
    labels = labels_of([3, 4], [token, 5])
    with pytest.raises(IndexError, match="out of range"):
        model(random_tokens(2, 6, vocab_size=30), labels=labels)


def test_words_are_the_labels_without_the_end_and_repetitions_need_a_blank() -> None:
    words = words_of(torch.tensor([[5, 5, 6, END], [5, 6, 6, 6], [END, -100, -100, -100], [-100] * 4]), [END], BLANK)
    assert words.tokens.tolist() == [[5, 5, 6, BLANK], [5, 6, 6, 6], [BLANK] * 4, [BLANK] * 4]
    assert words.counts.tolist() == [3, 4, 0, 0]
    assert words.has_target.tolist() == [True, True, True, False]
    assert tiny_ctc().needed_slots(words).tolist() == [4, 6, 0, 0]


@pytest.mark.parametrize("words", TARGETS, ids=str)
def test_best_alignment_is_the_best_of_all_paths(words: list[int]) -> None:
    """Paths of other tokens collapse to other targets, so that four tokens suffice."""
    log_probs = torch.randn(2, 6, 6, dtype=torch.float64).log_softmax(-1)
    tokens = state_tokens(words_of(labels_of([3] * 5, words), [END], BLANK), BLANK)[[1, 1]]
    slots = torch.tensor([6, 5])
    state_scores = log_probs.gather(2, tokens[:, None].expand(-1, 6, -1))
    found = best_alignment(state_scores, tokens, slots, torch.full((2,), len(words)))
    for row in range(2):
        size = int(slots[row])
        rows = log_probs[row, :size].tolist()
        paths = [path for path in itertools.product((BLANK, 3, 4, 5), repeat=size) if collapse(path) == tuple(words)]
        best = max(paths, key=lambda path: sum(scores[token] for scores, token in zip(rows, path, strict=True)))
        assert found[row, :size].tolist() == list(best)


@pytest.mark.parametrize("side", ["left", "right"])
def test_generated_targets_are_the_most_likely_path_collapsed(side: str) -> None:
    """Scores of the tokens add up to that of the path, and special tokens are never predicted."""
    model = sharp(vocab_size=12, upsampling=3)
    tokens, mask = padded_batch([6, 2, 4], side)
    tokens = tokens.clamp(max=11)
    generated = model.generate(tokens, attention_mask=mask, return_dict_in_generate=True, return_history=True)
    assert torch.equal(generated.sequences, model.generate(tokens, attention_mask=mask))
    assert torch.equal(generated.history[0], generated.sequences)
    logits = model(input_ids=tokens, attention_mask=mask).logits
    for row, size in enumerate((18, 6, 12)):
        log_probs = logits[row, :size].log_softmax(-1)
        allowed = log_probs.index_fill(1, torch.tensor([0, END]), -math.inf)
        path = allowed.argmax(-1).tolist()
        words = [*collapse(path), END]
        assert generated.path[row].tolist() == path + [BLANK] * (18 - size)
        assert generated.lengths[row] == len(words)
        padding = [BLANK] * (generated.sequences.shape[1] - 1 - len(words))
        assert generated.sequences[row].tolist() == [0, *words, *padding]
        score = sum(float(log_probs[slot, token]) for slot, token in enumerate(path))
        assert float(generated.sequences_scores[row]) == pytest.approx(score)
        assert float(generated.token_scores[row].sum()) == pytest.approx(score)


def test_score_of_a_token_is_that_of_its_slots_and_the_blanks_before_it() -> None:
    model, path = tiny_ctc(), [[BLANK, 5, 5, BLANK, 5, 6, BLANK, BLANK]]
    scores = torch.tensor([[1.0, 2, 4, 8, 16, 32, 64, 128]])
    model.most_likely_words = lambda *_: (torch.tensor(path), scores)
    call: dict[str, Any] = {"return_dict_in_generate": True}
    generated = model.generate(random_tokens(1, 4), **call)
    assert generated.sequences.tolist() == [[0, 5, 5, 6, END]]
    assert generated.token_scores.tolist() == [[7, 24, 32, 192]]
    limited = model.generate(random_tokens(1, 4), max_new_tokens=2, **call)
    assert limited.sequences.tolist() == [[0, 5, END]]
    assert limited.token_scores.tolist() == [[7, 248]]


def test_chunks_of_sentences_give_the_same_loss_and_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sentence alone."""
    model = tiny_ctc(dropout=0.0).double().train()
    batch = source_batch([6, 3, 5, 4], labels=targets(5, 2, 7, 3))

    def gradients() -> list[Tensor]:
        return [*torch.autograd.grad(model(**batch).loss, list(model.parameters()))]

    expected = gradients()
    monkeypatch.setattr("vaswani_transformer.slots.chunk_size", lambda device: 1)
    torch.testing.assert_close(gradients(), expected)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("upsampling", [1, 3])
def test_loss_without_logits_has_the_gradient_of_torchs_loss(smoothing: float, upsampling: int) -> None:
    """Targets with and without repetitions, an empty one, and with one slot per source token some that do not fit."""
    model = sharp(vocab_size=12, upsampling=upsampling, label_smoothing=smoothing).train()
    labels = labels_of([5, 5, 6], [], [7, 8, 9, 9, 7], [7], [4, 4, 4, 4, 4])
    tokens, mask = padded_batch([4, 2, 6, 1, 5])
    batch = {"input_ids": tokens.clamp(max=11), "attention_mask": mask, "labels": labels}
    results = []
    for skip_logits in (False, True):
        outputs = model(**batch, skip_logits=skip_logits)
        assert (outputs.logits is None) == skip_logits
        gradients = torch.autograd.grad(outputs.loss, list(model.parameters()))
        results.append([outputs.loss.detach(), outputs.sentence_losses.detach(), *gradients])
    assert not bool(results[0][1].isinf().all())
    torch.testing.assert_close(*results)


def test_label_smoothing_mixes_each_slot_with_the_uniform_distribution() -> None:
    model, batch = tiny_ctc(dropout=0.0), source_batch([3, 2], labels=targets(4, 2))
    outputs = model.train()(**batch, skip_logits=False)
    log_probs = outputs.logits.log_softmax(-1)
    uniform = -sum(log_probs[row, slot].mean() for row, size in enumerate((6, 4)) for slot in range(size)) / 6
    expected = 0.9 * model.eval()(**batch).loss + 0.1 * uniform
    torch.testing.assert_close(outputs.loss, expected, **FLOAT32)


def test_glancing_shows_floor_of_rho_times_the_mistakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first pass predicts 7 at every slot, and the best alignments are known; the last target does not fit."""
    model, (source, mask) = tiny_ctc().train(), padded_batch([3, 2, 2], "right")
    seven = torch.nn.Linear(32, 99)
    torch.nn.init.zeros_(seven.weight)
    seven.bias.data = torch.eye(99)[7]
    monkeypatch.setattr(model, "lm_head", seven)
    aligned = torch.tensor([[7, 7, 7, BLANK, 8, BLANK], [BLANK, 7, BLANK, BLANK, BLANK, BLANK], [BLANK] * 6])
    monkeypatch.setattr(ctc, "best_alignment", lambda *_: aligned)
    words = words_of(labels_of([7, 8], [7], [7, 7, 7]), [END], BLANK)
    encoded = model.read_source(model.encode(source, mask)[0], mask)
    slots = model.slot_mask(encoded)
    for ratio in (0.4, 1.0):
        model.glancing_ratio = ratio
        seen, tokens, accuracy = model.glance(encoded, torch.zeros(3, 6, 32), slots, words)
        assert seen.sum(1).tolist() == [math.floor(ratio * 3), math.floor(ratio * 3), 0]
        assert not bool(seen[1, 4:].any())
        assert torch.equal(tokens, aligned)
        torch.testing.assert_close(accuracy, torch.tensor(1 - 6 / 10))
    draws = torch.tensor([[0.9, 0.1, 0.2, 0.8, 0.7, 0.6], [0.4, 0.3, 0.2, 0.1, 0, 0], [0] * 6])
    model.glancing_ratio = 0.7
    seen, _, _ = model.glance(encoded, torch.zeros(3, 6, 32), slots, words, draws)
    assert seen.nonzero().tolist() == [[0, 1], [0, 2], [1, 2], [1, 3]]


@pytest.mark.parametrize("tiny", [tiny_ctc, tiny_dag])
def test_glancing_changes_the_loss_of_training_only(tiny: Callable[..., Any]) -> None:
    model, batch = tiny(dropout=0.0), source_batch([5, 3], labels=targets(4, 3))
    plain = model.train()(**batch)
    assert plain.accuracy is None
    model.glancing_ratio = 1.0
    glancing = model(**batch)
    assert not torch.equal(glancing.loss, plain.loss)
    assert 0 <= float(glancing.accuracy) <= 1
    glancing.loss.backward()
    evaluated = model.eval()(**batch).loss
    model.glancing_ratio = 0.0
    assert torch.equal(model(**batch).loss, evaluated)


def test_several_targets_of_a_source_use_the_same_slots() -> None:
    model, source, labels = sharp(), random_tokens(2, 3), targets(4, 2, 3, 5)
    together = model(input_ids=source, labels=labels)
    assert together.logits.shape[:2] == (4, 6)
    losses = [model(input_ids=source[row // 2][None], labels=labels[row][None]).loss for row in range(4)]
    lengths = torch.tensor([4, 2, 3, 5])
    torch.testing.assert_close(together.loss, (torch.stack(losses) * lengths).sum() / 14)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"upsampling": 0}, "upsampling"),
        (
            {"eos_token_id": 1},
            r"^eos_token_id: slots need an end token that is not <pad>, the token of an empty slot; got 1, and 1",
        ),
        ({"eos_token_id": None}, "^eos_token_id: slots need an end token"),
        ({"pad_token_id": None}, "^pad_token_id: not a single token id; got None"),
    ],
    ids=str,
)
def test_bad_field_is_an_error_that_names_it(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        tiny_ctc(**fields)


@pytest.mark.parametrize(
    ("name", "value", "default"),
    [("length_beam_size", 2, "1"), ("length_penalty", 0.6, "1.0")],
)
def test_setting_of_models_with_lengths_is_an_error(name: str, value: float, default: str) -> None:
    message = (
        f"^{name}: not supported by VaswaniCtcForConditionalGeneration; got {value}, expected {default}. Leave it out"
    )
    with pytest.raises(ValueError, match=message):
        tiny_ctc().generate(random_tokens(1, 3), **{name: value})


def test_learned_positions_bound_the_slots() -> None:
    model = tiny_ctc(position_embedding="learned", max_position_embeddings=8)
    assert model(input_ids=random_tokens(2, 3)).logits.shape[1] == 6
    assert model(input_ids=random_tokens(2, 6)).logits.shape[1] == 8


def searched(model: Any, **arguments: Any) -> list[list[tuple[tuple[int, ...], float]]]:
    """Return the words and the score of each target that `generate()` returns, by source."""
    generated = model.generate(**arguments, return_dict_in_generate=True)
    count = arguments.get("num_return_sequences", 1)
    rows = []
    for tokens, length in zip(generated.sequences.tolist(), generated.lengths.tolist(), strict=True):
        assert tokens[length] == END
        assert set(tokens[length + 1 :]) <= {BLANK}
        rows.append(tuple(tokens[1:length]))
    targets = list(zip(rows, generated.sequences_scores.tolist(), strict=True))
    return [targets[start : start + count] for start in range(0, len(targets), count)]


@pytest.mark.parametrize("bonus", [0.0, 0.7, -0.5])
@pytest.mark.parametrize("limit", [None, 3])
@pytest.mark.parametrize("seed", range(3))
def test_wide_search_finds_the_best_of_all_targets_by_the_sum_of_their_alignments(
    seed: int, limit: int | None, bonus: float
) -> None:
    """Three words, of which the last seed suppresses one; the sources have four and two slots."""
    model = sharp(seed, vocab_size=6)
    tokens, mask = padded_batch([2, 1], "left")
    batch = {"input_ids": tokens.clamp(max=5), "attention_mask": mask}
    suppressed = [5] if seed == 2 else []
    settings: dict[str, Any] = {"num_beams": 60, "num_return_sequences": 6, "length_bonus": bonus}
    settings |= {"suppress_tokens": suppressed, "max_new_tokens": limit}
    logits = model(**batch).logits
    results = searched(model, **batch, **settings)
    for row, slots in enumerate((4, 2)):
        allowed = {}
        for words, probability in likelihoods(logits[row, :slots].log_softmax(-1)).items():
            is_short = limit is None or len(words) < limit
            if is_short and not {0, END, *suppressed} & set(words):
                allowed[words] = math.log(probability) + bonus * len(words)
        best = sorted(allowed.items(), key=lambda item: -item[1])[:6]
        assert [words for words, _ in results[row]][: len(best)] == [words for words, _ in best]
        scores = [score for _, score in results[row]][: len(best)]
        assert scores == pytest.approx([score for _, score in best])


@pytest.mark.parametrize("bonus", [0.0, 0.7, -0.5])
@pytest.mark.parametrize("seed", range(3))
def test_search_itself_ranks_prefixes_by_the_sum_of_their_alignments(seed: int, bonus: float) -> None:
    """Before exact scores rank the targets that it has kept: the same word may repeat only after a blank."""
    numbers = torch.Generator().manual_seed(seed)
    log_probs = (2 * torch.randn(4, 4, generator=numbers, dtype=torch.float64)).log_softmax(-1)
    words = [word for word in range(4) if word != BLANK]
    slots = [([row[word] for word in words], words, row[BLANK]) for row in log_probs.exp().tolist()]
    found = prefix_beam_search(slots, num_beams=500, bonus=bonus, limit=4)
    expected = {target: math.log(p) + bonus * len(target) for target, p in likelihoods(log_probs).items()}
    assert found == sorted(expected, key=lambda target: -expected[target])


def test_narrow_search_ranks_distinct_targets_by_their_loss() -> None:
    model = sharp(vocab_size=30, upsampling=3)
    tokens, mask = padded_batch([6, 2, 4])
    batch = {"input_ids": tokens.clamp(max=29), "attention_mask": mask}
    for row, results in enumerate(searched(model, **batch, num_beams=4, num_return_sequences=4)):
        assert len({words for words, _ in results}) == 4
        scores = [score for _, score in results]
        assert scores == sorted(scores, reverse=True)
        source = {name: values[row : row + 1].expand(4, -1) for name, values in batch.items()}
        losses = model(**source, labels=labels_of(*(words for words, _ in results))).sentence_losses
        assert scores == pytest.approx((-losses).tolist())
        size = int(mask[row].sum())
        alone = searched(model, input_ids=batch["input_ids"][row : row + 1, :size], num_beams=4)
        assert alone[0][0][0] == results[0][0]


def test_saved_bonus_is_that_of_the_saved_search() -> None:
    model, tokens = tiny_ctc(), random_tokens(2, 4)
    best_paths = model.generate(tokens)
    model.generation_config = model.config.make_generation_config(num_beams=4, length_bonus=0.5)
    assert torch.equal(model.generate(tokens, num_beams=1), best_paths)


def test_search_whose_targets_are_all_empty_finds_the_empty_target() -> None:
    generated = tiny_ctc().generate(random_tokens(2, 4), num_beams=4, max_new_tokens=1, return_dict_in_generate=True)
    assert generated.sequences[:, 1:].tolist() == [[END]] * 2
    assert generated.sequences_scores.isfinite().all()


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"length_bonus": 0.5}, r"length_bonus: the most likely path has none; got 0\.5"),
        ({"num_beams": 2, "num_return_sequences": 3}, "num_return_sequences: more than the search finds; got 3"),
        ({"num_beams": 0}, "num_beams: out of range; got 0"),
    ],
)
def test_setting_of_the_search_that_has_no_meaning_is_an_error(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        tiny_ctc().generate(random_tokens(1, 4), **settings)
