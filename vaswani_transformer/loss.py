"""Label-smoothed cross-entropy over the output projection, without ever holding a batch's logits (5.4).

N target tokens, n of them in a chunk, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .config import VaswaniTransformerConfig, as_token_ids

CHUNK = 256  # tokens; the fastest of 64 to 2,048 on a CPU, where larger chunks exceed the cache
CACHE_ROWS = 32  # tokens whose float32 logits fit into a core's cache
ACCELERATOR_CHUNK = 4096  # tokens; a tenth faster than 2,048 on an H200, for 0.4 GiB with 37,000 entries


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums over `dtype`: float32 for half precision."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def chunk_size(device: torch.device) -> int:
    """Return the number of tokens whose logits are held at a time."""
    return CHUNK if device.type == "cpu" else ACCELERATOR_CHUNK


class LossWorkspace:
    """Computes loss and gradient of n tokens at a time, in one buffer that every chunk uses.

    A fresh tensor of n V numbers is slow on a CPU: the allocator returns its memory to the system each time.

    Args:
        hidden: all states (N, d_model), in the dtype of the products with `projection`.
        projection: (V, d_model), the output projection.
        mean_weight: (d_model,), the mean row of the projection, in the dtype of sums.
        smoothing: eps_ls.
    """

    def __init__(self, hidden: Tensor, projection: Tensor, mean_weight: Tensor, smoothing: float) -> None:
        self.projection, self.mean_weight, self.smoothing = projection, mean_weight, smoothing
        is_on_cpu = hidden.device.type == "cpu"
        self.size = max(1, min(chunk_size(hidden.device), hidden.shape[0]))
        self.rows = min(CACHE_ROWS, self.size) if is_on_cpu and not torch.compiler.is_compiling() else self.size
        self.logits = hidden.new_empty(self.size, projection.shape[0])
        self.logits_fp32 = None
        if hidden.dtype != mean_weight.dtype:
            self.logits_fp32 = mean_weight.new_empty(self.rows, projection.shape[0])

    def loss_and_gradient(self, states: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss (n, 1) of `targets` (n, 1) given states (n, d_model), and its gradient (n, V).

        The gradient is softmax(z) - (1 - eps) onehot(y): without the eps / V term, which the caller adds.
        """
        logits = torch.mm(states, self.projection.T, out=self.logits[: states.shape[0]])  # (n, V)
        blocks = zip(logits.split(self.rows), targets.split(self.rows), strict=True)
        logsumexp, true_logits = map(torch.cat, zip(*(self.logits_to_grad_(*block) for block in blocks), strict=True))
        mean = states.to(self.mean_weight.dtype) @ self.mean_weight[:, None]  # mean(z), (n, 1)
        loss = (1 - self.smoothing) * (logsumexp - true_logits) + self.smoothing * (logsumexp - mean)
        return loss, logits

    def logits_to_grad_(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Replace logits z (r, V) by softmax(z) - (1 - eps) onehot(y) in place; return logsumexp(z) and z_y (r, 1).

        The logits of few tokens stay in a CPU's cache from one operation to the next.
        """
        wide = logits if self.logits_fp32 is None else self.logits_fp32[: logits.shape[0]].copy_(logits)
        true_logits, largest = wide.gather(1, targets), wide.amax(1, keepdim=True)  # (r, 1)
        probs = torch.softmax(wide, 1, out=wide)  # (r, V), in place
        logsumexp = largest - probs.amax(1, keepdim=True).log()  # (r, 1)
        probs.scatter_add_(1, targets, torch.full_like(true_logits, self.smoothing - 1))
        if self.logits_fp32 is not None:
            logits.copy_(probs)
        return logsumexp, true_logits


class FusedLinearCrossEntropy(torch.autograd.Function):
    """The summed loss of `hidden @ weight.T` against `labels`, with its gradients, chunk by chunk.

    With q = (1 - eps) onehot(y) + eps / V and logits z the loss of a token is -sum_v q_v log softmax(z)_v, which is
    (1 - eps) (lse(z) - z_y) + eps (lse(z) - mean(z)); its gradient with respect to z is softmax(z) - q. mean(z) is
    h . mean(weight), so the smoothing needs no pass over the logits. The forward pass computes the gradients too, while
    it has the probabilities; the backward pass only scales them.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, is_target: Tensor | None, smoothing: float
    ) -> Tensor:
        """Return the loss of `hidden` (N, d_model), `weight` (V, d_model) and `labels` (N,), a sum in at least float32.

        `is_target` (N,) is False where a row does not count; None: all count.
        """
        wide = accumulation_dtype(hidden.dtype)
        projection = weight.to(hidden.dtype)  # (V, d_model)
        mean_weight = weight.mean(0, dtype=wide)  # (d_model,)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
        loss = torch.zeros((), dtype=wide, device=hidden.device)
        workspace = LossWorkspace(hidden, projection, mean_weight, smoothing)
        for start in range(0, hidden.shape[0], workspace.size):
            rows = slice(start, start + workspace.size)
            states = hidden[rows]  # (n, d_model)
            token_loss, gradient = workspace.loss_and_gradient(states, labels[rows, None])  # (n, 1), (n, V)
            if is_target is not None:
                token_loss, gradient = token_loss * is_target[rows, None], gradient * is_target[rows, None]
            loss = loss + token_loss.sum()  # `+=` has a gradient of zero where torch 2.11 compiles it
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


def check_labels_are_ids(labels: Tensor) -> None:
    """Raise ValueError unless labels are whole numbers of shape (B, T), with at least one position."""
    is_whole = not (labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool)
    if labels.dim() != 2 or labels.shape[1] == 0 or not is_whole:
        raise ValueError(
            f"labels: no token ids; got shape {tuple(labels.shape)} of {labels.dtype}, expected whole numbers (texts, "
            "tokens), at least one token each. Give an empty text its end token, and -100 where none counts."
        )


def recount(num_items: Tensor | int | None, before: Tensor, after: Tensor) -> Tensor | int | None:
    """Return a Trainer's count of the labels `before` for the labels `after`, more or fewer of the same batch."""
    if num_items is None:
        return None
    return num_items * (after.ne(-100).sum() / before.ne(-100).sum().clamp(min=1))


def without_padding(
    labels: Tensor, num_items: Tensor | int | None, config: VaswaniTransformerConfig
) -> tuple[Tensor, Tensor | int | None]:
    """Return `labels` (B, T) with -100 at `<pad>`, and a Trainer's count of them without it.

    A model whose `<pad>` also ends a target cannot tell the two apart: there it counts as any other token.

    Raises:
        ValueError: the labels are no whole numbers of shape (B, T), or have no position.
    """
    check_labels_are_ids(labels)
    pad = config.pad_token_id
    if pad is None or pad in as_token_ids(config.eos_token_id):
        return labels, num_items
    tokens = labels.long().masked_fill(labels == pad, -100)
    return tokens, recount(num_items, labels, tokens)


def reduce_loss(loss: Tensor, labels: Tensor, num_items_in_batch: Tensor | int | None) -> Tensor:
    """Divide a sum over target tokens by `num_items_in_batch`, or by the number of tokens in `labels`."""
    items = labels.ne(-100).sum() if num_items_in_batch is None else num_items_in_batch
    if not isinstance(items, Tensor):
        return loss / max(items, 1)
    items = items.clamp(min=1)
    is_host_scalar = items.dim() == 0 and items.device.type == "cpu"  # it needs no copy, for which the host waits
    return loss / (items if is_host_scalar else items.to(loss.device))


def projected_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    smoothing: float = 0.0,
    num_items_in_batch: Tensor | int | None = None,
) -> Tensor:
    """Return the cross-entropy of `labels` under softmax(hidden W^T), smoothed as in 5.4, with no (B, T, V) tensor.

    eps is shared over all V entries, the true one included, as in Szegedy et al. 2016, which the paper cites, and in
    torch's `label_smoothing`. tensor2tensor and fairseq share it over the V - 1 other entries: their eps is ours times
    (V - 1) / V.

    Args:
        hidden: (..., d_model), the decoder's output.
        weight: (V, d_model), the output projection.
        labels: (...), token ids; -100 where there is nothing to learn.
        smoothing: eps_ls.
        num_items_in_batch: the number of target tokens to divide the sum by; None for those of `labels`.

    Returns:
        The mean loss in nats a target token, a scalar; 0 where `labels` hold none.
    """
    device_type = hidden.device.type
    if torch.is_autocast_enabled(device_type):
        hidden = hidden.to(torch.get_autocast_dtype(device_type))
    hidden, flat_labels = hidden.flatten(0, -2), labels.flatten().to(hidden.device)
    is_target = flat_labels.ne(-100)  # (N,)
    if torch.compiler.is_compiling():  # a graph has no shapes that depend on the labels
        flat_labels = flat_labels.masked_fill(~is_target, 0)
    else:  # an accelerator's host waits here once, for the number of target tokens
        targets = is_target.nonzero()[:, 0]
        hidden, flat_labels, is_target = hidden.index_select(0, targets), flat_labels.index_select(0, targets), None
    with torch.autocast(device_type, enabled=False):
        loss = FusedLinearCrossEntropy.apply(hidden, weight, flat_labels, is_target, smoothing)
    return reduce_loss(loss, labels, num_items_in_batch)


def cross_entropy(
    logits: Tensor, labels: Tensor, smoothing: float = 0.0, num_items_in_batch: Tensor | int | None = None
) -> Tensor:
    """Return the same loss from given logits (..., V); gradients flow through them."""
    logits = logits.flatten(0, -2)
    loss = nn.functional.cross_entropy(
        logits.to(accumulation_dtype(logits.dtype)),
        labels.flatten().to(logits.device, torch.long),  # the only type that torch takes
        label_smoothing=smoothing,
        reduction="sum",
    )
    return reduce_loss(loss, labels, num_items_in_batch)
