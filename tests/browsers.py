"""The browser and Node.js of the tests. Without them a test is skipped, or fails if VASWANI_REQUIRE_BROWSER is set."""

import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Generator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import pytest

from vaswani_transformer.demo.command import start_server

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
TIMEOUT = 60_000  # milliseconds
LOCAL = ("http://127.0.0.1:", "file:", "data:", "blob:")

OpenPage = Callable[..., Any]


def missing(what: str) -> NoReturn:
    """Skip a test, or fail where a browser and Node.js are required."""
    if os.environ.get("VASWANI_REQUIRE_BROWSER"):
        pytest.fail(what)
    pytest.skip(what)


def node_program() -> str:
    """Return the path of Node.js: the system's, or the one that is part of Playwright."""
    playwright = find_spec("playwright")
    parts = [Path(str(playwright.origin)).parent / "driver" / "node"] if playwright else []
    found = [shutil.which("node"), *(str(path) for path in parts if path.is_file())]
    return next(filter(None, found), None) or missing("Node.js is not installed")


@contextlib.contextmanager
def started_browser() -> Generator[Any]:
    """Start Playwright's browser, or the system's."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing("Playwright is not installed")
    with sync_playwright() as started:
        installed = [started.chromium.executable_path, *filter(None, map(shutil.which, NAMES))]
        path = next((path for path in installed if Path(path).exists()), None)
        if path is None:
            missing("no browser is installed; run python -m playwright install chromium")
        browser = started.chromium.launch(executable_path=path, timeout=TIMEOUT, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextlib.contextmanager
def page_opener(browser: Any) -> Generator[OpenPage]:
    """Yield a function that opens an address; afterwards no text has run as a script, and no request has gone out."""
    problems: list[str] = []
    with contextlib.ExitStack() as stack:

        def open_page(address: str, errors: bool = False, **context: Any) -> Any:
            """Open a page, whose console may have `errors`, such as of a missing file."""
            page = browser.new_page(**context)
            stack.callback(page.close)
            page.set_default_timeout(TIMEOUT)
            page.on("dialog", lambda dialog: (problems.append(dialog.message), dialog.dismiss()))
            page.on("pageerror", lambda error: problems.append(str(error)))
            if not errors:
                page.on("console", lambda message: message.type == "error" and problems.append(message.text))
            page.on("request", lambda request: request.url.startswith(LOCAL) or problems.append(request.url))
            page.goto(address)
            return page

        yield open_page
    assert problems == []


@contextlib.contextmanager
def served(folder: Path) -> Generator[str]:
    """Serve a folder as `vaswani-demo` does, and yield its address."""
    with start_server(folder, "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
