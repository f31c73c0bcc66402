"""The demo on the site: its files, the button on its picture, and links into it; without it pages stay as they are."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from docs.tools import site_demo
from tests import ROOT
from tests.browsers import page_opener, served, started_browser

PICTURE = '<p><img alt="The demo" src="images/demo.png" /></p>'
LINKS = "see [the search of\nthe demo](translate.md#the-demo), [the demo](translate.md#the-demo)"
HOME = ROOT / "docs" / "index.md"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a folder as `vaswani-demo --output` does, of 3 MB, and name it in SITE_DEMO."""
    folder = tmp_path / "demo"
    (folder / "model").mkdir(parents=True)
    (folder / "index.html").write_text("<!doctype html><title>Demo</title><h1 id='search'>A page</h1>")
    (folder / "model" / "model.safetensors").write_bytes(bytes(3_000_000))
    (folder / "README.md").write_text("of a Space")
    monkeypatch.setenv("SITE_DEMO", str(folder))
    return folder


def test_pages_stay_as_they_are_without_a_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SITE_DEMO", raising=False)
    assert site_demo.on_page_content(PICTURE) == PICTURE
    assert site_demo.on_page_markdown(LINKS) == LINKS
    assert site_demo.on_files([], None) == []


def test_home_page_opens_with_the_picture_and_the_command() -> None:
    first_screen = HOME.read_text(encoding="utf-8").partition("\n## ")[0]
    assert "images/demo.png" in first_screen
    assert "`vaswani-demo models/tatoeba-en-de`" in first_screen


def test_picture_becomes_a_button_that_says_what_it_loads(folder: Path) -> None:
    page = site_demo.on_page_content(PICTURE)
    assert 'data-page="demo/"' in page
    assert "Translate here (3 MB to load)" in page.replace("\n", " ")


def test_links_to_search_and_attention_lead_into_the_demo(folder: Path) -> None:
    search = "[the search of\nthe demo](demo/index.html#search)"
    assert site_demo.on_page_markdown(LINKS) == f"see {search}, [the demo](translate.md#the-demo)"
    for page, part in (("paper-decoding", "search"), ("paper-model", "attention")):
        text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
        assert f"(demo/index.html#{part})" in site_demo.on_page_markdown(text)
    template = (ROOT / "vaswani_transformer" / "demo" / "web" / "index.html").read_text(encoding="utf-8")
    assert all(f'id="{part}"' in template for part in ("search", "attention"))


def test_folder_without_a_page_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SITE_DEMO", str(tmp_path))
    with pytest.raises(ValueError, match=r"contains no index\.html; write the folder with vaswani-demo models/tato"):
        site_demo.on_page_content(PICTURE)


def test_workflow_writes_the_demo_that_the_site_copies() -> None:
    text = (ROOT / ".github" / "workflows" / "docs.yml").read_text(encoding="utf-8")
    assert 'vaswani-demo models/tatoeba-en-de --output "$RUNNER_TEMP/demo"' in text
    assert "SITE_DEMO: ${{ runner.temp }}/demo" in text


@pytest.mark.slow
def test_button_on_the_site_loads_the_page_and_nothing_before(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the docs extra is not installed")
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert (site / "demo" / "model" / "model.safetensors").stat().st_size == 3_000_000
    assert not (site / "demo" / "README.md").exists()
    assert 'href="../demo/#search"' in (site / "paper-decoding" / "index.html").read_text(encoding="utf-8")
    requests: list[Any] = []
    with started_browser() as browser, page_opener(browser) as open_page, served(site) as address:
        page = open_page(address)
        page.on("request", lambda request: requests.append(request.url))
        page.wait_for_load_state("networkidle")
        assert page.locator("iframe").count() == 0
        page.get_by_role("button", name="Translate here").click()
        page.frame_locator("iframe").get_by_role("heading", name="A page").wait_for()
    assert f"{address}demo/" in requests
