"""The loss equals torch's in value and gradients, saves memory, and is what a model returns."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.batches import FLOAT32, random_batch, random_tokens, targets
from tests.models import EVERY_FAMILY, LargestTensor, tiny_model
from vaswani_transformer.loss import CHUNK, cross_entropy, projected_cross_entropy

# Sums of a few hundred float64 terms near 1, and of float32 terms: about a hundred units in the last place.
TOLERANCES: dict[torch.dtype, dict[str, Any]] = {
    torch.float64: {"rtol": 1e-10, "atol": 1e-12},
    torch.float32: {"rtol": 1e-4, "atol": 1e-6},
}


def random_case(
    tokens: int, vocab_size: int, ignored: float = 0.2, dtype: torch.dtype = torch.float64, d_model: int = 8
) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states (N, d_model), a projection (V, d_model) and labels (N,), some of them -100."""
    hidden = torch.randn(tokens, d_model, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab_size, d_model, dtype=dtype, requires_grad=True)
    labels = torch.randint(vocab_size, (tokens,)).masked_fill(torch.rand(tokens) < ignored, -100)
    return hidden, weight, labels


def torch_loss(hidden: Tensor, weight: Tensor, labels: Tensor, smoothing: float, items: int | None = None) -> Tensor:
    """Return torch's cross-entropy over all logits: a mean over target tokens, or the sum divided by `items`."""
    loss = nn.functional.cross_entropy(hidden @ weight.T, labels, label_smoothing=smoothing, reduction="sum")
    return loss / (max(int(labels.ne(-100).sum()), 1) if items is None else items)


def with_gradients(loss: Tensor, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    of_hidden, of_weight = torch.autograd.grad(loss, (hidden, weight))
    return loss, of_hidden, of_weight


def assert_equals_torch(
    case: tuple[Tensor, Tensor, Tensor], smoothing: float = 0.1, items: int | Tensor | None = None
) -> None:
    """Assert that the loss of a case and its gradients are torch's."""
    hidden, weight, _ = case
    ours = with_gradients(projected_cross_entropy(*case, smoothing, items), hidden, weight)
    theirs = with_gradients(torch_loss(*case, smoothing, None if items is None else int(items)), hidden, weight)
    torch.testing.assert_close(ours, theirs, **TOLERANCES[hidden.dtype])


def labeled_batch() -> dict[str, Tensor]:
    """Return sources and padded labels."""
    return {"input_ids": random_tokens(3, 6), "labels": targets(5, 2, 4)}


@settings(max_examples=30)
@given(
    tokens=st.integers(1, 40),
    vocab_size=st.integers(1, 30),
    smoothing=st.floats(0, 0.99),
    ignored=st.sampled_from([0.0, 0.3, 1.0]),
    dtype=st.sampled_from(list(TOLERANCES)),
    seed=st.integers(0, 2**32),
)
def test_loss_equals_torch_in_value_and_gradients(
    tokens: int, vocab_size: int, smoothing: float, ignored: float, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    assert_equals_torch(random_case(tokens, vocab_size, ignored, dtype), smoothing)


@pytest.mark.parametrize("tokens", [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1])
def test_chunked_loss_equals_the_whole_loss(tokens: int) -> None:
    assert_equals_torch(random_case(tokens, 11, ignored=0.0))


def test_loss_of_a_graph_has_every_row_and_the_same_value_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph has no shapes that depend on the labels, so rows without a target stay in it."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert_equals_torch(random_case(13, 11, ignored=0.4))


@pytest.mark.parametrize("needed", ["hidden", "weight"])
def test_only_required_gradients_are_computed(needed: str) -> None:
    """A frozen projection, as under LoRA, or frozen states."""
    hidden, weight, labels = random_case(9, 7)
    _, *both = with_gradients(projected_cross_entropy(hidden, weight, labels, 0.1), hidden, weight)
    frozen, free = (weight, hidden) if needed == "hidden" else (hidden, weight)
    frozen.requires_grad_(False)
    projected_cross_entropy(hidden, weight, labels, 0.1).backward()
    assert frozen.grad is None
    assert free.grad is not None
    assert torch.equal(free.grad, both[0 if needed == "hidden" else 1])


@pytest.mark.parametrize("items", [1, 37, torch.tensor(1), torch.tensor(37.0)])
def test_sum_is_divided_by_the_items_of_the_whole_batch(items: int | Tensor) -> None:
    hidden, weight, labels = case = random_case(20, 9)
    assert_equals_torch(case, items=items)
    loss = cross_entropy(hidden @ weight.T, labels, 0.1, items)
    torch.testing.assert_close(loss, torch_loss(*case, 0.1, int(items)), **TOLERANCES[torch.float64])


@pytest.mark.parametrize("items", [None, 5, 0, torch.tensor(0)])
def test_batch_without_targets_gives_zero_loss_and_gradient(items: int | Tensor | None) -> None:
    hidden, weight, _ = random_case(6, 5)
    labels = torch.full((6,), -100)
    loss, *gradients = with_gradients(projected_cross_entropy(hidden, weight, labels, 0.1, items), hidden, weight)
    assert loss == 0
    assert all((gradient == 0).all() for gradient in gradients)
    assert cross_entropy(hidden @ weight.T, labels, 0.1, items) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_close_to_the_exact_loss(dtype: torch.dtype) -> None:
    """Compared with float64 on the same rounded inputs.

    bfloat16 keeps 8 bits, so a logit near 8 is off by up to 1/64, at random; the mean over 300 tokens is off by far
    less. A gradient is a sum of products of such rounded numbers: off by about 1/256 of the largest. float16 keeps 11.
    """
    hidden, weight, labels = random_case(300, 50, dtype=dtype, d_model=16)
    ours = with_gradients(projected_cross_entropy(hidden, weight, labels, 0.1), hidden, weight)
    exact = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    theirs = with_gradients(torch_loss(*exact, labels, 0.1), *exact)
    assert ours[0].dtype == torch.float32
    torch.testing.assert_close(ours[0].double(), theirs[0], rtol=2e-3, atol=0)
    for mine, other in zip(ours[1:], theirs[1:], strict=True):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine.double(), other, rtol=0, atol=0.01 * float(other.abs().max()))


def test_training_never_allocates_tokens_by_vocabulary() -> None:
    vocab_size, tokens = 1000, 4 * CHUNK
    model = tiny_model(vocab_size=vocab_size).train()
    labels = random_tokens(32, tokens // 32, vocab_size=vocab_size)
    for skip_logits, rows in ((True, CHUNK), (False, tokens)):
        with LargestTensor() as largest:
            model(input_ids=random_tokens(32, 9), labels=labels, skip_logits=skip_logits).loss.backward()
        assert largest.numel == rows * vocab_size


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_is_that_of_the_logits_smoothed_in_training_only(smoothing: float) -> None:
    """In training no logits are returned."""
    model, batch = tiny_model(dropout=0.0, label_smoothing=smoothing), labeled_batch()
    outputs, training = model(**batch), model.train()(**batch)
    logits, labels = outputs.logits.flatten(0, 1), batch["labels"].flatten()
    torch.testing.assert_close(outputs.loss, nn.functional.cross_entropy(logits, labels))
    expected = nn.functional.cross_entropy(logits, labels, label_smoothing=smoothing)
    torch.testing.assert_close(training.loss, expected)
    assert training.logits is None


def test_labels_are_shifted_exactly_once() -> None:
    """A data collator returns `decoder_input_ids` with `labels`."""
    model, batch = tiny_model(), labeled_batch()
    shifted = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    assert shifted[:, 0].tolist() == [0, 0, 0]
    assert torch.equal(shifted[:, 1:], batch["labels"][:, :-1].masked_fill(batch["labels"][:, :-1] == -100, 1))
    assert torch.equal(model(**batch, decoder_input_ids=shifted).loss, model(**batch).loss)
    assert torch.equal(model(**batch, decoder_input_ids=shifted).logits, model(**batch).logits)


def test_labels_without_a_start_token_are_an_error() -> None:
    model = tiny_model(bos_token_id=None)
    with pytest.raises(ValueError, match=r"bos_token_id \(None\).*decoder_input_ids"):
        model(**labeled_batch())


def test_labels_that_are_no_token_ids_are_an_error() -> None:
    for labels in (torch.zeros(3, 0, dtype=torch.long), torch.zeros(8, dtype=torch.long), torch.zeros(3, 4)):
        with pytest.raises(ValueError, match=r"^labels: not token ids; got shape .*, expected integers"):
            tiny_model()(**labeled_batch() | {"labels": labels})


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("shape", [(2, 3), (2, 5)])
def test_labels_of_another_shape_than_the_target_are_an_error(is_training: bool, shape: tuple[int, ...]) -> None:
    """Otherwise a label would be compared with the state of another token."""
    model, batch = tiny_model().train(is_training), random_batch(batch=2, target=4)
    with pytest.raises(ValueError, match=r"labels: do not fit the target; got shape .*, expected \(2, 4\)"):
        model(**batch, labels=random_tokens(*shape))


@pytest.mark.parametrize("is_training", [True, False])
def test_loss_and_gradients_are_the_same_with_and_without_logits(is_training: bool) -> None:
    model = tiny_model(dropout=0.0).train(is_training)
    batch, results = labeled_batch(), {}
    for skip_logits in (True, False):
        model.zero_grad()
        outputs = model(**batch, skip_logits=skip_logits)
        assert (outputs.logits is None) == skip_logits
        outputs.loss.backward()
        results[skip_logits] = [outputs.loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]
    torch.testing.assert_close(results[True], results[False], **FLOAT32)


def test_output_projection_with_a_bias_learns_it() -> None:
    model = tiny_model(dropout=0.0).train()
    model.set_output_embeddings(nn.Linear(32, 99))
    loss = model(**(batch := labeled_batch())).loss
    (gradient,) = torch.autograd.grad(loss, model.lm_head.bias)
    expected = model(**batch, skip_logits=False).loss
    torch.testing.assert_close(loss, expected, **FLOAT32)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, model.lm_head.bias)[0], **FLOAT32)


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("kept", [1, 2, torch.tensor([0, 3])])
def test_logits_to_keep_trims_the_logits_and_not_the_loss(is_training: bool, kept: int | Tensor) -> None:
    model, batch = tiny_model(dropout=0.0).train(is_training), labeled_batch()
    positions = slice(-kept, None) if isinstance(kept, int) else kept
    complete = model(**batch, skip_logits=False)
    trimmed = model(**batch, skip_logits=False, logits_to_keep=kept)
    torch.testing.assert_close(trimmed.logits, complete.logits[:, positions])
    torch.testing.assert_close(trimmed.loss, complete.loss)
    tokens = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    unlabeled = model(input_ids=batch["input_ids"], decoder_input_ids=tokens, logits_to_keep=kept)
    torch.testing.assert_close(unlabeled.logits, complete.logits[:, positions])


def test_smoothed_loss_of_two_entries_computed_by_hand() -> None:
    """eps is spread over all V: logits (1, 0), true 0, eps 0.2: -0.9 log 0.7310586 - 0.1 log 0.2689414."""
    loss = projected_cross_entropy(torch.tensor([[1.0]]), torch.tensor([[1.0], [0.0]]), torch.tensor([0]), 0.2)
    assert float(loss) == pytest.approx(0.4132617, abs=1e-6)


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_padding_tokens_in_labels_never_count(family: str, is_training: bool) -> None:
    """`tokenizer(..., text_target=..., padding=True)` pads labels so, and a Trainer counts them: 20 of two batches."""
    model, source, labels = EVERY_FAMILY[family]().train(is_training), random_tokens(2, 6), targets(5, 2)

    def losses(labels: Tensor, items: int | None) -> list[Tensor]:
        torch.manual_seed(2)
        outputs = model(input_ids=source, labels=labels, num_items_in_batch=items)
        return [value for name, value in outputs.items() if name.endswith("loss")]

    padded = labels.masked_fill(labels == -100, 1)
    for counted, real in ((None, None), (20, 14)):
        torch.testing.assert_close(losses(padded, counted), losses(labels, real), **FLOAT32)


@pytest.mark.parametrize("family", ["autoregressive", "nat", "iterative_vae", "flowseq"])
def test_padding_token_that_also_ends_targets_counts(family: str) -> None:
    batch = {"input_ids": random_tokens(2, 6), "labels": targets(5, 2)}
    model, expected = EVERY_FAMILY[family](pad_token_id=2), EVERY_FAMILY[family]()
    torch.testing.assert_close(model(**batch).loss, expected(**batch).loss)
