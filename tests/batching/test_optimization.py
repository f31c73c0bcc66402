"""Equation (3) and the paper's Adam."""

import pytest
import torch

from vaswani_transformer.batching.optimization import learning_rate, paper_adam, paper_schedule


def test_learning_rate_is_equation_three() -> None:
    assert learning_rate(1, 512) == pytest.approx(4000**-1.5 * 512**-0.5)
    assert learning_rate(4000, 512) == pytest.approx(512**-0.5 * 4000**-0.5)  # the peak, about 7.0e-4
    assert learning_rate(100_000, 512) == pytest.approx(512**-0.5 * 100_000**-0.5)


def test_adam_step_equals_its_definition() -> None:
    """Three steps of Kingma and Ba's Algorithm 1 with the paper's beta_1, beta_2, epsilon and rate of a step (5.3)."""
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64))
    optimizer = paper_adam([weight])
    schedule = paper_schedule(optimizer, d_model=16, warmup_steps=2, scale=2.0)
    expected, mean, square = weight.detach().clone(), torch.zeros(3), torch.zeros(3)
    for step in (1, 2, 3):
        weight.grad = torch.tensor([0.3 * step, -0.7, 1e-9], dtype=torch.float64)
        mean = 0.9 * mean + 0.1 * weight.grad
        square = 0.98 * square + 0.02 * weight.grad**2
        corrected = (mean / (1 - 0.9**step)) / ((square / (1 - 0.98**step)).sqrt() + 1e-9)
        expected -= 2 * learning_rate(step, 16, 2) * corrected
        optimizer.step()
        schedule.step()
        torch.testing.assert_close(weight.detach(), expected)


def test_schedule_of_an_optimizer_whose_rate_is_not_1_is_an_error() -> None:
    weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    optimizer = torch.optim.Adam([{"params": weights[:1], "lr": 1.0}, {"params": weights[1:]}], lr=1e-3)
    with pytest.raises(ValueError, match=r"optimizer: .*got lr=0\.001, expected 1 in each parameter group"):
        paper_schedule(optimizer, d_model=16)


def test_schedule_made_for_a_resumed_optimizer_continues() -> None:
    """Its groups have the rate of the last step, and 1 as the rate that they began with."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = paper_adam([weight])
    schedule = paper_schedule(optimizer, d_model=16, warmup_steps=10)
    optimizer.step()
    schedule.step()
    resumed = paper_adam([weight])
    resumed.load_state_dict(optimizer.state_dict())
    again = paper_schedule(resumed, d_model=16, warmup_steps=10)
    again.load_state_dict(schedule.state_dict())
    resumed.step()
    again.step()
    assert resumed.param_groups[0]["lr"] == pytest.approx(learning_rate(3, 16, 10))


@pytest.mark.parametrize("warmup_steps", [0, -3, 0.5, float("nan")])
def test_schedule_without_a_warmup_step_is_an_error(warmup_steps: float) -> None:
    with pytest.raises(ValueError, match=rf"warmup_steps: .*got {warmup_steps}, expected at least 1"):
        paper_schedule(paper_adam([torch.nn.Parameter(torch.zeros(2))]), 16, warmup_steps)  # ty: ignore[invalid-argument-type]
