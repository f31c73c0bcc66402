"""The floating-point operations of training, and the peak rate of a device's data sheet.

B batch.
"""

import re

from torch import Tensor

from vaswani_transformer import (
    VaswaniCmlmForConditionalGeneration,
    VaswaniFlowSeqForConditionalGeneration,
    VaswaniIterativeVaeForConditionalGeneration,
    VaswaniNatForConditionalGeneration,
    VaswaniTransformerConfig,
    VaswaniTransformerForConditionalGeneration,
)
from vaswani_transformer.flow import HeadLinear, coupling_config
from vaswani_transformer.nat import LengthDifferenceHead

# Dense TFLOP/s of the vendors' data sheets, of matrix products that accumulate in float32 if the sheet
# distinguishes them: float32, TF32, float16, bfloat16. The first pattern that matches a device's name counts.
PEAKS: dict[str, tuple[float | None, float | None, float | None, float | None]] = {
    r"MIG": (None, None, None, None),  # a slice of a card
    r"B200": (75, 1100, 2250, 2250),
    r"H[12]00 NVL": (60, 418, 835, 835),
    r"H100 PCIe": (51, 378, 756, 756),
    r"H[12]00": (67, 495, 989, 989),
    r"A100": (19.5, 156, 312, 312),
    r"A40": (37.4, 74.8, 149.7, 149.7),
    r"A30": (10.3, 82, 165, 165),
    r"A10": (31.2, 62.5, 125, 125),
    r"L40S": (91.6, 183, 362, 362),
    r"L40": (90.5, 90.5, 181, 181),
    r"L4": (30.3, 60, 121, 121),
    r"RTX A6000": (38.7, 77.4, 154.8, 154.8),
    r"RTX 4090$": (82.6, 82.6, 165.2, 165.2),
    r"RTX 3090$": (35.6, 35.6, 71, 71),
    r"V100S": (16.4, None, 130, None),
    r"V100-PCIE": (14, None, 112, None),
    r"V100-SXM[23]": (15.7, None, 125, None),
    r"P100-PCIE": (9.3, None, 18.7, None),
    r"P100-SXM2": (10.6, None, 21.2, None),
    r"T4": (8.1, None, 65, None),
    r"MI300X": (163.4, None, 1307.4, 1307.4),
}
PRECISIONS = ("fp32", "tf32", "fp16", "bf16")


def peak_teraflops(name: str, precision: str) -> float | None:
    """Return a device's TFLOP/s of matrix products in a precision, by its data sheet; None if it is not known."""
    for pattern, peaks in PEAKS.items():
        if re.search(rf"\b{pattern}\b", name):
            return peaks[PRECISIONS.index(precision)] if precision in PRECISIONS else None
    return None


def pair_lengths(batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the source and target tokens of each pair of a batch, both (B,); masked target tokens count too."""
    target = batch["target_lengths"] if "target_lengths" in batch else batch["labels"].ne(-100).sum(1)
    return batch["attention_mask"].sum(1), target


def attention_products(
    config: VaswaniTransformerConfig, queries: Tensor, keys: Tensor, window: int | None = None
) -> int:
    """Return the multiplications of the four projections, the scores and the weighted values of attention.

    The texts have `queries` and `keys` tokens (B,). With a window of r a query attends to 2 r + 1 keys at most.
    """
    heads = config.num_heads * (config.head_dim + config.value_head_dim)
    near = keys if window is None else keys.clamp(max=2 * window + 1)
    return heads * (config.d_model * int(queries.sum() + keys.sum()) + int((queries * near).sum()))


def encoder_products(config: VaswaniTransformerConfig, source: Tensor) -> int:
    """Return the multiplications of the encoder for sources of these lengths (B,)."""
    feed_forward = 2 * config.d_model * config.d_ff * int(source.sum())
    return config.encoder_layers * (attention_products(config, source, source, config.attention_window) + feed_forward)


def decoder_products(config: VaswaniTransformerConfig, source: Tensor, target: Tensor) -> int:
    """Return the multiplications of the decoder for pairs of these lengths, both (B,)."""
    attention = attention_products(config, target, target, config.attention_window)
    attention += attention_products(config, target, source)
    return config.decoder_layers * (attention + 2 * config.d_model * config.d_ff * int(target.sum()))


def training_flops(config: VaswaniTransformerConfig, source: Tensor, target: Tensor) -> int:
    """Return the floating-point operations of the matrix products of training on pairs, forward and backward.

    Counted as usual for a device's utilization (Chowdhery et al. 2022, appendix B): two for a multiplication and its
    addition, twice the forward pass for the backward pass, and masked positions of attention like others. Padding and
    recomputation by gradient checkpointing do not count.
    """
    projection = config.vocab_size * config.d_model * int(target.sum())
    return 6 * (encoder_products(config, source) + decoder_products(config, source, target) + projection)


def autoregressive_flops(model: VaswaniTransformerForConditionalGeneration, batch: dict[str, Tensor]) -> int:
    return training_flops(model.config, *pair_lengths(batch))


def frozen_teacher_flops(teacher: VaswaniTransformerForConditionalGeneration, batch: dict[str, Tensor]) -> int:
    """Return the same of ENGINE's teacher, whose gradients reach only the mixtures of embeddings that it reads."""
    config, (source, target) = teacher.config, pair_lengths(batch)
    words = 2 * config.vocab_size * config.d_model * int(target.sum())  # mixed, and scored
    products = 2 * (decoder_products(config, source, target) + words) + encoder_products(config, source)
    near = target if config.attention_window is None else target.clamp(max=2 * config.attention_window + 1)
    scores = int((target * near).sum())  # both factors have gradients
    memory = config.d_model * int(source.sum())  # its projections have none
    heads = config.num_heads * (config.head_dim + config.value_head_dim)
    return 2 * (products + config.decoder_layers * heads * (scores - memory))


def nat_flops(model: VaswaniNatForConditionalGeneration, batch: dict[str, Tensor]) -> int:
    """Return the same of NAT; with glancing the decoder makes one more pass forward."""
    source, target = pair_lengths(batch)
    decoder = positional_decoder_products(model, source, target)
    glance = 2 * decoder if model.glancing_ratio > 0 else 0
    return 6 * (encoder_products(model.config, source) + length_difference_products(model, source) + decoder) + glance


def iterative_vae_flops(model: VaswaniIterativeVaeForConditionalGeneration, batch: dict[str, Tensor]) -> int:
    """Return the same of IterativeVAE, without recomputation.

    Its latent steps go to the vocabulary, and back unless the latent is the most likely word, a row of the embeddings.
    """
    config, (_, target) = model.config, pair_lengths(batch)
    inputs, is_relaxed = (
        (config.decoder_layers - 1) * config.d_model * int(target.sum()),
        config.latent_sample == "relaxed",
    )
    forth, back = inputs * (config.vocab_size + 3), inputs * config.vocab_size
    glance = 2 * (forth + back * is_relaxed) if model.glancing_ratio > 0 else 0
    return nat_flops(model, batch) + 6 * (forth + back * (is_relaxed or config.hint)) + glance


def flowseq_flops(model: VaswaniFlowSeqForConditionalGeneration, batch: dict[str, Tensor]) -> int:
    """Return the same of FlowSeq: encoder, posterior and decoder, and with a divergence the flow."""
    config, (source, target) = model.config, pair_lengths(batch)
    tokens, narrow = int(target.sum()), coupling_config(config)
    networks = 2 * decoder_products(config, source, target) + latent_reader_products(config, target)
    maps = (2 * config.d_model**2 + config.vocab_size * config.d_model) * tokens
    if model.kl_scale > 0:
        narrow.decoder_layers = couplings = 2 + 8 * config.flow_steps
        networks += decoder_products(narrow, source, target) + latent_reader_products(narrow, target)
        maps += couplings * narrow.d_model * config.d_model * (tokens + int(source.sum()))
        heads = [layer.weight for layer in model.flow.layers if isinstance(layer, HeadLinear)]
        maps += sum(config.d_model * len(weight) * tokens for weight in heads)
    return 6 * (encoder_products(config, source) + length_difference_products(model, source) + networks + maps)


def latent_reader_products(config: VaswaniTransformerConfig, target: Tensor) -> int:
    """Return the multiplications of positions that attend to latents; the positions are projected once a batch."""
    projected = config.num_heads * config.head_dim * config.d_model * int(target.sum())
    return attention_products(config, target, target) - projected


def positional_decoder_products(model: LengthDifferenceHead, source: Tensor, target: Tensor) -> int:
    """Return the multiplications of a decoder with positional attention, and of the projection to the vocabulary.

    Positional attention projects values and output only: its queries and keys are computed once a batch.
    """
    config, tokens = model.config, int(target.sum())
    width = config.num_heads * (config.head_dim + config.value_head_dim)
    positional = attention_products(config, target, target)
    positional -= 2 * config.num_heads * config.head_dim * config.d_model * tokens
    clip = config.relative_attention_clip
    relative = 0 if clip is None else width * (2 * clip + 1) * tokens
    decoder = decoder_products(config, source, target) + config.decoder_layers * (positional + relative)
    return decoder + config.vocab_size * config.d_model * tokens


def length_difference_products(model: LengthDifferenceHead, source: Tensor) -> int:
    """Return the multiplications of the predicted differences of length for sources (B,)."""
    return model.config.d_model * model.num_length_classes * len(source)


def cmlm_flops(model: VaswaniCmlmForConditionalGeneration, batch: dict[str, Tensor]) -> int:
    """Return the same of CMLM, whose encoder has a length token, and which projects masked tokens only."""
    config, (source, target) = model.config, pair_lengths(batch)
    projection = config.vocab_size * config.d_model * int(batch["labels"].ne(-100).sum())
    length = config.d_model * (config.max_target_length + 1) * len(source)
    encoder = encoder_products(config, source + 1)
    return 6 * (encoder + length + decoder_products(config, source, target) + projection)
