"""Hostile input: every reader and loader gets edited valid files, and answers with a result or with one line.

A case is decided by seed, target and number. Each target returns True for a result that its oracle accepts and False
for input that the reader rejected by a UserError of one line.
"""

import argparse
import contextlib
import copy
import functools
import gzip
import html.parser
import io
import json
import random
import re
import shutil
import struct
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import FSMTConfig, FSMTForConditionalGeneration

from tests.builders import random_attention_maps
from tests.campaign.mutations import dump, edit_bytes, edit_json, json_bytes
from tests.helpers import PAIRS, ROOT, model_of_pairs, tiny_model
from tests.nar_models import FAMILY
from tests.training.invented_results import results_of
from training.data.distilled import Distillation
from training.data.files import read_file
from training.recipe.fields import DataRecipe, load_recipe
from training.report.card import make_card
from training.report.results import read_results, results_errors
from training.run.checkpoints import changed_file, checkpoint_at, intact_checkpoint, settle, writing
from vaswani_transformer.convert.fairseq import from_fairseq
from vaswani_transformer.figures.page import render_page
from vaswani_transformer.parsing.linear import delinearize, linearize
from vaswani_transformer.parsing.trees import Tree, read_trees
from vaswani_transformer.parsing.words import split_plain, split_tokenized
from vaswani_transformer.support.checked_loading import load_config, load_model, load_tokenizer
from vaswani_transformer.support.errors import UserError, one_line
from vaswani_transformer.translation.command import LineFormat
from vaswani_transformer.translation.output import ResumableFile, is_finished
from vaswani_transformer.translation.readers import DigestedInput, json_texts, text_lines
from vaswani_transformer.translation.translator import Hypothesis, Translation

TEXT = "".join(f"{source}\n" for source in PAIRS).encode()
JSON_LINES = [{"translation": {"en": source, "de": target}} for source, target in PAIRS.items()]
TREES = b"""( (S (NP-SBJ-1 (PRP I)) (VP (VBP know) (NP (-NONE- *T*))) (. .)) )
(ROOT (S (NP=2 (DT The)
    (NN cat)) (VP (VBZ is) (ADJP (JJ -LRB-black-RRB-)))))
"""
RECIPE = (ROOT / "training" / "recipes" / "quickstart.yaml").read_bytes()
DATA = DataRecipe(kind="json", train="x", validation="x", test=None, source="en", target="de")


@dataclass
class Case:
    """A case: its random numbers and a folder that is empty."""

    draw: random.Random
    folder: Path

    def write(self, name: str, content: bytes) -> Path:
        path = self.folder / name
        path.write_bytes(content)
        return path


Check = Callable[[Case], bool]
TARGETS: dict[str, tuple[int, Check]] = {}
"""The share of each target in a campaign, and its function."""


def target(share: int) -> Callable[[Check], Check]:
    def add(function: Check) -> Check:
        TARGETS[getattr(function, "__name__", "")] = share, function
        return function

    return add


def count_lines(content: bytes) -> int:
    """Return the lines of a file: a line feed ends one, or a carriage return in a file without line feeds."""
    if not content:
        return 0
    content = content if b"\n" in content else content.replace(b"\r", b"\n")
    return len(content.removesuffix(b"\n").split(b"\n"))


def data_pairs(case: Case, kind: Any, name: str, empty: Any = None) -> list[tuple[str, str]]:
    recipe = replace(DATA, kind=kind, path=str(case.folder), empty=empty or case.draw.choice(("drop", "error")))
    pairs = list(read_file(recipe, name))
    assert all(side.encode() and (kind == "trees" or side == side.strip()) for pair in pairs for side in pair)
    return pairs


@target(10)
def text(case: Case) -> bool:
    contents = [edit_bytes(TEXT, case.draw), case.draw.choice((TEXT, edit_bytes(TEXT, case.draw)))]
    for language, content in zip(("en", "de"), contents, strict=True):
        case.write(f"x.{language}", content)
    pairs = data_pairs(case, "text", "x.{language}")
    numbers = [count_lines(content) for content in contents]
    assert numbers[0] == numbers[1]
    assert len(pairs) <= numbers[0]
    return True


def json_file(case: Case) -> bytes:
    """Return JSON Lines of which one line is edited."""
    lines = [json.dumps(row).encode() for row in JSON_LINES]
    number = case.draw.randrange(len(lines))
    lines[number] = json_bytes(JSON_LINES[number], case.draw)
    return b"".join(line + b"\n" for line in lines)


@target(10)
def json_pairs(case: Case) -> bool:
    content = json_file(case)
    case.write("x", content)
    assert len(data_pairs(case, "json", "x", "error")) == count_lines(content)
    return True


@target(8)
def compressed(case: Case) -> bool:
    content = b"".join(gzip.compress(json_file(case), 1) for _ in range(case.draw.choice((1, 1, 2))))
    is_whole = case.draw.random() < 0.2
    case.write("x.gz", content if is_whole else edit_bytes(content, case.draw))
    pairs = data_pairs(case, "json", "x.gz", "error")
    assert not is_whole or len(pairs) == count_lines(gzip.decompress(content))
    return True


@target(10)
def treebank(case: Case) -> bool:
    case.write("x", edit_bytes(TREES, case.draw))
    for source, target in data_pairs(case, "trees", "x"):
        tree = delinearize(target, source.split(" "))
        assert (linearize(tree.tree), tree.tree.words, tree.is_repaired) == (target, source.split(" "), False)
        ((_, again),) = read_trees([(1, str(tree.tree))], "x")
        assert str(again) == str(tree.tree)
    return True


@target(10)
def linear_trees(case: Case) -> bool:
    words = split_plain(edit_bytes(TEXT, case.draw).decode(errors="replace").replace("\0", ""))[:50]
    tree = delinearize(hostile_text(case, b"(S(NP()PRP)NP(VP()VBP()RB)VP()..)S" * case.draw.choice((1, 9))), words).tree
    assert tree.words == words
    assert "\n" not in str(tree)
    assert not words or [str(each) for _, each in read_trees([(1, str(tree))], "x")] == [str(tree)]
    return isinstance(tree, Tree)


@target(10)
def sentences(case: Case) -> bool:
    content = edit_bytes(TEXT, case.draw)
    lines = list(text_lines(io.BytesIO(content), "x"))
    assert len(lines) == count_lines(content)
    for line in lines:
        for words in (split_plain(line), split_tokenized(line)):
            assert not re.search(r"[() \t\r\n\f\v]", "".join(words))
    return True


@target(10)
def json_sentences(case: Case) -> bool:
    content = json_file(case)
    lines = list(json_texts(io.BytesIO(content), "x", "translation", "en"))
    assert len(lines) == count_lines(content)
    for line in lines:
        translation = Translation([Hypothesis(line, 1, -1.0)], 1, False, 1)
        for form in ("text", "jsonl"):
            options = argparse.Namespace(format=form, scores=True, nbest=None)
            (output,) = LineFormat(options).write(translation, 1)
            assert b"\n" not in output.encode()
    return True


@target(4)
def record(case: Case) -> bool:
    path, settings = case.folder / "out", {"model": "m", "beams": 4}
    texts = ["a", "b"]
    output = ResumableFile(path, 1, settings, [1, 2])
    read = DigestedInput(texts, "x")
    for text in read:
        output.write([text], read)
    if case.draw.random() < 0.5:
        output.finish(read)
    output.close()
    before = case.folder / "out.record"
    case.write("out.record", json_bytes(json.loads(before.read_bytes()), case.draw))
    if not is_finished(path, settings, texts, "x"):
        output = ResumableFile(path, 1, settings, [1, 2])
        output.close()
        assert output.done <= 2
    return True


@target(6)
def recipe(case: Case) -> bool:
    path = case.write("x.yaml", edit_bytes(RECIPE, case.draw))
    name = case.draw.choice(("training.steps", "data.path", "model.d_model", "seed", "decoding.num_beams", "note"))
    value = edit_bytes(b"12", case.draw).decode(errors="surrogateescape")
    load_recipe(path, [f"--{name}={value}"] if case.draw.random() < 0.5 else [])
    return True


@target(4)
def distillation(case: Case) -> bool:
    record = {
        "teacher": {"name": "x", "digest": "x"},
        "data": {"source": "en", "target": "de", "sources": 4, "sha256": "x", "first": {"sources": 4, "sha256": "x"}},
        "search": {},
        "settings": {"window": 2, "max_length": 9},
        "versions": {},
    }
    whole = Distillation(case.folder, record)
    for number in range(2):
        pairs = [row["translation"] for row in JSON_LINES[2 * number : 2 * number + 2]]
        whole.write_part(number, pairs, Counter())
    name = case.draw.choice(("distillation.json", "00000.json", "00001.jsonl"))
    case.write("distillation.json", json.dumps(record).encode())
    old = (case.folder / name).read_bytes()
    case.write(name, edit_bytes(old, case.draw) if name.endswith("l") else json_bytes(json.loads(old), case.draw))
    read = Distillation.load(case.folder)
    read.check_complete()
    assert sum(1 for _ in read.pairs()) == read.totals["kept"]
    return True


def make_checkpoint(run: Path, step: int) -> Path:
    folder = checkpoint_at(run, step)
    state = {"global_step": step, "best_global_step": 3, "log_history": [], "stateful_callbacks": {}}
    with writing(folder):
        (folder / "trainer_state.json").write_text(json.dumps(state))
        for name in ("model.safetensors", "optimizer.pt", "rng_state.pth", "stream.json"):
            (folder / name).write_bytes(name.encode() * 50)
    return folder


@target(2)
def checkpoint(case: Case) -> bool:
    """A file of the newest of two checkpoints is changed or lost; a run resumes from the other, and keeps this one."""
    earlier, newest = make_checkpoint(case.folder, 3), make_checkpoint(case.folder, 6)
    path = case.draw.choice(sorted(newest.iterdir()))
    before = path.read_bytes()
    if case.draw.random() < 0.1:
        path.unlink()
        after = None
    else:
        path.write_bytes(after := edit_bytes(before, case.draw))
    settle(case.folder)
    if after == before or (path.name == "manifest.json" and intact_checkpoint(case.folder) == newest):
        assert changed_file(newest) is None
        return True
    assert intact_checkpoint(case.folder) == earlier
    assert after is None or newest.with_name("checkpoint-6.damaged").joinpath(path.name).read_bytes() == after
    return False


class PageOutline(html.parser.HTMLParser):
    """The tags of a page, and the text of its payload."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[Any] = []
        self.payload = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, attrs))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] == ("script", [("type", "application/json"), ("id", "payload")]):
            self.payload = self.payload or data


def hostile_text(case: Case, text: bytes = b"one two") -> str:
    return edit_bytes(text, case.draw).decode(errors="replace")[:5000]


@functools.cache
def plain_maps() -> Any:
    return random_attention_maps(1, 1, ["one", "two"])


@target(4)
def attention_page(case: Case) -> bool:
    words = [hostile_text(case), "two"]
    page = render_page(replace(plain_maps(), source=hostile_text(case), target=hostile_text(case), source_tokens=words))
    shown = PageOutline(page.encode().decode())
    assert shown.tags == PageOutline(render_page(plain_maps())).tags
    assert json.loads(shown.payload)["stacks"]["encoder"]["queries"] == words
    return True


def outline(card: str) -> list[str]:
    """Return the marks of a card's lines: of headings, tables, lists and code."""
    return [line[:2] for line in card.split("\n") if line[:1] in set("#|`-")]


@functools.cache
def plain_card() -> str:
    results = results_of()
    results["recipe"]["note"] = "x"
    return make_card(results, "somebody/own").content.partition("\n---\n")[2]


@target(3)
def model_card(case: Case) -> bool:
    results, draw = results_of(), case.draw
    is_edited = draw.random() < 0.5
    if is_edited:
        results = edit_json(results, draw)
    else:
        recipe = results["recipe"]
        groups = (results, "name"), (recipe, "note"), (recipe["data"], "path"), (results["hardware"], "cpu")
        for group, field in (*groups, (results["test"]["examples"][0], "source")):
            group[field] = f"x{hostile_text(case, b'name')}"
    path = case.write("results.json", dump(results))
    read = read_results(path)
    with results_errors(path):
        card = make_card(read, "somebody/own")
    card.save(case.folder / "card.md")
    if not is_edited:
        text = card.content.partition("\n---\n")[2]
        assert outline(text) == outline(plain_card())
        outside = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
        assert "<" not in outside, outside[outside.index("<") :][:80]
    return True


@functools.cache
def saved_model(family: str) -> dict[str, bytes]:
    """Return the files of a tiny model of a family, with a tokenizer."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = copy.deepcopy(model_of_pairs()[1])
        if family == "parser":
            tokenizer.add_tokens(["(S", ")S", "(NP", ")NP", "()NN", "()VB"])
        model = (FAMILY | dict.fromkeys(("autoregressive", "parser"), tiny_model))[family](vocab_size=len(tokenizer))
        if family in ("autoregressive", "parser"):
            model.use_paper_decoding()
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


FAMILIES = ("autoregressive", *FAMILY)


def copy_model(case: Case, without: str = "", family: str | None = None) -> dict[str, bytes]:
    files = saved_model(family or case.draw.choice(FAMILIES))
    for name, content in files.items():
        if name != without:
            case.write(name, content)
    return files


@target(3)
def configuration(case: Case) -> bool:
    files = copy_model(case, "config.json")
    case.write("config.json", json_bytes(json.loads(files["config.json"]), case.draw))
    load_config(str(case.folder))
    return True


@target(1)
def whole_model(case: Case) -> bool:
    """A file of a model is edited, and all of it is loaded."""
    name = case.draw.choice(("config.json", "generation_config.json", "model.safetensors"))
    files = copy_model(case, name)
    old = files[name]
    case.write(name, json_bytes(json.loads(old), case.draw) if name.endswith("json") else edit_header(case, old))
    model = load_model(str(case.folder))
    assert all(weight.isfinite().all() for weight in model.parameters())
    return True


def prepare() -> None:
    """Make the valid files before processes are forked."""
    for family in FAMILIES:
        saved_model(family)
    fairseq_checkpoint()
    plain_maps()
    plain_card()


def edit_header(case: Case, content: bytes) -> bytes:
    """Return safetensors with an edited header, in half of the cases with its length made right."""
    (size,) = struct.unpack("<Q", content[:8])
    header = content[8 : 8 + size]
    if case.draw.random() < 0.2:
        return edit_bytes(content, case.draw)
    header = json_bytes(json.loads(header), case.draw)
    size = len(header) if case.draw.random() < 0.8 else case.draw.choice((0, 1, 2**40, 2**64 - 1))
    return struct.pack("<Q", size) + header + content[8 + struct.unpack("<Q", content[:8])[0] :]


@target(2)
def index(case: Case) -> bool:
    copy_model(case, family="autoregressive")
    (case.folder / "model.safetensors").rename(case.folder / "part.safetensors")
    outside = case.folder.with_name("outside.safetensors")
    if not outside.exists():
        shutil.copy(case.folder / "part.safetensors", outside)
    name = case.draw.choice(("part.safetensors", "../outside.safetensors", str(outside), "x/../part.safetensors"))
    with safe_open(case.folder / "part.safetensors", framework="pt") as file:
        weights = dict.fromkeys(file.keys(), "part.safetensors")
    weights[case.draw.choice(list(weights))] = name
    tree: Any = {"metadata": {"total_size": 1}, "weight_map": weights}
    if is_edited := case.draw.random() < 0.5:
        tree = edit_json(tree, case.draw)
    case.write("model.safetensors.index.json", dump(tree))
    load_model(str(case.folder))
    assert is_edited or name == "part.safetensors", name
    return True


@target(3)
def tokenizer(case: Case) -> bool:
    name = case.draw.choice(("tokenizer.json", "tokenizer.json", "tokenizer_config.json"))
    files = saved_model("autoregressive")
    for each in ("tokenizer.json", "tokenizer_config.json"):
        case.write(each, json_bytes(json.loads(files[each]), case.draw) if each == name else files[each])
    tokens = load_tokenizer(str(case.folder))
    for text in ("hello world", "", hostile_text(case, TEXT)):
        assert all(isinstance(token, int) for token in tokens(text).input_ids)
    return True


@functools.cache
def fairseq_checkpoint() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the weights and the settings of a model that fairseq could have saved."""
    sizes: Any = {f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    sizes |= dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "d_model"), 16)
    config = FSMTConfig(langs=["en", "de"], src_vocab_size=44, tgt_vocab_size=44, **sizes)
    weights = FSMTForConditionalGeneration(config).state_dict()
    names = {key: key.removeprefix("model.") for key in weights if "embed_positions" not in key}
    state = {name: weights[key].clone() for key, name in names.items()}
    for name in ("encoder.embed_tokens.weight", "decoder.output_projection.weight"):
        state[name] = state["decoder.embed_tokens.weight"]
    settings = dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2)
    settings |= dict.fromkeys(("max_source_positions", "max_target_positions"), 64)
    return state, settings | {"activation_fn": "relu", "dropout": 0.3}


@target(2)
def fairseq(case: Case) -> bool:
    state, settings = fairseq_checkpoint()
    state, fields = dict(state), edit_json(settings, case.draw) if case.draw.random() < 0.5 else settings
    key = case.draw.choice(list(state))
    match case.draw.randrange(4):
        case 0:
            del state[key]
        case 1:
            other = case.draw.choice(("", "x", "encoder.layers.x.fc1.weight", f"encoder.layers.{10**9}.fc1.weight"))
            state[other] = state[key]
        case 2:
            state[key] = case.draw.choice((*map(torch.ones, ((0,), (), (2, 2), (1, 2, 3))), "x", None, 1))
    stream = io.BytesIO()
    with contextlib.suppress(RecursionError):  # a value that no tool could have saved
        torch.save({"model": state, "args": fields}, stream)
    content = stream.getvalue()
    path = case.write("x.pt", edit_bytes(content, case.draw) if case.draw.random() < 0.5 else content)
    words = "".join(f"word{number} {number}\n" for number in range(40)).encode()
    dictionary = case.write("dict.txt", edit_bytes(words, case.draw)) if case.draw.random() < 0.3 else None
    from_fairseq(path, dictionary)
    return True


def run_case(seed: int, name: str, number: int, folder: Path) -> str:
    """Run a case in an empty folder; return "result" or "rejected".

    Raises:
        Exception: the reader raised it, or its result is wrong.
    """
    case = Case(random.Random(f"{seed}/{name}/{number}"), folder)
    try:
        return "result" if TARGETS[name][1](case) else "rejected"
    except UserError as error:
        line = one_line(error)
        assert line.isprintable()
        assert len(line) > 10, line
        return "rejected"


def cases(count: int) -> list[tuple[str, range]]:
    """Return the numbers of each target's cases in twenty rounds, so that a campaign that ends early has tried all."""
    shares = sum(share for share, _ in TARGETS.values())
    totals = {name: max(1, round(count * share / shares)) for name, (share, _) in TARGETS.items()}
    bounds = {name: [total * part // 20 for part in range(21)] for name, total in totals.items()}
    rounds = [(name, range(*bounds[name][part : part + 2])) for part in range(20) for name in TARGETS]
    return [(name, numbers) for name, numbers in rounds if numbers]
