"""The files of the page: complete, valid, with the languages, examples and licenses of the model."""

import base64
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load as load_tensors
from safetensors.torch import load_file

from tests import ROOT
from tests.commands import HOSTILE_TEXT, user_error
from tests.models import family_of_pairs, model_of_pairs, save, small_model
from vaswani_transformer import VaswaniTransformerTokenizer
from vaswani_transformer.demo import load_site
from vaswani_transformer.demo.site import EXAMPLES, all_modules, languages_and_examples, license_and_credits
from vaswani_transformer.figures.assets import EXPORT, IMPORT, inline_modules, modules_in_order

TATOEBA = ROOT / "models" / "tatoeba-en-de"
TATOEBA_CTC = ROOT / "models" / "tatoeba-en-de-ctc"


def settings_of(page: str) -> dict[str, Any]:
    """Return the settings in a page."""
    return json.loads(page.partition('id="settings">')[2].partition("</script>")[0])


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_folder_has_all_files_that_the_page_names(saved: Path, tmp_path: Path, dtype: str) -> None:
    load_site(str(saved), dtype=dtype).write(tmp_path)
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    named = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert {name for name in named if not name.startswith("data:")} >= {"page.css", "js/main.js", "js/transformer.js"}
    assert [name for name in named if not (name.startswith("data:") or (tmp_path / name).is_file())] == []
    assert (tmp_path / settings_of(page)["worker"]).is_file()
    expected = {name: getattr(torch, dtype) for name in load_file(saved / "model.safetensors")}
    weights = load_file(tmp_path / "model" / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in weights.items()} == expected
    assert ("float16" in page.partition("<footer>")[2]) == (dtype == "float16")


@pytest.mark.parametrize(
    ("family", "name", "value"), [("autoregressive", "no_repeat_ngram_size", 2), ("ctc", "max_new_tokens", 9)]
)
def test_saved_search_that_the_page_does_not_have_is_an_error(
    saved: Path, tmp_path: Path, family: str, name: str, value: int
) -> None:
    model, tokenizer = family_of_pairs(family)
    setattr(model.generation_config, name, value)
    save(tmp_path, model, tokenizer)
    models = [str(tmp_path)] if family == "autoregressive" else [str(saved), str(tmp_path)]
    with user_error(f"was saved with {name}, which the page's search does not have"):
        load_site(*models)


def test_single_file_contains_what_the_folder_does(saved: Path, tmp_path: Path) -> None:
    load_site(str(saved)).write(tmp_path)
    page = load_site(str(saved)).single_file()
    inside = dict(re.findall(r'<script type="text/plain" id="(model/[^"]*)">([^<]*)</script>', page))
    assert sorted(inside) == sorted(f"model/{path.name}" for path in (tmp_path / "model").iterdir())
    weights = load_tensors(base64.b64decode(inside["model/model.safetensors"]))
    for name, tensor in load_file(tmp_path / "model" / "model.safetensors").items():
        assert torch.equal(weights[name], tensor)
    assert not re.search(r'(?:src|href)="(?!data:)', page)


def test_modules_import_what_the_others_export() -> None:
    modules = all_modules()
    exports = {name: {match[1] for match in EXPORT.findall(text)} for name, text in modules.items()}
    for name, text in modules.items():
        assert len(re.findall(r"^import ", text, re.MULTILINE)) == len(IMPORT.findall(text)), name
        assert len(re.findall(r"^export ", text, re.MULTILINE)) == len(EXPORT.findall(text)), name
        for imported, module in IMPORT.findall(text):
            assert {each.strip() for each in imported.split(",")} <= exports[module], name
    for entry in ("main", "worker", "page"):
        script = inline_modules(modules, entry)
        assert not re.search(r"^(?:import|export) |</script", script, re.MULTILINE)
        order = modules_in_order(modules, entry)
        assert order[-1] == entry
        assert len(order) == len(set(order))


def test_page_needs_no_other_host() -> None:
    page = load_site(str(TATOEBA)).page("'self'", "", "", 0)
    without_footer = page.partition("<footer>")[0] + "".join(all_modules().values())
    assert set(re.findall(r"https?://[^\s\"]*", without_footer)) == {"http://www.w3.org/2000/svg"}
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy.startswith("default-src 'none'; script-src 'self'; ")


def test_shipped_model_has_its_languages_examples_and_licenses(tmp_path: Path) -> None:
    site = load_site(str(TATOEBA))
    assert (site.title, site.languages, site.examples) == ("English to German", ("en", "de"), EXAMPLES["en"])
    assert site.license == "apache-2.0"
    page = site.page("'self'", "", "", 0)
    for expected in ("Apache-2.0", "Tatoeba (https://tatoeba.org)", "CC BY 2.0 FR", 'lang="de"'):
        assert expected in page
    _, header, text = site.readme().split("---\n")
    assert yaml.safe_load(header)["sdk"] == "static"
    assert yaml.safe_load(header)["license"] == "apache-2.0"
    assert "Tatoeba" in text


def test_page_of_both_shipped_models_names_their_license_once(tmp_path: Path) -> None:
    site = load_site(str(TATOEBA), str(TATOEBA_CTC))
    assert (site.license, len(site.credits)) == ("apache-2.0", 1)
    site.write(tmp_path)
    for part in ("model", "ctc"):
        assert (tmp_path / part / "model.safetensors").stat().st_size < 10e6


def test_page_of_models_with_different_licenses_names_both(tmp_path: Path) -> None:
    model = save(tmp_path / "model", *model_of_pairs())
    ctc_model = save(tmp_path / "ctc", *family_of_pairs("ctc"))
    for folder, license in ((model, "mit"), (ctc_model, "cc-by-nc-4.0")):
        (folder / "README.md").write_text(f"---\nlicense: {license}\n---\n# A model\n")
    site = load_site(str(model), str(ctc_model))
    assert (site.license, site.credits) == ("", ["Weights: mit.", "Weights: cc-by-nc-4.0."])


def run(source: str, target: str, **data: str) -> dict[str, Any]:
    """Return the parts of a results.json that the page reads."""
    return {"recipe": {"data": {"source": source, "target": target, **data}}}


@pytest.mark.parametrize(
    ("results", "languages", "examples"),
    [
        (run("en", "de"), ("en", "de"), EXAMPLES["en"]),
        ({**run("en", "es"), "test": {"examples": [{"source": "hi"}]}}, ("en", "es"), ["hi"]),
        (run("src", "tgt", source_language="en", target_language="it"), ("en", "it"), EXAMPLES["en"]),
        (run("input", "output"), None, []),
        ([], None, []),
        (None, None, []),
    ],
)
def test_languages_and_examples_are_those_of_the_run(
    tmp_path: Path, results: Any, languages: tuple[str, str] | None, examples: list[str]
) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps(results))
    assert languages_and_examples(path if results is not None else None) == (languages, examples)


def test_license_is_that_of_the_card(tmp_path: Path) -> None:
    card = tmp_path / "README.md"
    card.write_text("---\nlicense: mit\n---\n# A model\n")
    assert license_and_credits(card) == ("mit", "Weights: mit.")
    card.write_text("# A model\n")
    assert license_and_credits(card) == ("", "")
    assert license_and_credits(None) == ("", "")


def test_hostile_text_is_text(saved: Path) -> None:
    plain = load_site(str(saved))
    site = replace(plain, title=HOSTILE_TEXT, examples=[HOSTILE_TEXT], credits=[HOSTILE_TEXT])
    page = site.page("'self'", "", "", 0)
    assert page.count("<script") == plain.page("'self'", "", "", 0).count("<script")
    assert settings_of(page)["examples"] == [HOSTILE_TEXT]
    assert "<img" not in page


def test_model_that_the_page_cannot_run_is_an_error(saved: Path, tmp_path: Path) -> None:
    nat = str(save(tmp_path / "nat", *family_of_pairs("nat")))
    with user_error(r"got vaswani_nat, expected vaswani_transformer\. `python -m vaswani_transformer\.figures`"):
        load_site(nat)
    with user_error("got vaswani_nat, expected vaswani_ctc"):
        load_site(str(saved), nat)
    tokenizer = model_of_pairs()[1]
    window = small_model(0, vocab_size=len(tokenizer), attention_window=3)
    with user_error("has an attention window, which the page does not support"):
        load_site(str(save(tmp_path / "window", window, tokenizer)))
    trees = VaswaniTransformerTokenizer.train_from_iterator(["a b c"], vocab_size=262)
    trees.add_tokens(["(A", ")A", "()t", "()u"])
    parser = small_model(0, vocab_size=len(trees))
    with user_error("is a parser, whose trees vaswani-parse writes"):
        load_site(str(save(tmp_path / "parser", parser, trees)))
