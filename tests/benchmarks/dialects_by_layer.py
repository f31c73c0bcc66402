"""Measure how IterativeVAE decides between two right answers, layer by layer, on the language of `tests.dialects`.

`python -m tests.benchmarks.dialects_by_layer --kl_scale 0.01 1 --seed 1 2` trains a model for each and prints, as lines
of JSON, the share of held-out sentences right after each layer, without and with noise, and the share of right words.
"""

import json
import random

import torch

from tests.dialects import (
    HELD_OUT,
    STEPS,
    answers_by_layer,
    draw_sources,
    share_of_answers,
    share_of_words,
    train_iterative_vae,
)
from tests.measuring import add_tiny, make_parser


def main() -> None:
    parser = make_parser("tests.benchmarks.dialects_by_layer", __doc__)
    parser.add_argument("--steps", type=int, default=STEPS, help="of training")
    parser.add_argument("--kl_scale", type=float, nargs="+", default=[1.0], help="kappa after a third of training")
    parser.add_argument("--seed", type=int, nargs="+", default=[1], help="of the weights, the dropout and the noise")
    add_tiny(parser, steps=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    sources = draw_sources(random.Random(2), HELD_OUT)
    for kl_scale in options.kl_scale:
        for seed in options.seed:
            torch.manual_seed(seed)
            model = train_iterative_vae(kl_scale, options.steps)
            plain = answers_by_layer(model, sources)
            shares = {
                "kl_scale": kl_scale,
                "seed": seed,
                "right": [share_of_answers(sources, answers) for answers in plain],
                "right_with_noise": [
                    share_of_answers(sources, answers) for answers in answers_by_layer(model, sources, do_sample=True)
                ],
                "right_words": [share_of_words(sources, answers) for answers in plain],
            }
            print(json.dumps(shares), flush=True)


if __name__ == "__main__":
    main()
