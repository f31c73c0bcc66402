"""`python -m tests.golden`: write the golden checkpoints that this version lacks.

Each is a tiny model that memorized a few pairs, as `push_to_hub` publishes it except for its code, with what it
computes: texts and token ids in `expected.json`, numbers in `expected.safetensors`. The command changes no checkpoint
that exists.
"""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM

from tests.golden import FOLDER, TEXTS, first_pairs, load, numbers, translations
from tests.models import PAIRS
from vaswani_transformer import (
    VaswaniCmlmConfig,
    VaswaniCtcConfig,
    VaswaniDagConfig,
    VaswaniFlowSeqConfig,
    VaswaniIterativeVaeConfig,
    VaswaniNatConfig,
    VaswaniTransformerConfig,
    VaswaniTransformerTokenizer,
    __version__,
)

STEPS = 600
MARGIN = 0.9  # the least probability of a token and of a length, so that rounding decides no search
GAP = 0.01  # the least difference between the best two steps of lookahead, in nats
SIZES: dict[str, Any] = {"d_model": 8, "d_ff": 16, "num_heads": 2, "encoder_layers": 1, "decoder_layers": 1}
NO_NOISE: dict[str, Any] = {"dropout": 0.0, "label_smoothing": 0.0}


@dataclass
class Golden:
    """How a golden checkpoint is made, beyond what all have in common; `saving` are options of `save_pretrained`."""

    config: type[VaswaniTransformerConfig]
    fields: dict[str, Any] = field(default_factory=dict)
    search: dict[str, Any] = field(default_factory=dict)
    algorithm: str = "wordpiece"
    dtype: torch.dtype = torch.float32
    saving: dict[str, Any] = field(default_factory=dict)


GOLDEN = {
    "transformer": Golden(
        VaswaniTransformerConfig,
        search={"num_beams": 4, "length_penalty": 0.6, "length_penalty_type": "gnmt", "max_source_relative_length": 50},
    ),
    # what adds weights or gives them another shape, byte pairs, bfloat16 and several files of weights
    "every-weight": Golden(
        VaswaniTransformerConfig,
        fields={
            "position_embedding": "learned",
            "max_position_embeddings": 16,
            "attention_bias": True,
            "attention_window": 2,
            "tie_word_embeddings": False,
            "d_k": 3,
            "d_v": 5,
        },
        search={"max_length": 15},
        algorithm="bpe",
        dtype=torch.bfloat16,
        saving={"max_shard_size": "8KB"},
    ),
    "nat": Golden(VaswaniNatConfig, search={"length_beam_size": 3}),
    "ctc": Golden(VaswaniCtcConfig),
    "dag": Golden(VaswaniDagConfig),
    "cmlm": Golden(
        VaswaniCmlmConfig, fields={"max_target_length": 12}, search={"num_iterations": 3, "length_beam_size": 2}
    ),
    "iterative-vae": Golden(VaswaniIterativeVaeConfig, fields={"decoder_layers": 2, "latent_dropout": 0.0}),
    "flowseq": Golden(VaswaniFlowSeqConfig, fields={"flow_steps": 1, "word_dropout": 0.0}),
}


def train(model: Any, batch: dict[str, Tensor]) -> None:
    """Let the model memorize the batch; a flow learns only its mode, which evaluation reads the words from."""
    has_flow = hasattr(model, "start_flow")
    if has_flow:
        model.eval().start_flow(**batch)
    model.train(not has_flow)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    model.eval()


def make(golden: Golden, folder: Path) -> None:
    """Train a model in float64, and publish it with its tokenizer into a folder."""
    torch.manual_seed(1)
    tokenizer = VaswaniTransformerTokenizer.train_from_iterator([*PAIRS, *PAIRS.values()], 300, golden.algorithm)
    fields = SIZES | NO_NOISE | golden.fields
    if golden.config is VaswaniCmlmConfig:
        tokenizer.add_special_tokens({"mask_token": "<mask>"})
        fields["mask_token_id"] = tokenizer.mask_token_id
    config = golden.config(vocab_size=len(tokenizer), **fields)
    model: Any = AutoModelForSeq2SeqLM.from_config(config).double()
    batch = tokenizer(list(PAIRS), text_target=list(PAIRS.values()), padding=True, return_tensors="pt")
    batch["labels"] = batch["labels"].masked_fill(batch["labels"] == tokenizer.pad_token_id, -100)
    train(model, dict(batch))
    model.generation_config = config.make_generation_config(**golden.search)
    model.to(golden.dtype).with_remote_code().save_pretrained(folder, **golden.saving)
    tokenizer.with_remote_code().save_pretrained(folder)
    for path in folder.glob("*.py"):
        path.unlink()


def least_probability(computed: dict[str, Tensor]) -> float:
    """Return the smallest probability that a token of the labels, a slot's best token or the likeliest length has."""
    labels, probabilities = computed["labels"], computed["logits"].softmax(-1)
    if "is_slot" in computed:
        return probabilities.amax(-1)[computed["is_slot"]].min().item()
    likely = [probabilities.gather(-1, labels.clamp(min=0)[..., None])[labels.ne(-100)].min()]
    if "length_logits" in computed:
        likely.append(computed["length_logits"].softmax(-1).amax(-1).min())
    return min(probability.item() for probability in likely)


@torch.no_grad()
def least_gap(model: Any, tokenizer: Any) -> float:
    """Return how far, in nats, the best step of lookahead is above the second, at least, at the vertices of paths."""
    batch = tokenizer(list(PAIRS), padding=True, return_tensors="pt")
    path = model.generate(**batch, return_dict_in_generate=True).path  # (B, U)
    source = model.read_source(model.encode(**batch)[0], batch["attention_mask"])
    mask = model.slot_mask(source)
    states = model.slot_states(source, mask)
    words = model.lm_head(states).log_softmax(-1).amax(-1)
    best, second = (model.transitions(states, mask) + words[:, None]).topk(2).values.unbind(-1)  # (B, U)
    is_step = path.ne(tokenizer.pad_token_id) & path.ne(tokenizer.eos_token_id)
    return (best - second)[is_step].min().item()


def write_expected(folder: Path) -> None:
    """Write what the saved model computes in float64; raise RuntimeError if rounding could change a search."""
    model, tokenizer = load(folder, torch.float64)
    if (translated := translations(model, tokenizer, list(PAIRS))) != list(PAIRS.values()):
        raise RuntimeError(f"{folder.name}: has not memorized its pairs; got {translated}. Train it longer.")
    if hasattr(model, "transitions"):  # several paths have the same words, so no transition need be probable
        if (gap := least_gap(model, tokenizer)) < GAP:
            raise RuntimeError(f"{folder.name}: too unsure; got a gap of {gap:.4f}. Train it longer.")
    elif (least := least_probability(numbers(model, tokenizer, PAIRS))) < MARGIN:
        raise RuntimeError(f"{folder.name}: too unsure; got a probability of {least:.2f}. Train it longer.")
    expected = {"targets": PAIRS, "tokens": {text: tokenizer(text)["input_ids"] for text in TEXTS}}
    text = json.dumps(expected, ensure_ascii=False, indent=1)
    (folder / "expected.json").write_text(text + "\n", encoding="utf-8")
    computed = numbers(model, tokenizer, first_pairs(expected))
    rounded = {name: value.float() if value.is_floating_point() else value for name, value in computed.items()}
    save_file(rounded, folder / "expected.safetensors")


def main() -> None:
    """Write the checkpoints that the folder of this version lacks."""
    for name, golden in GOLDEN.items():
        folder = FOLDER / __version__ / name
        if not folder.exists():
            make(golden, folder)
            write_expected(folder)
            print(f"{folder.relative_to(FOLDER)}: {sum(path.stat().st_size for path in folder.iterdir()):,d} bytes")


if __name__ == "__main__":
    main()
