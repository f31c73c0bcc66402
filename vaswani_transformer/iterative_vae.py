"""IterativeVAE: a non-autoregressive decoder with layers that refine a discrete latent over the vocabulary.

B batch, S source, T target, k target rows per source row, l lengths of a length beam, N layers, V vocabulary.

Before each layer but the first, the states predict words, and some words go back into the states. There are two kinds
of latents. Discrete ones (`discrete`), those of the report, are samples at every position, for which the reference is a
hint. Revealed ones are words at some positions, y. In training a random part of the reference is known, which grows
evenly from layer to layer: S_1 is empty, and S_2 to S_N are nested sets of positions. The last layer that does not know
a word predicts it. At inference each layer commits the most probable words in place of the reference's, as many as are
known in training; m is the number of target tokens.

Length, soft copy and layers are those of NAT.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self, cast

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import pad
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin

from .config import VaswaniTransformerConfig, checked_field, positive_float, unit_rate
from .discrete import LatentPass
from .layers import Dropout, read_table
from .nar import NarLMOutput, NarTargets
from .nar_decoder import EncodedSource, LengthTarget, MeasuredSource, PositionalDecoder, TargetInputs, canvas
from .nat import VaswaniNatConfig, VaswaniNatForConditionalGeneration, VaswaniNatModel
from .settings import NarSettings

NEW_LATENT = "revealed"
"""The latent of a new configuration that sets no field of a discrete one."""

latent_type = checked_field(
    lambda value: value in (None, "revealed", "discrete"), "is not a latent; choose 'revealed' or 'discrete'."
)
latent_sample_type = checked_field(
    lambda value: value in (None, "discrete", "relaxed"), "is not a sample of a latent; choose 'discrete' or 'relaxed'."
)


@strict
class VaswaniIterativeVaeConfig(VaswaniNatConfig):
    """Hyperparameters of IterativeVAE; `label_smoothing` defaults to 0.

    Args:
        latent: "revealed", the reference's words at random positions in training and the most probable words at
            inference; or "discrete", the report's sample at every position. None for revealed, unless a field that only
            a discrete latent has is set: `latent_sample`, `hint`, `kl_weights` or `gumbel_temperature`.
        latent_sample: of a discrete latent: "discrete", a word with the gradient of a Gumbel-softmax
            (straight-through), or "relaxed", the Gumbel-softmax itself.
        hint: whether a discrete latent sees the reference in training. Without it there is neither noise nor a KL
            divergence.
        kl_weights: w_2 to w_N, the weight of a discrete latent's KL divergence before each layer but the first; None
            for (N + 1 - i)^2 before layer i.
        gumbel_temperature: tau, the temperature of the Gumbel-softmax.
        latent_dropout: dropout rate of the embedded latents.
    """

    model_type = "vaswani_iterative_vae"
    keys_to_ignore_at_inference = [
        *VaswaniNatConfig.keys_to_ignore_at_inference,
        *("bound", "kl_loss", "layer_losses", "layer_kl", "prior_weights", "hint_weights"),
    ]

    latent: str | None = latent_type(default=None)
    latent_sample: str | None = latent_sample_type(default=None)
    hint: bool = True
    kl_weights: list[float | int] | None = None
    gumbel_temperature: float | int = positive_float(default=1.0)
    latent_dropout: float | int = unit_rate(default=0.1)
    label_smoothing: float | int = unit_rate(default=0.0)

    def __post_init__(self, **kwargs: Any) -> None:
        """Choose the latent if it is not given."""
        if self.latent is None:
            self.latent = "discrete" if self.discrete_settings() else NEW_LATENT
        if self.latent == "discrete" and self.latent_sample is None:
            self.latent_sample = "discrete"
        super().__post_init__(**kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Self:
        """Read a saved configuration; one without `latent` was saved when every latent was discrete."""
        return super().from_dict({"latent": "discrete", **config_dict}, **kwargs)

    def discrete_settings(self) -> dict[str, Any]:
        """Return the fields of a discrete latent that are not at their defaults."""
        defaults = {"latent_sample": None, "hint": True, "kl_weights": None, "gumbel_temperature": 1}
        return {name: getattr(self, name) for name, default in defaults.items() if getattr(self, name) != default}

    def validate_latent(self) -> None:
        """Check that no setting of a discrete latent is set for revealed ones."""
        settings = self.discrete_settings()
        if self.latent == "revealed" and settings:
            name, value = next(iter(settings.items()))
            raise ValueError(
                f'{name}: not supported by latent="revealed"; got {value!r}. Leave it out, or set latent="discrete".'
            )

    def validate_kl_weights(self) -> None:
        """Check that each layer but the first has a nonnegative weight."""
        if self.kl_weights is None:
            return
        count = self.decoder_layers - 1
        are_valid = all(0 <= weight < float("inf") for weight in self.kl_weights)
        if len(self.kl_weights) != count or not are_valid:
            raise ValueError(
                f"kl_weights ({self.kl_weights}) must be {count} finite numbers of at least 0, one for each decoder "
                "layer but the first; leave it None for the squares that fall to 1."
            )

    @property
    def layer_kl_weights(self) -> list[float | int]:
        """Return w_2 to w_N."""
        if self.kl_weights is not None:
            return self.kl_weights
        return [(self.decoder_layers + 1 - layer) ** 2 for layer in range(2, self.decoder_layers + 1)]


class RevealedStep(nn.Module):
    """Latent step of revealed words: LN(gate h + Dropout((1 - gate) e)).

    At known positions e is the scaled embedding of the word, and elsewhere `empty`, a learned vector. The gate is the
    sigmoid of a linear function of h.
    """

    def __init__(self, config: VaswaniTransformerConfig, dropout: float) -> None:
        super().__init__()
        self.gate = nn.Linear(config.d_model, 1)
        self.empty = nn.Parameter(torch.zeros(config.d_model))
        self.dropout = Dropout(dropout)
        self.norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.config = config

    def forward(self, states: Tensor, words: Tensor, is_known: Tensor, table: Tensor) -> Tensor:
        """Return the new states (k B, T, d_model).

        Args:
            states: h (k B, T, d_model).
            words: (k B, T), token ids; they count only at known positions.
            is_known: (k B, T), True at known positions.
            table: E (V, d_model), the embeddings.
        """
        embedded = self.config.embedding_scale * nn.functional.embedding(words, table)  # (k B, T, d_model)
        latent = torch.where(is_known[..., None], embedded, self.empty.to(embedded.dtype))
        latent = latent.to(states.dtype)
        gate = self.gate(states).sigmoid()  # (k B, T, 1)
        return self.norm(gate * states + self.dropout((1 - gate) * latent)).to(states.dtype)


def nested_positions(is_real: Tensor, draws: Tensor, layers: int, share: Tensor | None = None) -> list[Tensor]:
    """Return S_2 to S_N, (k B, T) each: the real positions t with u_t < (i - 1) / N.

    Args:
        is_real: (k B, T), True at tokens.
        draws: (k B, T), u_t of each position, uniform on [0, 1).
        layers: N.
        share: (k B, 1), the share of positions in S_N instead of (N - 1) / N; in [0, 1].
    """
    known = (layers - 1) / layers if share is None else share
    steps = layers - 1
    return [is_real & (draws < known * step / steps) for step in range(1, layers)]


def repeats_neighbor(words: Tensor, ranked: Tensor) -> Tensor:
    """Return which of `words` (k B, T) equal a neighbor that is ranked higher; of equally ranked ones, the second."""
    is_equal = words[:, 1:] == words[:, :-1]  # (k B, T - 1), of a word and the next one
    is_lower = ranked[:, 1:] <= ranked[:, :-1]
    repeats_left = pad(is_equal & is_lower, (1, 0))
    repeats_right = pad(is_equal & ~is_lower, (0, 1))
    return repeats_left | repeats_right


@dataclass
class CommittedWords:
    """Prior of one decoder pass: before layer i it knows at most the ceil(m (i - 1) / N) most probable words.

    Of equal neighbors only the more probable word is committed, and no word equal to a committed neighbor; later layers
    predict the others again. A committed word and its log-probability stay as they are. So the sum of all
    log-probabilities is that of a target of which the words are predicted in this order.
    """

    read: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    """Function that reads words and log-probabilities (k B, T) from states (k B, T, d_model) at a mask's positions."""
    is_real: Tensor  # (k B, T), True at tokens
    layers: int  # N
    words: Tensor = field(init=False)  # (k B, T), of the last layer at positions that are not committed
    log_probs: Tensor = field(init=False)  # (k B, T)
    is_committed: Tensor = field(init=False)  # (k B, T)
    states: Tensor | None = field(default=None, init=False)  # (k B, T, d_model), those that predicted the words
    history: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # words and `is_committed` after each layer

    def __post_init__(self) -> None:
        self.is_committed = torch.zeros_like(self.is_real)

    def apply(self, step: RevealedStep, states: Tensor, table: Tensor) -> Tensor:
        """Commit words of the states (k B, T, d_model), and apply the step before the next layer."""
        self.read_open(states)
        layer = len(self.history) + 1
        lengths = self.is_real.sum(1, keepdim=True)  # (k B, 1), m
        counts = (lengths * layer + self.layers - 1) // self.layers  # (k B, 1), ceil(m layer / N)

        # Committed words stay first, then the most probable ones; repetitions and padding are last.
        ranked = self.log_probs.masked_fill(self.is_committed, 1.0)  # above every log-probability
        ranked = ranked.masked_fill(~self.is_real, float("-inf"))
        can_commit = self.is_real & (self.is_committed | ~repeats_neighbor(self.words, ranked))
        ranked = ranked.masked_fill(~can_commit, float("-inf"))
        ranks = ranked.argsort(dim=1, descending=True, stable=True).argsort(1)
        self.is_committed = can_commit & (ranks < counts)
        self.history.append((self.words, self.is_committed))
        return step(states, self.words, self.is_committed, table)

    def read_open(self, states: Tensor) -> None:
        """Read the words that are not committed from the states (k B, T, d_model) after a layer."""
        states = states.to(self.is_real.device)
        is_open = self.is_real & ~self.is_committed
        words, log_probs = self.read(states, is_open)
        if self.states is not None:  # not the first layer
            words = torch.where(is_open, words, self.words)
            log_probs = torch.where(is_open, log_probs, self.log_probs)
        self.words = words
        self.log_probs = log_probs
        self.states = self.output(states)

    def output(self, states: Tensor) -> Tensor:
        """Return the states that predict each word: those from which it was committed, or those of the last layer."""
        if self.states is None:
            return states
        return torch.where(self.is_committed[..., None], self.states, states.to(self.states.device))

    def loss(self, head: Any, target: LengthTarget, predictions: dict[str, Any]) -> dict[str, Tensor]:
        """Return no further terms, since the pass does not see the target."""
        return {}

    def decode(self, head: Any, source: MeasuredSource, mask: Tensor, settings: NarSettings) -> NarTargets:
        """Return a target for each row of `mask` (l B, T), whose words the layers commit one after the other."""
        inputs_embeds = head.decoder_input(source, mask)
        states = head.model.decoder.run(source, mask, inputs_embeds=inputs_embeds, latent=self)[0]
        self.read_open(states)  # the words that no step has committed
        history = [*self.history, (self.words, self.is_real)]
        return NarTargets(
            self.words,
            self.log_probs,
            history=[words for words, _ in history],
            committed=[is_committed for _, is_committed in history],
        )


@dataclass
class RevealedWords:
    """Posterior of one decoder pass: before layer i it knows the reference's words at S_i."""

    words: Tensor  # (k B, T), y, any id at padding
    revealed: list[Tensor]  # S_2 to S_N, (k B, T) each
    states: list[Tensor] = field(default_factory=list)  # after layers 1 to N - 1, (k B, T, d_model) each
    predicting: Tensor | None = None  # (k B, T, d_model), the states that predict each word
    shows_words: ClassVar[bool] = False  # in the decoder's input

    @staticmethod
    def make_step(config: VaswaniIterativeVaeConfig) -> RevealedStep:
        """Return a new latent step."""
        return RevealedStep(config, config.latent_dropout)

    @classmethod
    def of_target(
        cls, head: Any, source: MeasuredSource, target: LengthTarget, has_hint: bool, draws: Tensor | None
    ) -> "RevealedWords | CommittedWords":
        """Return the posterior of a target, and limit its labels to the words that stay hidden; the prior without hint.

        `draws` (k B, T), uniform on [0, 1), determine which words are known; if None, they come from torch's generator.
        """
        if not has_hint or target.labels is None:
            return cls.without_target(head, target.mask, head.special_tokens())
        labels = target.labels.to(source.memory.device)
        is_real = labels.ne(-100)  # (k B, T)
        if draws is None:
            draws = torch.rand(labels.shape, device=labels.device)
        share = None
        if head.training and head.glancing_ratio > 0:
            share = head.share_of_mistakes(source, target, labels)
        revealed = nested_positions(is_real, draws.to(labels.device), head.config.decoder_layers, share)
        if revealed:
            target.labels = labels.masked_fill(revealed[-1], -100)
        return cls(labels.clamp(min=0), revealed)

    @staticmethod
    def without_target(
        head: Any, mask: Tensor, suppress_tokens: list[int] | None, is_sampled: bool = False
    ) -> CommittedWords:
        """Return the prior for targets of `mask` (k B, T), which never commits any of `suppress_tokens`."""
        lengths = mask.sum(1)

        @torch.no_grad()
        def read(states: Tensor, is_read: Tensor) -> tuple[Tensor, Tensor]:
            return head.read_words(states, lengths, is_read, suppress_tokens, has_scores=True)

        return CommittedWords(read, mask.bool(), head.config.decoder_layers)

    @staticmethod
    def without_head(hidden_states: Tensor, mask: Tensor | None, table: Tensor, layers: int) -> CommittedWords:
        """Return the prior for a decoder that is used by itself; the embeddings are its output projection."""
        is_real = hidden_states.new_ones(hidden_states.shape[:2], dtype=torch.bool)
        if mask is not None:  # boolean or additive; its first row tells the keys of the first position
            is_key = mask if mask.dtype == torch.bool else mask == 0
            is_real = is_key[:, 0, 0].expand_as(is_real)

        @torch.no_grad()
        def read(states: Tensor, is_read: Tensor) -> tuple[Tensor, Tensor]:
            log_probs, words = functional.linear(states, table).log_softmax(-1).max(-1)
            return words, log_probs

        return CommittedWords(read, is_real, layers)

    def apply(self, step: RevealedStep, states: Tensor, table: Tensor) -> Tensor:
        """Apply the step before the next layer to the states (k B, T, d_model)."""
        is_known = self.revealed[len(self.states)]
        self.states.append(states)
        return step(states, self.words, is_known, table)

    def output(self, states: Tensor) -> Tensor:
        """Return the states that predict each word: those of the last layer that does not know it."""
        # Backwards, since a known word stays known.
        for is_known, earlier in reversed(list(zip(self.revealed, self.states, strict=True))):
            states = torch.where(is_known[..., None].to(states.device), earlier.to(states.device), states)
        self.predicting = states
        return states

    def loss(self, head: Any, target: LengthTarget, predictions: dict[str, Any]) -> dict[str, Tensor]:
        """Return the bound as the loss of all words, and its terms."""
        # The words that become known before each layer but the first; the layer before predicts them.
        is_known = torch.zeros_like(self.words, dtype=torch.bool)  # (k B, T)
        is_new = []
        for is_revealed in self.revealed:
            is_new.append(is_revealed & ~is_known)
            is_known = is_revealed

        # Their losses are the divergences; `token_loss` is that of the words that stay hidden from the last layer.
        token_loss = predictions["token_loss"]
        states = cast(Tensor, self.predicting).to(token_loss.device)  # (k B, T, d_model)
        summed, token_losses = head.token_losses(states, self.words.masked_fill(~is_known, -100))  # scalar, (k B, T)
        layer_kl = [target.mean((token_losses * mask).sum()) for mask in is_new]  # K_2 to K_N
        layer_losses = torch.stack([*layer_kl, token_loss.detach()])  # (N,)
        bound = token_loss + target.mean(summed)
        return {
            "loss": bound + head.config.length_loss_weight * predictions["length_loss"],
            "token_loss": bound,
            "bound": bound,
            "layer_losses": layer_losses,
            "layer_kl": layer_losses[:-1],
        }


Latent = LatentPass | RevealedWords | CommittedWords
"""The latents of one decoder pass: discrete ones, the posterior and the prior of revealed ones."""
LATENTS: dict[str, type[Any]] = {"revealed": RevealedWords, "discrete": LatentPass}
"""The latents of a target by `latent` of the configuration; each class makes its steps, and also the latents of a pass
that does not see the target."""


class LatentDecoder(PositionalDecoder):
    """NAT's decoder with a latent step before each layer but the first."""

    _no_split_modules = ["PositionalDecoderLayer", "LatentStep", "RevealedStep"]

    def __init__(self, config: VaswaniIterativeVaeConfig) -> None:
        super().__init__(config)
        self.latent_steps = nn.ModuleList(
            LATENTS[cast(str, config.latent)].make_step(config) for _ in range(config.decoder_layers - 1)
        )
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialize as every model does, and the vectors of unknown words with zeros."""
        super()._init_weights(module)
        if isinstance(module, RevealedStep):
            init.zeros_(module.empty)

    def run_layers(
        self,
        hidden_states: Tensor,
        mask: Tensor | None,
        memory: Tensor | None,
        source_mask: Tensor | None,
        past_key_values: Cache | None,
        latent: Latent | None = None,
        depth: int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Apply all layers and latent steps to `hidden_states` (k B, T, d_model).

        Args:
            latent: the latents of this pass; None for inference with the embeddings as output projection.
            depth: number of layers to apply; None for all.
        """
        vocab_size = self.config.vocab_size
        scale = self.config.embedding_scale
        table = read_table(self.embed_tokens, vocab_size, hidden_states.device, scale)  # E (V, d_model)
        if latent is None:
            latents = LATENTS[self.config.latent]
            latent = cast(Latent, latents.without_head(hidden_states, mask, table, self.config.decoder_layers))
        positions = self.position_encodings(hidden_states)  # (1, T, d_model)
        self_attention_mask = self.without_diagonal(mask, hidden_states)

        for index, layer in enumerate(self.layers[:depth]):
            if index > 0:
                step: Any = self.latent_steps[index - 1]
                hidden_states = latent.apply(step, hidden_states, table)
            hidden_states = layer(
                hidden_states,
                mask,
                memory,
                positions,
                encoder_attention_mask=source_mask,
                past_key_values=past_key_values,
                self_attention_mask=self_attention_mask,
                **kwargs,
            )  # (k B, T, d_model)
        return latent.output(hidden_states)


class VaswaniIterativeVaeModel(VaswaniNatModel):
    """Encoder and latent decoder with a shared embedding matrix, which also projects in the latent steps."""

    config_class = VaswaniIterativeVaeConfig
    decoder_class = LatentDecoder


@dataclass
class IterativeVaeLMOutput(NarLMOutput):
    """Output of IterativeVAE; the fields below are means over target tokens, and None if the model does not have them.

    The mean of `bound` over samples, in evaluation mode with `has_hint`, is an upper bound of -log p(y | x, m). With
    revealed latents `token_loss` is the bound too, and a pass that does not see the labels has none of these fields.
    """

    bound: Tensor | None = None  # cross-entropy after the last layer plus the sum of layer_kl
    kl_loss: Tensor | None = None  # weighted sum of layer_kl, without kl_scale; 0 without a hint
    layer_losses: Tensor | None = None  # (N,), cross-entropy after each layer; revealed: of the words it predicts
    layer_kl: Tensor | None = None  # (N - 1,), KL(q || prior) before each layer but the first
    prior_weights: Tensor | None = None  # (N - 1,), a, the weight of the predicted distribution
    hint_weights: Tensor | None = None  # (N - 1,), b, the weight of the hint


class VaswaniIterativeVaeForConditionalGeneration(VaswaniNatForConditionalGeneration, GenerationMixin):
    """IterativeVAE, with `generate()` in one pass; `return_history` returns the words after every layer.

    In training mode the latents see the `labels`. The `loss` is the sum of `layer_losses` and `length_loss_weight`
    `length_loss`, and with a discrete latent also `kl_scale` `kl_loss`; with revealed latents the sum of `layer_losses`
    is the `bound`. In evaluation mode the latents see no labels and have no noise, and the `loss` is the negative
    log-likelihood of words and length in the pass that `generate()` makes.

    `forward` also takes `has_hint`: whether the latents see the `labels`; None: in training mode only. In evaluation
    mode `has_hint=True` computes the `bound` from one sample of the latents. `reveal_draws` (k B, T), uniform on
    [0, 1), determine revealed latents. Other latents, and these without draws, come from torch's generator.

    Attributes:
        kl_scale: kappa, the weight of a discrete latent's KL divergences in training; not part of the configuration.
        glancing_ratio: with a discrete latent as in NAT; words that are shown have neither hint nor loss. With revealed
            latents, if above 0, the last layer knows as many words as this ratio of the first layer's mistakes.
    """

    config_class = VaswaniIterativeVaeConfig
    body_class = VaswaniIterativeVaeModel
    output_class = IterativeVaeLMOutput
    further_arguments = (*VaswaniNatForConditionalGeneration.further_arguments, "has_hint", "reveal_draws")
    kl_scale: float = 1.0

    def __init__(self, config: VaswaniIterativeVaeConfig) -> None:
        super().__init__(config)
        if config.latent == "discrete" and config.hint:
            self.family_settings = (*self.family_settings, "do_sample")

    @property
    def latents(self) -> type[Any]:
        """Return the class of a target's latents."""
        return LATENTS[self.config.latent]

    def make_target(self, source: MeasuredSource, inputs: TargetInputs) -> LengthTarget:
        target = super().make_target(source, inputs)
        has_hint = inputs.further["has_hint"]
        if has_hint is None:
            has_hint = self.training
        target.latent = self.latents.of_target(self, source, target, has_hint, inputs.further["reveal_draws"])
        target.decoder_inputs["latent"] = target.latent
        return target

    def training_input(
        self, source: MeasuredSource, target: LengthTarget, labels: Tensor, draws: dict[str, Tensor | None]
    ) -> Tensor:
        """Return the soft copy (k B, T, d_model); with a discrete latent also words that glancing shows."""
        if not self.latents.shows_words:
            return self.decoder_input(source, target.mask)
        return super().training_input(source, target, labels, draws)

    def first_pass(self, source: MeasuredSource, mask: Tensor, inputs_embeds: Tensor) -> Tensor:
        latent = self.latents.without_target(self, mask, self.special_tokens())
        return self.model.decoder.run(source, mask, inputs_embeds=inputs_embeds, latent=latent)[0]

    @torch.no_grad()
    def share_of_mistakes(self, source: EncodedSource, target: LengthTarget, labels: Tensor) -> Tensor:
        """Return `glancing_ratio` times the share (k B, 1) of words that the first layer gets wrong."""
        is_real = labels.ne(-100)  # (k B, T)
        latent = self.latents.without_target(self, target.mask, self.special_tokens())
        states = self.model.decoder.run(source, target.mask, **target.decoder_inputs, latent=latent, depth=1)[0]
        mistakes = self.count_mistakes(states, labels)[:, None]  # (k B, 1)
        lengths = is_real.sum(1, keepdim=True)  # (k B, 1)
        target.outputs["accuracy"] = 1 - mistakes.sum() / lengths.sum().clamp(min=1)
        return self.glancing_ratio * mistakes / lengths.clamp(min=1)

    def decode_targets(self, source: MeasuredSource, lengths: Tensor, settings: NarSettings) -> NarTargets:
        """Predict a target for each of `lengths` (l B,) in one pass, with the words after each layer as history."""
        mask = canvas(lengths)  # (l B, T)
        latent = self.latents.without_target(self, mask, settings.suppress_tokens, settings.do_sample)
        return latent.decode(self, source, mask, settings)
