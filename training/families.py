"""How each family is trained: the fields of its recipes, its schedules, random choices and logged values.

B batch, T target.
"""

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from accelerate.utils import broadcast, gather_object
from datasets import Dataset
from jsonargparse.typing import ClosedUnitInterval, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from training.data import Data
from training.energy import EnergyTrainer
from training.recipe import BeamSearch, BeamTraining, Recipe, SearchRecipe, TrainingRecipe
from training.trainer import PaperTrainer, StepBatches
from vaswani_transformer import VaswaniFlowSeqForConditionalGeneration
from vaswani_transformer.batching.pairs import ArrowRows, Ragged
from vaswani_transformer.cmlm import mask_targets, sample_masks
from vaswani_transformer.flowseq import ActNorm
from vaswani_transformer.model import ProjectedModel
from vaswani_transformer.slots import SlotConfig
from vaswani_transformer.support.command import UserError
from vaswani_transformer.support.loading import eval_mode

PAIRS = 100_000  # pairs whose tokens are counted at a time


@dataclass(frozen=True)
class FamilyRecipe:
    """How recipes train a family of models.

    Attributes:
        training: fields of the recipe's group `training`.
        decoding: fields of the recipe's group `decoding`.
        make_trainer: maker of the trainer of a run, from recipe, model, data and folder.
        needs_mask: whether the vocabulary needs `<mask>`.
        has_phases: whether some steps train only a part of the weights.
        fits: returns a mask of the tokenized pairs whose targets the model of a recipe can produce; None for all.
    """

    training: type[TrainingRecipe]
    decoding: type[SearchRecipe]
    make_trainer: Callable[..., Any]
    needs_mask: bool = False
    has_phases: bool = False
    fits: Callable[[Recipe, Dataset], NDArray[np.bool_]] | None = None


AUTOREGRESSIVE = FamilyRecipe(
    training=BeamTraining,
    decoding=BeamSearch,
    make_trainer=PaperTrainer,
)


def draw(seeds: list[int], labels: Tensor, make: Callable[[int, torch.Generator], Tensor]) -> Tensor:
    """Return random numbers (B, T, ...) for `labels` (B, T), drawn by `make` from each target's length and seed."""
    generator = torch.Generator()
    lengths = labels.ne(-100).sum(1).tolist()
    rows = [make(length, generator.manual_seed(seed)) for length, seed in zip(lengths, seeds, strict=True)]
    return pad_sequence(rows, batch_first=True)


@dataclass(frozen=True)
class LengthBeam(SearchRecipe):
    """Search with a non-autoregressive model that predicts the length.

    Args:
        length_beam_size: number of candidate lengths for each translation.
    """

    length_beam_size: PositiveInt = 1


@dataclass(frozen=True)
class GlancingTraining(TrainingRecipe):
    """Training of NAT and GLAT (Qian et al. 2021).

    Args:
        glancing: number of reference words shown per mistake of the first pass, at the first and the last step, such as
            [0.5, 0.3]; null for none.
        glancing_steps: number of steps over which it changes; null for `steps`.
    """

    glancing: tuple[ClosedUnitInterval, ClosedUnitInterval] | None = None
    glancing_steps: PositiveInt | None = None

    @property
    def evaluation_search(self) -> dict[str, float]:
        return {"length_beam_size": 1}


class GlancingTrainer(PaperTrainer):
    """Trainer of NAT and GLAT, with scheduled glancing."""

    training: GlancingTraining
    log_parts = {"length_loss": "length_loss", "accuracy": "glancing_accuracy"}

    def step_attributes(self, step: int) -> dict[str, float]:
        if self.training.glancing is None:
            return {}
        first, last = self.training.glancing
        done = min(1.0, step / (self.training.glancing_steps or self.training.steps))
        return {"glancing_ratio": first + (last - first) * done}

    def add_draws(self, batch: dict[str, Tensor], seeds: list[int]) -> dict[str, Tensor]:
        if self.training.glancing is None:
            return batch
        shown = self.shown_tokens(batch)
        draws = draw(seeds, shown, lambda length, generator: torch.rand(length, generator=generator))
        return {**batch, "glancing_draws": draws}

    def shown_tokens(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the tokens that may be shown (B, T), -100 at padding."""
        return batch["labels"]


NAT = FamilyRecipe(
    training=GlancingTraining,
    decoding=LengthBeam,
    make_trainer=GlancingTrainer,
)


@dataclass(frozen=True)
class PrefixSearch(SearchRecipe):
    """Search with a CTC model.

    Args:
        num_beams: number of open prefixes; 1 for the most likely path, without a search.
        length_bonus: added to the log-probability of a translation for each of its tokens; larger values favor longer
            translations.
    """

    num_beams: PositiveInt = 1
    length_bonus: float = 0.0


@dataclass(frozen=True)
class CtcTraining(GlancingTraining):
    """Training of CTC, where `glancing` shows tokens of the best alignment."""

    @property
    def evaluation_search(self) -> dict[str, float]:
        return {"num_beams": 1, "length_bonus": 0.0}


class SlotTrainer(GlancingTrainer):
    """Trainer of CTC and DAG, with scheduled glancing."""

    log_parts = {"accuracy": "glancing_accuracy"}

    def shown_tokens(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the source tokens, once for each of their slots (B, U), -100 at padding."""
        sources = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        return sources.repeat_interleave(self.model.config.upsampling, dim=1)


def ctc_slots(targets: Ragged) -> NDArray[np.integer]:
    """Return the number of words of each target, without `</s>`, and of the blanks between equal neighbors."""
    count = len(targets.lengths)
    target_of_token = np.repeat(np.arange(count), targets.lengths)
    has_same_target = target_of_token[1:] == target_of_token[:-1]
    is_repeated = (targets.tokens[1:] == targets.tokens[:-1]) & has_same_target
    return targets.lengths - 1 + np.bincount(target_of_token[1:][is_repeated], minlength=count)


def dag_vertices(targets: Ragged) -> NDArray[np.integer]:
    """Return the number of words of each target, without `</s>`, and of the first and the last vertex."""
    return targets.lengths + 1


def fits_into_slots(
    recipe: Recipe, pairs: Dataset, needed_slots: Callable[[Ragged], NDArray[np.integer]]
) -> NDArray[np.bool_]:
    """Return a mask of the pairs whose target fits into the slots that its source has, by the number that it needs."""
    # The slots do not depend on the size of the vocabulary, so it may be any.
    config = cast(SlotConfig, recipe.model_config(vocab_size=2**31))
    slots = config.upsampling * ArrowRows(pairs, "input_ids").lengths
    if config.position_embedding == "learned":
        slots = np.minimum(slots, config.max_position_embeddings)

    # The tokens of all targets at once might not fit into memory.
    targets = ArrowRows(pairs, "labels")
    needed = [np.zeros(0, np.int64)]
    for start in range(0, len(pairs), PAIRS):
        rows = range(start, min(start + PAIRS, len(pairs)))
        needed.append(needed_slots(targets.take(rows)))
    return np.concatenate(needed) <= slots


CTC = FamilyRecipe(
    training=CtcTraining,
    decoding=PrefixSearch,
    make_trainer=SlotTrainer,
    fits=partial(fits_into_slots, needed_slots=ctc_slots),
)


@dataclass(frozen=True)
class PathSearch(SearchRecipe):
    """Search with a DAG model.

    Args:
        decoding_strategy: which path to follow: the most likely transition from each vertex (greedy), the most likely
            transition times word (lookahead), or the path that is best as a whole (viterbi).
        length_penalty: alpha of viterbi; larger values favor longer translations.
    """

    decoding_strategy: Literal["greedy", "lookahead", "viterbi"] = "lookahead"
    length_penalty: float = 1.0


@dataclass(frozen=True)
class DagTraining(GlancingTraining):
    """Training of DAG, where `glancing` shows words of the best path."""

    @property
    def evaluation_search(self) -> dict[str, float]:
        return {}


DAG = FamilyRecipe(
    training=DagTraining,
    decoding=PathSearch,
    make_trainer=SlotTrainer,
    fits=partial(fits_into_slots, needed_slots=dag_vertices),
)


Operator = Literal[
    "softmax", "straight_through_softmax", "straight_through_logits", "gumbel_softmax", "straight_through_gumbel"
]


@dataclass(frozen=True)
class CmlmTraining(TrainingRecipe):
    """Training of CMLM and ENGINE (Tu et al. 2020).

    Args:
        evaluation_iterations: iterations of Mask-Predict in evaluations.
        energy_from: autoregressive teacher with the same vocabulary, whose negative log-likelihood of the model's
            output is the loss; null to train on masked words.
        energy_inputs: operator that converts the model's log-probabilities to the teacher's input.
        energy_outputs: operator that converts the model's log-probabilities to the output that the teacher scores.
    """

    evaluation_iterations: PositiveInt = 4
    energy_from: str | None = None
    energy_inputs: Operator = "softmax"
    energy_outputs: Operator = "softmax"

    @property
    def evaluation_search(self) -> dict[str, float]:
        return {"length_beam_size": 1, "num_iterations": self.evaluation_iterations}

    @property
    def selects_by_energy(self) -> bool:
        return self.energy_from is not None


@dataclass(frozen=True)
class MaskPredict(LengthBeam):
    """Mask-Predict (Ghazvininejad et al. 2019).

    Args:
        num_iterations: number of decoder passes over each translation.
    """

    num_iterations: PositiveInt = 10


class CmlmTrainer(PaperTrainer):
    """Trainer of CMLM on masked words."""

    log_parts = {"length_loss": "length_loss"}

    def add_draws(self, batch: dict[str, Tensor], seeds: list[int]) -> dict[str, Tensor]:
        tokenizer = self.processing_class
        labels = batch["labels"]
        draws = draw(seeds, labels, lambda length, generator: torch.rand(1 + length, generator=generator))  # (B, 1 + T)
        is_masked = sample_masks(labels.ne(-100), draws=(draws[:, 0], draws[:, 1:]))
        return mask_targets(batch, is_masked, tokenizer.mask_token_id, tokenizer.pad_token_id)


def make_cmlm_trainer(recipe: Recipe, model: ProjectedModel, data: Data, run: Path) -> PaperTrainer:
    """Return the trainer of a CMLM, or of ENGINE if the recipe names a teacher."""
    trainer_class = EnergyTrainer if recipe.training.selects_by_energy else CmlmTrainer
    return trainer_class(recipe, model, data, run)


CMLM = FamilyRecipe(
    training=CmlmTraining,
    decoding=MaskPredict,
    make_trainer=make_cmlm_trainer,
    needs_mask=True,
)


@dataclass(frozen=True)
class LatentTraining(GlancingTraining):
    """Training of IterativeVAE.

    With revealed latents `glancing` is the number of words that they reveal per mistake of the first layer.

    Args:
        kl_scale: weight of a discrete latent's KL divergences.
        kl_warmup_steps: number of steps in which the weight rises linearly from 0; 0 for the full weight from the
            start.
    """

    kl_scale: NonNegativeFloat = 1.0
    kl_warmup_steps: NonNegativeInt = 30_000


class LatentTrainer(GlancingTrainer):
    """Trainer of IterativeVAE, with a scheduled weight of a discrete latent's KL divergences."""

    log_parts = {
        **GlancingTrainer.log_parts,
        "bound": "bound",
        "kl_loss": "kl_loss",
        "layer_losses": "layer_loss",
        "layer_kl": "layer_kl",
        "prior_weights": "prior_weight",
        "hint_weights": "hint_weight",
    }

    def step_attributes(self, step: int) -> dict[str, float]:
        training = cast(LatentTraining, self.training)
        done = min(1.0, (step + 1) / max(1, training.kl_warmup_steps))
        return {**super().step_attributes(step), "kl_scale": training.kl_scale * done}

    def add_draws(self, batch: dict[str, Tensor], seeds: list[int]) -> dict[str, Tensor]:
        if self.model.config.latent == "discrete":
            return super().add_draws(batch, seeds)
        return {**batch, "reveal_draws": self.reveal_draws(batch["labels"], seeds)}  # (B, T)

    @staticmethod
    def reveal_draws(labels: Tensor, seeds: list[int]) -> Tensor:
        """Return the draws (B, T) that determine the revealed latents of `labels` (B, T)."""
        return draw(seeds, labels, lambda length, generator: torch.rand(length, generator=generator))

    def sentence_statistics(self, logits: Tensor, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the bound and its divergences, from samples that do not change the random state of training.

        Revealed latents depend on the run's seed and the target, so batches of a different size have the same bound.
        """
        if self.model.config.latent == "revealed":
            targets = [row[row.ne(-100)].numpy() for row in inputs["labels"].cpu()]
            seeds = [zlib.crc32(target.tobytes(), self.recipe.seed) for target in targets]
            inputs = inputs | {"reveal_draws": self.reveal_draws(inputs["labels"], seeds)}
        device = self.args.device
        with torch.random.fork_rng([device] if device.type != "cpu" else []):
            torch.manual_seed(self.recipe.seed)
            outputs = self.model(**inputs, has_hint=True, skip_logits=True)
        means = {"bound": outputs.bound}
        for layer, value in enumerate(outputs.layer_kl, start=2):
            means[f"layer_kl_{layer}"] = value
        tokens = inputs["labels"].ne(-100).sum(1)  # (B,), each gets the batch's mean
        return {name: mean * tokens for name, mean in means.items()}


ITERATIVE_VAE = FamilyRecipe(
    training=LatentTraining,
    decoding=LengthBeam,
    make_trainer=LatentTrainer,
)


@dataclass(frozen=True)
class FlowTraining(TrainingRecipe):
    """Training of FlowSeq (Ma et al. 2019).

    Args:
        decoder_steps: number of initial steps, which train posterior and decoder without the prior.
        kl_scale: weight of the KL divergence.
        kl_warmup_steps: number of steps after these in which the weight rises linearly from 0.
    """

    decoder_steps: NonNegativeInt = 30_000
    kl_scale: PositiveFloat = 1.0
    kl_warmup_steps: NonNegativeInt = 10_000

    @property
    def evaluation_search(self) -> dict[str, float]:
        return {"length_beam_size": 1, "num_latent_samples": 1, "latent_temperature": 0.0}


@dataclass(frozen=True)
class LatentSearch(LengthBeam):
    """Search with FlowSeq.

    Args:
        num_latent_samples: number of latent samples for each length.
        latent_temperature: standard deviation of the prior's noise; 0 for the mode.
    """

    num_latent_samples: PositiveInt = 1
    latent_temperature: NonNegativeFloat = 0.0


class FlowTrainer(PaperTrainer):
    """Trainer of FlowSeq in phases: without the prior, initialization of the flow, with the prior."""

    training: FlowTraining
    model: VaswaniFlowSeqForConditionalGeneration
    log_parts = {name: name for name in ("token_loss", "length_loss", "kl_loss", "log_determinant")}

    def check_evaluations(self) -> None:
        """Check also that the flow starts, without which the final model has no prior to rank samples by."""
        super().check_evaluations()
        training = self.training
        search = cast(LatentSearch, self.recipe.decoding)
        has_no_flow = training.decoder_steps >= training.steps and training.start_from is None
        if search.latent_temperature > 0 and has_no_flow:
            raise UserError(
                f"decoding.latent_temperature: the model would have no prior; got {search.latent_temperature} with "
                f"training.decoder_steps {training.decoder_steps} of training.steps {training.steps}, expected fewer. "
                "Reduce training.decoder_steps, or set decoding.latent_temperature=0."
            )

    def step_attributes(self, step: int) -> dict[str, float]:
        done = (step - self.training.decoder_steps + 1) / max(1, self.training.kl_warmup_steps)
        return {"kl_scale": self.training.kl_scale * min(1.0, max(0.0, done))}

    def add_draws(self, batch: dict[str, Tensor], seeds: list[int]) -> dict[str, Tensor]:
        def make(length: int, generator: torch.Generator) -> Tensor:
            words = torch.rand(length, 1, generator=generator)
            return torch.cat([words, torch.randn(length, self.model.config.d_model, generator=generator)], dim=1)

        draws = draw(seeds, batch["labels"], make)  # (B, T, 1 + d_model)
        return {**batch, "word_draws": draws[..., 0], "latent_noise": draws[..., 1:]}

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device) -> StepBatches:
        batches, tokens = super().get_batch_samples(epoch_iterator, num_batches, device)
        if self.state.global_step >= self.training.decoder_steps and not float(self.model.flow.started):
            self.start_flow(batches)
        return batches, tokens

    def _determine_best_metric(self, metrics: dict[str, float], trial: object) -> bool:
        """Ignore evaluations before the flow starts, whose translations come from latents that are not trained yet."""
        has_prior = self.state.global_step > self.training.decoder_steps
        return has_prior and super()._determine_best_metric(metrics, trial)

    def can_be_averaged(self, step: int) -> bool:
        """Return whether the flow was started at a step, as it is in the last weights."""
        first = self.training.decoder_steps + 1
        return step >= first or self.state.global_step < first

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


FLOWSEQ = FamilyRecipe(
    training=FlowTraining,
    decoding=LatentSearch,
    make_trainer=FlowTrainer,
    has_phases=True,
)
