"""The gradient of every training loss, compared with finite differences of the loss itself in float64.

Dropout is off, and the random draws of a step are those of a seed. Straight-through samples are biased by design, so
their gradient is compared with the finite differences of the surrogate that defines it.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.batches import END
from tests.models import EVERY_FAMILY
from training import energy
from training.energy import OPERATORS, Energy
from vaswani_transformer import VaswaniFlowSeqConfig, VaswaniFlowSeqForConditionalGeneration, discrete, loss, slots

SIZES: dict[str, Any] = {
    **{"vocab_size": 11, "d_model": 8, "num_heads": 2, "encoder_layers": 1, "decoder_layers": 3, "d_ff": 8},
    **{"dropout": 0.0, "activation_function": "gelu"},  # relu has corners
}
SOURCE = torch.tensor([[4, 5, 6, 7, END], [8, 9, END, 1, 1]])
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
LABELS = torch.tensor([[6, 7, 7, END], [9, 5, END, -100]])
STEP = 1e-5
"""The step of the central differences: their error is about 1e-10 from the curvature and 1e-11 from rounding."""
PARTS = ("", "encoder", "decoder", "shared")
"""Parts of the names of the weights that a direction moves: all weights, those of a stack, or the embeddings."""
DIRECTIONS = 2

MODES: dict[str, tuple[str, dict[str, Any]]] = {  # the family, and fields of its configuration and attributes
    "autoregressive": ("autoregressive", {}),
    "autoregressive, without smoothing": ("autoregressive", {"label_smoothing": 0.0}),
    "autoregressive, window": ("autoregressive", {"attention_window": 1}),
    "autoregressive, learned positions, untied": (
        "autoregressive",
        {"position_embedding": "learned", "max_position_embeddings": 20, "tie_word_embeddings": False},
    ),
    "NAT": ("nat", {}),
    "NAT, plain attention": ("nat", {"relative_attention_clip": None, "mask_diagonal": False}),
    "GLAT": ("nat", {"glancing_ratio": 0.5}),
    "CTC": ("ctc", {}),
    "CTC, without smoothing": ("ctc", {"label_smoothing": 0.0}),
    "CTC with glancing": ("ctc", {"glancing_ratio": 0.5}),
    "CTC with glancing, untied": ("ctc", {"glancing_ratio": 0.7, "tie_word_embeddings": False}),
    "DAG": ("dag", {}),
    "DAG, smoothing": ("dag", {"label_smoothing": 0.1}),
    "DAG with glancing": ("dag", {"glancing_ratio": 0.5}),
    "DAG with glancing, untied": ("dag", {"glancing_ratio": 0.7, "tie_word_embeddings": False}),
    "CMLM": ("cmlm", {}),
    "revealed latents": ("iterative_vae", {}),
    "revealed latents, smoothing": ("iterative_vae", {"label_smoothing": 0.1}),
    "revealed latents, glancing": ("iterative_vae", {"glancing_ratio": 0.7}),
    "GLAT by layer": ("iterative_vae", {"latent": "discrete", "hint": False, "glancing_ratio": 0.5}),
    "relaxed latents": ("iterative_vae", {"latent_sample": "relaxed", "gumbel_temperature": 0.7}),
    "relaxed latents, glancing, KL": (
        "iterative_vae",
        {"latent_sample": "relaxed", "glancing_ratio": 0.5, "kl_scale": 0.3, "label_smoothing": 0.1},
    ),
    "FlowSeq, without the prior": ("flowseq", {"kl_scale": 0.0}),
    "FlowSeq, KL": ("flowseq", {"kl_scale": 0.5}),
}


def make(family: str, config: dict[str, Any]) -> Any:
    """Return a model of a family; that of FlowSeq starts its flow from the batch."""
    if family != "flowseq":
        return EVERY_FAMILY[family](**config)
    model = VaswaniFlowSeqForConditionalGeneration(VaswaniFlowSeqConfig(**config, flow_steps=1)).eval()
    model.start_flow(SOURCE, LABELS, MASK)
    return model


def model_of(family: str, fields: dict[str, Any]) -> Any:
    """Return a small random model in float64 and training mode; `fields` may be attributes of the head."""
    names = ("glancing_ratio", "kl_scale")
    without_dropout = {"iterative_vae": {"latent_dropout": 0.0}, "flowseq": {"word_dropout": 0.0}}.get(family, {})
    config = {name: value for name, value in fields.items() if name not in names}
    model = make(family, {**SIZES, **without_dropout, **config})
    generator = torch.Generator().manual_seed(3)
    for weight in model.parameters():
        weight.data = 0.3 * torch.randn(weight.shape, generator=generator, dtype=torch.float64)
    for name in names:
        if name in fields:
            setattr(model, name, fields[name])
    return model.double().train()


def loss_of(model: Any, **arguments: Any) -> Callable[[], Tensor]:
    """Return the training loss of a batch, with the same random draws at each call."""

    def compute() -> Tensor:
        torch.manual_seed(5)
        return model(input_ids=SOURCE, attention_mask=MASK, labels=LABELS, **arguments).loss

    return compute


def assert_gradient(model: Any, compute: Callable[[], Tensor], surrogate: Callable[[], Tensor] | None = None) -> None:
    """Compare the derivatives of `compute` along random directions with differences of `surrogate`, or of itself."""
    surrogate = surrogate or compute
    model.zero_grad()
    compute().backward()
    weights = dict(model.named_parameters())
    generator = torch.Generator().manual_seed(7)
    for part in PARTS:
        for _ in range(DIRECTIONS):
            direction = {}
            for name, weight in weights.items():
                if part in name:
                    direction[name] = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
            computed = 0.0
            for name, step in direction.items():
                if weights[name].grad is not None:
                    computed += float((weights[name].grad * step).sum())

            def moved(size: float, direction: dict[str, Tensor] = direction) -> float:
                for name, step in direction.items():
                    weights[name].data.add_(step, alpha=size)
                with torch.no_grad():
                    value = float(surrogate())
                for name, step in direction.items():
                    weights[name].data.sub_(step, alpha=size)
                return value

            expected = (moved(STEP) - moved(-STEP)) / (2 * STEP)
            assert computed == pytest.approx(expected, rel=1e-4, abs=1e-6), part


@pytest.mark.parametrize("mode", MODES)
def test_gradient_of_every_training_loss_is_that_of_finite_differences(mode: str) -> None:
    family, fields = MODES[mode]
    model = model_of(family, fields)
    compute = loss_of(model)
    assert_gradient(model, compute)
    assert torch.equal(compute(), compute())  # the draws are fixed


CHUNKED_MODES = [
    *("autoregressive", "GLAT", "CTC with glancing", "DAG with glancing", "CMLM", "revealed latents"),
    *("GLAT by layer", "relaxed latents, glancing, KL"),
]


@pytest.mark.parametrize(
    ("mode", "recomputes"), [*((mode, False) for mode in CHUNKED_MODES), ("relaxed latents, glancing, KL", True)]
)
def test_gradient_of_losses_in_chunks_and_over_a_given_number_of_tokens(
    mode: str, recomputes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (loss, slots, discrete):
        monkeypatch.setattr(module, "chunk_size", lambda device: 2)
    if recomputes:
        monkeypatch.setattr(discrete, "RECOMPUTED", 0)
    family, fields = MODES[mode]
    model = model_of(family, fields)
    assert_gradient(model, loss_of(model, num_items_in_batch=9))


class FixedPoint:
    """Keeps the values of the first pass, in the order of the calls, for the surrogates of straight-through samples.

    A straight-through sample is hard(w) + soft(w) - constant, where hard and the constant soft(w_0) are those of the
    weights w_0 at which the gradient is computed. With both fixed at w_0, it is differentiable.
    """

    def __init__(self) -> None:
        self.values: list[Tensor] = []
        self.calls = 0

    def first(self, value: Tensor) -> Tensor:
        """Return the value that this call had in the first pass."""
        if self.calls == len(self.values):
            self.values.append(value.detach().clone())
        self.calls += 1
        return self.values[self.calls - 1]

    def of(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Return `compute` as a pass that starts at the first call."""

        def run() -> Tensor:
            self.calls = 0
            return compute()

        return run


@pytest.mark.parametrize("fields", [{}, {"glancing_ratio": 0.5, "kl_scale": 0.3}], ids=["hint", "glancing, KL"])
def test_gradient_of_discrete_latents_is_that_of_their_surrogate(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """z E = (row of the word) + (softmax((s + g) / tau) - constant) E_0, where E_0 is the fixed matrix."""
    model = model_of("iterative_vae", {"latent_sample": "discrete", **fields})
    compute = loss_of(model)
    fixed = FixedPoint()

    def embed(step: Any, scores: Tensor, table: Tensor, noise: Any) -> Tensor:
        if noise is None:  # the first pass of glancing, without a gradient
            return table[scores.argmax(1)]
        noisy = scores + noise(scores)
        words = fixed.first(noisy.argmax(1))
        soft = (noisy / step.temperature).softmax(-1)
        return table[words] + (soft - fixed.first(soft)) @ fixed.first(table)

    def surrogate() -> Tensor:
        with monkeypatch.context() as patch:
            patch.setattr(discrete.LatentStep, "embed", embed)
            return compute()

    repeated = fixed.of(surrogate)
    torch.testing.assert_close(repeated(), compute())
    assert_gradient(model, compute, repeated)


@pytest.mark.parametrize("outputs", OPERATORS)
@pytest.mark.parametrize("inputs", OPERATORS)
def test_gradient_of_the_energy_is_that_of_its_operators_surrogate(
    inputs: str, outputs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operators without straight-through samples are their own surrogates."""
    student, teacher = model_of("cmlm", {}), model_of("autoregressive", {})
    for weight in teacher.parameters():
        weight.data *= 1.1  # so that it is a different model
    measured = Energy(teacher, inputs, outputs)
    is_real, fixed = LABELS.ne(-100), FixedPoint()

    def compute() -> Tensor:
        masked = LABELS.masked_fill(is_real, student.config.mask_token_id).masked_fill(~is_real, 1)
        logits = student(
            input_ids=SOURCE, attention_mask=MASK, decoder_input_ids=masked, labels=LABELS, skip_logits=False
        ).logits
        torch.manual_seed(5)
        return measured(logits, is_real, SOURCE, MASK).sum()

    def straight_through(scores: Tensor, soft: Tensor) -> Tensor:
        one_hot = fixed.first(torch.nn.functional.one_hot(scores.argmax(-1), scores.shape[-1]).to(scores.dtype))
        return one_hot + (soft - fixed.first(soft))

    def surrogate() -> Tensor:
        with monkeypatch.context() as patch:
            patch.setattr(energy, "straight_through", straight_through)
            return compute()

    repeated = fixed.of(surrogate)
    torch.testing.assert_close(repeated(), compute())
    assert_gradient(student, compute, repeated)
