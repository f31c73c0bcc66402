"""Trainers of the non-autoregressive families: schedules, random choices and logged values.

B batch, T target.
"""

from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import broadcast, gather_object
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from training.trainer import PaperTrainer
from vaswani_transformer.cmlm import mask_targets, sample_masks
from vaswani_transformer.flowseq import ActNorm
from vaswani_transformer.support.modes import eval_mode


def draw(seeds: list[int], labels: Tensor, make: Callable[[int, torch.Generator], Tensor]) -> Tensor:
    """Return random numbers (B, T, ...) for `labels` (B, T), drawn by `make` from each target's length and seed."""
    generator, lengths = torch.Generator(), labels.ne(-100).sum(1).tolist()
    rows = [make(length, generator.manual_seed(seed)) for length, seed in zip(lengths, seeds, strict=True)]
    return pad_sequence(rows, batch_first=True)


class GlancingTrainer(PaperTrainer):
    """Trainer of NAT and GLAT, with scheduled glancing."""

    log_parts = {"length_loss": "length_loss", "accuracy": "glancing_accuracy"}

    def step_attributes(self, step: int) -> dict[str, float]:
        training = self.recipe.training
        if training.glancing is None:
            return {}
        first, last = training.glancing
        return {"glancing_ratio": first + (last - first) * min(1.0, step / (training.glancing_steps or training.steps))}

    def add_draws(self, batch: dict[str, Tensor], seeds: list[int]) -> dict[str, Tensor]:
        if self.recipe.training.glancing is None:
            return batch
        draws = draw(seeds, batch["labels"], lambda length, generator: torch.rand(length, generator=generator))
        return batch | {"glancing_draws": draws}


class CmlmTrainer(PaperTrainer):
    """Trainer of CMLM on masked words."""

    log_parts = {"length_loss": "length_loss"}

    def add_draws(self, batch: dict[str, Tensor], seeds: list[int]) -> dict[str, Tensor]:
        tokenizer, labels = self.processing_class, batch["labels"]
        draws = draw(seeds, labels, lambda length, generator: torch.rand(1 + length, generator=generator))  # (B, 1 + T)
        is_masked = sample_masks(labels.ne(-100), draws=(draws[:, 0], draws[:, 1:]))
        return mask_targets(batch, is_masked, tokenizer.mask_token_id, tokenizer.pad_token_id)


class LatentTrainer(GlancingTrainer):
    """Trainer of IterativeVAE, with a scheduled weight of a discrete latent's KL divergences."""

    log_parts = GlancingTrainer.log_parts | {
        "bound": "bound",
        "kl_loss": "kl_loss",
        "layer_losses": "layer_loss",
        "layer_kl": "layer_kl",
        "prior_weights": "prior_weight",
        "hint_weights": "hint_weight",
    }

    def step_attributes(self, step: int) -> dict[str, float]:
        training = self.recipe.training
        done = min(1.0, (step + 1) / max(1, training.kl_warmup_steps))
        return super().step_attributes(step) | {"kl_scale": training.kl_scale * done}

    def add_draws(self, batch: dict[str, Tensor], seeds: list[int]) -> dict[str, Tensor]:
        if not self.model.config.is_revealed:
            return super().add_draws(batch, seeds)
        draws = draw(seeds, batch["labels"], lambda length, generator: torch.rand(1 + length, generator=generator))
        return batch | {"reveal_draws": draws}  # (B, 1 + T)

    def sentence_statistics(self, logits: Tensor, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the bound and its divergences, from samples that do not change the random state of training."""
        device = self.args.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(self.recipe.seed)
            outputs = self.model(**inputs, has_hint=True, skip_logits=True)
        means = {"bound": outputs.bound}
        for layer, value in enumerate(outputs.layer_kl, start=2):
            means[f"layer_kl_{layer}"] = value
        tokens = inputs["labels"].ne(-100).sum(1)  # (B,), each gets the batch's mean
        return {name: mean * tokens for name, mean in means.items()}


class FlowTrainer(PaperTrainer):
    """Trainer of FlowSeq in phases: without the prior, initialization of the flow, with the prior."""

    log_parts = {name: name for name in ("token_loss", "length_loss", "kl_loss", "log_determinant")}

    def step_attributes(self, step: int) -> dict[str, float]:
        training = self.recipe.training
        done = (step - training.decoder_steps + 1) / max(1, training.kl_warmup_steps)
        return {"kl_scale": training.kl_scale * min(1.0, max(0.0, done))}

    def add_draws(self, batch: dict[str, Tensor], seeds: list[int]) -> dict[str, Tensor]:
        def make(length: int, generator: torch.Generator) -> Tensor:
            words = torch.rand(length, 1, generator=generator)
            return torch.cat([words, torch.randn(length, self.model.config.d_model, generator=generator)], dim=1)

        draws = draw(seeds, batch["labels"], make)  # (B, T, 1 + d_model)
        return batch | {"word_draws": draws[..., 0], "latent_noise": draws[..., 1:]}

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list, Any]:
        batches, tokens = super().get_batch_samples(*args, **kwargs)
        if self.state.global_step >= self.recipe.training.decoder_steps and not float(self.model.flow.started):
            self.start_flow(batches)
        return batches, tokens

    def start_flow(self, batches: list[dict[str, Tensor]]) -> None:
        """Initialize the flow's actnorms from the pairs of a step on all processes."""
        parts = gather_object(batches)
        pairs = {}
        for name in ("input_ids", "attention_mask", "labels", "word_draws", "latent_noise"):
            rows = [row for part in parts for row in part[name].cpu()]
            padded = pad_sequence(rows, batch_first=True, padding_value=-100 if name == "labels" else 0)
            pairs[name] = padded.to(self.args.device)
        with eval_mode(self.model), self.accelerator.autocast():
            self.model.start_flow(**pairs)
        for layer in self.model.flow.layers:
            if isinstance(layer, ActNorm):  # the same to the bit in every process
                broadcast([layer.log_scale.data, layer.shift.data])


TRAINERS = {
    "autoregressive": PaperTrainer,
    "nat": GlancingTrainer,
    "cmlm": CmlmTrainer,
    "iterative_vae": LatentTrainer,
    "flowseq": FlowTrainer,
}
