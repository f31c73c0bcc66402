"""NAT and GLAT: soft copy, length and attentions against lists and loops, parts that can be turned off, glancing.

B batch, S source, T target.
"""

import math
from typing import Any

import pytest
import torch

from tests.batches import END, FLOAT32, assert_dropped, random_tokens, targets
from tests.models import TINY, tiny_nat
from vaswani_transformer import VaswaniNatConfig
from vaswani_transformer.nar_decoder import (
    MeasuredSource,
    PositionalAttention,
    RelativeSelfAttention,
    canvas,
    soft_copy,
)


@pytest.mark.parametrize("side", ["right", "left"])
def test_soft_copy_equals_a_list_at_every_pair_of_lengths(side: str) -> None:
    """Row i of a target is real row floor(i n / m), for all n, m up to 40, each target with its own source."""
    rows, counts, lengths = torch.arange(40.0).view(1, 40, 1), torch.arange(1, 41), torch.arange(1, 41).repeat(40)
    first = torch.zeros(40) if side == "right" else 40 - counts
    is_real = (torch.arange(40) >= first[:, None]) & (torch.arange(40) < (first + counts)[:, None])
    copied = soft_copy(rows.expand(40, -1, -1), is_real, canvas(lengths)).view(40, 40, 40)  # n, m, position
    for n in range(1, 41):
        for m in range(1, 41):
            assert copied[n - 1, m - 1, :m].tolist() == [first[n - 1] + i * n // m for i in range(m)]


def test_length_candidates_equal_lists() -> None:
    """n + class - 20 for all n up to 40 and all classes, without lengths below 1."""
    head, logits = tiny_nat(), -torch.arange(41.0)[None]
    for n in range(1, 41):
        source = MeasuredSource(torch.zeros(1, n, 1), None, torch.ones(1, n).bool(), logits, torch.tensor([n - 20]))
        expected = [n + label - 20 for label in range(41) if n + label > 20]
        assert head.best_lengths(source, len(expected)).tolist() == [expected]
        classes = source.length_classes(torch.arange(1, 81))
        assert classes.tolist() == [min(20, max(-20, m - n)) + 20 for m in range(1, 81)]


def test_dropout_of_relative_attention_applies_to_its_weights() -> None:
    module = RelativeSelfAttention(VaswaniNatConfig(**TINY, attention_dropout=0.25), 0, clip=2)
    states = torch.randn(1, 40, 32)
    complete, dropped = (module.train(training)(states)[1] for training in (False, True))
    assert_dropped(dropped, complete, 0.25)


@pytest.mark.parametrize("form", ["none", "bool", "float"])
def test_relative_attention_equals_a_triple_loop(form: str) -> None:
    """Equations (3) and (4) of Shaw et al. 2018, term by term in float64."""
    sizes: dict[str, Any] = TINY | {"d_k": 6, "d_v": 10}
    module = RelativeSelfAttention(VaswaniNatConfig(**sizes), 0, clip=2).double().eval()
    for table in (module.relative_keys, module.relative_values):
        torch.nn.init.normal_(table.weight)
    states = torch.randn(2, 7, 32, dtype=torch.float64)
    allowed = torch.ones(2, 1, 7, 7).bool() if form == "none" else torch.rand(2, 1, 7, 7) < 0.7
    allowed |= torch.eye(7).bool()
    masks = {"none": None, "bool": allowed, "float": torch.zeros(2, 1, 7, 7).double().masked_fill(~allowed, -1e30)}
    query, key, value = module.project(states)
    expected = torch.zeros(2, 7, 4, 10, dtype=torch.float64)
    for batch in range(2):
        for head in range(4):
            for i in range(7):
                clipped = [min(2, max(-2, j - i)) + 2 for j in range(7)]
                keys = key[batch, head] + module.relative_keys.weight[clipped]
                scores = keys @ query[batch, head, i] / math.sqrt(6)
                weights = scores.masked_fill(~allowed[batch, 0, i], -math.inf).softmax(0)
                expected[batch, i, head] = weights @ (value[batch, head] + module.relative_values.weight[clipped])
    actual, weights = module.attend(query, key, value, masks[form])
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
    assert weights is not None
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 7).double())


def test_positional_weights_do_not_depend_on_the_words() -> None:
    config = VaswaniNatConfig(**TINY)
    config._attn_implementation = "eager"
    module, positions = PositionalAttention(config, 0).eval(), torch.randn(1, 5, 32)
    (first, weights), (second, other_weights) = (module(torch.randn(3, 5, 32), positions) for _ in range(2))
    assert not torch.equal(first, second)
    assert torch.equal(weights, other_weights)
    assert torch.equal(weights[0], weights[2])


def test_without_relative_attention_a_diagonal_mask_hides_a_position_from_itself() -> None:
    """With m = 1 it keeps its own key. Without the mask every position attends to itself."""
    model = tiny_nat(relative_attention_clip=None, attn_implementation="eager")
    assert not [name for name, _ in model.named_parameters() if "relative" in name]
    outputs = model(input_ids=random_tokens(2, 6), labels=targets(5, 1), output_attentions=True)
    for weights in outputs.decoder_attentions:
        assert float(weights[0, :, range(5), range(5)].abs().max()) == 0
        assert torch.equal(weights[1, :, 0, 0], torch.ones(4))
    model.config.mask_diagonal = False
    outputs = model(input_ids=random_tokens(2, 6), labels=targets(5, 1), output_attentions=True)
    assert float(outputs.decoder_attentions[0][0, :, range(5), range(5)].min()) > 0


def test_glancing_shows_floor_of_rho_times_the_mistakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first pass is wrong at known positions, because every prediction is token 7."""
    model = tiny_nat().train()
    labels = torch.tensor([[7, 7, 7, 7, 7], [7, 8, 9, 9, END], [8, 9, 9, END, -100]])
    predict_seven = torch.nn.Linear(32, 99)
    torch.nn.init.zeros_(predict_seven.weight)
    predict_seven.bias.data = torch.eye(99)[7]
    monkeypatch.setattr(model, "lm_head", predict_seven)
    source = model.read_source(model.encode(random_tokens(3, 6)).last_hidden_state, None)
    for ratio in (0.3, 0.5, 1.0):
        model.glancing_ratio = ratio
        drawn = torch.zeros(3, 5)
        for _ in range(50):
            seen, accuracy = model.glance(source, torch.randn(3, 5, 32), labels)
            assert seen.sum(1).tolist() == [0, math.floor(ratio * 4), math.floor(ratio * 4)]
            drawn += seen
        assert bool((drawn[1] > 0).all())  # the right word too: positions are drawn from all
        assert not bool(seen[2, 4])
        torch.testing.assert_close(accuracy, torch.tensor(6 / 14))


def test_glancing_learns_from_the_hidden_positions_only(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_nat(dropout=0.0, label_smoothing=0.0).train()
    labels, source = targets(4, 3), random_tokens(2, 6)
    seen = torch.tensor([[1, 0, 0, 1], [0, 1, 0, 0]]).bool()
    monkeypatch.setattr(model, "glance", lambda *_, **__: (seen, torch.tensor(0.5)))
    model.glancing_ratio = 0.5
    outputs = model(input_ids=source, labels=labels, skip_logits=False)
    log_probs = outputs.logits.log_softmax(-1)
    hidden = [(0, 1), (0, 2), (1, 0), (1, 2)]
    expected = sum(-log_probs[row, i, labels[row, i]] for row, i in hidden) / 7
    torch.testing.assert_close(outputs.token_loss, expected, **FLOAT32)
    assert float(outputs.accuracy) == 0.5


def test_first_pass_leaves_no_gradient_and_evaluation_does_not_glance() -> None:
    model, labels, source = tiny_nat(dropout=0.0).train(), targets(6, 4), random_tokens(2, 6)
    encoded = model.read_source(model.encode(source).last_hidden_state, None)
    seen, accuracy = model.glance(encoded, torch.randn(2, 6, 32, requires_grad=True), labels)
    assert not seen.requires_grad
    assert not accuracy.requires_grad
    plain = model.eval()(input_ids=source, labels=labels).loss
    model.glancing_ratio = 1.0
    assert torch.equal(model(input_ids=source, labels=labels).loss, plain)
