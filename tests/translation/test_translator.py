"""Many texts at once: in order, each translated as by itself, in batches within their budget."""

import copy
import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, FSMTConfig, FSMTForConditionalGeneration, GenerationConfig

from tests.batches import FLOAT32
from tests.models import (
    FAMILY,
    LENGTH_FAMILY,
    SLOT_FAMILY,
    SOURCES,
    TARGETS,
    WITH_SCORES,
    ModelAndTokenizer,
    family_of_pairs,
    model_of_pairs,
    paper_model_of_pairs,
    small_model,
    tiny_marian,
    tiny_model,
)
from vaswani_transformer import VaswaniTransformerTokenizer
from vaswani_transformer.pipeline import VaswaniTransformerTranslationPipeline
from vaswani_transformer.support.loading import eval_mode
from vaswani_transformer.tokenizer import source_encoder, text_encoder
from vaswani_transformer.translation.translator import (
    Hypothesis,
    TooLongError,
    Translator,
    batches_by_length,
    translate,
    unknown_words,
)

START, PAD, END = 0, 1, 2
TEXTS = [*SOURCES, "", "cat", "the cat is what", " "]


@pytest.fixture(scope="module")
def model_and_tokenizer() -> ModelAndTokenizer:
    return paper_model_of_pairs()


def generate_single(model_and_tokenizer: ModelAndTokenizer, text: str, **settings: Any) -> list[str]:
    """Return the translations of a single text by `generate()`, without special tokens, or empty texts."""
    model, tokenizer = model_and_tokenizer
    if not text.strip():
        return [""] * settings.get("num_return_sequences", 1)
    generated = model.generate(**tokenizer([text], return_tensors="pt"), **settings)
    return tokenizer.batch_decode(generated, skip_special_tokens=True)


@pytest.fixture(scope="module")
def model_of_bytes() -> tuple[Any, VaswaniTransformerTokenizer]:
    """Return a model and a tokenizer of one token a byte and one for the end."""
    tokenizer = VaswaniTransformerTokenizer.train_from_iterator(["a"], vocab_size=259)
    return tiny_model(vocab_size=262), tokenizer


class Echo(Translator):
    """A translator whose search returns each text, and which records its batches."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.batches: list[list[list[int]]] = []

    def translate_batch(
        self, sources: list[list[int]], texts: list[str], prefixes: list[list[int]] | None = None
    ) -> list[list[Hypothesis]]:
        self.batches.append(sources)
        echoes = self.tokenizer.batch_decode(sources, skip_special_tokens=True)
        return [[Hypothesis(text, len(row), None)] for text, row in zip(echoes, sources, strict=True)]


texts_of_letters = st.lists(st.text("ab ", max_size=12), max_size=30)


@given(texts=texts_of_letters, budget=st.integers(1, 200), window=st.integers(1, 12), skip=st.integers(0, 30))
def test_texts_come_back_in_order_and_skipping_changes_no_batch(
    model_of_bytes: ModelAndTokenizer, texts: list[str], budget: int, window: int, skip: int
) -> None:
    complete, remainder = (Echo(*model_of_bytes, batch_tokens=budget, window=window) for _ in range(2))
    translations = list(complete(iter(texts)))
    assert [translation.text for translation in translations] == [text if text.strip() else "" for text in texts]
    assert [translation.source_tokens for translation in translations] == [
        len(text) + 1 if text.strip() else 0 for text in texts
    ]
    counted = []
    assert list(remainder(texts, skip, counted.append)) == translations[skip:]
    assert all(batch in complete.batches for batch in remainder.batches)
    assert sum(counted) == len(translations[skip:])


def test_text_is_translated_in_a_batch_as_by_itself(model_and_tokenizer: ModelAndTokenizer) -> None:
    expected = [generate_single(model_and_tokenizer, text)[0] for text in TEXTS]
    assert expected[:6] == TARGETS
    for batch_tokens, window in ((1, 100), (40, 100), (4096, 3), (4096, 100)):
        translations = translate(*model_and_tokenizer, TEXTS, batch_tokens=batch_tokens, window=window)
        assert [translation.text for translation in translations] == expected


@pytest.mark.parametrize("settings", [{"num_beams": 1}, {"num_return_sequences": 3}, {"max_new_tokens": 3}])
def test_arguments_of_generate_are_passed_on(model_and_tokenizer: ModelAndTokenizer, settings: dict[str, Any]) -> None:
    translations = translate(*model_and_tokenizer, TEXTS[4:9], **settings)
    expected = [generate_single(model_and_tokenizer, text, **settings) for text in TEXTS[4:9]]
    assert [[hypothesis.text for hypothesis in translation.hypotheses] for translation in translations] == expected


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"length_penalty": None},
        {"length_penalty_type": "power", "length_penalty": -1},
        {"max_new_tokens": 3},
    ],
)
def test_scores_are_those_that_beam_search_ranks_by(
    model_and_tokenizer: ModelAndTokenizer, settings: dict[str, Any]
) -> None:
    model, tokenizer = model_and_tokenizer
    every = list(translate(*model_and_tokenizer, TEXTS[:6], scores=True, num_return_sequences=4, **settings))
    for text, translation in zip(TEXTS[:6], every, strict=True):
        batch = tokenizer([text], return_tensors="pt")
        expected = model.generate(**batch, num_return_sequences=4, **WITH_SCORES, **settings).sequences_scores
        scores = torch.tensor([hypothesis.score for hypothesis in translation.hypotheses])
        torch.testing.assert_close(scores, expected, **FLOAT32)


def test_texts_may_be_endless(model_and_tokenizer: ModelAndTokenizer) -> None:
    taken = []
    texts = (taken.append(text) or text for text in itertools.cycle(SOURCES))
    translations = translate(*model_and_tokenizer, texts, window=6)
    assert [translation.text for translation in itertools.islice(translations, 8)] == [*TARGETS, *TARGETS[:2]]
    assert len(taken) == 12


FAMILIES = ("autoregressive", *FAMILY)


def family(name: str) -> tuple[Any, Any]:
    return family_of_pairs(name) if name in FAMILY else paper_model_of_pairs()


@pytest.mark.parametrize("name", FAMILIES)
def test_search_of_a_record_is_the_complete_search(name: str) -> None:
    """The same model with the record as its only settings has the same translations."""
    (model, tokenizer), is_autoregressive = family(name), name not in FAMILY
    saved = {"max_length": 512, "suppress_tokens": [5, 9]}
    saved |= {"num_beams": 4, "forced_eos_token_id": 2} if is_autoregressive else {}
    saved |= {"length_beam_size": 3} if name in LENGTH_FAMILY else {}
    model.generation_config = model.config.make_generation_config(**saved)
    limit = {"max_source_relative_length": 3}
    call = {"length_penalty": 0.6, "length_penalty_type": "gnmt"} if is_autoregressive else {}
    call |= {"length_beam_size": 2} if name in LENGTH_FAMILY else {}
    settings: dict[str, Any] = {"generation_config": GenerationConfig(**limit), **call}
    search = Translator(model, tokenizer, **settings).settings.search()
    expected = [translation.text for translation in translate(model, tokenizer, SOURCES, **settings)]
    kept = {"suppress_tokens": [5, 9]} | ({"num_beams": 4} if is_autoregressive else {})
    assert search == kept | limit | call | {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
    model.generation_config = GenerationConfig(**search)
    assert [translation.text for translation in translate(model, tokenizer, SOURCES)] == expected


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_model_that_saves_no_limit_has_targets_of_more_than_twenty_tokens(name: str, trained: bool) -> None:
    """An autoregressive model has the paper's limit, models with slots that of these, and others predict a length."""
    model, tokenizer = family(name)
    model.generation_config = model.config.make_generation_config()
    if trained:  # Seq2SeqTrainer writes Transformers' defaults into it, a max_length of 20 among them
        defaults = GenerationConfig._get_default_generation_params()
        model.generation_config.update(**defaults, defaults_only=True)
    settings: dict[str, Any] = {"suppress_tokens": [tokenizer.eos_token_id]}
    expected = len(tokenizer("hello world")["input_ids"]) + 50
    if name in SLOT_FAMILY:
        slots = 12 * len(tokenizer("hello world")["input_ids"])
        settings, expected = {}, slots + 1
        model.config.upsampling = 12
        words = torch.arange(slots) % 2 + 70
        model.most_likely_words = lambda states, *_: (words.expand(len(states), -1), states.new_zeros(states.shape[:2]))
    if name == "dag":  # its path visits all vertices, of which the first has no word and the last has </s>
        expected = slots - 1
        is_next = torch.eye(slots).roll(1, dims=1)
        model.transitions.forward = lambda states, mask: is_next.log().expand(len(states), -1, -1)
    if name in LENGTH_FAMILY:
        settings, expected = {}, 30
        model.best_lengths = lambda source, beam: torch.full((len(source.lengths), beam), expected)
    (translation,) = translate(model, tokenizer, ["hello world"], **settings)
    assert translation.hypotheses[0].tokens == expected
    translator = VaswaniTransformerTranslationPipeline(model=model, tokenizer=tokenizer)
    assert translator("hello world", **settings) == [{"translation_text": translation.text}]


LONG = "the cat is black i love you this is a book"


def test_text_that_is_too_long_is_truncated_or_kept(model_and_tokenizer: ModelAndTokenizer) -> None:
    model, tokenizer = model_and_tokenizer
    tokens = tokenizer(LONG)["input_ids"]
    short, long = translate(*model_and_tokenizer, ["cat", LONG], max_source_tokens=8)
    assert (long.source_tokens, long.is_truncated, short.is_truncated) == (len(tokens), True, False)
    batch = torch.tensor([[*tokens[:7], tokenizer.eos_token_id]])
    assert long.text == tokenizer.decode(model.generate(batch)[0], skip_special_tokens=True)
    (kept,) = translate(*model_and_tokenizer, [LONG], max_source_tokens=8, too_long="keep")
    assert (kept.text, kept.is_truncated) == (generate_single(model_and_tokenizer, LONG)[0], False)


@pytest.mark.parametrize(
    ("table", "settings"),
    [
        ({}, {"max_source_tokens": 5, "too_long": "error"}),
        ({"position_embedding": "learned", "max_position_embeddings": 5}, {"too_long": "keep"}),
    ],
)
def test_text_that_is_too_long_is_an_error_before_its_window_is_translated(
    model_of_bytes: ModelAndTokenizer, table: dict[str, Any], settings: dict[str, Any]
) -> None:
    translator = Echo(tiny_model(vocab_size=262, **table), model_of_bytes[1], window=2, **settings)
    translations = translator(["a", "abcd", "a", "abcde", "a"])
    assert [translation.text for translation in itertools.islice(translations, 2)] == ["a", "abcd"]
    with pytest.raises(TooLongError, match=r"Text 3 has 6 tokens, more than 5; shorten it") as refusal:
        next(translations)
    assert (refusal.value.index, len(translator.batches)) == (3, 1)


def test_limit_of_no_source_token_is_an_error() -> None:
    with pytest.raises(ValueError, match="max_source_tokens, batch_tokens and window must be at least 1"):
        Translator(*model_of_pairs(), max_source_tokens=0)


@pytest.mark.parametrize("settings", [{}, {"max_new_tokens": 5}], ids=str)
def test_learned_positions_bound_the_source_and_its_translation(settings: dict[str, Any]) -> None:
    _, tokenizer = model_of_pairs()
    model = tiny_model(vocab_size=len(tokenizer), position_embedding="learned", max_position_embeddings=30)
    assert Translator(model, tokenizer, max_source_tokens=31, **settings).max_source_tokens == 30
    (translation,) = translate(model, tokenizer, [LONG * 3], suppress_tokens=[tokenizer.eos_token_id], **settings)
    assert (translation.is_truncated, translation.hypotheses[0].tokens) == (True, settings.get("max_new_tokens", 30))
    assert Translator(tiny_model(vocab_size=len(tokenizer)), tokenizer).max_source_tokens == 1024


@pytest.mark.parametrize("pad", [1, 2, 0])
def test_target_ends_with_its_end_token_or_where_its_padding_begins(pad: int) -> None:
    _, tokenizer = model_of_pairs()
    model = tiny_model(vocab_size=len(tokenizer), pad_token_id=pad)
    model.generation_config.eos_token_id = [2, 7]
    targets = torch.tensor([[5, 2, pad, pad], [5, 6, 7, pad], [5, 6, 8, 9], [2, pad, pad, pad]])
    translator = Translator(model, tokenizer)
    assert translator.target_lengths(targets.tolist()) == [2, 3, 4, 1]
    assert translator.target_lengths([[5, 6, 8, pad]]) == [4 if pad == 2 else 3]


@pytest.mark.parametrize("name", ["autoregressive", *FAMILY])
@pytest.mark.parametrize(
    ("target", "is_unfinished"),
    [
        ([5, 6, 2], False),
        ([9, *[5] * 12, 2], True),
        ([5, 6, 7, 8] * 3 + [2], True),
        ([5, 6, 7] * 4 + [8, 2], False),
        ([5] * 11 + [2], False),
        ([5, 6, 7, 8, 9] * 4 + [2], False),
        ([5, 6], None),
        ([], None),
    ],
)
def test_target_without_its_end_or_with_a_loop_at_it_is_unfinished(
    name: str, target: list[int], is_unfinished: bool | None
) -> None:
    """A non-autoregressive model writes its end wherever it stops, so only a loop shows."""
    expected = name == "autoregressive" if is_unfinished is None else is_unfinished
    assert Translator(*family_of_pairs(name)).is_unfinished(target) == expected


PREFIXES = ["", "te amo mucho", "la gata es", "buenas", "este", ""]


@pytest.mark.parametrize(
    "settings",
    [
        {"num_beams": 1},
        {"num_beams": 4, "num_return_sequences": 3},
        {"length_penalty_type": "power", "num_beams": 4, "early_stopping": True},
        {"do_sample": True, "num_beams": 1, "num_return_sequences": 2},
        {"num_beams": 2, "suppress_tokens": [70, 71, 72, 73, 74, 75]},
    ],
    ids=str,
)
def test_translation_continues_its_prefix(model_and_tokenizer: ModelAndTokenizer, settings: dict[str, Any]) -> None:
    free = list(translate(*model_and_tokenizer, SOURCES, **settings))
    for batch_tokens in (1, 2048):
        limits: dict[str, Any] = {"batch_tokens": batch_tokens, **settings}
        continued = list(translate(*model_and_tokenizer, SOURCES, prefixes=PREFIXES, **limits))
        for prefix, translation in zip(PREFIXES, continued, strict=True):
            assert all(hypothesis.text.startswith(prefix) for hypothesis in translation.hypotheses)
        if not settings.get("do_sample"):
            assert [free[row].text for row in (0, 5)] == [continued[row].text for row in (0, 5)]


def test_prefix_of_the_own_translation_changes_nothing(model_and_tokenizer: ModelAndTokenizer) -> None:
    """Also the score, which counts the tokens of the prefix."""
    begins = [target.rpartition(" ")[0] for target in TARGETS]
    expected = list(translate(*model_and_tokenizer, SOURCES, scores=True))
    actual = list(translate(*model_and_tokenizer, SOURCES, scores=True, prefixes=begins))
    assert [each.text for each in actual] == [each.text for each in expected]
    for one, other in zip(actual, expected, strict=True):
        assert one.hypotheses[0].score == pytest.approx(other.hypotheses[0].score, abs=1e-5)


def test_prefix_beyond_the_limit_leaves_an_unfinished_translation(model_and_tokenizer: ModelAndTokenizer) -> None:
    (translation,) = translate(*model_and_tokenizer, ["cat"], prefixes=["el gato es negro"], max_new_tokens=3)
    assert "el gato es negro".startswith(translation.text)
    assert translation.is_unfinished


def test_text_without_a_word_ignores_its_prefix(model_and_tokenizer: ModelAndTokenizer) -> None:
    texts = [translation.text for translation in translate(*model_and_tokenizer, [" ", "cat"], prefixes=["el", ""])]
    assert texts[0] == ""


def test_prefix_of_another_architecture_follows_its_forced_first_token() -> None:
    _, tokenizer = model_of_pairs()
    model: Any = tiny_marian(vocab_size=len(tokenizer), max_position_embeddings=40)
    settings: dict[str, Any] = {"num_beams": 3, "max_new_tokens": 12}
    for forced in (None, 9):
        model.generation_config.forced_bos_token_id = forced
        first = "" if forced is None else tokenizer.decode([forced])
        for translation in translate(model, tokenizer, ["hello world", "cat"], prefixes=["hola", "el"], **settings):
            begin = "hola" if translation.source == "hello world" else "el"
            assert translation.text.startswith(f"{first}{begin}")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prefixes": ["el"]}, "prefixes: not as many texts as in texts; got 1, expected one for each"),
        ({"prefixes": "el"}, "prefixes is the str 'el'; pass a list with one for each text"),
        ({"prefixes": ["", 3]}, "Prefix 1: not a text"),
        (
            {"prefixes": ["", ""], "num_beams": 2, "do_sample": True},
            "prefixes: not supported by beams that sample; got",
        ),
    ],
)
def test_prefixes_that_do_not_fit_are_an_error(
    model_and_tokenizer: ModelAndTokenizer, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        list(translate(*model_and_tokenizer, ["cat", "cat"], **settings))


@pytest.mark.parametrize("name", FAMILY)
def test_prefix_is_an_error_before_a_non_autoregressive_model_translates(name: str) -> None:
    with pytest.raises(
        ValueError, match=r"prefixes: not supported by the model; got a Vaswani.*predicts all words at once"
    ):
        translate(*family_of_pairs(name), iter(()), prefixes=[])


def test_model_of_another_architecture_translates_too() -> None:
    _, tokenizer = model_of_pairs()
    model: Any = tiny_marian(vocab_size=len(tokenizer), max_position_embeddings=40)
    settings: dict[str, Any] = {"num_beams": 3, "max_new_tokens": 6}
    translations = list(translate(model, tokenizer, TEXTS, **settings, scores=True))
    assert [translation.text for translation in translations] == [
        generate_single((model, tokenizer), text, **settings)[0] for text in TEXTS
    ]
    batch = tokenizer(["cat"], return_tensors="pt")
    expected = model.generate(**batch, **settings, **WITH_SCORES).sequences_scores
    assert translations[7].hypotheses[0].score == pytest.approx(expected.item(), rel=1e-4)
    assert Translator(model, tokenizer).max_source_tokens == 40


@pytest.mark.parametrize("kind", ["own", "fsmt"])
def test_scores_begin_with_the_start_token_of_the_search(kind: str) -> None:
    """FSMT does not shift labels, and a saved search may begin with another token than the configuration's."""
    _, tokenizer = model_of_pairs()
    model: Any = small_model(0, vocab_size=len(tokenizer))
    if kind == "fsmt":
        sizes: dict[str, Any] = {"src_vocab_size": len(tokenizer), "tgt_vocab_size": len(tokenizer), "d_model": 16}
        layers: dict[str, Any] = {"encoder_layers": 1, "decoder_layers": 1, "forced_eos_token_id": None}
        model = FSMTForConditionalGeneration(FSMTConfig(**sizes, **layers)).eval()
    model.generation_config.update(decoder_start_token_id=7, length_penalty_type="power")
    settings: dict[str, Any] = {"num_beams": 3, "max_new_tokens": 6, "length_penalty": 1.0}
    (actual,) = translate(model, tokenizer, ["the cat"], scores=True, **settings)
    output = model.generate(**tokenizer(["the cat"], return_tensors="pt"), **settings, **WITH_SCORES)
    assert actual.hypotheses[0].score == pytest.approx(output.sequences_scores.item(), rel=1e-4)


def test_model_in_training_translates_without_dropout_and_stays_in_training(
    model_and_tokenizer: ModelAndTokenizer,
) -> None:
    (model, tokenizer), modes = model_and_tokenizer, []
    handle = model.model.encoder.register_forward_pre_hook(lambda stack, _: modes.append(stack.training))
    model.train()
    try:
        assert [translation.text for translation in translate(model, tokenizer, SOURCES)] == TARGETS
        assert (modes, model.training) == ([False], True)
    finally:
        handle.remove()
        model.eval()


def test_empty_window_is_an_error_at_once(model_and_tokenizer: ModelAndTokenizer) -> None:
    with pytest.raises(ValueError, match="window must be at least 1"):
        translate(*model_and_tokenizer, [], window=0)


def test_tokenizer_without_padding_is_an_error() -> None:
    tokenizer: Any = SimpleNamespace(pad_token_id=None)
    with pytest.raises(ValueError, match=r"its padding token is missing; set tokenizer\.pad_token"):
        translate(tiny_model(), tokenizer, ["a"])


def test_single_text_is_not_taken_for_a_list_of_its_characters(model_and_tokenizer: ModelAndTokenizer) -> None:
    with pytest.raises(TypeError, match=r"texts is the str 'hello world'; pass a list of texts, for example \[text\]"):
        translate(*model_and_tokenizer, "hello world")


@pytest.mark.parametrize("max_source_tokens", [4, 99])
def test_text_that_spells_its_end_does_not_end(model_of_bytes: ModelAndTokenizer, max_source_tokens: int) -> None:
    translator = Echo(*model_of_bytes, max_source_tokens=max_source_tokens)
    list(translator(["</s> a</s>", "<pad> b <s>"]))
    for tokens in translator.batches[0]:
        assert tokens[-1] == END
        assert not {START, PAD, END} & set(tokens[:-1])


@pytest.mark.parametrize("wrong", [None, ("a", "b"), b"cat", 7])
def test_input_that_is_not_a_text_is_an_error_with_its_index(
    model_and_tokenizer: ModelAndTokenizer, wrong: Any
) -> None:
    with pytest.raises(TypeError, match=r"Text 1: not a text to translate; got .*, expected str"):
        list(translate(*model_and_tokenizer, ["cat", wrong]))
    with pytest.raises(ValueError, match=r"Text 0: not a text; got .*, half of a surrogate pair"):
        list(translate(*model_and_tokenizer, ["\ud800"]))


def test_resized_model_translates_the_same_and_one_that_lacks_a_token_is_an_error() -> None:
    model, tokenizer = copy.deepcopy(model_of_pairs()[0]), model_of_pairs()[1]
    model.resize_token_embeddings(pad_to_multiple_of=64)
    assert model.config.vocab_size > len(tokenizer)
    assert [translation.text for translation in translate(model, tokenizer, SOURCES)] == TARGETS
    model.resize_token_embeddings(len(tokenizer) - 1)
    with pytest.raises(ValueError, match=rf"its tokenizer has {len(tokenizer)} entries, the model only"):
        list(translate(model, tokenizer, SOURCES))


def test_last_of_several_threads_restores_the_mode() -> None:
    """All threads are inside at once, and leave one after another."""
    model = torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Dropout())
    model[1].eval()
    count, inside = 8, Barrier(8, timeout=60)

    def modes_until_all_have_left(number: int) -> list[bool]:
        modes = []
        for _ in range(20):
            inside.wait()
            with eval_mode(cast(Any, model)):
                for _ in range(number + 1):  # the first thread leaves in the first turn
                    modes.append(any(module.training for module in model.modules()))
                    inside.wait()
            for _ in range(number + 1, count):
                inside.wait()
        return modes

    with ThreadPoolExecutor(count) as pool:
        assert not any(itertools.chain(*pool.map(modes_until_all_have_left, range(count))))
    assert [model.training, model[0].training, model[1].training] == [True, True, False]


@pytest.mark.parametrize(
    ("algorithm", "vocab_size", "expected"),
    [
        ("wordpiece", 26, ["Hello", "§"]),  # pieces spell the other
        ("bpe", 265, ["§", "é", "naïve", "山"]),  # of characters that bytes spell
    ],
)
def test_unknown_words_are_those_that_the_vocabulary_lacks(
    algorithm: str, vocab_size: int, expected: list[str], tmp_path: Path
) -> None:
    learned = ["The cat sleeps and the dogs sleep.", "The cats eat the dog and the cat sleeps."]
    VaswaniTransformerTokenizer.train_from_iterator(learned, vocab_size, algorithm).save_pretrained(tmp_path)
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path)
    texts = [*learned, "", "The  Hello catt sleeps . the §" if algorithm == "wordpiece" else "a § é naïve 山"]
    assert unknown_words(tokenizer, text_encoder(tokenizer)(texts), texts) == [[], [], [], expected]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("the -xyz- cat", ["-", "xyz", "-"]),
        ("the §xyz cat", ["§", "xyz"]),
        ("the\tcat", []),
        ("the\u2028cat", []),
        ("the\u00a0xyz", ["xyz"]),
        ("the cat\u2009sleeps", []),
        ("the \u200bcat", ["\u200b"]),
    ],
)
def test_unknown_words_are_named_as_they_stand_in_the_text(text: str, expected: list[str]) -> None:
    tokenizer = VaswaniTransformerTokenizer.train_from_iterator(["the cat sleeps", "the cat"], 200, "wordpiece")
    assert unknown_words(tokenizer, source_encoder(tokenizer)([text]), [text]) == [expected]


@given(lengths=st.lists(st.integers(1, 60), max_size=40), budget=st.integers(1, 300))
def test_batch_keeps_to_its_budget_and_every_text_is_in_one(lengths: list[int], budget: int) -> None:
    batches = batches_by_length(lengths, budget)
    assert sorted(itertools.chain(*batches)) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(16, *(lengths[index] for index in batch)) <= budget
    ordered = [lengths[index] for batch in batches for index in batch]
    assert ordered == sorted(lengths, reverse=True)
