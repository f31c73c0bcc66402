"""The optimizers of a recipe, each with its learning rate."""

from collections.abc import Iterable

from torch import nn
from torch.optim import Optimizer, RAdam
from torch.optim.lr_scheduler import LambdaLR

from training.recipe.fields import TrainingRecipe
from vaswani_transformer.batching.schedule import paper_adam, paper_schedule


def make_optimizer(training: TrainingRecipe, parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return the paper's Adam (5.3), or rectified Adam with decoupled weight decay (Liu et al. 2020)."""
    if training.optimizer == "paper":
        return paper_adam(parameters)
    return RAdam(
        [parameter for parameter in parameters if parameter.requires_grad],
        lr=training.learning_rate,
        betas=(0.9, 0.98),
        eps=1e-8,
        weight_decay=training.weight_decay,
        decoupled_weight_decay=True,
    )


def make_schedule(training: TrainingRecipe, optimizer: Optimizer, d_model: int) -> LambdaLR:
    """Return equation (3), or exponential decay; neither depends on the number of training steps."""
    if training.optimizer == "paper":
        return paper_schedule(optimizer, d_model, training.warmup_steps, training.learning_rate_scale)
    return LambdaLR(optimizer, lambda done: training.learning_rate_decay ** (done / training.learning_rate_decay_steps))
