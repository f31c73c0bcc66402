"""The model in JavaScript, in Node: against the package's tokenizers, models and searches."""

import itertools
import json
import random
import shutil
import struct
import subprocess
import unicodedata
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.activations import ACT2FN

from bench.measuring import sources_of
from tests import ROOT
from tests.batches import FLOAT32, random_tokens
from tests.browsers import node_program
from tests.models import WITH_SCORES, load_tokenizer, random_model, small_model, tiny_ctc
from vaswani_transformer import VaswaniTransformerForConditionalGeneration, VaswaniTransformerTokenizer
from vaswani_transformer.ctc import collapse
from vaswani_transformer.figures.tokens import display_tokens
from vaswani_transformer.prefix_search import prefix_beam_search
from vaswani_transformer.search import SearchSettings, beam_search, greedy_search
from vaswani_transformer.tokenizer import source_encoder, text_encoder

Call = Callable[..., Any]
MODEL = ROOT / "models" / "tatoeba-en-de"
SCRIPTS = [ROOT / "vaswani_transformer" / "demo" / folder for folder in ("model", "web")]
PAD, END = 1, 2
VOCABULARY = 7


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Generator[Call]:
    """Start the runner beside the model's files, and return a function that calls one of its functions."""
    folder = tmp_path_factory.mktemp("scripts")
    for path in [*(path for folder in SCRIPTS for path in folder.glob("*.js")), Path(__file__).with_name("runner.mjs")]:
        shutil.copy(path, folder)
    (folder / "package.json").write_text('{"type": "module"}', encoding="utf-8")  # as in a page's script
    runner = subprocess.Popen(
        [node_program(), str(folder / "runner.mjs")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8"
    )
    assert runner.stdin is not None
    assert runner.stdout is not None
    stdin, stdout = runner.stdin, runner.stdout

    def call(function: str, **values: Any) -> Any:
        stdin.write(json.dumps({"call": function, **values}, default=str) + "\n")  # str() of a path
        stdin.flush()
        answer = json.loads(stdout.readline())
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer["result"]

    yield call
    stdin.close()
    assert runner.wait(timeout=10) == 0
    stdout.close()


# Files of weights


def bits_of(tensor: Tensor) -> list[int]:
    return tensor.float().numpy().view(np.uint32).tolist()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_number_of_16_bits_is_read_exactly(node: Call, tmp_path: Path, dtype: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    numbers = every[~every.isnan()]  # a NaN's other bits are free
    save_file({"numbers": numbers, "nan": every[every.isnan()][:1]}, tmp_path / "model.safetensors")
    read = node("bits", path=tmp_path / "model.safetensors")
    assert read["numbers"] == bits_of(numbers)
    assert np.isnan(np.array(read["nan"], dtype=np.uint32).view(np.float32)).all()


def write_tensors(path: Path, header: dict[str, Any], numbers: bytes) -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + numbers)
    return path


def test_numbers_at_any_byte_are_read(node: Call, tmp_path: Path) -> None:
    numbers = torch.tensor([1.5, -2.25])
    for start in range(4):
        header = {"numbers": {"dtype": "F32", "shape": [2], "data_offsets": [start, start + 8]}}
        path = write_tensors(tmp_path / "model.safetensors", header, bytes(start) + numbers.numpy().tobytes())
        assert node("bits", path=path) == {"numbers": bits_of(numbers)}


def test_damaged_or_unknown_file_is_an_error_of_one_line(node: Call, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    whole = (MODEL / "model.safetensors").read_bytes()
    for content in (b"", whole[:7], whole[:100], whole[:-1], struct.pack("<Q", 4) + b"html"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"^model\.safetensors: damaged; got .*, expected .* Load it again\.$"):
            node("bits", path=path)
    write_tensors(path, {"ids": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}}, bytes(8))
    with pytest.raises(ValueError, match=r"^ids: .* got I64, expected F32, F16, BF16\."):
        node("bits", path=path)


# Tokenizers

PHRASES = ["The cat is black.", "Die Katze ist schwarz!", "isn't it?", "El gato_2 es negro, ¿no?", "ÄÖÜ straße x² ▁▂"]
PIECES = [
    *("the", "The cat", "isn't", " it's", "schwarz", "Straße", "ÄÖÜ", "İ", "ΟΔΟΣ", "42", "4.2", "_", "²", "½", "Ⅷ"),
    *(" ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u2003", "\u3000", "\u0085", "\ufeff", "\u200b", "\u2028", "\x00"),
    *("e\u0301", "\u0301", "A\u030a", "\u1100\u1161\u11a8", "\u0344", "\u212b", "ﬁ", "日本", "🙂", "👩\u200d👧"),
    *("</s>", "<s>", "<pad>", "<unk>", "<mask>", "<2es>", "<2de>", "<2", "es>", "\u2581", "\u2582", "▁▂", "▁the"),
    *("...", "?!", "--", "'", "'s", "$&", "\\", "x" * 300, "ab" * 200),
]


def odd_texts(count: int) -> list[str]:
    """Return texts of odd pieces and characters, all assigned since Unicode 3.2, on whose properties versions agree."""
    generator = random.Random(0)
    characters = [chr(code) for code in range(0x20000) if unicodedata.ucd_3_2_0.category(chr(code)) not in ("Cn", "Cs")]
    texts = ["", *PIECES]
    while len(texts) < count:
        length = generator.randint(1, 8)
        pieces = generator.choices(PIECES, k=length) + generator.choices(characters, k=generator.randint(0, 4))
        generator.shuffle(pieces)
        texts.append("".join(pieces))
    return texts


ODD_TEXTS = odd_texts(500)


def shipped_tokenizer() -> Any:
    return load_tokenizer(MODEL)


def trained_tokenizer(algorithm: str, size: int, texts: list[str], tags: bool = False) -> Any:
    tokenizer = VaswaniTransformerTokenizer.train_from_iterator(texts, size, algorithm)
    if tags:
        tokenizer.add_special_tokens({"additional_special_tokens": ["<2es>", "<2"]})
        tokenizer.add_tokens(["<2de>", "the"])
    return tokenizer


TOKENIZERS: dict[str, Callable[[], Any]] = {
    "shipped": shipped_tokenizer,
    "bytes": partial(trained_tokenizer, "bpe", 330, PHRASES),
    "words": partial(trained_tokenizer, "wordpiece", 120, PHRASES),
    "small letters": partial(trained_tokenizer, "wordpiece", 90, [text.lower() for text in PHRASES]),
    "bytes with tags": partial(trained_tokenizer, "bpe", 330, PHRASES, tags=True),
    "words with tags": partial(trained_tokenizer, "wordpiece", 120, PHRASES, tags=True),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokenizer_encodes_and_decodes_odd_texts_as_the_package(node: Call, tmp_path: Path, name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    tokenizer.save_pretrained(tmp_path)
    assert node("encode", folder=tmp_path, texts=ODD_TEXTS) == text_encoder(tokenizer)(ODD_TEXTS).input_ids
    assert node("encodeSources", folder=tmp_path, texts=ODD_TEXTS) == source_encoder(tokenizer)(ODD_TEXTS).input_ids

    generator = random.Random(1)
    rows = [generator.choices(range(len(tokenizer)), k=generator.randint(0, 20)) for _ in range(500)]  # not in UTF-8
    decoded = tokenizer.batch_decode(rows, skip_special_tokens=True)
    assert node("decode", folder=tmp_path, rows=rows) == decoded


def test_long_word_takes_no_quadratic_time_and_the_cache_is_bounded(node: Call, tmp_path: Path) -> None:
    """Merging by passes over the word took more than a second for 8,000 letters, so minutes for these."""
    tokenizer = trained_tokenizer("bpe", 330, PHRASES)
    tokenizer.save_pretrained(tmp_path)
    texts = ["a" * 100_000, "thecat" * 10_000, " ".join(map(str, range(25_000)))]
    assert node("encode", folder=tmp_path, texts=texts) == text_encoder(tokenizer)(texts).input_ids
    assert 0 < node("cachedWords", folder=tmp_path) <= 10_000


def test_tokenizer_that_the_package_does_not_train_is_an_error(node: Call, tmp_path: Path) -> None:
    trained_tokenizer("bpe", 330, PHRASES).save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    for name, field, value in (("model", "model", "Unigram"), ("normalizer", "normalizer", "NFKC")):
        (tmp_path / name).mkdir()
        changed = {**fields, field: {**fields[field], "type": value}}
        (tmp_path / name / "tokenizer.json").write_text(json.dumps(changed), encoding="utf-8")
        with pytest.raises(ValueError, match=rf"^tokenizer\.json: unknown {name}; got {value}, expected .*\.$"):
            node("encode", folder=tmp_path / name, texts=[""])


@pytest.mark.parametrize(
    ("field", "setting", "value"),
    [
        ("pre_tokenizer", "add_prefix_space", True),
        ("pre_tokenizer", "use_regex", False),
        ("model", "byte_fallback", True),
        ("model", "end_of_word_suffix", "</w>"),
        ("added_tokens", "lstrip", True),
    ],
)
def test_setting_that_would_split_a_text_otherwise_is_an_error(
    node: Call, tmp_path: Path, field: str, setting: str, value: object
) -> None:
    tokenizer = trained_tokenizer("bpe", 330, PHRASES)
    tokenizer.add_tokens(["<2es>"])
    tokenizer.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    part = fields[field][-1] if field == "added_tokens" else fields[field]
    part[setting] = value
    (tmp_path / "tokenizer.json").write_text(json.dumps(fields), encoding="utf-8")
    with pytest.raises(ValueError, match=rf"^tokenizer\.json: unknown {field}\.{setting}; got {json.dumps(value)}, "):
        node("encode", folder=tmp_path, texts=[""])


@pytest.mark.parametrize("kind", ["bpe", "wordpiece"])
def test_note_names_the_characters_that_no_token_has(node: Call, tmp_path: Path, kind: str) -> None:
    trained_tokenizer(kind, 330 if kind == "bpe" else 60, ["Über den Äpfeln", "the cat"]).save_pretrained(tmp_path)
    notes = node("unknownNotes", folder=tmp_path, texts=["the cat", "Über den Äpfeln", "Über 水"])
    assert notes[:2] == ["", ""]
    assert notes[2].startswith(f"The vocabulary has 水 {'only as bytes' if kind == 'bpe' else 'not at all'}, ")


# Models


def test_product_of_any_size_is_that_of_torch(node: Call) -> None:
    for rows, inputs, outputs in itertools.product((1, 2, 4, 5, 9), (1, 3, 4), (1, 2, 3, 4, 5, 7)):
        x, weight, bias = torch.randn(rows, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
        numbers = {"x": x.flatten().tolist(), "weight": weight.flatten().tolist(), "bias": bias.tolist()}
        product = node("linear", inputs=inputs, **numbers)
        expected = torch.nn.functional.linear(x, weight, bias)
        torch.testing.assert_close(torch.tensor(product).view(rows, outputs), expected, **FLOAT32)


@pytest.mark.parametrize("name", ACT2FN)
def test_activation_function_is_that_of_the_configuration(node: Call, tmp_path: Path, name: str) -> None:
    function = ACT2FN[name]
    if list(function.parameters()):  # its parameters are in the model's file
        check_logits(node, tmp_path, random_model(activation_function=name))
        return
    values = [*np.linspace(-12, 12, 97), -1e4, 1e4]
    computed = torch.tensor(node("activation", name=name, values=values))
    expected = function(torch.tensor(values, dtype=torch.float64)).float()
    torch.testing.assert_close(computed, expected, rtol=1e-6, atol=1e-6)


def check_logits(node: Call, folder: Path, model: Any, source_length: int = 7) -> None:
    """Compare logits and all attention weights with the model's in float64."""
    model.save_pretrained(folder)
    size = model.config.vocab_size
    source, target = (random_tokens(1, length, vocab_size=size) for length in (source_length, 5))
    computed = node("forward", folder=folder, source=source[0].tolist(), target=target[0].tolist())
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model.double()(input_ids=source, decoder_input_ids=target, output_attentions=True, use_cache=False)
    assert_near(computed["logits"], expected.logits[0])
    heads = model.config.num_heads
    for name, attentions in (("encoder", expected.encoder_attentions), ("cross", expected.cross_attentions)):
        weights = torch.tensor(computed[name]).unflatten(-1, (heads, -1))  # (N, Q, H, K)
        assert_near(weights.transpose(1, 2), torch.stack([layer[0] for layer in attentions]))
    for rows, layer in zip(computed["decoder"], expected.decoder_attentions, strict=True):
        for position, row in enumerate(rows):
            assert_near(torch.tensor(row).view(heads, -1), layer[0, :, position, : position + 1])


def assert_near(computed: Any, expected: Tensor) -> None:
    """Assert equality to 1e-5, relative to the largest number, which is that of float32's rounding."""
    largest = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(torch.as_tensor(computed).double(), expected.double(), rtol=0, atol=1e-5 * largest)


SHAPES: dict[str, dict[str, Any]] = {
    "base": {},
    "one head and layer": {"num_heads": 1, "encoder_layers": 1, "decoder_layers": 3},
    "learned positions": {"position_embedding": "learned", "max_position_embeddings": 9},
    "odd widths": {"position_embedding": "learned", "d_model": 9, "num_heads": 3, "d_ff": 5, "vocab_size": 7},
    "smallest": {"position_embedding": "learned", "d_model": 1, "num_heads": 1, "d_ff": 1, "vocab_size": 5},
    "d_k and d_v": {"d_k": 3, "d_v": 5, "attention_bias": True},
    "heads that do not divide": {"d_k": 4, "d_v": 6, "num_heads": 3},
    "untied": {"tie_word_embeddings": False, "scale_embedding": False, "layer_norm_eps": 1e-3},
    "other ids": {"pad_token_id": 0, "bos_token_id": 5, "eos_token_id": [4, 6], "decoder_start_token_id": 0},
}


@pytest.mark.parametrize("name", SHAPES)
def test_logits_and_weights_are_those_of_the_package(node: Call, tmp_path: Path, name: str) -> None:
    check_logits(node, tmp_path, random_model(**SHAPES[name]))


def test_logits_of_a_long_source_are_those_of_the_package(node: Call, tmp_path: Path) -> None:
    check_logits(node, tmp_path, random_model(), source_length=200)


def test_model_without_javascript_or_with_other_weights_is_an_error(node: Call, tmp_path: Path) -> None:
    model = random_model()
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    errors = {
        r"config\.json: .* got vaswani_nat, expected vaswani_transformer or vaswani_ctc": {"model_type": "vaswani_nat"},
        r"attention_window: .* got 2, expected null": {"attention_window": 2},
        r"model\.encoder\.layers\.2\.self_attn\.q_proj\.weight: .* got none, expected 1024": {"encoder_layers": 3},
        r"model\.shared\.weight: .* got 3168, expected 3200": {"vocab_size": 100},
        "activation_function: unknown; got cubic": {"activation_function": "cubic"},
    }
    for index, (message, fields) in enumerate(errors.items()):
        folder = tmp_path / str(index)
        folder.mkdir()
        shutil.copy(tmp_path / "model.safetensors", folder)
        (folder / "config.json").write_text(json.dumps({**config, **fields}), encoding="utf-8")
        with pytest.raises(ValueError, match=rf"^{message}.*\.$"):
            node("forward", folder=folder, source=[3], target=[0])


def test_text_beyond_the_learned_positions_is_an_error(node: Call, tmp_path: Path) -> None:
    random_model(position_embedding="learned", max_position_embeddings=4).save_pretrained(tmp_path)
    node("forward", folder=tmp_path, source=[3] * 4, target=[0] * 4)
    with pytest.raises(ValueError, match=r"^text: longer .* got 5 tokens, expected 4\."):
        node("forward", folder=tmp_path, source=[3] * 5, target=[0])


# Searches


class TableStepper:
    """`Stepper` whose logits are a row of a table, chosen by all tokens of a beam."""

    def __init__(self, table: Tensor) -> None:
        self.table = table

    def step(self, tokens: Tensor) -> Tensor:
        rows = torch.zeros(len(tokens), dtype=torch.long)
        for column in tokens.T:
            rows = (31 * rows + column + 1) % len(self.table)
        return self.table[rows]

    def reorder(self, beams: Tensor) -> None: ...

    def keep(self, sources: Tensor) -> None: ...


def make_table(seed: int) -> Tensor:
    """Return log-probabilities (rows, V) in float64, of which the end token's are high enough that targets end."""
    generator = torch.Generator().manual_seed(seed)
    logits = 1.5 * torch.randn(211, VOCABULARY, generator=generator, dtype=torch.float64)
    logits[:, END] += 0.5
    return logits.log_softmax(1)


def compare_searches(node: Call, seed: int, prompt: list[int], limit: int, ends: list[int], **settings: Any) -> None:
    """Compare the targets of both beam searches on a table."""
    table = make_table(seed)
    k = settings["num_beams"]
    expected = beam_search(
        TableStepper(table),
        torch.tensor([prompt] * k),
        SearchSettings(
            limits=torch.tensor([limit]),
            end_tokens=torch.tensor(ends, dtype=torch.long),
            pad_token=PAD,
            **settings,
        ),
    )
    names = {"num_beams": "beams", "num_returned": "returned", "length_penalty_type": "penalty"}
    names["early_stopping"] = "earlyStopping"
    options = {names.get(name, name): value for name, value in settings.items()}
    options |= {"limit": limit, "ends": ends, "suppressed": []}
    targets = node("search", table=table.tolist(), prompt=prompt, settings=options)

    # A row ends where the beam indices do; a row without a target has the score of an empty slot.
    lengths = (expected.beam_indices >= 0).sum(1).tolist()
    rows = [row for row in range(len(lengths)) if expected.scores[row] > -1e8]
    tokens = expected.tokens[:, len(prompt) :].tolist()
    assert [target["tokens"] for target in targets] == [tokens[row][: lengths[row]] for row in rows]
    parents = expected.beam_indices.tolist()
    assert [target["parents"] for target in targets] == [parents[row][: lengths[row]] for row in rows]
    assert [target["score"] for target in targets] == pytest.approx(expected.scores[rows].tolist(), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("beams", [1, 2, 3, 5])
@pytest.mark.parametrize("penalty", ["gnmt", "power"])
@pytest.mark.parametrize("alpha", [-0.5, 0.0, 0.6, 1.5])
def test_beam_search_is_that_of_the_package(node: Call, beams: int, penalty: str, alpha: float) -> None:
    for seed, limit, stops in itertools.product(range(2), (1, 2, 12), (False, True, "never")):
        compare_searches(
            node, seed, [0], limit, [END], num_beams=beams, num_returned=1 + seed * (beams - 1), alpha=alpha,
            length_penalty_type=penalty, early_stopping=stops,
        )  # fmt: skip


@pytest.mark.parametrize("prompt", [[0], [0, 4], [0, 4, 3, 6, 5]], ids=len)
@pytest.mark.parametrize("ends", [[], [END], [END, 5], [END, 3, 6]], ids=len)
def test_beam_search_from_a_prefix_and_with_any_ends_is_that_of_the_package(
    node: Call, prompt: list[int], ends: list[int]
) -> None:
    for seed in range(3):
        settings = {"num_beams": 3, "num_returned": 3, "alpha": 0.6, "length_penalty_type": "gnmt"}
        compare_searches(node, 10 + seed, prompt, 9, ends, **settings)


@pytest.mark.parametrize("prompt", [[0], [0, 4]], ids=len)
def test_greedy_search_is_that_of_the_package(node: Call, prompt: list[int]) -> None:
    for seed, limit in itertools.product(range(20), (1, 6)):
        table = make_table(seed)
        settings = SearchSettings(torch.tensor([limit]), torch.tensor([END]), PAD)
        expected = greedy_search(TableStepper(table), torch.tensor([prompt]), settings)[0, len(prompt) :].tolist()
        options = {"alpha": 0.0, "penalty": "gnmt", "limit": limit, "ends": [END], "suppressed": []}
        (target,) = node("search", table=table.tolist(), prompt=prompt, settings=options, greedy=True)
        assert target["tokens"] == expected
        assert target["parents"] == [0] * len(expected)


def test_more_beams_than_targets_find_every_target(node: Call) -> None:
    """With a limit of two tokens there are an end alone, and each other token followed by any."""
    table = make_table(0)
    options = {"beams": 60, "returned": 60, "alpha": 0.0, "penalty": "gnmt", "earlyStopping": False, "suppressed": []}
    targets = node("search", table=table.tolist(), prompt=[0], settings={**options, "limit": 2, "ends": [END]})
    every = [[END], *([first, last] for first in range(VOCABULARY) if first != END for last in range(VOCABULARY))]
    assert sorted(target["tokens"] for target in targets) == sorted(every)
    assert sum(np.exp(target["logProb"]) for target in targets) == pytest.approx(1)
    assert all(np.diff([target["score"] for target in targets]) <= 0)


def test_step_of_a_search_has_the_open_beams_and_the_finished_targets(node: Call, tmp_path: Path) -> None:
    small_model(3, vocab_size=12).save_pretrained(tmp_path)
    options = {"beams": 3, "maxTokens": 4}
    steps = node("steps", folder=tmp_path, source=[3, 4, 2], options=options)
    (best,) = node("translate", folder=tmp_path, sources=[[3, 4, 2]], options=options)[0]
    finished = []
    for length, candidates in enumerate(steps, start=1):
        kept = [each for each in candidates if each["isKept"]]
        assert all(len(each["tokens"]) == length for each in candidates)
        assert sum(not each["isFinished"] for each in kept) <= 3
        assert all(each["isFinished"] == (each["tokens"][-1] == END or length == 4) for each in candidates)
        finished += [each for each in kept if each["isFinished"]]
    assert max(finished, key=lambda each: each["score"])["tokens"] == best["tokens"]


def test_saved_options_are_those_of_the_generation_config(node: Call) -> None:
    saved = json.loads((MODEL / "generation_config.json").read_text(encoding="utf-8"))
    paper = {"beams": 4, "alpha": 0.6, "penalty": "gnmt", "maxSourceRelative": 50, "start": 0, "ends": 2}
    assert node("savedOptions", saved=saved) == paper
    power = {"beams": 1, "alpha": 1, "penalty": "power"}
    assert node("savedOptions", saved={}) == power
    assert node("savedOptions", saved={"max_length": 20}) == power  # Transformers' default
    assert node("savedOptions", saved={"length_bonus": 0.5}) == {**power, "bonus": 0.5}
    saved = {"max_length": 30, "suppress_tokens": [3], "early_stopping": True, "eos_token_id": [2, 4]}
    limited = {**power, "maxTokens": 29, "maxSourceRelative": None}
    assert node("savedOptions", saved=saved) == {**limited, "suppressed": [3], "earlyStopping": True, "ends": [2, 4]}
    saved = {"max_length": 30, "max_new_tokens": 7, "max_source_relative_length": 3}
    assert node("savedOptions", saved=saved) == {**power, "maxTokens": 7, "maxSourceRelative": 3}


@pytest.mark.parametrize("beams", [1, 4])
def test_search_by_weights_that_are_not_finite_is_an_error(node: Call, tmp_path: Path, beams: int) -> None:
    model = small_model(0)
    model.model.shared.weight.data.fill_(torch.nan)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"^logits: NaN, so no target has a score\."):
        node("translate", folder=tmp_path, sources=[[3, 2]], options={"beams": beams})


def check_targets(
    node: Call, folder: Path, model: Any, sources: list[list[int]], returned: int = 4, **settings: Any
) -> None:
    """Compare the best targets of each source: equal, or with scores that differ by less than 1e-4."""
    beams = settings.get("num_beams", 4)
    returned = min(returned, beams)
    options = {"beams": beams, "returned": returned}
    if prefix := settings.pop("prefix", []):
        start = model.config.target_start_token_id
        settings["decoder_input_ids"] = torch.tensor(len(sources) * [[start, *prefix]])
        options["prefix"] = prefix
    if suppressed := settings.get("suppress_tokens"):
        options["suppressed"] = suppressed
    translated = node("translate", folder=folder, sources=sources, options=options)
    output = model.generate(**sources_of(sources), num_return_sequences=returned, **settings, **WITH_SCORES)
    rows = output.sequences.unflatten(0, (-1, returned)).tolist()
    for targets, sequences, scores in zip(
        translated, rows, output.sequences_scores.unflatten(0, (-1, returned)).tolist(), strict=True
    ):
        assert [target["score"] for target in targets] == pytest.approx(scores, abs=1e-4)
        for rank, (target, row) in enumerate(zip(targets, sequences, strict=True)):
            expected = row[1 + len(prefix) :][: len(target["tokens"])]
            gaps = [abs(scores[rank] - other) for index, other in enumerate(scores) if index != rank]
            assert target["tokens"] == expected or min(gaps, default=0) < 1e-4


def test_targets_of_small_models_are_those_of_the_package(node: Call, tmp_path: Path) -> None:
    every: list[dict[str, Any]] = [{}, {"num_beams": 2}, {"prefix": [4, 3]}, {"suppress_tokens": [3, 5]}]
    for seed, settings in enumerate(every):
        folder = tmp_path / str(seed)
        model = small_model(seed, vocab_size=20, position_embedding="learned", max_position_embeddings=12)
        model.save_pretrained(folder)
        check_targets(node, folder, model, [[3, 4, 2], [9, 8, 7, 6, 5, 2]], **settings)


SUBJECTS = ["I", "You", "She", "My brother", "The old man", "Tom", "Nobody in this room", "The children", "They", "All"]
ENDINGS = [
    *("saw the dog.", "would like a cup of tea!", "had never been to Berlin before.", "bought 25 books last year."),
    *("didn't know what to say.", "can swim, but cannot fly.", "wanted to learn French?", "lost the keys."),
    *("waited for the train until it began to rain.", "is not as young as the author of the letter."),
]
SENTENCES = [f"{subject} {ending}" for subject in SUBJECTS for ending in ENDINGS]


def check_trained_model(node: Call, sentences: list[str], returned: int) -> None:
    model = VaswaniTransformerForConditionalGeneration.from_pretrained(MODEL).eval()
    sources = source_encoder(load_tokenizer(MODEL))(sentences).input_ids
    assert node("encodeSources", folder=MODEL, texts=sentences) == sources
    check_targets(node, MODEL, model, sources, returned)


def test_trained_model_translates_as_the_package(node: Call) -> None:
    check_trained_model(node, ["Where are they?", "I would like a cup of tea."], returned=4)


@pytest.mark.slow
def test_trained_model_translates_a_hundred_sentences_as_the_package(node: Call) -> None:
    assert len(SENTENCES) == 100
    check_trained_model(node, SENTENCES[::11], returned=4)
    check_trained_model(node, SENTENCES, returned=1)


# CTC

CTC_SHAPES: dict[str, dict[str, Any]] = {
    "base": {},
    "upsampling": {"upsampling": 3, "attention_bias": True, "d_v": 3},
    "learned positions": {"position_embedding": "learned", "max_position_embeddings": 9},
    "other ids": {"pad_token_id": 4, "bos_token_id": 5, "eos_token_id": [3, 6], "decoder_start_token_id": 7},
}


@pytest.mark.parametrize("name", CTC_SHAPES)
def test_ctc_takes_the_most_likely_path_and_collapses_it(node: Call, tmp_path: Path, name: str) -> None:
    model = tiny_ctc(**CTC_SHAPES[name], vocab_size=12)
    for parameter in model.parameters():
        parameter.data += 0.4 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path)
    config = model.config
    blank = config.pad_token_id
    excluded = [token for token in model.special_tokens() if token != blank] + [8]
    for source in ([9], [9, 10, 11, 8, 2], [4, 9, 9, 10, 8, 8, 2]):
        searches = [{"beams": 1}, {"beams": 3}, {"beams": 4, "bonus": 0.7}, {"beams": 3, "limit": 2}]
        computed = node("ctc", folder=tmp_path, source=source, suppressed=[8], searches=searches)
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([source])).logits[0].double()  # (U, V)
        assert_near(computed["logits"], logits)

        # Each slot has the best token that is permitted, and the target is that of the path.
        permitted = logits.index_fill(1, torch.tensor(excluded), -torch.inf)
        path = torch.tensor(computed["path"])[:, None]
        torch.testing.assert_close(permitted.gather(1, path)[:, 0], permitted.amax(1), **FLOAT32)
        assert computed["logProb"] == pytest.approx(float(logits.log_softmax(1).gather(1, path).sum()), abs=1e-3)
        target = collapse(path.T, blank, model.end_ids[0], torch.tensor([99]))
        assert computed["tokens"] == target.tokens[0, : int(target.lengths[0]) - 1].tolist()

        # A search's targets and scores are those of `generate()`.
        for options, targets in zip(searches[1:], computed["searched"][1:], strict=True):
            settings = {
                "num_beams": options["beams"],
                "length_bonus": options.get("bonus", 0.0),
                "suppress_tokens": [8],
            }
            limits = {"max_new_tokens": options.get("limit", 98) + 1, "num_return_sequences": len(targets)}
            output = model.generate(torch.tensor([source]), **settings, **limits, return_dict_in_generate=True)
            rows = [
                row[1:length] for row, length in zip(output.sequences.tolist(), output.lengths.tolist(), strict=True)
            ]
            scores = output.sequences_scores.tolist()
            assert [target["score"] for target in targets] == pytest.approx(scores, abs=1e-4)
            assert [target["tokens"] for target in targets] == rows or min(np.abs(np.diff(scores)), default=1) < 1e-4


def test_prefix_search_is_that_of_the_package(node: Call) -> None:
    generator = random.Random(0)
    for beams, bonus, limit in itertools.product((1, 2, 5), (-0.5, 0.0, 1.0), (1, 3, 99)):
        slots = []
        for _ in range(7):
            words = generator.sample(range(4), k=3)
            slots.append(([generator.random() for _ in words], words, generator.random()))
        read = [
            {
                "words": [{"probability": each, "token": word} for each, word in zip(*columns, strict=True)],
                "blank": blank,
            }
            for *columns, blank in slots
        ]
        found = node("prefixSearch", slots=read, beams=beams, bonus=bonus, limit=limit)
        assert [tuple(tokens) for tokens in found] == prefix_beam_search(slots, beams, bonus, limit)


# Labels


def test_labels_of_tokens_are_those_of_figures(node: Call) -> None:
    tokenizer = shipped_tokenizer()
    rows = [tokenizer(text)["input_ids"] for text in ODD_TEXTS[::5]]
    assert node("labels", folder=MODEL, rows=rows) == [display_tokens(tokenizer, row) for row in rows]
