"""Translation pipeline `pipeline("vaswani-translation")`, like the one of Transformers 4.

B batch, S source, T target, n translations per text.
"""

import copy
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers.pipelines import Pipeline

from .settings import default_limit
from .tokenizer import check_text, check_vocabulary, is_of_this_package, source_encoder

TASK = "vaswani-translation"


class VaswaniTransformerTranslationPipeline(Pipeline):
    """Pipeline that translates texts with `model.generate()` and the model's generation config.

    `pipeline("vaswani-translation", model="...")` supports three forms of input:

    - For a text it returns a list of one dictionary `{"translation_text": ...}`.
    - For a list of texts it returns a list of dictionaries.
    - For a generator, an iterator or a `torch.utils.data.Dataset` it returns an iterator over the texts' lists.

    With `num_return_sequences=n` the result of every text is a list of n dictionaries, best first.

    On a CPU a prepared model is faster: pass the result of `prepare_for_inference` as `model`, with its `tokenizer`.

    With `batch_size` a list is batched by length, and the results keep the order of the list. The translation of a text
    of only white space is empty.

    Args, of the pipeline or of a call:
        clean_up_tokenization_spaces: remove spaces before punctuation; None for the tokenizer's setting.
        truncation: truncate texts at the tokenizer's `model_max_length`; a bool, or a strategy of the tokenizer.
        **generate_kwargs: arguments of `generate()`, such as `num_beams=1` or `max_new_tokens=100`, which override the
            generation config. Without a length limit, targets of this package's models are at most 50 tokens longer
            than their sources. With `return_dict_in_generate` and `output_scores` beam search adds `score`.
    """

    model: Any
    tokenizer: Any

    _load_tokenizer = True
    # If True, the pipeline's defaults override the model's settings.
    _pipeline_calls_generate = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.check_vocabulary()

    def check_vocabulary(self) -> None:
        """Raise ValueError if the tokenizer does not fit a model of this package."""
        if is_of_this_package(self.model):
            check_vocabulary(self.model, self.tokenizer)

    def _sanitize_parameters(
        self,
        clean_up_tokenization_spaces: bool | None = None,
        truncation: bool | str | None = None,
        **generate_kwargs: Any,
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        preprocess_kwargs = {}
        if truncation is not None:
            preprocess_kwargs["truncation"] = truncation
        postprocess_kwargs = {}
        if clean_up_tokenization_spaces is not None:
            postprocess_kwargs["clean_up_tokenization_spaces"] = clean_up_tokenization_spaces
        return preprocess_kwargs, generate_kwargs, postprocess_kwargs

    def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.check_vocabulary()  # either may have changed
        if isinstance(inputs, Iterator):
            return super().__call__((text for text in inputs), *args, **kwargs)
        if isinstance(inputs, str) or not isinstance(inputs, Sequence):
            return super().__call__(inputs, *args, **kwargs)
        texts = [check_text(text, f"Text {index}") for index, text in enumerate(inputs)]
        if not texts:
            return []

        # Texts of similar length share a batch, the longest first.
        encoded = source_encoder(self.tokenizer)(texts, verbose=False)
        lengths = [len(tokens) for tokens in encoded["input_ids"]]
        order = sorted(range(len(texts)), key=lengths.__getitem__, reverse=True)
        sorted_results = super().__call__([texts[index] for index in order], *args, **kwargs)
        by_index = dict(zip(order, sorted_results, strict=True))

        # Back in the order of the texts; a single translation needs no list around it.
        results = [by_index[index] for index in range(len(texts))]
        if all(len(result) == 1 for result in results):
            return [result[0] for result in results]
        return results

    def preprocess(self, input_: Any, **encode_kwargs: Any) -> dict[str, Any]:
        """Return a text's tokens and mask (1, S), and a flag (1,): False for a text of only white space."""
        text = check_text(input_, "The text")
        settings = {"return_attention_mask": True, "verbose": False, "return_tensors": "pt", **encode_kwargs}
        encoded = source_encoder(self.tokenizer)(text, **settings)
        return {
            "input_ids": encoded["input_ids"],
            "attention_mask": encoded["attention_mask"],
            "has_text": torch.tensor([bool(text.strip())]),
        }

    def _forward(self, input_tensors: dict[str, Any], **generate_kwargs: Any) -> Any:
        """Return the tokens (B, n, T) of the translations, and their scores, (B, n) or None."""
        has_text = input_tensors.pop("has_text")  # (B,)
        generate_kwargs.update(default_limit(self.model, **generate_kwargs))
        output = self.model.generate(**input_tensors, **generate_kwargs)
        if isinstance(output, torch.Tensor):
            tokens = output  # (n B, T)
            scores = None
        else:
            tokens = output.sequences
            scores = output.get("sequences_scores")  # (n B,)
        size = has_text.shape[0]
        return {
            "output_ids": tokens.view(size, -1, tokens.shape[1]),  # (B, n, T)
            "scores": None if scores is None else scores.view(size, -1),  # (B, n)
            "has_text": has_text,
        }

    def postprocess(self, model_outputs: Any, **decode_kwargs: Any) -> list[dict[str, Any]]:
        """Return the translations of one text as dictionaries, best first."""
        # Transformers ignores this setting for byte-pair encoding, so it is off there and applied here.
        cleans_up = decode_kwargs.get("clean_up_tokenization_spaces")
        decode_kwargs["clean_up_tokenization_spaces"] = None if cleans_up is None else False
        texts = self.tokenizer.batch_decode(model_outputs["output_ids"][0], skip_special_tokens=True, **decode_kwargs)
        if cleans_up:
            texts = [self.tokenizer.clean_up_tokenization(text) for text in texts]
        records = [{"translation_text": text if model_outputs["has_text"] else ""} for text in texts]
        if model_outputs["scores"] is not None:
            for record, score in zip(records, model_outputs["scores"][0].tolist(), strict=True):
                record["score"] = score
        return records

    def save_pretrained(self, save_directory: str | os.PathLike, **kwargs: Any) -> None:
        """Save model, tokenizer and pipeline with their code, so that they load without the package."""
        published = copy.copy(self)
        for name in ("model", "tokenizer"):
            component = getattr(self, name)
            if is_of_this_package(component):
                setattr(published, name, component.with_remote_code())
        super(VaswaniTransformerTranslationPipeline, published).save_pretrained(save_directory, **kwargs)


PUBLISHED_PIPELINES = {
    TASK: {
        "impl": f"pipeline.{VaswaniTransformerTranslationPipeline.__name__}",
        "pt": ["AutoModelForSeq2SeqLM"],
        "type": "text",
    }
}
"""Pipeline entry in the config.json of a published model."""
