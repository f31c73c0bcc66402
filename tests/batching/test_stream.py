"""Batches of a stream under a token budget: each pair once, the same steps on all ranks, resumed exactly."""

import itertools
import math
import random
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import datasets
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore, PrefixStore
from torch.utils.data import DataLoader, Dataset
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments
from transformers.testing_utils import CaptureLogger

from tests.batching.samplers import LENGTHS, sampler
from tests.helpers import PAIRS, model_of_pairs, tiny_model
from vaswani_transformer import VaswaniTransformerTokenizer
from vaswani_transformer.batching import PairCollator, TokenBudgetBatches
from vaswani_transformer.batching import stream as stream_module
from vaswani_transformer.batching.schedule import paper_adam, paper_schedule


class Stream:
    """Pairs of these lengths, whose source repeats the pair's number; every iteration begins with the first."""

    def __init__(self, pairs: list[tuple[int, int]]) -> None:
        self.pairs = pairs

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number, (source, target) in enumerate(self.pairs):
            yield {"input_ids": [number] * source, "labels": [6] * target}


def streamed(pairs: list[tuple[int, int]], **options: Any) -> TokenBudgetBatches:
    sizes: dict[str, Any] = {"source_tokens": 60, "target_tokens": 60, "buffer_size": 60}
    return TokenBudgetBatches(Stream(pairs), **sizes | options)


def numbers(batches: Iterable[Any]) -> list[list[int]]:
    """Return the numbers of each batch's pairs."""
    sources = [batch["input_ids"] for batch in batches]
    return [rows.tokens[rows.lengths.cumsum() - 1].tolist() for rows in sources]


def ranks_of(
    pairs: list[tuple[int, int]], num_processes: int, accumulation: int, epoch: int = 0
) -> list[list[list[int]]]:
    """Return the numbers of the pairs in every rank's batches of an epoch."""
    options: dict[str, Any] = {"num_processes": num_processes, "accumulation": accumulation}
    return [numbers(streamed(pairs, rank=rank, **options).batches_of(epoch)) for rank in range(num_processes)]


@given(LENGTHS, st.integers(1, 3), st.integers(1, 2), st.integers(0, 5))
def test_streamed_ranks_get_every_pair_once_in_as_many_batches_within_the_budgets(
    pairs: list[tuple[int, int]], num_processes: int, accumulation: int, epoch: int
) -> None:
    """A step keeps to both budgets, and a micro-batch to its share plus one pair."""
    ranks = ranks_of(pairs, num_processes, accumulation, epoch)
    assert sorted(number for rank in ranks for batch in rank for number in batch) == list(range(len(pairs)))
    assert len({len(rank) for rank in ranks}) == 1
    assert len(ranks[0]) % accumulation == 0  # an epoch ends with a complete step
    beyond = 0 if num_processes * accumulation == 1 else 1
    for batch in (batch for rank in ranks for batch in rank):
        assert batch
        longest = max(max(pairs[number]) for number in batch)
        assert (len(batch) - beyond) * num_processes * accumulation * longest <= 60 or len(batch) <= 2 * beyond


@settings(max_examples=20)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=72, max_size=300), st.integers(0, 3))
def test_streamed_step_is_the_same_for_any_number_of_processes_and_micro_batches(
    pairs: list[tuple[int, int]], epoch: int
) -> None:
    """Every step of such short pairs has a pair for each micro-batch, except the last of a buffer."""
    (one_process,) = ranks_of(pairs, 1, 1, epoch)
    assume(min(map(len, one_process)) >= 6)
    for num_processes, accumulation in ((2, 1), (1, 3), (3, 2)):
        ranks = ranks_of(pairs, num_processes, accumulation, epoch)
        steps = [
            sorted(number for rank in ranks for part in rank[step : step + accumulation] for number in part)
            for step in range(0, len(ranks[0]), accumulation)
        ]
        assert steps == [sorted(batch) for batch in one_process]


def test_stream_that_fits_in_a_buffer_has_the_steps_of_the_sampler() -> None:
    generator = random.Random(0)
    pairs = [(generator.randint(1, 9), generator.randint(1, 9)) for _ in range(310)]
    lengths = [sorted(pairs[number] for number in batch) for batch in sampler(pairs)]
    stream_steps = numbers(streamed(pairs, buffer_size=300).batches_of(0))
    assert sorted(lengths) == sorted(sorted(pairs[number] for number in batch) for batch in stream_steps)


def test_streamed_epochs_differ_and_the_seed_determines_each() -> None:
    generator = random.Random(0)
    pairs = [(generator.randint(3, 12), generator.randint(3, 12)) for _ in range(500)]
    first, second = (numbers(streamed(pairs, seed=1).batches_of(epoch)) for epoch in (0, 1))
    assert first != second
    assert sorted(map(sorted, first)) != sorted(map(sorted, second))  # pairs meet other pairs
    assert numbers(streamed(pairs, seed=1).batches_of(0)) == first
    assert numbers(streamed(pairs, seed=2).batches_of(0)) != first


def test_stream_continues_from_epoch_to_epoch() -> None:
    pairs = [(length % 9 + 1, length % 7 + 1) for length in range(200)]
    stream = streamed(pairs)
    epochs = [numbers(stream.batches_of(epoch)) for epoch in range(3)]
    together = list(itertools.chain(*epochs))
    assert numbers(itertools.islice(stream, len(together))) == together
    assert stream.epoch == 2


def test_stream_sets_the_epoch_of_its_source_before_reading_it() -> None:
    epochs = []
    stream = streamed([(3, 3)] * 20)
    source: Any = stream.source
    source.set_epoch = epochs.append
    list(itertools.islice(stream, 3))
    assert epochs[:3] == [0, 1, 2]


@pytest.mark.parametrize("buffer_size", [50, 200])
def test_stream_reads_at_most_a_buffer_and_a_tenth_ahead_of_the_present_one(buffer_size: int) -> None:
    read = 0

    class Counted(Stream):
        def __iter__(self) -> Iterator[dict[str, Any]]:
            nonlocal read
            for pair in super().__iter__():
                read += 1
                yield pair

    generator = random.Random(0)
    pairs = [(generator.randint(1, 30), generator.randint(1, 30)) for _ in range(2000)]
    stream = TokenBudgetBatches(Counted(pairs), 60, 60, buffer_size=buffer_size)
    for _ in stream.batches_of(0):
        assert read <= (stream.state_dict()["buffer"] + 2) * buffer_size + buffer_size // 10
    assert read == 2000


@given(LENGTHS, st.integers(1, 2), st.integers(0, 200))
def test_stream_resumes_from_its_saved_position(pairs: list[tuple[int, int]], accumulation: int, steps: int) -> None:
    """The batches are equal, also in a later epoch, and on another number of processes from the same step."""
    pairs = [(9, 40), *pairs]  # an incomplete step, which resuming drops
    options: dict[str, Any] = {"accumulation": accumulation, "max_length": 30, "too_long": "drop"}
    left = streamed(pairs, **options)
    batches = iter(left)
    list(itertools.islice(batches, steps * accumulation))
    resumed = streamed(pairs, **options)
    resumed.load_state_dict(left.state_dict())
    expected = numbers(itertools.islice(batches, 40))
    assert numbers(itertools.islice(resumed, 40)) == expected
    assert numbers(itertools.islice(resumed, 40)) == expected  # in every further iteration
    assert left.state_dict() == resumed.state_dict()


def test_resumed_stream_repeats_an_incomplete_step() -> None:
    stream = streamed([(3, 3)] * 100, accumulation=2)
    first = numbers(itertools.islice(stream, 5))
    again = streamed([(3, 3)] * 100, accumulation=2)
    again.load_state_dict(stream.state_dict())
    assert numbers([next(iter(again))]) == first[4:]


def test_resumed_stream_encodes_only_the_buffer_of_its_position() -> None:
    encoded = []

    def encode(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        encoded.extend(item["input_ids"][0] for item in items)
        return items

    pairs = [(number % 9 + 1, 5) for number in range(300)]
    stream = streamed(pairs, encode=encode)
    plain = numbers(streamed(pairs).batches_of(0))
    assert numbers(stream.batches_of(0)) == plain
    assert encoded == list(range(300))
    list(itertools.islice(stream, len(plain) - 1))
    resumed = streamed(pairs, encode=encode)
    resumed.load_state_dict(stream.state_dict())
    encoded.clear()
    assert numbers([next(iter(resumed))]) == plain[-1:]
    assert encoded[:60] == list(range(240, 300))  # the last buffer, then perhaps the next epoch
    with pytest.raises(ValueError, match=r"encode returned 2 pairs for 66 items; return one for each"):
        next(iter(streamed(pairs, encode=lambda items: items[:2])))


@pytest.mark.parametrize("accumulation", [1, 2])
def test_ranks_with_a_store_encode_each_item_once_and_have_the_batches_of_ranks_without(
    monkeypatch: pytest.MonkeyPatch, accumulation: int
) -> None:
    """Two epochs, the second of a resumed stream, with pairs that are too long."""
    monkeypatch.setattr(stream_module, "ENCODE_BATCH", 7)
    pairs, encoded, store = [(number % 35 + 1, number % 40 + 1) for number in range(200)], [], HashStore()

    def encode(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        assert items
        encoded.extend(item["input_ids"][0] for item in items)
        return items

    def two_epochs(rank: int, store: HashStore | None = None, **more: Any) -> list[list[int]]:
        options: dict[str, Any] = {"accumulation": accumulation, "max_length": 30, "too_long": "drop"} | more
        stores = [None if store is None else PrefixStore(name, store) for name in ("first", "second")]
        first, second = (streamed(pairs, rank=rank, num_processes=2, store=each, **options) for each in stores)
        batches = numbers(first.batches_of(0))
        iterator = iter(first)
        list(itertools.islice(iterator, len(batches) + accumulation))
        second.load_state_dict(first.state_dict())
        iterator.close()
        return batches + numbers(itertools.islice(second, 8))

    with ThreadPoolExecutor(2) as threads:
        shared = list(threads.map(lambda rank: two_epochs(rank, store, encode=encode), range(2)))
    assert shared == [two_epochs(rank) for rank in range(2)]
    assert sorted(encoded[:200]) == list(range(200))


def test_stream_that_is_left_in_the_middle_ends_its_thread() -> None:
    """Rank 1 has stopped, so the next buffer never comes."""
    pairs, store = [(number % 9 + 1, 5) for number in range(600)], HashStore()
    ranks = [iter(streamed(pairs, rank=rank, num_processes=2, store=store)) for rank in range(2)]
    with ThreadPoolExecutor(2) as threads:
        assert all(list(threads.map(next, ranks)))
    for rank in ranks:
        rank.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


def test_sharded_stream_that_is_shuffled_upstream_resumes_exactly() -> None:
    rows = [{"input_ids": [number] * (number % 9 + 1), "labels": [6] * 4} for number in range(300)]
    shards = datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=6)
    stream, other = (
        TokenBudgetBatches(shards.shuffle(seed=3, buffer_size=20), 60, 60, buffer_size=60) for _ in range(2)
    )
    first, second = (numbers(stream.batches_of(epoch)) for epoch in (0, 1))
    for epoch in (first, second):
        assert sorted(itertools.chain(*epoch)) == list(range(300))
    assert set(first[0]) != set(second[0])
    list(itertools.islice(stream, len(first) + 11))
    other.load_state_dict(stream.state_dict())
    assert numbers(itertools.islice(other, len(second) - 11)) == second[11:]


def test_streamed_pairs_that_are_too_long_are_an_error_or_dropped_with_a_count() -> None:
    pairs = [(3, 3), (3, 61), (3, 3), (31, 3)]
    with pytest.raises(ValueError, match=r"Pair 1 has 3 source and 61 target tokens, more than 60 and 60; .*drop"):
        next(iter(streamed(pairs)))
    with pytest.raises(ValueError, match=r"Pair 2 has 31 source and 3 target tokens, more than 30 and 30"):
        next(iter(streamed([*pairs[:1], *pairs[2:]], max_length=30)))
    with CaptureLogger(stream_module.logger) as captured:
        (batch,) = numbers(streamed(pairs, too_long="drop", max_length=30).batches_of(4))
    assert sorted(batch) == [0, 2]
    assert "Epoch 4: dropped 2 of 4 pairs, longer than 30 source or 30 target tokens." in captured.out
    with CaptureLogger(stream_module.logger) as captured:
        list(streamed(pairs, too_long="drop", num_processes=2, rank=1).batches_of(0))
    assert not captured.out  # only one rank reports it


def test_count_of_dropped_pairs_continues_in_a_resumed_stream() -> None:
    pairs = [(3, 61 if number % 10 == 0 else 3) for number in range(300)]
    stream, resumed = (streamed(pairs, too_long="drop") for _ in range(2))
    list(itertools.islice(stream, 7))
    assert stream.state_dict()["dropped"] > 0
    resumed.load_state_dict(stream.state_dict())
    with CaptureLogger(stream_module.logger) as captured:
        list(itertools.islice(resumed, 12))
    assert resumed.epoch == 1
    assert "dropped 30 of 300 pairs" in captured.out


def test_stream_that_cannot_be_batched_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"an iterator \(generator\), which ends with the first epoch"):
        TokenBudgetBatches(iter(Stream([(3, 3)])))
    with pytest.raises(ValueError, match=r"buffer_size \(30\) is too small for the 4 micro-batches .* at least 40"):
        streamed([(3, 3)], buffer_size=30, num_processes=2, accumulation=2)
    with pytest.raises(ValueError, match=r"max_length: let a side have at most 0 and 0 tokens.*; give at least 1"):
        streamed([(3, 3)], max_length=0)
    with pytest.raises(ValueError, match=r"3 pairs, without 1 that are too long, cannot be split over the 4"):
        next(iter(streamed([(3, 3), (3, 99)] + [(3, 3)] * 2, num_processes=2, accumulation=2, too_long="drop")))


def first_batches(stream: TokenBudgetBatches, workers: int) -> list[list[int]]:
    loader = DataLoader(stream, batch_size=None, collate_fn=lambda pairs: pairs, num_workers=workers)
    return numbers(itertools.islice(loader, 10))


@pytest.mark.slow
def test_one_worker_process_gives_the_same_batches_and_several_are_an_error() -> None:
    stream = streamed([(length % 9 + 1, 5) for length in range(200)])
    assert first_batches(stream, 1) == first_batches(stream, 0)
    with pytest.raises(ValueError, match=r"2 worker processes would each yield all batches; .*num_workers=1"):
        first_batches(stream, 2)


def padding_share(batches: Iterable[Any]) -> float:
    positions = tokens = 0
    for batch in batches:
        for rows in batch.values():
            positions += len(rows.lengths) * int(rows.lengths.max())
            tokens += len(rows.tokens)
    return 1 - tokens / positions


@pytest.mark.slow
@pytest.mark.parametrize(
    ("buffer_size", "tokens", "share"), [(20_000, 4_096, 0.04), (20_000, 25_000, 0.12), (100_000, 25_000, 0.05)]
)
def test_padding_share_falls_with_larger_buffers_and_rises_with_larger_steps(
    buffer_size: int, tokens: int, share: float
) -> None:
    """Bounds are just above the measured share. A buffer of 20,000 makes only 28 steps of 25,000 tokens, so each step
    has a twenty-eighth of all lengths.
    """
    generator = random.Random(0)
    pairs = []
    for _ in range(100_000):
        length = max(2, round(generator.lognormvariate(math.log(25), 0.5)))
        pairs.append((length, max(2, round(length * generator.uniform(0.9, 1.2)))))
    stream = TokenBudgetBatches(Stream(pairs), tokens, tokens, buffer_size=buffer_size)
    assert padding_share(stream.batches_of(0)) < share


class StreamTrainer(Seq2SeqTrainer):
    """The stock Trainer with the data loader of the docstring of `TokenBudgetBatches`."""

    def get_train_dataloader(self) -> DataLoader:
        return DataLoader(cast(Dataset, self.train_dataset), batch_size=None, collate_fn=self.data_collator)


class TextStream:
    """The six pairs for training a model, repeated until an epoch has several buffers."""

    def __init__(self, tokenizer: VaswaniTransformerTokenizer) -> None:
        self.rows = [
            dict(tokenizer(f"{source} {number}", text_target=target))
            for number in range(8)
            for source, target in PAIRS.items()
        ]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 2])
def test_stock_trainer_trains_on_a_stream_and_resumes_in_a_later_epoch(tmp_path: Path, accumulation: int) -> None:
    """Dropout and batches are those of an uninterrupted run."""
    _, tokenizer = model_of_pairs()

    def train(folder: Path, resume: str | None = None) -> Any:
        torch.manual_seed(7)
        model = tiny_model(vocab_size=len(tokenizer)).train()
        batches = TokenBudgetBatches(TextStream(tokenizer), 60, 60, accumulation=accumulation, buffer_size=20)
        optimizer = paper_adam(model.parameters())
        assert len(list(batches.batches_of(0))) < 15 * accumulation
        arguments = Seq2SeqTrainingArguments(
            str(folder),
            max_steps=25,
            save_steps=17,
            gradient_accumulation_steps=accumulation,
            report_to="none",
            max_grad_norm=0,
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = StreamTrainer(
            model,
            arguments,
            train_dataset=batches,
            data_collator=cast(Any, PairCollator(tokenizer, model)),
            optimizers=(optimizer, paper_schedule(optimizer, model.config.d_model, warmup_steps=10)),
        )
        trainer.train(resume_from_checkpoint=resume)
        assert trainer.state.global_step == 25
        return model.state_dict()

    uninterrupted = train(tmp_path / "uninterrupted")
    resumed = train(tmp_path / "resumed", resume=str(tmp_path / "uninterrupted" / "checkpoint-17"))
    assert all(torch.equal(uninterrupted[name], resumed[name]) for name in uninterrupted)
