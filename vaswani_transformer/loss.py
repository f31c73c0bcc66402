"""Label-smoothed cross-entropy over the output projection, computed in chunks of tokens (5.4).

N target tokens, n of them in a chunk, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .config import VaswaniTransformerConfig
from .stacks import check_inputs

CHUNK = 256  # tokens at a time on a CPU
CACHE_ROWS = 32  # tokens whose float32 logits fit into a core's cache
ACCELERATOR_CHUNK = 4096  # tokens at a time on an accelerator


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for sums over `dtype`: float32 for half precision, else `dtype`."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def chunk_size(device: torch.device) -> int:
    """Return the number of tokens in a chunk."""
    return CHUNK if device.type == "cpu" else ACCELERATOR_CHUNK


class LossWorkspace:
    """Loss and gradient of n tokens at a time, in one reused buffer.

    Args:
        hidden: (N, d_model), all states.
        projection: (V, d_model), the output projection, in the dtype of `hidden`.
        mean_weight: (d_model,), the mean row of the projection, in the dtype of sums.
        smoothing: eps_ls.
    """

    def __init__(self, hidden: Tensor, projection: Tensor, mean_weight: Tensor, smoothing: float) -> None:
        self.projection = projection
        self.mean_weight = mean_weight
        self.smoothing = smoothing
        self.size = max(1, min(chunk_size(hidden.device), hidden.shape[0]))

        # On a CPU, the passes over the logits run over few rows at a time, which stay in the cache.
        self.rows = self.size
        if hidden.device.type == "cpu" and not torch.compiler.is_compiling():
            self.rows = min(CACHE_ROWS, self.size)

        self.logits = hidden.new_empty(self.size, projection.shape[0])
        self.logits_fp32 = None
        if hidden.dtype != mean_weight.dtype:
            self.logits_fp32 = mean_weight.new_empty(self.rows, projection.shape[0])

    def loss_and_gradient(self, states: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss (n, 1) of `targets` (n, 1) after states (n, d_model), and its gradient (n, V).

        The gradient is softmax(z) - (1 - eps) onehot(y); the caller subtracts eps / V.
        """
        logits = torch.mm(states, self.projection.T, out=self.logits[: states.shape[0]])  # (n, V)
        blocks = zip(logits.split(self.rows), targets.split(self.rows), strict=True)
        results = [self.logits_to_grad_(*block) for block in blocks]
        logsumexp = torch.cat([block_logsumexp for block_logsumexp, _ in results])  # (n, 1)
        true_logits = torch.cat([block_true_logits for _, block_true_logits in results])  # (n, 1)
        mean = states.to(self.mean_weight.dtype) @ self.mean_weight[:, None]  # mean(z), (n, 1)
        loss = (1 - self.smoothing) * (logsumexp - true_logits) + self.smoothing * (logsumexp - mean)
        return loss, logits

    def logits_to_grad_(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Replace logits z (r, V) by softmax(z) - (1 - eps) onehot(y) in place; return logsumexp(z) and z_y (r, 1)."""
        wide = logits if self.logits_fp32 is None else self.logits_fp32[: logits.shape[0]].copy_(logits)
        true_logits = wide.gather(1, targets)  # (r, 1)
        largest = wide.amax(1, keepdim=True)  # (r, 1)
        probs = torch.softmax(wide, 1, out=wide)  # (r, V), in place
        logsumexp = largest - probs.amax(1, keepdim=True).log()  # (r, 1)
        probs.scatter_add_(1, targets, torch.full_like(true_logits, self.smoothing - 1))
        if self.logits_fp32 is not None:
            logits.copy_(probs)
        return logsumexp, true_logits


class FusedLinearCrossEntropy(torch.autograd.Function):
    """Summed cross-entropy of `hidden @ weight.T` against `labels`, chunk by chunk.

    With q = (1 - eps) onehot(y) + eps / V and logits z, the loss of a token is -sum_v q_v log softmax(z)_v =
    (1 - eps) (lse(z) - z_y) + eps (lse(z) - mean(z)), with the gradient softmax(z) - q. Since mean(z) is
    h . mean(weight), the smoothing needs no pass over the logits. The forward pass also computes the gradients, and the
    backward pass scales them. `setup_context` makes `torch.func.grad` work.
    """

    @staticmethod
    def forward(
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        is_target: Tensor | None,
        smoothing: float,
        needs_grad: tuple[bool, bool],
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Return the summed loss, the loss (N,) of each token, and the sum's gradients in `hidden` and `weight`.

        All are in at least float32, and only the sum is differentiable.

        Args:
            hidden: (N, d_model).
            weight: (V, d_model).
            labels: (N,).
            is_target: (N,), False at rows without a loss; None if all rows have one.
            smoothing: eps_ls.
            needs_grad: whether to compute each of the two gradients.
        """
        wide = accumulation_dtype(hidden.dtype)
        projection = weight.to(hidden.dtype)  # (V, d_model)
        mean_weight = weight.mean(0, dtype=wide)  # (d_model,)
        grad_hidden = torch.empty_like(hidden) if needs_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if needs_grad[1] else None
        loss = torch.zeros((), dtype=wide, device=hidden.device)
        token_losses = torch.empty(hidden.shape[0], dtype=wide, device=hidden.device)
        workspace = LossWorkspace(hidden, projection, mean_weight, smoothing)

        # Add up the chunks; eps / V, the same for every token, is subtracted from their sum below.
        for start in range(0, hidden.shape[0], workspace.size):
            rows = slice(start, start + workspace.size)
            states = hidden[rows]  # (n, d_model)
            token_loss, gradient = workspace.loss_and_gradient(states, labels[rows, None])  # (n, 1), (n, V)
            if is_target is not None:
                token_loss = token_loss * is_target[rows, None]
                gradient = gradient * is_target[rows, None]
            token_losses[rows] = token_loss.squeeze(1)
            loss = loss + token_loss.sum()  # `+=` has a gradient of zero where torch 2.11 compiles it
            if grad_hidden is not None:
                grad_hidden[rows] = gradient @ projection - (smoothing * mean_weight).to(hidden.dtype)
            if grad_weight is not None and wide == hidden.dtype:
                grad_weight.addmm_(gradient.T, states)
            elif grad_weight is not None:
                grad_weight += gradient.T @ states

        # Rows without a loss get no gradient, and the smoothing takes none from them.
        if is_target is not None:
            hidden = hidden * is_target[:, None]
            grad_hidden = None if grad_hidden is None else grad_hidden * is_target[:, None]
        if grad_weight is not None:
            grad_weight -= smoothing / weight.shape[0] * hidden.sum(0, dtype=wide)
        return loss, token_losses, grad_hidden, grad_weight

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
        _, token_losses, *gradients = output
        ctx.mark_non_differentiable(token_losses, *[gradient for gradient in gradients if gradient is not None])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*gradients)
        ctx.dtypes = [None if given is None else given.dtype for given in inputs[: len(gradients)]]
        ctx.num_constants = len(inputs) - len(gradients)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        """Scale the gradients in the first arguments, one for each output after the first two."""
        scaled = []
        for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True):
            scaled.append(None if gradient is None else (gradient * grad_loss.to(gradient.dtype)).to(dtype))
        return *scaled, *[None] * ctx.num_constants


def recount(num_items: Tensor | int | None, before: Tensor, after: Tensor) -> Tensor | int | None:
    """Adjust a Trainer's count of the labels `before` to the labels `after` of the same batch."""
    if num_items is None:
        return None
    count_before = before.ne(-100).sum().clamp(min=1)
    count_after = after.ne(-100).sum()
    return num_items * (count_after / count_before)


def without_padding(
    labels: Tensor, num_items: Tensor | int | None, config: VaswaniTransformerConfig
) -> tuple[Tensor, Tensor | int | None]:
    """Return `labels` (B, T) with -100 at `<pad>`, and the adjusted count of a Trainer.

    If `<pad>` is also the end token, it remains a label.

    Raises:
        ValueError: the labels are not integers of shape (B, T) with T > 0.
    """
    check_inputs(labels=labels)
    is_whole = not (labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool)
    if labels.dim() != 2 or labels.shape[1] == 0 or not is_whole:
        raise ValueError(
            f"labels: not token ids; got shape {tuple(labels.shape)} of {labels.dtype}, expected integers of shape "
            "(batch, length), length >= 1. End an empty text with its end token, and put -100 where no token counts."
        )
    pad = config.pad_token_id
    if pad is None or pad in config.end_token_ids:
        return labels, num_items
    tokens = labels.long().masked_fill(labels == pad, -100)
    return tokens, recount(num_items, labels, tokens)


def reduce_loss(loss: Tensor, labels: Tensor, num_items_in_batch: Tensor | int | None) -> Tensor:
    """Divide a sum over target tokens by `num_items_in_batch`, or by the number of tokens in `labels`."""
    items = labels.ne(-100).sum() if num_items_in_batch is None else num_items_in_batch
    if not isinstance(items, Tensor):
        return loss / max(items, 1)
    items = items.flatten()[0].clamp(min=1)  # a Trainer with DataParallel passes it in the shape (1, 1)
    is_on_host = items.device.type == "cpu"  # a scalar there needs no copy to the device
    return loss / (items if is_on_host else items.to(loss.device))


def summed_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, smoothing: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return the label-smoothed cross-entropy of `labels` under softmax(hidden W^T) without a (B, T, V) tensor (5.4).

    The smoothing distributes eps over all V entries, as in Szegedy et al. 2016 and torch. tensor2tensor and fairseq
    distribute it over the V - 1 incorrect entries, so their eps is this one times (V - 1) / V.

    Args:
        hidden: (..., d_model), the decoder's output.
        weight: (V, d_model), the output projection.
        labels: (...), token ids, -100 at positions without a loss.
        smoothing: eps_ls.

    Returns:
        The sum over tokens in nats, a scalar, and without gradient the loss of each token (...), 0 without a label.
    """
    device_type = hidden.device.type
    if torch.is_autocast_enabled(device_type):
        hidden = hidden.to(torch.get_autocast_dtype(device_type))

    # Leave out positions without a loss: in a graph, which needs fixed shapes, by a mask; else by an index, with one
    # synchronization for the number of target tokens.
    hidden = hidden.flatten(0, -2)  # (N, d_model)
    flat_labels = labels.flatten().to(hidden.device)  # (N,)
    is_target = flat_labels.ne(-100)  # (N,)
    targets = None
    if torch.compiler.is_compiling():
        flat_labels = flat_labels.masked_fill(~is_target, 0)
    else:
        targets = is_target.nonzero()[:, 0]
        hidden = hidden.index_select(0, targets)
        flat_labels = flat_labels.index_select(0, targets)
        is_target = None

    with torch.autocast(device_type, enabled=False):
        needs_grad = hidden.requires_grad, weight.requires_grad
        loss, token_losses, *_ = FusedLinearCrossEntropy.apply(
            hidden, weight, flat_labels, is_target, smoothing, needs_grad
        )
    if targets is not None:
        token_losses = token_losses.new_zeros(labels.numel()).index_copy(0, targets, token_losses)
    return loss, token_losses.view(labels.shape)


def projected_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    smoothing: float = 0.0,
    num_items_in_batch: Tensor | int | None = None,
) -> Tensor:
    """Return the mean of `summed_cross_entropy` in nats per target token, a scalar; 0 if `labels` have no token.

    The other arguments are those of `summed_cross_entropy`.

    Args:
        num_items_in_batch: number of target tokens that divides the sum; None for that of `labels`.
    """
    return reduce_loss(summed_cross_entropy(hidden, weight, labels, smoothing)[0], labels, num_items_in_batch)


def token_cross_entropy(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """Return the loss (...) of each of `labels` (...) from logits (..., V), 0 without a label."""
    losses = nn.functional.cross_entropy(
        logits.flatten(0, -2).to(accumulation_dtype(logits.dtype)),
        labels.flatten().to(logits.device, torch.long),  # required by torch
        label_smoothing=smoothing,
        reduction="none",
    )
    return losses.view(labels.shape)


def cross_entropy(
    logits: Tensor, labels: Tensor, smoothing: float = 0.0, num_items_in_batch: Tensor | int | None = None
) -> Tensor:
    """Return the loss of `projected_cross_entropy` from logits (..., V)."""
    logits = logits.flatten(0, -2)
    loss = nn.functional.cross_entropy(
        logits.to(accumulation_dtype(logits.dtype)),
        labels.flatten().to(logits.device, torch.long),  # required by torch
        label_smoothing=smoothing,
        reduction="sum",
    )
    return reduce_loss(loss, labels, num_items_in_batch)
