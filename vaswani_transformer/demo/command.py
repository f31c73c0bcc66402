"""The command `vaswani-demo MODEL`, also `python -m vaswani_transformer.demo`, which writes and serves a web page."""

import argparse
import sys
import tempfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from transformers.utils import logging

from ..support.command import MODEL_HELP, CommandParser, UserError, exit_on_user_error, positive_argument, say
from ..support.files import atomic_folder, write_atomically, write_errors
from .site import DTYPES, load_site


class Handler(SimpleHTTPRequestHandler):
    """Serves the files of the page, without a log; a browser asks each time whether they have changed."""

    # On Windows the registry may have other types for modules, which browsers refuse.
    extensions_map = SimpleHTTPRequestHandler.extensions_map | {".js": "text/javascript", ".html": "text/html"}

    def end_headers(self) -> None:
        self.send_header("Cache-Control", "no-cache")
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Write nothing."""


class Server(ThreadingHTTPServer):
    """Server with a thread for each request."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Write the traceback of an error, unless the browser has closed the connection, as phones often do."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


def is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = CommandParser(
        prog="vaswani-demo",
        description="Serve a page that translates in the browser, and shows the beam search and the attention weights.",
        epilog="Ctrl-C ends it. The page needs no network: the model runs in the browser, and no text leaves it.",
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument(
        "ctc_model", metavar="CTC_MODEL", nargs="?", help="a non-autoregressive CTC model to compare with"
    )
    host_help = "address to serve at (127.0.0.1: this machine only; 0.0.0.0: every device in the network)"
    parser.add_argument("--host", default="127.0.0.1", help=host_help)
    parser.add_argument("--port", type=positive_argument, default=7860, metavar="N", help="port of the address (7860)")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--output", type=Path, metavar="DIR", help="write a static site instead, and serve nothing")
    output.add_argument("--single", type=Path, metavar="FILE", help="write one HTML file instead, and serve nothing")
    parser.add_argument("--force", action="store_true", help="replace the file that --single names")
    dtype_help = "of the weights that the browser loads (float16; float32 gives the translations of the package)"
    parser.add_argument("--dtype", choices=DTYPES, default="float16", help=dtype_help)
    parser.add_argument("--revision", default="main", help="branch, tag or commit of a model on the Hub (main)")
    options = parser.parse_args(arguments)
    if options.single is not None and options.single.exists() and not options.force:
        parser.error(f"{options.single}: the file exists; choose a different --single, or replace it with --force.")
    if options.output is not None and options.output.exists() and not is_empty_folder(options.output):
        parser.error(f"{options.output}: exists and is not an empty folder; choose a different --output.")
    return options


def start_server(folder: Path, host: str, port: int) -> Server:
    """Return a server of a folder's files at an address."""
    try:
        return Server((host, port), partial(Handler, directory=folder))
    except (OSError, OverflowError) as error:
        address = f"--host={host} --port={port}"
        raise UserError(f"{address}: is in use or not permitted; choose a different port or host.") from error


def serve(folder: Path, host: str, port: int) -> None:
    """Serve a folder's files until Ctrl-C."""
    with start_server(folder, host, port) as server:
        say(f"http://{'localhost' if host == '0.0.0.0' else host}:{port}/")
        if host == "0.0.0.0":
            say(f"Phones use http://ADDRESS:{port}, with this machine's address in the network.")
        server.serve_forever()


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    logging.disable_progress_bar()
    with exit_on_user_error(ValueError):
        site = load_site(options.model, options.ctc_model, options.dtype, options.revision)
        fix = "make room, or choose a different place"
        if options.output is not None:
            with write_errors(options.output, fix), atomic_folder(options.output) as folder:
                site.write(folder)
            say(str(options.output))
        elif options.single is not None:
            with write_errors(options.single, fix):
                write_atomically(options.single, site.single_file())
            say(str(options.single))
        else:
            with tempfile.TemporaryDirectory() as folder:
                with write_errors(folder, fix):
                    site.write(Path(folder))
                serve(Path(folder), options.host, options.port)
