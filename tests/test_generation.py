"""Every way of calling `generate()` finds the same target; settings of the call win, and invalid ones are errors."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM, ForcedEOSTokenLogitsProcessor, GenerationConfig

from tests.batches import padded_batch, random_tokens, targets
from tests.models import EVERY_FAMILY, PAIRS, SLOT_FAMILY, WITH_SCORES, model_of_pairs, small_model, tiny_model
from vaswani_transformer import VaswaniTransformerForConditionalGeneration, search
from vaswani_transformer.settings import CallSettings

SOURCE = torch.tensor([[3, 4, 2]])  # two words and the end
# Not tied, because a random tied model repeats its last token; in float64, so that rounding decides between no tokens.
MODEL = tiny_model(tie_word_embeddings=False).double().requires_grad_(False)
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beam": {"num_beams": 3},
    "paper": {"num_beams": 4, "length_penalty": 0.6, "length_penalty_type": "gnmt"},
}


@settings(max_examples=15)
@given(
    lengths=st.lists(st.integers(1, 8), min_size=2, max_size=4),
    side=st.sampled_from(["left", "right"]),
    way=st.sampled_from(list(WAYS)),
)
def test_batch_gives_what_each_source_gives_by_itself(lengths: list[int], side: str, way: str) -> None:
    source, mask = padded_batch(lengths, side)
    together = MODEL.generate(source, attention_mask=mask, max_new_tokens=8, **WAYS[way])
    for row, kept in enumerate(mask.bool()):
        (single,) = MODEL.generate(source[row, kept][None], max_new_tokens=8, **WAYS[way])
        assert torch.equal(together[row, : len(single)], single)
        assert (together[row, len(single) :] == 1).all()


def test_record_of_a_search_has_a_length_penalty_only_with_beams() -> None:
    model = tiny_model()
    model.generation_config = GenerationConfig(length_penalty=0.6)
    assert "length_penalty" not in CallSettings(None, model, {}).search()
    assert CallSettings(None, model, {"num_beams": 2}).search()["length_penalty"] == 0.6


@pytest.mark.parametrize("way", [{}, {"use_cache": False}, {"num_beams": 1, "cache_implementation": "static"}])
@pytest.mark.parametrize("first", [0, 7])
def test_given_target_positions_count_on_from_the_last_one(way: dict[str, Any], first: int) -> None:
    """The oracle runs the whole target at the given positions for each token."""
    source, start = random_tokens(2, 6), torch.tensor([[0, 5], [0, 9]])
    options: dict[str, Any] = {"decoder_input_ids": start, "max_new_tokens": 5, "eos_token_id": None}
    positions = first + torch.arange(2).expand(2, 2)
    found = MODEL.generate(source, decoder_position_ids=positions, **options, **way)
    expected = start
    for length in range(2, 7):
        at = first + torch.arange(length).expand(2, length)
        logits = MODEL(input_ids=source, decoder_input_ids=expected, decoder_position_ids=at, use_cache=False).logits
        expected = torch.cat((expected, logits[:, -1].argmax(-1, keepdim=True)), 1)
    assert torch.equal(found, expected)


ENDS = {1: list(range(10, 30)), 3: list(range(26, 30))}


@pytest.mark.parametrize("num_beams", ENDS)
def test_target_positions_stay_with_their_source_when_others_end(num_beams: int) -> None:
    """Several words end a target, so that sources leave the batch at different steps."""
    model = small_model(1, vocab_size=30).double()
    source, positions = random_tokens(8, 5, vocab_size=30), torch.arange(8)[:, None] * 3
    options: dict[str, Any] = {"max_new_tokens": 9, "eos_token_id": ENDS[num_beams], "num_beams": num_beams}
    start = torch.zeros(8, 1, dtype=torch.long)
    together = model.generate(source, decoder_input_ids=start, decoder_position_ids=positions, **options)
    lengths = set()
    for row in range(8):
        only = slice(row, row + 1)
        options |= {"decoder_input_ids": start[only], "decoder_position_ids": positions[only]}
        (single,) = model.generate(source[only], **options)
        assert torch.equal(together[row, : len(single)], single)
        lengths.add(len(single))
    assert len(lengths) > 1


@settings(max_examples=15)
@given(prefix=st.integers(1, 7), source=st.integers(1, 8))
def test_prefix_of_a_target_is_continued_to_the_same_target(prefix: int, source: int) -> None:
    tokens = random_tokens(2, source)
    complete = MODEL.generate(tokens, max_new_tokens=8)
    again = MODEL.generate(tokens, decoder_input_ids=complete[:, :prefix], max_new_tokens=9 - prefix)
    assert torch.equal(again, complete)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("way", [{}, WITH_SCORES], ids=str)
def test_target_is_continued_from_its_cache_to_the_same_target(way: dict[str, Any], window: int | None) -> None:
    """With a window the cache has only the newest keys."""
    model, tokens = tiny_model(tie_word_embeddings=False, attention_window=window).double(), random_tokens(2, 6)
    complete = model.generate(tokens, max_new_tokens=8, min_new_tokens=8)
    start = model.generate(tokens, max_new_tokens=4, min_new_tokens=4, **WITH_SCORES)
    given = {"past_key_values": start.past_key_values, "decoder_input_ids": start.sequences}
    again = model.generate(tokens, **given, max_new_tokens=4, min_new_tokens=4, **way)
    assert torch.equal(again.sequences if way else again, complete)


@pytest.mark.parametrize("way", ["greedy", "beam"])
def test_batch_in_bfloat16_equals_single_sentences(way: str) -> None:
    """The model is confident, because in bfloat16 tokens of nearly equal probability are equal."""
    trained, tokenizer = model_of_pairs()
    model = copy.deepcopy(trained).bfloat16()
    batch = tokenizer(list(PAIRS), padding=True, return_tensors="pt")
    together = model.generate(**batch, max_new_tokens=20, **WAYS[way])
    assert tokenizer.batch_decode(together, skip_special_tokens=True) == list(PAIRS.values())
    for row, text in zip(together, PAIRS, strict=True):
        (single,) = model.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=20, **WAYS[way])
        assert torch.equal(row[: len(single)], single)
    assert torch.equal(model.generate(**batch, max_new_tokens=20, use_cache=False, **WAYS[way]), together)


@pytest.mark.parametrize("num_beams", [1, 2])
def test_sampling_follows_its_seed_and_its_settings(num_beams: int) -> None:
    source = random_tokens(3, 5)

    def sample(**settings: Any) -> Tensor:
        torch.manual_seed(5)
        return MODEL.generate(source, do_sample=True, num_beams=num_beams, max_new_tokens=8, **settings)

    assert torch.equal(sample(), sample())
    assert torch.equal(sample(), sample(use_cache=False))
    assert not torch.equal(sample(), MODEL.generate(source, max_new_tokens=8))
    if num_beams == 1:
        assert torch.equal(sample(top_k=1), MODEL.generate(source, max_new_tokens=8))


@pytest.mark.parametrize("way", WAYS)
def test_encoder_outputs_replace_the_source_and_are_unchanged(way: str) -> None:
    source, mask = padded_batch([5, 3])
    encoded = MODEL.get_encoder()(source, attention_mask=mask)
    before = encoded.last_hidden_state
    generated = MODEL.generate(encoder_outputs=encoded, attention_mask=mask, max_new_tokens=6, **WAYS[way])
    assert torch.equal(generated, MODEL.generate(source, attention_mask=mask, max_new_tokens=6, **WAYS[way]))
    assert encoded.last_hidden_state is before


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("way", WAYS)
def test_gradient_checkpointing_changes_no_target_in_training_mode(way: str) -> None:
    """Layers that checkpoint drop a cache until Transformers 5.24, and would see only the newest token."""
    model = tiny_model(tie_word_embeddings=False, dropout=0.0).double()
    source, mask = padded_batch([5, 3])
    expected = model.generate(source, attention_mask=mask, max_new_tokens=8, **WAYS[way])
    model.train().gradient_checkpointing_enable({"use_reentrant": False})
    assert torch.equal(model.generate(source, attention_mask=mask, max_new_tokens=8, **WAYS[way]), expected)


def swapped(tokens: Tensor) -> Tensor:
    """Return tokens with 0 and 1 exchanged."""
    return torch.where(tokens < 2, 1 - tokens, tokens)


@pytest.mark.parametrize("way", WAYS)
def test_pad_id_0_works_like_any_other(way: str) -> None:
    """The same model with the embeddings of `<s>` and `<pad>` exchanged generates the same targets."""
    model, tokenizer = model_of_pairs()
    other = tiny_model(vocab_size=len(tokenizer), d_model=64, d_ff=128, pad_token_id=0, bos_token_id=1).requires_grad_(
        False
    )
    state = model.state_dict()
    for name, weight in state.items():
        if weight.shape[0] == len(tokenizer):
            state[name] = weight[swapped(torch.arange(len(tokenizer)))]
    other.load_state_dict(state)
    batch = tokenizer(list(PAIRS), padding=True, return_tensors="pt")
    renamed: dict[str, Any] = {"input_ids": swapped(batch["input_ids"]), "attention_mask": batch["attention_mask"]}
    expected = model.generate(**batch, max_new_tokens=20, **WAYS[way])
    generated = other.generate(**renamed, max_new_tokens=20, **WAYS[way])
    assert swapped(generated).tolist() == expected.tolist()
    labels = torch.tensor([[5, 6, 2, -100]])
    assert other.prepare_decoder_input_ids_from_labels(labels).tolist() == [[1, 5, 6, 2]]


END = 2


def limit_of(model: VaswaniTransformerForConditionalGeneration, **arguments: Any) -> int:
    """Return the number of new tokens of a target that nothing ends, for a source of three tokens.

    It is what the settings say before the search.
    """
    settings: dict[str, Any] = arguments | {"attention_mask": torch.ones(1, 3)}
    call = CallSettings(settings.pop("generation_config", None), model, settings)
    length = model.generate(SOURCE, suppress_tokens=[1, 2], **arguments).shape[1] - 1
    assert call.target_limits().tolist() == [length]
    return length


def test_padding_counts_for_no_limit_whether_its_mask_is_given_or_inferred() -> None:
    short, padded = torch.tensor([[5, 6, 7, 2]]), torch.tensor([[5, 6, 7, 2, 1, 1, 1]])
    options: dict[str, Any] = {"max_source_relative_length": 2, "suppress_tokens": [1, 2]}
    expected = MODEL.generate(short, **options)
    assert expected.shape == (1, 1 + 4 + 2)
    for mask in (None, padded.ne(1).long()):
        assert torch.equal(MODEL.generate(padded, attention_mask=mask, **options), expected)


def test_argument_of_the_call_wins_over_the_saved_limit() -> None:
    model = small_model(0)
    search: dict[str, Any] = {"num_beams": 2, "length_penalty_type": "gnmt", "max_source_relative_length": 5}
    model.generation_config = model.config.make_generation_config(**search)
    assert limit_of(model) == 8
    assert limit_of(model, max_new_tokens=11) == 11
    assert limit_of(model, max_length=12) == 11
    assert limit_of(model, max_source_relative_length=1) == 4
    assert limit_of(model, max_source_relative_length=9, max_new_tokens=6) == 6
    assert limit_of(model, max_source_relative_length=2, max_new_tokens=6) == 5
    assert limit_of(model, max_source_relative_length=None, max_new_tokens=4) == 4
    assert limit_of(model, generation_config=GenerationConfig(max_new_tokens=10, num_beams=1)) == 10
    assert limit_of(model, generation_config=GenerationConfig(num_beams=1)) == 8


def test_max_length_in_the_models_own_config_never_shortens_the_limit() -> None:
    model = small_model(0)
    model.generation_config.max_length = 4  # Seq2SeqTrainer leaves 20 there after an evaluation
    assert limit_of(model, max_source_relative_length=5) == 8
    assert limit_of(model) == limit_of(model, max_length=None) == 53
    special = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
    for max_length, new_tokens in ((4, 3), (None, 20)):  # 20: of Transformers
        model.generation_config = GenerationConfig(**special, max_length=max_length)
        assert limit_of(model) == new_tokens
        assert limit_of(model, max_length=None) == 20


INVALID = [
    ({"length_penalty_type": "wu"}, r"length_penalty_type: .*got 'wu', expected one of power, gnmt"),
    ({"max_source_relative_length": -1}, r"max_source_relative_length: .*got -1, expected a whole number of at"),
    ({"max_source_relative_length": True}, r"max_source_relative_length: .*got True, expected a whole number"),
    ({"length_penalty": float("nan")}, r"length_penalty: .*got nan, expected a finite number"),
    ({"num_beams": 0}, r"num_beams: .*got 0, expected a whole number of at least 1"),
    (
        {"forced_eos_token_id": 4, "max_source_relative_length": 3},
        r"forced_eos_token_id: .*got 4 and 3, expected one of",
    ),
]


@pytest.mark.parametrize("level", ["call", "config", "model"])
@pytest.mark.parametrize(("settings", "message"), INVALID)
def test_invalid_setting_is_an_error_of_one_line(settings: dict[str, Any], message: str, level: str) -> None:
    model = small_model(0)
    if level == "model":
        vars(model.generation_config).update(settings)
    config = GenerationConfig(num_beams=2)
    vars(config).update(settings)
    given = {"call": settings, "config": {"generation_config": config}, "model": {}}[level]
    with pytest.raises(ValueError, match=message) as error:
        model.generate(torch.tensor([[3, 2]]), **given)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("level", ["call", "config", "model"])
@pytest.mark.parametrize("num_beams", [1, 2])
def test_forced_end_that_is_the_end_is_ignored_where_each_source_has_a_limit(num_beams: int, level: str) -> None:
    model, forced = small_model(0), {"forced_eos_token_id": END}
    config, call = GenerationConfig(num_beams=num_beams), forced if level == "call" else {}
    expected = model.generate(SOURCE, config, min_new_tokens=53)
    vars({"call": GenerationConfig(), "config": config, "model": model.generation_config}[level]).update(forced)
    targets = model.generate(SOURCE, config, min_new_tokens=53, **call)
    assert (targets.shape[1], END in targets) == (54, False)
    assert torch.equal(targets, expected)
    assert model.generate(SOURCE, config, min_new_tokens=3, max_new_tokens=3, **call)[0, -1] == END
    processors = [ForcedEOSTokenLogitsProcessor(5, END)]  # the caller's own
    assert model.generate(SOURCE, config, processors, **call).shape[1] <= 5


def test_none_against_a_saved_beam_setting_is_transformers_default() -> None:
    model = small_model(1)
    assert torch.equal(model.generate(SOURCE, num_beams=None), model.generate(SOURCE, num_beams=1))
    first, second = (model.generate(SOURCE, length_penalty=alpha, **WITH_SCORES) for alpha in (None, 1.0))
    assert torch.equal(first.sequences_scores, second.sequences_scores)


def test_search_that_only_transformers_has_is_an_error_under_gnmt() -> None:
    with pytest.raises(ValueError, match='length_penalty_type="gnmt" does not support prefill_chunk_size'):
        small_model(0).generate(torch.tensor([[3, 2]]), prefill_chunk_size=2)


def test_target_beyond_the_learned_positions_is_an_error_before_the_first_step() -> None:
    model = small_model(0, position_embedding="learned", max_position_embeddings=6)
    assert model.generate(torch.tensor([[3, 2]]), max_new_tokens=6).shape[1] <= 7
    with pytest.raises(ValueError, match=r"max_length \(8, .*exceeds the 6 learned positions; .* max_new_tokens <= 6"):
        model.generate(torch.tensor([[3, 2]]), max_new_tokens=7)
    padded, mask = torch.tensor([[3, END, 1, 1, 1]]), torch.tensor([[1, 1, 0, 0, 0]])
    assert model.generate(padded, attention_mask=mask, max_source_relative_length=4).shape[1] <= 7
    assert model.generate(torch.tensor([[3, 2]]), suppress_tokens=[END], max_source_relative_length=50).shape[1] == 7
    model.generation_config.max_new_tokens = 7
    assert model.generate(padded, attention_mask=mask, max_source_relative_length=4).shape[1] <= 7
    with pytest.raises(ValueError, match=r"max_length \(8, .* max_new_tokens <= 6"):
        model.generate(torch.tensor([[3, 2]]), max_source_relative_length=None)


def test_papers_settings_are_saved_with_the_model(tmp_path: Path) -> None:
    small_model(0).save_pretrained(tmp_path)
    search = AutoModelForSeq2SeqLM.from_pretrained(tmp_path).generation_config
    assert (search.num_beams, search.length_penalty) == (4, 0.6)
    assert (search.length_penalty_type, search.max_source_relative_length) == ("gnmt", 50)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"inputs": random_tokens(6)}, r"inputs: not a batch of texts; got shape \(6,\), expected"),
        ({"input_ids": random_tokens(6)}, r"input_ids: .* got shape \(6,\), expected"),
        ({"input_ids": [[5, 6, 2]]}, "input_ids: .* got a list, expected a tensor"),
        ({"input_ids": random_tokens(2, 6), "attention_mask": [[1] * 6] * 2}, "attention_mask: .* got a list"),
        ({"inputs_embeds": torch.zeros(6, 32)}, r"inputs_embeds: .* got shape \(6, 32\), expected"),
        ({"input_ids": random_tokens(2, 6), "generation_config": {"num_beams": 2}}, "generation_config: .*GenerationC"),
        (
            {"input_ids": random_tokens(2, 6), "watermarking_config": {"bias": 2.0}},
            "watermarking_config: .* got {'bias",
        ),
    ],
)
@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_argument_of_a_wrong_type_or_shape_is_an_error_of_one_line(
    family: str, call: dict[str, Any], message: str
) -> None:
    model = EVERY_FAMILY[family]()
    with pytest.raises(ValueError, match=rf"^{message}[^\n]*$"):
        model.generate(**call)
    if not call.keys() & {"inputs", "generation_config", "watermarking_config"}:
        with pytest.raises(ValueError, match=rf"^{message}[^\n]*$"):
            model(**call, labels=targets(3, 2))


@pytest.mark.parametrize("family", sorted(EVERY_FAMILY.keys() - {"flowseq"}))
@pytest.mark.parametrize("beams", [1, 3])
def test_scores_of_nan_are_a_warning_or_what_their_handler_does(
    family: str, beams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlowSeq raises its own error."""
    model, reports, handled = EVERY_FAMILY[family](), [], []
    monkeypatch.setattr(search.logger, "warning", lambda *message: reports.append(message))
    settings: dict[str, Any] = {"num_beams" if family == "autoregressive" else "length_beam_size": beams}
    if family in SLOT_FAMILY:  # predicts no length
        settings = {}
    model.generate(random_tokens(3, 6), **settings)
    assert reports == []
    model.model.encoder.layers[0].register_forward_hook(
        lambda *call: call[2].index_fill(0, torch.tensor([1]), math.nan)
    )
    model.generate(random_tokens(3, 6), **settings)
    assert [message[1:] for message in reports] == [(1, 2)]
    model.generate(random_tokens(3, 6), **settings, nan_handler=handled.append)
    assert (handled, len(reports)) == ([[1]], 1)
