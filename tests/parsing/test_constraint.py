"""The search writes only well-formed trees: the processor against all of them, and in searches of several models."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformers import BartConfig, BartForConditionalGeneration, PreTrainedModel

from tests.models import tiny_model, tiny_nat
from vaswani_transformer import (
    VaswaniTransformerForConditionalGeneration,
    VaswaniTransformerTokenizer,
    prepare_for_inference,
)
from vaswani_transformer.parsing import delinearize, parse
from vaswani_transformer.parsing.constraint import TreeTokens, WellFormedTrees, tree_constraint

LABELS = ["(A", "(B", ")A", ")B", "()t", "()u", "(C", ")D"]  # C is never closed, and D never opened
TOKENIZER = VaswaniTransformerTokenizer.train_from_iterator(["a b c"], vocab_size=262)
TOKENIZER.add_tokens(LABELS)
IDS = {text: TOKENIZER.get_vocab()[text] for text in [*LABELS, "</s>", "<s>", "<pad>"]}
TOKENS = cast(TreeTokens, TreeTokens.of(TOKENIZER, len(TOKENIZER)))


def forests(words: int, length: int) -> Iterator[tuple[str, ...]]:
    """Yield every sequence of nodes over that many words of at most `length` tokens, by the grammar of linear trees."""
    if words == 0:
        yield ()
        return
    for tag, rest in itertools.product(("()t", "()u"), forests(words - 1, length - 1) if length else ()):
        yield (tag, *rest)
    for label in "AB":
        for inner in range(1, words + 1):
            for body in forests(inner, length - 2) if length > 2 else ():
                for rest in forests(words - inner, length - 2 - len(body)):
                    yield (f"({label}", *body, f"){label}", *rest)


def permitted(words: list[int], limits: list[int], prefixes: list[tuple[str, ...]]) -> list[set[str]]:
    """Return the tokens that the processor leaves after each of equally long targets, one a sentence."""
    processor = WellFormedTrees(TOKENS, words, torch.tensor(limits))
    rows = torch.tensor([[IDS["<s>"], *(IDS[token] for token in prefix)] for prefix in prefixes])
    scores = processor(rows, torch.zeros(len(rows), len(TOKENIZER)))
    by_id = {index: text for text, index in IDS.items()}
    return [{by_id.get(index, "other") for index in (row == 0).nonzero()[:, 0].tolist()} for row in scores]


@pytest.mark.parametrize("words", [1, 2, 3])
def test_permitted_tokens_are_those_that_continue_a_well_formed_tree(words: int) -> None:
    """Brute force: after every beginning of a tree, exactly the next tokens of the trees within the limit."""
    limit = words + 5
    trees = [(*tree, "</s>") for tree in forests(words, limit - 1)]
    assert all(not delinearize("".join(tree[:-1]), ["a"] * words).is_repaired for tree in trees)
    continuations: dict[tuple[str, ...], set[str]] = {}
    for tree in trees:
        for length in range(len(tree)):
            continuations.setdefault(tree[:length], set()).add(tree[length])
    for _, group in itertools.groupby(sorted(continuations, key=len), len):
        prefixes = list(group)
        actual = permitted([words] * len(prefixes), [limit] * len(prefixes), prefixes)
        assert actual == [continuations[prefix] for prefix in prefixes]


def test_sentence_beyond_its_limit_gets_the_places_that_fit() -> None:
    assert permitted([9], [3], [("()t", "()u")]) == [{"</s>"}]


def test_forced_token_stays() -> None:
    """As Transformers forces the first token of BART."""
    scores = torch.full((1, len(TOKENIZER)), -torch.inf)
    scores[0, IDS["<s>"]] = 0
    processor = WellFormedTrees(TOKENS, [1], torch.tensor([9]))
    torch.testing.assert_close(processor(torch.tensor([[2]]), scores), scores)


def bart() -> PreTrainedModel:
    sides = {"layers": 1, "ffn_dim": 16, "attention_heads": 2}
    sizes: dict[str, Any] = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in sides.items()}
    special: dict[str, Any] = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
    config = BartConfig(vocab_size=len(TOKENIZER), d_model=16, **sizes, **special)
    model = BartForConditionalGeneration(config).eval()
    model.generation_config.forced_bos_token_id = 0
    return model


def own() -> VaswaniTransformerForConditionalGeneration:
    """Return an untrained model with the search of the paper."""
    model = tiny_model(vocab_size=len(TOKENIZER))
    model.use_paper_decoding()
    return model


@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize("make", [own, lambda: prepare_for_inference(own()), bart], ids=["own", "prepared", "BART"])
def test_untrained_model_writes_only_trees(make: Callable[[], PreTrainedModel], beams: int) -> None:
    sentences = [["a"], ["b", "c", "a", "b"], ["c", "c"], ["a", "b", "c", "a", "b", "c", "a"]]
    limit = {"max_new_tokens": 30} if make is bart else {}
    parsed = list(parse(make(), TOKENIZER, sentences, num_beams=beams, **limit))
    assert [sentence.tree.words for sentence in parsed] == sentences
    assert not any(sentence.is_repaired for sentence in parsed)


@pytest.mark.parametrize("beams", [1, 3])
def test_finished_sentences_leave_the_batch(beams: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = []

    def permitted(processor: WellFormedTrees, input_ids: Tensor) -> Tensor:
        rows.append(len(input_ids))
        return original(processor, input_ids)

    original = WellFormedTrees.permitted
    monkeypatch.setattr(WellFormedTrees, "permitted", permitted)
    assert len(list(parse(own(), TOKENIZER, [["a"], ["b"] * 9], num_beams=beams, max_new_tokens=12))) == 2
    assert rows[0] == 2 * beams
    assert rows[-1] == beams


def test_search_of_other_vocabularies_and_of_models_that_write_all_at_once_is_free() -> None:
    plain = VaswaniTransformerTokenizer.train_from_iterator(["a ()b (c )c"], vocab_size=270)
    assert tree_constraint(tiny_model(vocab_size=270), plain) is None
    assert tree_constraint(tiny_nat(vocab_size=len(TOKENIZER)), TOKENIZER) is None
