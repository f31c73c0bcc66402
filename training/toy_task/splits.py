"""Training, validation and test sentences, separated by the word combinations in them.

Validation and test have unseen combinations of known words. A digest reserves some collocations, which are pairs of
adjective and noun ("red house") or of verb and object ("buy house"), for either split. A sentence with a reserved
collocation belongs only to that split. So training sees every word but no reserved collocation, and no sentence is in
two splits.
"""

import hashlib

from datasets import Dataset, DatasetDict, Features, Translation

from training.toy_task.grammar import Sentence, generate_sentences
from training.toy_task.phrases import Collocation

MAX_SPLIT_SIZE = 100_000  # sentences; the grammar has far more, but a split as rare as the test set fills slowly


def reserved_split(collocation: Collocation) -> str:
    """Return the split that a collocation is reserved for: one in ten for test, one in ten for validation."""
    digest = hashlib.sha256(" ".join(collocation).encode()).digest()
    return {0: "test", 1: "validation"}.get(digest[0] % 10, "train")


def assign_split(sentence: Sentence) -> str | None:
    """Return the split that the sentence's collocations are reserved for; None if they are reserved for two."""
    reserved = {reserved_split(collocation) for collocation in sentence.collocations} - {"train"}
    if len(reserved) > 1:
        return None
    return reserved.pop() if reserved else "train"


def sample_splits(sizes: dict[str, int], seed: int) -> dict[str, dict[str, str]]:
    """Return the first distinct sentences of each split as a dict from English to Spanish."""
    splits: dict[str, dict[str, str]] = {split: {} for split in sizes}
    unfilled, sentences = set(sizes), generate_sentences(seed)
    while unfilled:
        sentence = next(sentences)
        split = assign_split(sentence)
        if split in unfilled:
            splits[split][sentence.en] = sentence.es
            if len(splits[split]) == sizes[split]:
                unfilled.remove(split)
    return splits


def make_splits(
    train_size: int = 60_000, validation_size: int = 500, test_size: int = 1_000, seed: int = 2017
) -> DatasetDict:
    """Return distinct sentence pairs in the schema of translation data sets: `{"translation": {"en": ..., "es": ...}}`.

    A smaller split is the beginning of a larger one with the same seed.
    """
    sizes = {"train": train_size, "validation": validation_size, "test": test_size}
    for split, size in sizes.items():
        if not 1 <= size <= MAX_SPLIT_SIZE:
            raise ValueError(
                f"{split}_size: outside the range that the shipped task fills in reasonable time; got {size}, expected "
                f"1 to {MAX_SPLIT_SIZE}. Choose a size in this range, or train on data of your own."
            )
    features = Features({"translation": Translation(languages=["en", "es"])})
    return DatasetDict(
        {
            split: Dataset.from_list([{"translation": {"en": en, "es": es}} for en, es in pairs.items()], features)
            for split, pairs in sample_splits(sizes, seed).items()
        }
    )
