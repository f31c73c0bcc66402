"""Compute exactly what a latent with a hint, and revealed words, are worth on a language whose words share one choice.

    python -m bench.latent_price

A sentence has T words. All of them share a fair coin, and each also makes a private choice of M, so there are V = 2 M
words. A model that predicts words independently pays T (ln 2 + ln M) nats a sentence, and no model less than
ln 2 + T ln M. The gain of a latent is the first number minus what the ideal decoder pays with it: the
reconstruction R, and the weighted divergence w K.
"""

import math

from bench.measuring import make_parser, report

STRENGTHS = [step / 20 for step in range(1, 241)]  # of the hint, in nats
FIRST_STRENGTH = math.log(2)  # softplus(0), where training begins
LANGUAGES = [(words, choices) for words in (3, 6) for choices in (1, 10, 200)]


def hint_costs(words: int, choices: int, strength: float) -> tuple[float, float]:
    """Return reconstruction R and divergence K of a sentence in nats, with a hint of b nats at each word.

    The prior of a latent is uniform, and its posterior softmax(b onehot(y)).
    """
    vocabulary = 2 * choices
    boost = math.exp(strength)
    total = boost + vocabulary - 1
    divergence = math.log(vocabulary / total) + boost / total * strength

    # how much more probable a latent of the right side of the coin is than one of the wrong side
    evidence = (boost + choices - 1) / choices
    is_right = (boost + choices - 1) / total

    reconstruction = 0.0
    for others in range(words):  # the number of other words whose latents have the right side
        weight = math.comb(words - 1, others) * is_right**others * (1 - is_right) ** (words - 1 - others)
        with_own = 1 / (1 + evidence ** (words - 2 * (others + 1)))  # p(coin | latents) if its own latent is right
        without_own = 1 / (1 + evidence ** (words - 2 * others))
        cases = [
            (boost / total, with_own * boost / (boost + choices - 1)),  # the latent is the word
            ((choices - 1) / total, with_own / (boost + choices - 1)),  # the right side, a different choice
            (choices / total, without_own / choices),  # the wrong side
        ]
        reconstruction -= weight * sum(share * math.log(probability) for share, probability in cases if share)
    return words * reconstruction, words * divergence


def hint_gain(words: int, choices: int, strength: float, weight: float) -> float:
    """Return the nats that a hint saves in a sentence, given the weight of its divergence."""
    reconstruction, divergence = hint_costs(words, choices, strength)
    return words * math.log(2 * choices) - reconstruction - weight * divergence


def revealed_gain(words: int, share: float) -> float:
    """Return the gain if each word is revealed with a probability: a hidden word learns the coin from any revealed one.

    Revealed words are paid for as without a latent, so private choices change nothing.
    """
    hidden = 1 - share
    return words * hidden * (1 - hidden ** (words - 1)) * math.log(2)


def gains(words: int, choices: int) -> dict[str, float]:
    """Return the possible gain of a language, and those of hints and of revealed words, in nats a sentence."""
    hints = {w: max(hint_gain(words, choices, strength, w) for strength in STRENGTHS) for w in (1, 2)}
    return {
        "possible": (words - 1) * math.log(2),
        "hint, w = 1": max(0.0, hints[1]),
        "hint, w = 2": max(0.0, hints[2]),
        "hint at its start, w = 1": hint_gain(words, choices, FIRST_STRENGTH, 1),
        "revealed words": max(revealed_gain(words, percent / 100) for percent in range(101)),
    }


def main(arguments: list[str] | None = None) -> None:
    """Print the gains for languages with few and many private choices."""
    options = make_parser("latent_price", __doc__, {}).parse_args(arguments)
    rows = [{"words": words, "choices": choices, **gains(words, choices)} for words, choices in LANGUAGES]
    report(rows, options)


if __name__ == "__main__":
    main()
