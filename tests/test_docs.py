"""README and docs: every Python block runs, every shell command parses, every link has a target, the site builds."""

import ast
import dataclasses
import gzip
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForSeq2SeqLM, PreTrainedConfig

import vaswani_transformer
from docs.tools import reference
from docs.tools.paper import CODING_PAGE
from docs.tools.paper import PAGES as PAGES_OF_THE_PAPER
from docs.tools.repository import line_of
from tests import ROOT
from tests.command_parsers import PAGES, anchors_of, blocks_of, commands_of, parse
from tests.commands import run_python
from tests.forks import run_forked
from tests.hub import Hub, client_environment, serving
from tests.models import load_tokenizer
from training.recipe import load_recipe
from training.train import run

# The pages of the paper in code run as one program, in test_paper_page.py, and the coding exercises in
# test_coding_exercises.py; blocks that contain one of these texts run in test_examples.py and
# convert/test_fine_tuning.py, with their own models.
RUN_ELSEWHERE = ("books-en-it", "runs/lora", "runs/opus-en-de")


def page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks_to_run(page: Path) -> list[str]:
    return [block for block in blocks_of(page, "python") if not any(text in block for text in RUN_ELSEWHERE)]


RUN_PAGES = [page for page in PAGES if page not in (*PAGES_OF_THE_PAPER, CODING_PAGE) and blocks_to_run(page)]


def run_block(block: str, folder: Path, environment: dict[str, str]) -> str:
    """Run a block and return its output; a block that trusts remote code cannot import the package."""
    if "trust_remote_code=True" in block:
        block = f"import sys; sys.modules['vaswani_transformer'] = None\n{block}"
    if "somebody/" in block:  # on the Hub, whose address is read at import
        return run_python(block, folder=folder, **environment, PYTHONPATH=str(ROOT))
    (folder / "block.py").write_text(block, encoding="utf-8")
    return run_forked("block.py", folder=folder)


@pytest.fixture(scope="session")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a quickstart run of two steps on a few sentences; its translations are bad and short.

    The model has as few layers as the pages allow, one of which draws a decoder's second layer: what they compile or
    export is traced layer by layer.
    """
    folder = tmp_path_factory.mktemp("quickstart") / "runs" / "quickstart"
    steps = ["--training.steps=2", "--training.evaluation_steps=2", "--decoding.max_source_relative_length=2"]
    steps += ["--model.encoder_layers=1", "--model.decoder_layers=2"]
    recipe = ROOT / "training" / "recipes" / "quickstart.yaml"
    data = tmp_path_factory.mktemp("data")
    for split, count in (("train", 5000), ("validation", 50), ("test", 50)):
        with gzip.open(ROOT / "training" / "quickstart" / f"{split}.jsonl.gz") as lines:
            (data / f"{split}.jsonl.gz").write_bytes(gzip.compress(b"".join(islice(lines, count))))
    run(load_recipe(recipe, [*steps, f"--data.path={data}", f"--output_dir={folder}"]))
    return folder


PageOutputs = Callable[[Path], tuple[dict[str, str], Path]]  # the output of each block of a page, and their folder


@pytest.fixture(scope="session")
def page_outputs(quickstart: Path, tmp_path_factory: pytest.TempPathFactory) -> PageOutputs:
    """Return a function that runs a page's blocks in order, once, and returns their outputs and the folder."""
    pages: dict[Path, tuple[dict[str, str], Path]] = {}

    def outputs_of(page: Path) -> tuple[dict[str, str], Path]:
        if page not in pages:
            for package in ("ctranslate2", "onnx", "peft"):  # of extras
                if any(f"{package} import" in block or f"import {package}" in block for block in blocks_to_run(page)):
                    pytest.importorskip(package)
            folder = tmp_path_factory.mktemp(page.stem)
            (folder / "runs").mkdir()
            (folder / "runs" / "quickstart").symlink_to(quickstart)
            (folder / "models").symlink_to(ROOT / "models")
            with serving(Hub()) as url:
                environment = client_environment(url, folder / "home")
                pages[page] = {block: run_block(block, folder, environment) for block in blocks_to_run(page)}, folder
        return pages[page]

    return outputs_of


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN_PAGES, ids=page_name)
def test_every_python_block_runs(page: Path, page_outputs: PageOutputs) -> None:
    page_outputs(page)


TWO = ["the dogs sleep.", "the old woman sees a house."]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "sentences", "search"),
    [
        ("torch.compile", TWO, {}),
        ("offload_folder", TWO, {}),
        ("prepare_for_inference(model", TWO, {}),
    ],
)
def test_another_way_of_running_the_model_gives_its_translations(
    text: str, sentences: list[str], search: dict[str, Any], page_outputs: PageOutputs, quickstart: Path
) -> None:
    """The only Python block of all pages that holds `text` prints what plain `generate()` finds."""
    ((page, block),) = [(page, block) for page in RUN_PAGES for block in blocks_to_run(page) if text in block]
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(quickstart), load_tokenizer(quickstart)
    tokens = model.generate(**tokenizer(sentences, padding=True, return_tensors="pt"), **search)
    expected = tokenizer.batch_decode(tokens, skip_special_tokens=True)
    assert ast.literal_eval(page_outputs(page)[0][block].splitlines()[-1]) == expected


COMMANDS = sorted({(page_name(page), shlex.join(words)) for page in PAGES for words in commands_of(page)})


@pytest.mark.parametrize(("page", "command"), COMMANDS, ids=[f"{page}: {command}" for page, command in COMMANDS])
def test_shell_command_is_accepted_by_its_own_parser(
    page: str, command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("source.txt", "target.txt", "test.jsonl"):  # files that the page expects
        (tmp_path / name).touch()
    (tmp_path / "training").symlink_to(ROOT / "training")
    monkeypatch.chdir(tmp_path)
    program, *arguments = shlex.split(command)
    parse(program, arguments)


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_link_leads_to_a_file_and_a_heading_that_exist_without_markup_that_github_would_print(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"^#.*\{", text, flags=re.MULTILINE)
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    for link in re.findall(r"\]\((.*?)\)", prose):
        target, _, anchor = link.partition("#")
        if target.startswith("http"):
            continue
        if workflow := re.match(r"\.\./\.\./actions(/workflows/[\w.]+)", target):  # of the repository's page on GitHub
            assert (ROOT / f".github{workflow[1]}").is_file(), link
            continue
        path = (page.parent / target) if target else page
        assert path.exists(), link
        if path.suffix == ".py":  # `anchor` is a function
            assert not anchor or line_of(str(path.resolve().relative_to(ROOT)), anchor)
            continue
        if path.suffix == ".html":
            assert not anchor or f'id="{anchor}"' in path.read_text(encoding="utf-8"), link
            continue
        assert not anchor or anchor in anchors_of(path.read_text(encoding="utf-8")), link


def test_readme_is_short_and_one_environment_does_the_set_up() -> None:
    """One command makes the environment in which the next translate and train; one runs the tests, as CI does."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) <= 120
    commands = [block.strip() for block in blocks_of(ROOT / "README.md", "bash")]
    assert [number for number, command in enumerate(commands) if "venv" in command] == [0]
    assert '".[train]"' in commands[0]
    assert any("training/recipes/quickstart.yaml" in command for command in commands)
    assert 'pip install -e ".[dev]" && python -m pytest' in commands
    assert "python -m pytest" in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()


def test_badges_say_what_the_package_says() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    badges = dict(re.findall(r"img\.shields\.io/badge/(\w+)-(.*)-blue", readme))
    assert badges["license"].replace("--", "-") == project["license"]
    assert badges["python"] == project["requires-python"].removeprefix(">=") + "+"


def test_every_page_is_in_the_navigation_or_left_out_by_name() -> None:
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    navigation = settings.partition("\nnot_in_nav:")[2]
    assert [page.name for page in (ROOT / "docs").glob("*.md") if f" {page.name}\n" not in navigation] == []


REFERENCE = ("api.md", "fields.md", "changelog.md", "security.md")  # made from code, or not in docs/


def navigation() -> list[Path]:
    """Return the pages of the navigation that are written by hand."""
    names = re.findall(
        r"([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2], re.MULTILINE
    )
    assert len(names) <= 28
    return [ROOT / "docs" / name for name in names if name not in REFERENCE]


def test_pages_are_few_and_short() -> None:
    """A reader finds what is there; what only a few need is beside the kept results or on a page of the reference."""
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in navigation()) <= 42_500


@pytest.mark.parametrize("word", ["excel", "quantize", "alignment", "likelihood"])
def test_search_finds_a_word_that_readers_look_for(word: str) -> None:
    assert any(re.search(rf"\b{word}", page.read_text(encoding="utf-8"), re.IGNORECASE) for page in navigation())


def test_every_public_name_is_on_the_api_page() -> None:
    names = [name for section in reference.SECTIONS.values() for name in section]
    assert sorted(name for name in names if "." not in name) == sorted(vaswani_transformer.__all__)


@pytest.mark.parametrize("name", ["api", "fields"])
def test_reference_page_is_what_the_code_says(name: str) -> None:
    """`python -m docs.tools.reference` writes both pages."""
    page = {"api": reference.api_page, "fields": reference.fields_page}[name]()
    assert (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") == page


@pytest.mark.parametrize("name", reference.CONFIGURATIONS)
def test_page_of_fields_has_every_field_of_a_configuration_with_a_text_of_its_own(name: str) -> None:
    config_class = getattr(vaswani_transformer, name)
    text = (ROOT / "docs" / "fields.md").read_text(encoding="utf-8")
    sections = ["VaswaniTransformerConfig", name]
    tables = "".join(re.split(r"\n##+ ", text.partition(f"\n### {section}\n")[2])[0] for section in set(sections))
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\| ([^|]+) \|$", tables, flags=re.MULTILINE))
    common = {field.name for field in dataclasses.fields(PreTrainedConfig)} - {"tie_word_embeddings"}
    fields = {field.name for field in dataclasses.fields(config_class)} - common
    assert fields <= rows.keys()
    assert len(set(rows.values())) == len(rows)


@pytest.mark.slow
def test_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the docs extra is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    site, repository = "https://somebody.github.io/project/", "https://github.com/somebody/project"
    environment = os.environ | {"SITE_URL": site, "REPOSITORY_URL": repository, "EDIT_URI": "edit/main/docs/"}
    finished = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    model = (tmp_path / "paper-model" / "index.html").read_text(encoding="utf-8")
    text = re.sub(r"<[^>]*>", "", model)
    assert "scores = query @ key.transpose(-2, -1) * scaling" in text  # the source of equation (1)
    assert "```" not in text
    assert "$" not in re.sub(r"<(script|style).*?</\1>", "", model, flags=re.DOTALL)  # formulas are MathML
    for page in tmp_path.rglob("*.html"):
        assert "fonts.googleapis.com" not in page.read_text(encoding="utf-8")
