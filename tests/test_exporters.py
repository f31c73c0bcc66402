"""Transformers' exporters turn the model into encoder and decoder steps that decode without it.

B batch, T target, V vocabulary.
"""

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache

from tests.exports import exported_by_transformers, opened, step_logits
from tests.helpers import FLOAT32, PAIRS, model_of_pairs, random_tokens, source_batch, tiny_model
from vaswani_transformer.pretrained import CACHE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning"),
]


def test_onnx_runtime_computes_the_steps_of_a_model_with_other_settings() -> None:
    """Exported on two sentences, for other numbers and lengths; the search of the paper has four rows per source."""
    model = tiny_model(position_embedding="learned", attention_bias=True, d_v=5, tie_word_embeddings=False)
    model.use_paper_decoding()
    graphs = opened(exported_by_transformers(model, source_batch([5, 3]), "onnx"))
    for side, lengths in [("right", [4, 9, 1]), ("left", [2, 7]), ("right", [6])]:
        batch, targets = source_batch(lengths, side), random_tokens(len(lengths), 8)
        expected = model(**batch, decoder_input_ids=targets).logits
        torch.testing.assert_close(step_logits(graphs, batch, targets), expected, **FLOAT32)


def test_torch_export_programs_translate_as_generate_does() -> None:
    """They have the model's inputs and outputs: the complete encoder output, and a cache."""
    model, tokenizer = model_of_pairs()
    few, batch = (dict(tokenizer(texts, padding=True, return_tensors="pt")) for texts in (list(PAIRS)[:2], list(PAIRS)))
    encoder, first, later = (program.module() for program in exported_by_transformers(model, few, "dynamo").values())
    known = {"attention_mask": batch["attention_mask"], "encoder_outputs": encoder(**batch)}
    cache = EncoderDecoderCache(DynamicCache(config=model.config), DynamicCache(config=model.config))
    expected = model.generate(**batch, num_beams=1, max_new_tokens=20)
    outputs = first(**known, decoder_input_ids=expected[:, :1], **{CACHE: cache})
    for position in range(1, expected.shape[1]):
        token = expected[:, position : position + 1]  # (B, 1)
        assert torch.equal(outputs.logits[:, -1:].argmax(-1)[token != 1], token[token != 1])
        outputs = later(**known, decoder_input_ids=token, **{CACHE: outputs[CACHE]})
