"""Measure how FlowSeq decides between two right answers, on the language of `tests.dialects`.

`python -m tests.benchmarks.dialects_of_flowseq --steps 1200 --seed 1` trains a model, a third of the steps without the
prior, and prints as a line of JSON the shares of held-out sentences and of words that are right: at temperature 0, and
of four latents of a temperature the ones that importance weights rank first.
"""

import json
import random
from typing import Any

import torch

from tests.dialects import (
    HELD_OUT,
    STEPS,
    answers_of,
    draw_sources,
    encode,
    share_of_answers,
    share_of_words,
    train_flowseq,
)
from tests.measuring import add_tiny, make_parser


def main() -> None:
    parser = make_parser("tests.benchmarks.dialects_of_flowseq", __doc__)
    parser.add_argument("--steps", type=int, default=STEPS, help="of training")
    parser.add_argument("--seed", type=int, default=1, help="of the weights and the latents")
    parser.add_argument("--held_out", type=int, default=HELD_OUT, help="sentences to translate")
    add_tiny(parser, steps=3, held_out=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    model: Any = train_flowseq(options.steps)
    sources = draw_sources(random.Random(2), options.held_out)
    searches: dict[str, dict[str, Any]] = {"temperature 0": {}}
    for temperature in (0.5, 1.0):
        settings = {"latent_temperature": temperature, "num_latent_samples": 4}
        searches[f"4 at temperature {temperature:g}"] = settings
    shares: dict[str, Any] = {"steps": options.steps, "seed": options.seed}
    for name, settings in searches.items():
        answers = answers_of(model.generate(**encode(sources), **settings))
        shares[name] = {"right": share_of_answers(sources, answers), "right_words": share_of_words(sources, answers)}
    print(json.dumps(shares), flush=True)


if __name__ == "__main__":
    main()
