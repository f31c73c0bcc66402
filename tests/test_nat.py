"""NAT and GLAT: components that can be turned off, and glancing.

B batch, S source, T target.
"""

import math
from typing import Any

import pytest
import torch

from tests.helpers import FLOAT32, random_tokens
from tests.nar_models import END, targets, tiny_nat


def test_nat_ignores_words_in_its_decoder() -> None:
    model, source, labels = tiny_nat(), random_tokens(2, 6), targets(3, 2)
    expected = model(input_ids=source, labels=labels).loss
    assert torch.equal(model(input_ids=source, labels=labels, decoder_input_ids=random_tokens(2, 3)).loss, expected)


@pytest.mark.parametrize("settings", [{"relative_attention_clip": None}, {"mask_diagonal": False}], ids=str)
def test_each_component_of_nat_can_be_turned_off(settings: dict[str, Any]) -> None:
    model = tiny_nat(**settings)
    names = [name for name, _ in model.named_parameters() if "relative" in name]
    assert bool(names) == ("mask_diagonal" in settings)
    batch = {"input_ids": random_tokens(2, 6), "labels": targets(5, 3)}
    assert not torch.allclose(model(**batch).logits, tiny_nat()(**batch).logits)


def test_without_relative_attention_a_diagonal_mask_hides_a_position_from_itself() -> None:
    """One layer, whose self-attention is then free of a position's own value."""
    model = tiny_nat(relative_attention_clip=None, attn_implementation="eager")
    outputs = model(input_ids=random_tokens(2, 6), labels=targets(5, 1), output_attentions=True)
    for weights in outputs.decoder_attentions:
        assert float(weights[0, :, range(5), range(5)].abs().max()) == 0
        assert torch.equal(weights[1, :, 0, 0], torch.ones(4))


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


@pytest.mark.parametrize("value", [2.0, -0.1, math.nan])
def test_glancing_ratio_is_a_share(value: float) -> None:
    model = tiny_nat()
    with pytest.raises(ValueError, match=r"^glancing_ratio: .* got .*, expected 0 to 1\."):
        model.glancing_ratio = value
    assert model.glancing_ratio == 0


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
    source_states = model.read_source(model.encode(source).last_hidden_state, None)
    assert source_states.lengths.tolist() == [6, 6]


def test_first_pass_leaves_no_gradient_and_evaluation_does_not_glance() -> None:
    model, labels, source = tiny_nat(dropout=0.0).train(), targets(6, 4), random_tokens(2, 6)
    encoded = model.read_source(model.encode(source).last_hidden_state, None)
    seen, accuracy = model.glance(encoded, torch.randn(2, 6, 32, requires_grad=True), labels)
    assert not seen.requires_grad
    assert not accuracy.requires_grad
    plain = model.eval()(input_ids=source, labels=labels).loss
    model.glancing_ratio = 1.0
    assert torch.equal(model(input_ids=source, labels=labels).loss, plain)
