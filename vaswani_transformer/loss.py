"""Label-smoothed cross-entropy over the tied projection, without the logits of a whole batch (5.4).

N target tokens, n of them in a chunk, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

CHUNK = 256  # tokens; the fastest of 64 to 2,048 on a CPU, where larger chunks fall out of the cache


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Sums of half-precision terms are kept in float32."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


class ProjectedCrossEntropy(torch.autograd.Function):
    """The summed loss of `hidden @ weight.T` against `labels`, with its gradients, chunk after chunk.

    With q = (1 - eps) onehot(y) + eps / V and logits z the loss of a token is -sum_v q_v log softmax(z)_v, which is
    (1 - eps) (lse(z) - z_y) + eps (lse(z) - mean(z)); its gradient with respect to z is softmax(z) - q. mean(z) is
    h . mean(weight), so the smoothing never touches the logits. The gradients are made along with the loss, where
    the probabilities are at hand; the backward pass only scales them.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, is_target: Tensor | None, smoothing: float
    ) -> Tensor:
        """`hidden` (N, d_model), `weight` (V, d_model), `labels` (N,); the sum of the loss in float32 or wider.

        `is_target` (N,) is False where a row counts for nothing; None: all count.
        """
        wide = accumulation_dtype(hidden.dtype)
        projection = weight.to(hidden.dtype)  # (V, d_model)
        mean_weight = weight.mean(0, dtype=wide)  # (d_model,)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
        loss = torch.zeros((), dtype=wide, device=hidden.device)
        for start in range(0, hidden.shape[0], CHUNK):
            rows = slice(start, start + CHUNK)
            states, targets = hidden[rows], labels[rows, None]  # (n, d_model), (n, 1)
            logits = (states @ projection.T).to(wide)  # (n, V)
            true_logits = logits.gather(1, targets)  # (n, 1)
            log_probs = nn.functional.log_softmax(logits, dim=-1)  # (n, V)
            true_log_probs = log_probs.gather(1, targets)  # (n, 1)
            above_mean = true_logits - true_log_probs - (states.to(wide) @ mean_weight)[:, None]  # lse(z) - mean(z)
            token_loss = smoothing * above_mean - (1 - smoothing) * true_log_probs  # (n, 1)
            gradient = log_probs.exp_().scatter_add_(1, targets, torch.full_like(true_logits, smoothing - 1))
            if is_target is not None:
                token_loss, gradient = token_loss * is_target[rows, None], gradient * is_target[rows, None]
            loss += token_loss.sum()
            gradient = gradient.to(hidden.dtype)  # softmax(z) - (1 - eps) onehot(y), (n, V)
            if grad_hidden is not None:
                grad_hidden[rows] = gradient @ projection - (smoothing * mean_weight).to(hidden.dtype)
            if grad_weight is not None:
                grad_weight += gradient.T @ states
        if is_target is not None:
            hidden = hidden * is_target[:, None]
            grad_hidden = None if grad_hidden is None else grad_hidden * is_target[:, None]
        if grad_weight is not None:
            grad_weight -= smoothing / weight.shape[0] * hidden.sum(0, dtype=wide)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = grad_hidden * grad_loss.to(grad_hidden.dtype)
        if grad_weight is not None:
            grad_weight = (grad_weight * grad_loss).to(ctx.weight_dtype)
        return grad_hidden, grad_weight, None, None, None


def normalise(loss: Tensor, labels: Tensor, num_items_in_batch: Tensor | int | None) -> Tensor:
    """A sum over target tokens as their mean, or as the share of `num_items_in_batch` tokens of a larger batch."""
    if num_items_in_batch is None:
        return loss / labels.ne(-100).sum().clamp(min=1)
    if isinstance(num_items_in_batch, Tensor):
        return loss / num_items_in_batch.to(loss.device).clamp(min=1)
    return loss / max(num_items_in_batch, 1)


def projected_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    smoothing: float = 0.0,
    num_items_in_batch: Tensor | int | None = None,
) -> Tensor:
    """Cross-entropy of `labels` under softmax(hidden W^T), smoothed as in 5.4, holding no (B, T, V) tensor.

    eps is shared over all V entries, the true one included, as in Szegedy et al. 2016, which the paper cites without
    saying more; so does torch's `label_smoothing`. tensor2tensor and fairseq share it over the V - 1 other entries:
    their eps is ours times (V - 1) / V.

    Args:
        hidden: (..., d_model), the decoder's output.
        weight: (V, d_model), the output projection.
        labels: (...), token ids; -100 where there is nothing to learn.
        smoothing: eps_ls.
        num_items_in_batch: the target tokens by whose number the sum is divided; None for those of `labels`.

    Returns:
        The mean loss in nats a target token, a scalar; 0 where `labels` hold none.
    """
    device_type = hidden.device.type
    if torch.is_autocast_enabled(device_type):
        hidden = hidden.to(torch.get_autocast_dtype(device_type))
    hidden, flat_labels = hidden.flatten(0, -2), labels.flatten().to(hidden.device)
    is_target = flat_labels.ne(-100)  # (N,)
    if torch.compiler.is_compiling():  # a graph knows no number of tokens that depends on the labels
        flat_labels = flat_labels.masked_fill(~is_target, 0)
    else:
        hidden, flat_labels, is_target = hidden[is_target], flat_labels[is_target], None
    with torch.autocast(device_type, enabled=False):
        loss = ProjectedCrossEntropy.apply(hidden, weight, flat_labels, is_target, smoothing)
    return normalise(loss, labels, num_items_in_batch)


def cross_entropy(
    logits: Tensor, labels: Tensor, smoothing: float = 0.0, num_items_in_batch: Tensor | int | None = None
) -> Tensor:
    """The same loss from logits (..., V) that are there already; gradients flow through them."""
    logits = logits.flatten(0, -2)
    loss = nn.functional.cross_entropy(
        logits.to(accumulation_dtype(logits.dtype)),
        labels.flatten().to(logits.device),
        label_smoothing=smoothing,
        reduction="sum",
    )
    return normalise(loss, labels, num_items_in_batch)


__all__ = ["cross_entropy", "projected_cross_entropy"]
