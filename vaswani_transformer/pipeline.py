"""`pipeline("vaswani-translation")`: texts in, translations out, as the translation pipeline of Transformers 4 had it.

B texts of a batch, S source, T target, n translations of a text.
"""

import copy
import os
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from transformers.pipelines import Pipeline

from .tokenizer import text_encoder

TASK = "vaswani-translation"


class VaswaniTransformerTranslationPipeline(Pipeline):
    """Translates texts as `model.generate()` does, by the model's own generation config.

    `pipeline("vaswani-translation", model="...")` takes a text, a list of texts, or a generator, an iterator or a
    `torch.utils.data.Dataset` of texts. A text gives a list of one dictionary `{"translation_text": ...}`, and a list
    of texts a list of dictionaries; a generator, an iterator or a data set gives an iterator over what each of its
    texts alone gives. Where `num_return_sequences` asks for n translations, a text of a list, too, gives a list of n
    dictionaries, the best first.

    On a CPU a copy that `prepare_for_inference` made is faster: give it as the `model`, with its `tokenizer`.

    With `batch_size` a list is batched by length, the longest texts first; the results keep the order of the list. A
    text of white space alone has the empty translation.

    Args, of the pipeline or of a call:
        clean_up_tokenization_spaces: whether to take out spaces before punctuation; None: as the tokenizer says.
        truncation: whether to cut a text at the tokenizer's `model_max_length`, or how, as the tokenizer names it.
        **generate_kwargs: arguments of `generate()`, such as `num_beams=1` or `max_new_tokens=100`, which win over the
            model's generation config. With `return_dict_in_generate` and `output_scores` a translation that beam search
            found has its `score` beside it.

    Raises:
        TypeError: what should be a text is not a str.
    """

    _load_tokenizer = True
    # Pipelines that are said to generate lay defaults of their own over the model's settings, or rebuild them.
    _pipeline_calls_generate = False

    def _sanitize_parameters(
        self,
        clean_up_tokenization_spaces: bool | None = None,
        truncation: bool | str | None = None,
        **generate_kwargs: Any,
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        before = {} if truncation is None else {"truncation": truncation}
        clean_up = clean_up_tokenization_spaces
        after = {} if clean_up is None else {"clean_up_tokenization_spaces": clean_up}
        return before, generate_kwargs, after

    def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(inputs, Iterator):
            return super().__call__((text for text in inputs), *args, **kwargs)
        if isinstance(inputs, str) or not isinstance(inputs, Sequence):
            return super().__call__(inputs, *args, **kwargs)
        texts = [text_of(text) for text in inputs]
        if not texts:
            return []
        lengths = [len(tokens) for tokens in cast(Any, text_encoder(self.tokenizer))(texts, verbose=False)["input_ids"]]
        order = sorted(range(len(texts)), key=lengths.__getitem__, reverse=True)
        found = dict(zip(order, super().__call__([texts[index] for index in order], *args, **kwargs), strict=True))
        results = [found[index] for index in range(len(texts))]
        return [result[0] for result in results] if all(len(result) == 1 for result in results) else results

    def preprocess(self, input_: Any, **encode_kwargs: Any) -> dict[str, Any]:
        """The tokens of a text and their mask (1, S), and whether there is anything to translate (1)."""
        text = text_of(input_)
        settings = {"return_attention_mask": True, "verbose": False, "return_tensors": "pt"} | encode_kwargs
        encoded = cast(Any, text_encoder(self.tokenizer))(text, **settings)
        tokens, mask = encoded["input_ids"].long(), encoded["attention_mask"].long()  # (1, S)
        if tokens.shape[1] == 0:  # an empty text of a tokenizer that ends none: a row that is not looked at
            tokens, mask = torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1, dtype=torch.long)
        return {"input_ids": tokens, "attention_mask": mask, "has_text": torch.tensor([bool(text.strip())])}

    def _forward(self, input_tensors: dict[str, Any], **generate_kwargs: Any) -> Any:
        """The translations' tokens (B, n, T), and their scores (B, n) or None."""
        has_text = input_tensors.pop("has_text")  # (B,)
        found = cast(Any, self.model).generate(**input_tensors, **generate_kwargs)
        tokens = found if isinstance(found, torch.Tensor) else found.sequences  # (n B, T)
        scores = None if isinstance(found, torch.Tensor) else found.get("sequences_scores")  # (n B,)
        size = has_text.shape[0]
        return {
            "output_ids": tokens.view(size, -1, tokens.shape[1]),  # (B, n, T)
            "scores": None if scores is None else scores.view(size, -1),  # (B, n)
            "has_text": has_text,
        }

    def postprocess(self, model_outputs: Any, **decode_kwargs: Any) -> list[dict[str, Any]]:
        """The translations of a text as text, the best first."""
        decode = cast(Any, self.tokenizer).batch_decode
        texts = decode(model_outputs["output_ids"][0], skip_special_tokens=True, **decode_kwargs)
        records = [{"translation_text": text if model_outputs["has_text"] else ""} for text in texts]
        if model_outputs["scores"] is not None:
            for record, score in zip(records, model_outputs["scores"][0].tolist(), strict=True):
                record["score"] = score
        return records

    def save_pretrained(self, save_directory: str | os.PathLike, **kwargs: Any) -> None:
        """Save the model and its tokenizer with the code that loads them, and this pipeline, without the package."""
        published = copy.copy(self)
        for name in ("model", "tokenizer"):
            part = getattr(self, name)
            if hasattr(part, "with_remote_code"):
                setattr(published, name, part.with_remote_code())
        super(VaswaniTransformerTranslationPipeline, published).save_pretrained(save_directory, **kwargs)


def text_of(text: Any) -> str:
    """`text`, if it is one."""
    if not isinstance(text, str):
        raise TypeError(f"{text!r} is of type {type(text).__name__}, not a text to translate; give a str.")
    return text


PUBLISHED_PIPELINES = {
    TASK: {
        "impl": f"pipeline.{VaswaniTransformerTranslationPipeline.__name__}",
        "pt": ["AutoModelForSeq2SeqLM"],
        "type": "text",
    }
}
"""What the config.json of a published model says of the pipeline."""

__all__ = ["PUBLISHED_PIPELINES", "TASK", "VaswaniTransformerTranslationPipeline"]
