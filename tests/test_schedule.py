"""Equation (3) and the paper's Adam."""

import pytest
import torch

from vaswani_transformer.schedule import learning_rate, paper_adam, paper_schedule


def test_learning_rate_is_equation_three() -> None:
    assert learning_rate(1, 512) == pytest.approx(4000**-1.5 * 512**-0.5)
    assert learning_rate(4000, 512) == pytest.approx(512**-0.5 * 4000**-0.5)  # the peak, about 7.0e-4
    assert learning_rate(100_000, 512) == pytest.approx(512**-0.5 * 100_000**-0.5)


def test_schedule_gives_step_n_the_rate_of_step_n() -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = paper_adam([weight])
    schedule = paper_schedule(optimizer, d_model=64, warmup_steps=3, scale=2.0)
    for step in range(1, 8):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(2 * learning_rate(step, 64, 3))
        weight.grad = torch.ones(1)
        optimizer.step()
        schedule.step()


def test_adam_has_the_papers_settings() -> None:
    optimizer = paper_adam([torch.nn.Parameter(torch.zeros(2))])
    settings = optimizer.param_groups[0]
    assert (settings["betas"], settings["eps"], settings["weight_decay"]) == ((0.9, 0.98), 1e-9, 0)


def test_adam_step_equals_its_definition() -> None:
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    optimizer = paper_adam([weight])
    paper_schedule(optimizer, d_model=16, warmup_steps=2)
    gradient = torch.tensor([0.3, -0.7], dtype=torch.float64)
    weight.grad = gradient.clone()
    optimizer.step()
    rate = learning_rate(1, 16, 2)  # in the first step both moments, corrected, are the gradient and its square
    expected = torch.tensor([1.0, -2.0], dtype=torch.float64) - rate * gradient / (gradient.abs() + 1e-9)
    torch.testing.assert_close(weight.detach(), expected)
