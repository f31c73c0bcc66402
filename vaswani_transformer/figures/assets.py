"""Files of web pages: templates, style sheets, and JavaScript modules, which one script can contain."""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "web"
IMPORT = re.compile(r'^import \{([^}]*)\} from "\./([\w-]+)\.js";$', re.MULTILINE)
EXPORT = re.compile(r"^export ((?:async function|function\*?|class|const) (\w+))", re.MULTILINE)


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def fill_template(template: str, fields: Mapping[str, str]) -> str:
    """Return a template with each {{name}} replaced by that field, in which nothing is replaced."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: fields[match[1]], template)


def json_for_html(value: Any) -> str:
    """Return a value as JSON, without characters that mean something in HTML."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def modules_of(folders: Iterable[Path]) -> dict[str, str]:
    """Return the JavaScript modules of folders by name; each imports from "./NAME.js", as if all were in one folder."""
    return {path.stem: read(path) for folder in folders for path in sorted(folder.glob("*.js"))}


def modules_in_order(modules: Mapping[str, str], entry: str) -> list[str]:
    """Return the names of a module and of those that it imports, each after those that it imports itself."""
    names: list[str] = []
    for _, imported in IMPORT.findall(modules[entry]):
        names += [name for name in modules_in_order(modules, imported) if name not in names]
    return [*names, entry]


def inline_modules(modules: Mapping[str, str], entry: str) -> str:
    """Return one script with a module and those that it imports, for a page that cannot load modules.

    Each module becomes a function with its own names, which returns what the module exports.
    """
    script = '"use strict";\nconst modules = {};\n'
    for name in modules_in_order(modules, entry):
        exported = ", ".join(match[1] for match in EXPORT.findall(modules[name]))
        body = IMPORT.sub(r'const {\1} = modules["\2"];', EXPORT.sub(r"\1", modules[name]))
        script += f'modules["{name}"] = (() => {{\n{body}\nreturn {{ {exported} }};\n}})();\n'
    return script
