"""Print the digest of the shipped task's sentences: `python -m tests.training.toy_task.sentence_digest SEED`."""

import hashlib
import itertools
import sys

from training.toy_task.grammar import generate_sentences


def digest_of_sentences(seed: int) -> str:
    """Return the SHA-256 of the first 3,000 sentences, in both languages."""
    texts = (f"{sentence.en} | {sentence.es}\n" for sentence in itertools.islice(generate_sentences(seed), 3_000))
    return hashlib.sha256("".join(texts).encode()).hexdigest()


if __name__ == "__main__":
    print(digest_of_sentences(int(sys.argv[1])))
