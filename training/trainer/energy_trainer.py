"""Train a CMLM, all words masked, to minimize the energy of its output under a teacher: ENGINE (Tu et al. 2020)."""

from typing import Any

import torch
from torch import Tensor

from training.recipe.flops import autoregressive_flops
from training.trainer.draws import pin_like
from training.trainer.energy import Energy
from training.trainer.trainer import RecipeTrainer
from vaswani_transformer.cmlm_masks import mask_targets


class EnergyTrainer(RecipeTrainer):
    """A trainer whose loss is the energy and the length's cross-entropy, both per target token.

    A target gives only its length. Evaluations log the `energy` of the likeliest words at the references' lengths,
    which chooses the best checkpoint.
    """

    def __init__(self, energy: Energy, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.energy = energy

    def add_random_choices(self, batch: dict[str, Any], step: int) -> dict[str, Any]:
        """Return a batch with every word masked."""
        tokenizer, is_real = self.processing_class, batch["labels"].ne(-100)
        return pin_like(batch, mask_targets(batch, is_real, tokenizer.mask_token_id, tokenizer.pad_token_id))

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Return the energy and the length's loss in place of the model's own."""
        _, outputs = super().compute_loss(model, inputs | {"skip_logits": False}, True, num_items_in_batch)
        is_real, tokens = inputs["labels"].ne(-100), torch.as_tensor(num_items_in_batch).max()
        with self.accelerator.autocast():  # the teacher too, whose forward Accelerate does not wrap
            energy = self.energy(outputs.logits, is_real, inputs["input_ids"], inputs["attention_mask"]).sum()
        self.monitor.add_part("energy", energy, self.learned_tokens)
        loss = energy / tokens + self.model.config.length_loss_weight * outputs.length_loss
        loss = loss * self.accelerator.num_processes  # as the Trainer does, since it averages over processes
        return (loss, outputs) if return_outputs else loss

    def sentence_statistics(self, logits: Tensor, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the energy (B,) of each target's likeliest words."""
        is_real = inputs["labels"].ne(-100)
        energies = self.energy.of_argmax(logits, is_real, inputs["input_ids"], inputs["attention_mask"])
        return {"energy": energies}

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Return the operations of a batch; the teacher makes two of the three passes of a model that trains."""
        teacher = self.energy.teacher
        return super().floating_point_ops(inputs) + 2 * autoregressive_flops(teacher, inputs) // 3
