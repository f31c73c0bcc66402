"""Check what a user of the wheel needs; CI runs it outside the checkout with only the wheel installed."""

import subprocess
import tempfile
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedTokenizerBase, pipeline

import vaswani_transformer
from vaswani_transformer import VaswaniTransformerConfig, VaswaniTransformerTokenizer
from vaswani_transformer.figures.page import attention_page


def main() -> None:
    """Create a model, save it, load it by its Auto classes, translate with it, and import all commands."""
    assert not (Path(vaswani_transformer.__file__).parent.parent / "pyproject.toml").exists(), (
        "not the installed package"
    )
    torch.manual_seed(0)
    texts = ["the dogs sleep.", "los perros duermen."]
    tokenizer = VaswaniTransformerTokenizer.train_from_iterator(texts, vocab_size=280)
    sizes: dict[str, Any] = {"d_model": 32, "d_ff": 64, "num_heads": 4, "encoder_layers": 2, "decoder_layers": 2}
    config = VaswaniTransformerConfig(vocab_size=len(tokenizer), **sizes)
    model = AutoModelForSeq2SeqLM.from_config(config)
    with tempfile.TemporaryDirectory() as folder:
        model.use_paper_decoding()
        model.generation_config.max_source_relative_length = 2
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        translator = pipeline("vaswani-translation", model=folder)
        assert isinstance(translator(texts[0])[0]["translation_text"], str)
        loaded = AutoModelForSeq2SeqLM.from_pretrained(folder)
        page = attention_page(
            loaded, cast(PreTrainedTokenizerBase, AutoTokenizer.from_pretrained(folder)), texts[0], texts[1]
        )
        assert page.startswith("<!doctype html>")
        command = ["vaswani-translate", folder, "--dtype=int8", "--device=cpu"]
        lines = subprocess.run(command, input="the dogs sleep.\n\n", capture_output=True, text=True, check=True).stdout
        assert lines.count("\n") == 2
    for command in entry_points(group="console_scripts"):
        if command.name.startswith("vaswani-"):
            command.load()


if __name__ == "__main__":
    main()
