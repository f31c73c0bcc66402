"""Alignment error rate of each decoder layer's cross-attention: `python -m bench.alignments MODEL FILE`.

FILE has JSON Lines with `source`, `target` and `alignment`, made by hand: `1-2` is a sure link of the source word 1 and
the target word 2, counted from 0, and `1p2` a possible one. The model reads each target, and words are aligned as
`vaswani-translate --details` does. With A links of the model, S sure links, and P sure or possible ones, the rate is
1 - (|A and S| + |A and P|) / (|A| + |S|) (Och and Ney 2003).
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

import torch

from bench.measuring import Row, make_parser, report
from vaswani_transformer.support.loading import load_model, load_tokenizer
from vaswani_transformer.tokenizer import source_encoder, text_encoder
from vaswani_transformer.translation.details import forced_pass, make_details, words_of_source
from vaswani_transformer.translation.targets import decoder_inputs

Links = set[tuple[int, int]]


def read_links(text: str) -> tuple[Links, Links]:
    """Return the sure links, and all links, of an alignment such as `0-0 1p2`."""
    links = {(int(source), int(target)): sign for source, sign, target in re.findall(r"(\d+)([-p])(\d+)", text)}
    return {link for link, sign in links.items() if sign == "-"}, set(links)


def model_links(model: Any, tokenizer: Any, source: str, target: str, layer: int) -> Links:
    """Return the links of a layer for a pair."""
    batch = source_encoder(tokenizer)([source], return_tensors="pt")
    labels = text_encoder(tokenizer)(text_target=[target], return_tensors="pt")["input_ids"]  # (1, T)
    tokens, mask = batch["input_ids"], torch.ones_like(batch["input_ids"])
    inputs = decoder_inputs(model, labels, tokenizer.pad_token_id)
    scores, weights = forced_pass(model, tokens, mask, labels, inputs, layer)
    words = words_of_source(tokenizer, source, tokens[0].tolist())
    return set(make_details(tokenizer, words, labels[0].tolist(), scores[0], weights[0]).alignment)


def layer_rows(options: argparse.Namespace) -> list[Row]:
    """Return the error rate of each layer."""
    model = load_model(str(options.model), dtype="float32").eval()
    tokenizer = load_tokenizer(str(options.model))
    pairs = [json.loads(line) for line in options.file.read_text(encoding="utf-8").splitlines()]
    rows: list[Row] = []
    for layer in range(1, model.config.decoder_layers + 1):
        correct = total = 0
        for pair in pairs:
            sure, possible = read_links(pair["alignment"])
            links = model_links(model, tokenizer, pair["source"], pair["target"], layer)
            correct += len(links & sure) + len(links & possible)
            total += len(links) + len(sure)
        rows.append({"layer": layer, "alignment error rate": 1 - correct / total})
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser("alignments", __doc__, {})
    parser.add_argument("model", metavar="MODEL", help="the folder of an autoregressive model")
    parser.add_argument("file", type=Path, metavar="FILE", help="pairs with alignments by hand")
    options = parser.parse_args(arguments)
    report(layer_rows(options), options)


if __name__ == "__main__":
    main()
