"""Golden checkpoints, and what a model computes that later versions must compute too.

Each folder is named by the version that made it. B batch, T target, V vocabulary.
"""

import itertools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM, PreTrainedTokenizerBase

from tests.models import load_tokenizer

FOLDER = Path(__file__).parent
# No text of them is a sentence of the models; byte pairs spell all of it, word pieces lack some characters.
TEXTS = ("", "Hello  World", "the book</s>love", "¿qué? naïve's (ok).", "日本 \U0001f600\n")


def load(folder: Path, dtype: torch.dtype) -> tuple[Any, PreTrainedTokenizerBase]:
    """Return a golden model in evaluation mode and its tokenizer, by their Auto classes."""
    model, info = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval(), load_tokenizer(folder)


def translations(model: Any, tokenizer: PreTrainedTokenizerBase, sources: list[str]) -> list[str]:
    """Return what the model translates the sources to, by its saved search."""
    batch = tokenizer(sources, padding=True, return_tensors="pt")
    return tokenizer.batch_decode(model.generate(**batch), skip_special_tokens=True)


@torch.no_grad()
def numbers(model: Any, tokenizer: PreTrainedTokenizerBase, pairs: dict[str, str]) -> dict[str, Tensor]:
    """Return what the model computes for sources and their targets, in evaluation mode.

    These are the labels (B, T) with -100 at padding, the logits (B, T, V) and the loss, where the model predicts
    lengths their logits, where it has slots their mask, where it has transitions the scores (B, T) of the tokens that
    it generates, and where it has a posterior the divergence of its mean from the prior in training mode.
    """
    batch = tokenizer(list(pairs), text_target=list(pairs.values()), padding=True, return_tensors="pt")
    batch["labels"] = batch["labels"].masked_fill(batch["labels"] == tokenizer.pad_token_id, -100)
    outputs = model(**batch)
    computed = {"labels": batch["labels"], "logits": outputs.logits, "loss": outputs.loss}
    if "length_logits" in outputs:
        computed["length_logits"] = outputs.length_logits
    if hasattr(model, "slot_mask"):
        source = model.read_source(outputs.encoder_last_hidden_state, batch["attention_mask"])
        computed["is_slot"] = model.slot_mask(source).bool()
    if hasattr(model, "transitions"):
        source = {name: batch[name] for name in ("input_ids", "attention_mask")}
        computed["token_scores"] = model.generate(**source, return_dict_in_generate=True).token_scores
    if hasattr(model, "posterior"):
        shape = batch["labels"].shape
        draws = {"word_draws": torch.ones(shape), "latent_noise": torch.zeros(*shape, model.config.d_model)}
        computed["kl_loss"] = model.train()(**batch, **draws).kl_loss
        model.eval()
    return computed


def first_pairs(expected: dict[str, Any]) -> dict[str, str]:
    """Return the two pairs whose numbers are saved."""
    return dict(itertools.islice(expected["targets"].items(), 2))
