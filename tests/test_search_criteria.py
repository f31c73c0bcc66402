"""The search ends by each criterion of a call, and searches within or next to a search do not disturb it."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import EosTokenCriteria, GenerationConfig, MaxLengthCriteria, StoppingCriteria, StoppingCriteriaList

from tests.ending_models import END, WAYS, call_arguments, ending_model, sources
from vaswani_transformer import search as search_module
from vaswani_transformer.generation import SourceLimitCriteria, search_settings


class CallEveryStep(StoppingCriteria):
    """Calls a function at every step, and stops nothing."""

    def __init__(self, do: Callable[[Tensor], Any]) -> None:
        self.do = do

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        self.do(input_ids)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class SumCriterion(StoppingCriteria):
    """A caller's criterion that ends the targets whose sum of tokens is a multiple of a number."""

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        return input_ids.sum(1) % 7 == 5


CRITERIA = {
    "the usual": lambda: [MaxLengthCriteria(5), EosTokenCriteria(END)],
    "beyond a table of positions": lambda: [MaxLengthCriteria(5, max_position_embeddings=2), EosTokenCriteria(END)],
    "of the sources": lambda: [EosTokenCriteria(END), SourceLimitCriteria(torch.tensor([3, 4]), 1)],
    "no end": lambda: [MaxLengthCriteria(5)],
    "two ends": lambda: [EosTokenCriteria([END, 3])],
    "two that look for an end": lambda: [EosTokenCriteria(END), EosTokenCriteria(3)],
    "a caller's": lambda: [EosTokenCriteria(END), SumCriterion()],
    "an end without a dimension": lambda: [EosTokenCriteria(torch.tensor(END))],
    "an end of two dimensions": lambda: [EosTokenCriteria(torch.tensor([[END]]))],
    "none": list,
}


@pytest.mark.parametrize("name", CRITERIA)
def test_search_ends_the_rows_that_its_criteria_end(name: str) -> None:
    """Twenty beams of two sources end by the settings that the criteria give."""
    criteria = StoppingCriteriaList(CRITERIA[name]())
    config = GenerationConfig(num_beams=10, num_return_sequences=1, max_length=6, eos_token_id=END, pad_token_id=1)
    generator, prompt = torch.Generator().manual_seed(0), torch.zeros(20, 1, dtype=torch.long)
    settings, _ = search_settings(prompt, [], StoppingCriteriaList([*criteria, MaxLengthCriteria(6)]), config)
    state = search_module.SearchState.start(prompt, settings)
    for new_tokens in range(1, 6):
        tokens = torch.randint(0, 5, (20, 1), generator=generator)
        rows = torch.arange(20).view(2, 10)
        ends = search_module.ended(state, rows, tokens.view(2, 10), new_tokens, settings)
        sequences = torch.cat((state.beams[0], tokens), dim=1)
        expected = StoppingCriteriaList([*criteria, MaxLengthCriteria(6)])(sequences, None)
        assert torch.equal(ends.flatten(), expected)
        state.beams = search_module.extend(state, rows.flatten(), tokens.flatten())


def test_max_length_criterion_is_a_limit_that_no_step_asks_for() -> None:
    """It would warn beyond `max_position_embeddings`; but sinusoids have no end, and that of a table is an error."""
    prompt = torch.zeros(1, 1, dtype=torch.long)
    config = GenerationConfig(num_beams=1, num_return_sequences=1, max_length=9, pad_token_id=1)
    for table in (3, None):
        criteria = StoppingCriteriaList([MaxLengthCriteria(6, max_position_embeddings=table)])
        made, _ = search_settings(prompt, [], criteria, config)
        assert made.ends is None
        assert made.limits.tolist() == [5]


@pytest.mark.parametrize("way", WAYS)
def test_search_ends_targets_by_all_its_criteria(way: str) -> None:
    """A criterion that ends no target changes nothing; one that ends some changes what greedy search finds."""
    model, ends = ending_model(1), CallEveryStep(lambda _: None)
    expected = model.generate(**call_arguments(way))
    generated = model.generate(**call_arguments(way), stopping_criteria=StoppingCriteriaList([ends]))
    assert torch.equal(generated, expected)
    if way == "greedy":
        assert not torch.equal(
            model.generate(**call_arguments(way), stopping_criteria=StoppingCriteriaList([SumCriterion()])), generated
        )


def calling(do: Callable[[Tensor], Any]) -> StoppingCriteriaList:
    return StoppingCriteriaList([CallEveryStep(do)])


@pytest.mark.parametrize("way", WAYS)
def test_failed_call_leaves_no_state_in_the_model(way: str) -> None:
    model = ending_model(1)
    expected = model.generate(**call_arguments(way))

    def fail(input_ids: Tensor) -> None:
        if input_ids.shape[1] > 3:
            raise KeyError("in the middle")

    with pytest.raises(KeyError, match="in the middle"):
        model.generate(**call_arguments(way), stopping_criteria=calling(fail))
    assert torch.equal(model.generate(**call_arguments(way)), expected)


INNER_WAYS: dict[str, dict[str, Any]] = {**WAYS, "assisted": {"num_beams": 1, "prompt_lookup_num_tokens": 2}}


@pytest.mark.parametrize("inner_way", INNER_WAYS)
@pytest.mark.parametrize("way", ["greedy", "beam"])
def test_nested_searches_are_independent(way: str, inner_way: str) -> None:
    outer, inner = ending_model(1), ending_model(2, 97)
    options = sources([4] if inner_way == "assisted" else [4, 2], 97) | INNER_WAYS[inner_way]
    options |= {"max_source_relative_length": 8}

    def search_within() -> Tensor:
        torch.manual_seed(5)
        return inner.generate(**options)

    expected, expected_within, inner_results = outer.generate(**call_arguments(way)), search_within(), []
    drawn = outer.generate(
        **call_arguments(way), stopping_criteria=calling(lambda _: inner_results.append(search_within()))
    )
    assert torch.equal(drawn, expected)
    assert len(inner_results) > 2
    assert all(torch.equal(each, expected_within) for each in inner_results)


def test_searches_on_several_threads_are_independent() -> None:
    """Each thread waits within its search until all others are within theirs."""
    ways = ["greedy", "beam", "many", "power"]
    models = [ending_model(seed, 40 + 57 * seed) for seed in range(len(ways))]
    options = [call_arguments(way) for way in ways]  # drawn here, because all threads share one generator
    expected = [model.generate(**given) for given, model in zip(options, models, strict=True)]
    barrier = threading.Barrier(len(ways))
    drawn: list[Any] = [None] * len(ways)

    def decode(index: int) -> None:
        def meet(input_ids: Tensor) -> None:
            if input_ids.shape[1] <= 3:
                barrier.wait(timeout=60)

        drawn[index] = models[index].generate(**options[index], stopping_criteria=calling(meet))

    threads = [threading.Thread(target=decode, args=(index,)) for index in range(len(ways))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(*pair) for pair in zip(drawn, expected, strict=True))
