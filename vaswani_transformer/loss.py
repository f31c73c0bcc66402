"""Label-smoothed cross-entropy over the tied projection, without the logits of a whole batch (5.4).

N target tokens, n of them in a chunk, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

CHUNK = 256  # tokens; the fastest of 64 to 2,048 on a CPU, where larger chunks fall out of the cache
CACHED = 32  # tokens whose logits, in float32, a core's own cache holds
ACCELERATOR_CHUNK = 2048  # tokens; a GPU wants more work of every kernel


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Sums of half-precision terms are kept in float32."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


class Chunk:
    """Loss and gradient of n tokens at a time, in memory that the next n use again.

    Tensors of n V numbers are slow to come by on a CPU: the allocator returns them to the system each time.

    Args:
        hidden: all states (N, d_model), whose dtype the products with `projection` (V, d_model) have.
        mean_weight: (d_model,), the mean row of the projection, in the dtype of sums.
        smoothing: eps_ls.
    """

    def __init__(self, hidden: Tensor, projection: Tensor, mean_weight: Tensor, smoothing: float) -> None:
        self.projection, self.mean_weight, self.smoothing = projection, mean_weight, smoothing
        is_on_cpu = hidden.device.type == "cpu"
        self.size = max(1, min(CHUNK if is_on_cpu else ACCELERATOR_CHUNK, hidden.shape[0]))
        self.rows = min(CACHED, self.size) if is_on_cpu and not torch.compiler.is_compiling() else self.size
        self.logits = hidden.new_empty(self.size, projection.shape[0])
        self.wide_logits = None
        if hidden.dtype != mean_weight.dtype:
            self.wide_logits = mean_weight.new_empty(self.rows, projection.shape[0])

    def loss_and_gradient(self, states: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Loss (n, 1) of `targets` (n, 1) after states (n, d_model), and softmax(z) - (1 - eps) onehot(y) (n, V)."""
        logits = torch.mm(states, self.projection.T, out=self.logits[: states.shape[0]])  # (n, V)
        parts = zip(logits.split(self.rows), targets.split(self.rows), strict=True)
        normaliser, true_logits = map(torch.cat, zip(*(self.to_gradient(*part) for part in parts), strict=True))
        mean = states.to(self.mean_weight.dtype) @ self.mean_weight[:, None]  # mean(z), (n, 1)
        loss = (1 - self.smoothing) * (normaliser - true_logits) + self.smoothing * (normaliser - mean)
        return loss, logits

    def to_gradient(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """lse(z) and z_y (r, 1) of logits z (r, V), in whose place stands softmax(z) - (1 - eps) onehot(y) then.

        The logits of few tokens stay in a CPU's cache from one operation on them to the next.
        """
        wide = logits if self.wide_logits is None else self.wide_logits[: logits.shape[0]].copy_(logits)
        true_logits, largest = wide.gather(1, targets), wide.amax(1, keepdim=True)  # (r, 1)
        probs = torch.softmax(wide, 1, out=wide)  # (r, V), in place
        normaliser = largest - probs.amax(1, keepdim=True).log()  # (r, 1)
        probs.scatter_add_(1, targets, torch.full_like(true_logits, self.smoothing - 1))
        if self.wide_logits is not None:
            logits.copy_(probs)
        return normaliser, true_logits


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
        chunk = Chunk(hidden, projection, mean_weight, smoothing)
        for start in range(0, hidden.shape[0], chunk.size):
            rows = slice(start, start + chunk.size)
            states = hidden[rows]  # (n, d_model)
            token_loss, gradient = chunk.loss_and_gradient(states, labels[rows, None])  # (n, 1), (n, V)
            if is_target is not None:
                token_loss, gradient = token_loss * is_target[rows, None], gradient * is_target[rows, None]
            loss += token_loss.sum()
            if grad_hidden is not None:
                grad_hidden[rows] = gradient @ projection - (smoothing * mean_weight).to(hidden.dtype)
            if grad_weight is not None and wide == hidden.dtype:
                grad_weight.addmm_(gradient.T, states)
            elif grad_weight is not None:
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
