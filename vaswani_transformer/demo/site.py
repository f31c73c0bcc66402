"""The page as a static site, or as one file: HTML, JavaScript modules, and the files of its models."""

import base64
import html
import json
import re
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import metadata_load
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.models.whisper.tokenization_whisper import LANGUAGES

from ..figures.assets import FOLDER as SHARED
from ..figures.assets import fill_template, inline_modules, json_for_html, modules_in_order, modules_of, read
from ..figures.style import head_colors
from ..parsing.linear import is_parser
from ..settings import CallSettings
from ..support.command import UserError
from ..support.loading import find_file, load_model, load_tokenizer
from ..tokenizer import check_vocabulary

HERE = Path(__file__).parent
FAMILIES = {"model": "vaswani_transformer", "ctc": "vaswani_ctc"}  # by the folder of the files
SEARCHES = {
    "model": {"max_source_relative_length", "max_new_tokens", "max_length", "early_stopping"},
    "ctc": {"length_bonus"},
}
"""Settings of a saved search that the page has, by the same folders, besides those of `EVERY_SEARCH`."""
EVERY_SEARCH = {
    *("num_beams", "num_return_sequences", "length_penalty", "length_penalty_type", "suppress_tokens"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"),
}
FILES = ("config.json", "generation_config.json", "tokenizer.json", "model.safetensors")
DTYPES = {"float16": torch.float16, "float32": torch.float32}
POLICY = (
    "default-src 'none'; script-src {scripts}; worker-src 'self' blob:; connect-src 'self'; "
    "style-src 'self' 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
)
EXAMPLES = {  # by the source's language
    "en": [
        "Tom lost his hat because it was too big.",
        "Where is the nearest station?",
        "If it rains tomorrow, we will stay at home.",
        "I would like a cup of tea without milk.",
        "She asked me whether I could help her.",
    ],
}
CODE_LICENSE = "Code: vaswani-transformer, Apache-2.0."
ROUNDED = (
    "Weights in float16: the English-German model translates 999 of 1,000 test sentences as in float32, which "
    "<code>vaswani-demo --dtype=float32</code> writes."
)


@dataclass(frozen=True)
class Site:
    """What the page of a model says: title, languages, examples and credits."""

    models: dict[str, tuple[PreTrainedModel, PreTrainedTokenizerBase]]  # by the folder of their files
    title: str
    languages: tuple[str, str] | None  # codes of source and target
    examples: list[str] = field(default_factory=list)
    license: str = ""  # of the weights, from the model's card
    credits: list[str] = field(default_factory=list)  # sentences on licenses
    dtype: str = "float16"

    def write(self, folder: Path) -> None:
        """Write the static site, with a README.md that makes it a static Space of the Hub."""
        for name in self.models:
            self.write_model(name, folder)
        modules = all_modules()
        needed = dict.fromkeys([*modules_in_order(modules, "main"), *modules_in_order(modules, "worker")])
        (folder / "js").mkdir()
        for name in needed:
            (folder / "js" / f"{name}.js").write_text(modules[name], encoding="utf-8")
        (folder / "page.css").write_text(style(), encoding="utf-8")
        head = ['<link rel="stylesheet" href="page.css">']
        head += [f'<link rel="modulepreload" href="js/{name}.js">' for name in needed]
        head += [f'<link rel="preload" as="fetch" crossorigin href="model/{name}">' for name in FILES]
        page = self.page(
            "'self'",
            "\n".join(head),
            '<script type="module" src="js/main.js"></script>',
            weights_size(folder),
            worker="js/worker.js",
        )
        (folder / "index.html").write_text(page, encoding="utf-8")
        (folder / "README.md").write_text(self.readme(), encoding="utf-8")

    def single_file(self) -> str:
        """Return the page as one file, with everything inside."""
        modules = all_modules()
        scripts = []
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            for name in self.models:
                self.write_model(name, folder)
                for file in FILES:
                    content = base64.b64encode((folder / name / file).read_bytes()).decode()
                    scripts.append(f'<script type="text/plain" id="{name}/{file}">{content}</script>')
            size = weights_size(folder)
        scripts.append(f'<script type="text/plain" id="worker">{inline_modules(modules, "worker")}</script>')
        scripts.append(f"<script>{inline_modules(modules, 'main')}</script>")
        return self.page("'unsafe-inline'", f"<style>\n{style()}</style>", "\n".join(scripts), size)

    def write_model(self, name: str, folder: Path) -> None:
        """Write the files that the page reads of a model."""
        model, tokenizer = self.models[name]
        model.to(DTYPES[self.dtype]).save_pretrained(folder / name, max_shard_size="100GB")
        tokenizer.save_pretrained(folder / name)
        for path in (folder / name).iterdir():
            if path.name in FILES:
                path.chmod(0o644)  # safetensors writes for the user alone, and a server may be a different one
            else:
                path.unlink()

    def page(self, script_source: str, head: str, scripts: str, size: int, worker: str | None = None) -> str:
        """Return the HTML of the page, with `size` bytes of weights."""
        model, _ = self.models["model"]
        settings = {
            "worker": worker,
            "hasCtc": "ctc" in self.models,
            "examples": self.examples,
            "colors": head_colors(model.config.num_heads),
        }
        names = [html.escape(language_name(code)) for code in self.languages or ()] or ["Source", "Target"]
        codes = [f'lang="{html.escape(code)}"' if code in LANGUAGES else "" for code in self.languages or ("", "")]
        fields = {
            "policy": POLICY.format(scripts=script_source),
            "title": html.escape(self.title),
            "head": head,
            "source_label": names[0],
            "target_label": names[1],
            "source_lang": codes[0],
            "target_lang": codes[1],
            "size": f"{size / 1e6:.1f} MB",
            "search": read(SHARED / "search.html"),
            "attention": read(SHARED / "attention.html"),
            "footer": self.footer(),
            "settings": json_for_html(settings),
            "scripts": scripts,
        }
        return fill_template(read(HERE / "web" / "index.html"), fields)

    def footer(self) -> str:
        """Return paragraphs on licenses and numbers."""
        rounded = ROUNDED if self.dtype == "float16" else "Weights in float32."
        paragraphs = [*map(html.escape, [CODE_LICENSE, *self.credits]), rounded]
        return "".join(f"<p>{paragraph}</p>" for paragraph in paragraphs)

    def readme(self) -> str:
        """Return a README.md whose header makes the folder a static Space of the Hub."""
        fields = {"title": self.title, "emoji": "🔎", "sdk": "static", "app_file": "index.html", "pinned": False}
        if self.license:
            fields["license"] = self.license
        header = "".join(f"{name}: {json.dumps(value, ensure_ascii=False)}\n" for name, value in fields.items())
        text = (
            "A Transformer that translates in the browser, and shows its beam search and attention weights. The folder "
            "is a static site: publish it on any web server, or try it with `python -m http.server`."
        )
        return "\n\n".join([f"---\n{header}---", f"# {self.title}", text, *[CODE_LICENSE, *self.credits]]) + "\n"


def all_modules() -> dict[str, str]:
    """Return the JavaScript modules of the page by name."""
    return modules_of([HERE / "model", HERE / "web", SHARED])


def style() -> str:
    sheets = [SHARED / f"{name}.css" for name in ("base", "search", "attention")]
    return "".join(map(read, [*sheets, HERE / "web" / "demo.css"]))


def weights_size(folder: Path) -> int:
    """Return the bytes of the weights that are loaded before the first translation."""
    return (folder / "model" / "model.safetensors").stat().st_size


def language_name(code: str) -> str:
    """Return the name of a language, or the code of an unknown one."""
    return LANGUAGES[code].title() if code in LANGUAGES else code


def languages_and_examples(path: Path | None) -> tuple[tuple[str, str] | None, list[str]]:
    """Return the codes of a run's languages, and example sources, from its `results.json`.

    The sources are those of the run's example translations, or else sentences of its source language.
    """
    try:
        results = {} if path is None else json.loads(path.read_bytes())
        data = results["recipe"]["data"]
        names = (("source_language", "source"), ("target_language", "target"))
        source, target = [str(data.get(language) or data[column]) for language, column in names]
        examples = [str(example["source"]) for example in results.get("test", {}).get("examples", [])]
    except (ValueError, KeyError, TypeError, AttributeError):  # missing or of a different tool
        return None, []
    is_known = source in LANGUAGES or target in LANGUAGES
    return (source, target) if is_known else None, examples or EXAMPLES.get(source, [])


def license_and_credits(path: Path | None) -> tuple[str, str]:
    """Return the license in the header of a model's card, and the sentence in its table on licenses, without links."""
    if path is None:
        return "", ""
    try:
        license = str((metadata_load(path) or {}).get("license", ""))
    except ValueError:
        license = ""
    row = re.search(r"^\| License \| (.*) \|$", read(path), re.MULTILINE)
    if not row and not license:
        return "", ""
    sentence = f"weights: {license}"
    if row:
        sentence = re.sub(r"\[([^\]]*)\]\((https?://[^)]*)\)", r"\1 (\2)", row[1])  # plain links
    return license, f"{sentence[0].upper()}{sentence[1:]}."


def load_part(name: str, folder: str, **source: Any) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model that the page can run, and its tokenizer."""
    tokenizer = load_tokenizer(name, **source)
    model = load_model(name, dtype="float32", **source)
    check_vocabulary(model, tokenizer)
    if model.config.model_type != FAMILIES[folder]:
        raise UserError(
            f"{name}: is not a model for this place of the page; got {model.config.model_type}, expected "
            f"{FAMILIES[folder]}. `python -m vaswani_transformer.figures` shows the search of every model."
        )
    if model.config.attention_window is not None:
        raise UserError(f"{name}: has an attention window, which the page does not support. Choose a different model.")
    if is_parser(tokenizer):
        raise UserError(f"{name}: is a parser, whose trees vaswani-parse writes. Choose a model that translates.")
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        problem = "has no tokenizer.json, which the page reads"
        raise UserError(f"{name}: {problem}; got a {type(tokenizer).__name__}. Choose a different model.")
    others = CallSettings(None, model, {}).search().keys() - SEARCHES[folder] - EVERY_SEARCH
    if others:
        problem = "the page's search does not have; take it out of generation_config.json"
        raise UserError(f"{name}: was saved with {min(others)}, which {problem}.")
    return model, tokenizer


def load_site(model: str, ctc_model: str | None = None, dtype: str = "float16", revision: str = "main") -> Site:
    """Load the models of a page, from folders or the Hub.

    Args:
        model: the paper's model.
        ctc_model: a CTC model, which translates beside it in one pass.
        dtype: "float16" or "float32", of the weights that the page loads.
        revision: branch, tag or commit of a model on the Hub.

    Raises:
        UserError: a model cannot be loaded, or the page cannot run it.
    """
    models = {"model": load_part(model, "model", revision=revision)}
    if ctc_model is not None:
        models["ctc"] = load_part(ctc_model, "ctc", revision=revision)
    languages, examples = languages_and_examples(find_file(model, "results.json", revision))
    cards = [find_file(name, "README.md", revision) for name in (model, ctc_model) if name is not None]
    licenses, sentences = zip(*map(license_and_credits, cards), strict=True)
    license = licenses[0] if len(set(licenses)) == 1 else ""  # that of the whole page
    credits = [sentence for sentence in dict.fromkeys(sentences) if sentence]
    title = " to ".join(map(language_name, languages or ())) or Path(model).name or model
    return Site(models, title, languages, examples, license, credits, dtype)
