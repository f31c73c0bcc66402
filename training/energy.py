"""ENGINE (Tu et al. 2020): training of a fully masked CMLM to minimize the energy of its output under a teacher.

B batch, S source, T target, N target tokens, V vocabulary of the teacher. The energy is the teacher's negative
log-likelihood, made differentiable by operators that convert the student's log-probabilities to the teacher's inputs
and outputs.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from training.data import Data
from training.models import load_trained
from training.recipe import Recipe
from training.trainer import PaperTrainer
from vaswani_transformer import VaswaniTransformerForConditionalGeneration
from vaswani_transformer.cmlm import mask_targets
from vaswani_transformer.discrete import gumbel_noise
from vaswani_transformer.loss import accumulation_dtype
from vaswani_transformer.model import ProjectedModel


def straight_through(scores: Tensor, soft: Tensor) -> Tensor:
    """Return the one-hot of the largest of `scores` (N, V), whose gradient is that of `soft` (N, V)."""
    one_hot = functional.one_hot(scores.argmax(-1), scores.shape[-1]).to(scores.dtype)
    return one_hot + (soft - soft.detach())


# Functions of log-probabilities (N, V) and noise (N, V) that return the teacher's input or output.
OPERATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "softmax": lambda log_probs, _: log_probs.exp(),
    "straight_through_softmax": lambda log_probs, _: straight_through(log_probs, log_probs.exp()),
    "straight_through_logits": lambda log_probs, _: straight_through(log_probs, log_probs),
    "gumbel_softmax": lambda log_probs, noise: (log_probs + noise).softmax(-1),
    "straight_through_gumbel": lambda log_probs, noise: straight_through(
        log_probs + noise, (log_probs + noise).softmax(-1)
    ),
}


class Energy:
    """Energy of targets under a frozen teacher.

    It is not a module, so that the teacher is neither saved nor sharded with the student.

    Args:
        teacher: autoregressive model, which is switched to evaluation mode.
        inputs: operator for the teacher's input.
        outputs: operator for the output that the teacher scores; it uses the same noise as `inputs`.
    """

    def __init__(
        self, teacher: VaswaniTransformerForConditionalGeneration, inputs: str = "softmax", outputs: str = "softmax"
    ) -> None:
        self.teacher = teacher.eval().requires_grad_(False)
        self.inputs = inputs
        self.outputs = outputs

    def __call__(self, logits: Tensor, is_real: Tensor, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Return the energy (B,) of each target, in nats.

        Args:
            logits: (B, T, V or more), logits of the student; entries beyond V, such as `<mask>`, are ignored.
            is_real: (B, T), True at the tokens of each target, including `</s>`.
            input_ids, attention_mask: (B, S), the source.
        """
        student = logits[..., : self.teacher.config.vocab_size][is_real]  # (N, V)
        log_probs = student.to(accumulation_dtype(student.dtype)).log_softmax(-1)

        # What the teacher reads, and what it scores, with the same noise.
        is_random = any("gumbel" in name for name in (self.inputs, self.outputs))
        noise = gumbel_noise(log_probs) if is_random else log_probs.new_zeros(())
        words = OPERATORS[self.inputs](log_probs, noise)  # (N, V)
        scored = words if self.inputs == self.outputs else OPERATORS[self.outputs](log_probs, noise)  # (N, V)
        teacher = self.teacher_log_probs(words, is_real, input_ids, attention_mask)  # (N, V)

        # The last token is always `</s>`, whatever the student predicts there.
        is_last = (is_real.sum(1, keepdim=True) == is_real.cumsum(1))[is_real]  # (N,)
        ends = teacher[:, self.teacher.config.end_token_id]
        losses = -torch.where(is_last, ends, (scored * teacher).sum(-1))  # (N,)
        rows = is_real.nonzero()[:, 0]
        return losses.new_zeros(len(is_real)).index_add(0, rows, losses)

    @torch.no_grad()
    def of_argmax(self, logits: Tensor, is_real: Tensor, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Return the teacher's negative log-likelihood (B,) of the most likely words and their end."""
        one_hot = Energy(self.teacher, "straight_through_softmax", "straight_through_softmax")
        return one_hot(logits, is_real, input_ids, attention_mask)

    def teacher_log_probs(
        self, words: Tensor, is_real: Tensor, input_ids: Tensor, attention_mask: Tensor | None
    ) -> Tensor:
        """Return the teacher's log-probabilities (N, V) of each token, given distributions of words (N, V)."""
        body = self.teacher.model
        with torch.no_grad():  # the source does not depend on the student
            memory = body.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state

        # The decoder reads mean embeddings, shifted right after the start token.
        embed = body.decoder.embed_tokens
        means = (words.to(embed.weight.dtype) @ embed.weight) * embed.embed_scale  # (N, d_model)
        embeds = means.new_zeros(*is_real.shape, means.shape[-1])  # (B, T, d_model)
        embeds = embeds.masked_scatter(is_real.unsqueeze(-1), means)
        start_token = torch.tensor(self.teacher.config.target_start_token_id, device=words.device)
        start = embed(start_token).to(means.dtype).expand(len(is_real), 1, -1)
        states = body.decoder(
            inputs_embeds=torch.cat([start, embeds[:, :-1]], dim=1),
            attention_mask=is_real.long(),
            encoder_hidden_states=memory,
            encoder_attention_mask=attention_mask,
            use_cache=False,
        ).last_hidden_state
        logits = self.teacher.lm_head(states[is_real])  # (N, V)
        return logits.to(accumulation_dtype(logits.dtype)).log_softmax(-1)


class EnergyTrainer(PaperTrainer):
    """Trainer with the energy and the cross-entropy of the length as loss, per target token.

    Only the lengths of the references are used. Evaluations log the `energy` of the most likely words at these lengths,
    which selects the best checkpoint.
    """

    log_parts = {"length_loss": "length_loss"}

    def __init__(self, recipe: Recipe, model: ProjectedModel, data: Data, run: Path) -> None:
        super().__init__(recipe, model, data, run)
        training = self.training
        teacher_class = VaswaniTransformerForConditionalGeneration
        teacher = load_trained(training.energy_from, teacher_class, data.tokenizer, "training.energy_from")
        teacher.set_attn_implementation(model.config._attn_implementation)
        self.energy = Energy(teacher.to(self.args.device), training.energy_inputs, training.energy_outputs)

    def add_draws(self, batch: dict[str, Tensor], seeds: list[int]) -> dict[str, Tensor]:
        tokenizer = self.processing_class
        return mask_targets(batch, batch["labels"].ne(-100), tokenizer.mask_token_id, tokenizer.pad_token_id)

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Return the energy and the loss of the length."""
        with_logits = {**inputs, "skip_logits": False}
        _, outputs = super().compute_loss(model, with_logits, True, num_items_in_batch)
        is_real = inputs["labels"].ne(-100)
        tokens = torch.as_tensor(num_items_in_batch)
        with self.accelerator.autocast():  # for the teacher, which Accelerate does not wrap
            energy = self.energy(outputs.logits, is_real, inputs["input_ids"], inputs["attention_mask"]).sum()
        self.totals["energy"] += energy.detach()
        loss = energy / tokens + self.model.config.length_loss_weight * outputs.length_loss
        loss = loss * self.accelerator.num_processes  # gradients are averaged over processes
        return (loss, outputs) if return_outputs else loss

    def sentence_statistics(self, logits: Tensor, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        is_real = inputs["labels"].ne(-100)
        return {"energy": self.energy.of_argmax(logits, is_real, inputs["input_ids"], inputs["attention_mask"])}
