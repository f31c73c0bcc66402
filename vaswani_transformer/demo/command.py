"""The command `vaswani-demo MODEL`, also `python -m vaswani_transformer.demo`, which serves a web page."""

import os
import time
from typing import Any

from transformers.utils import logging

from ..support.command_line import MODEL_HELP, CommandParser, positive_argument, say
from ..support.errors import UserError, exit_on_user_error
from ..support.loading import LoadOptions, add_load_options
from .page import load_page

LAUNCH: dict[str, Any] = {
    "share": False,
    "ssr_mode": False,  # else Node, where it is installed
    "run_history": False,  # else the browser stores every text
    "enable_monitoring": False,
    "footer_links": [],
    "quiet": True,
    "prevent_thread_lock": True,
}
"""Arguments of Gradio's `launch()`: no public link, no telemetry, no history."""


def main(arguments: list[str] | None = None) -> None:
    parser = CommandParser(
        prog="vaswani-demo",
        description="Serve a page on this machine that translates or parses what is typed, and shows how.",
        epilog="Ctrl-C ends it. The page needs no network, and nothing leaves this machine unless you change --host.",
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    host_help = "address to serve at (127.0.0.1: this machine only; 0.0.0.0: everybody in the network can use the page)"
    parser.add_argument("--host", default="127.0.0.1", help=host_help)
    parser.add_argument("--port", type=positive_argument, default=7860, metavar="N", help="port of the address (7860)")
    add_load_options(parser)
    options = parser.parse_args(arguments)
    logging.disable_progress_bar()
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read while Gradio is imported
    with exit_on_user_error(ValueError):
        page = load_page(**vars(LoadOptions.of(options)))
        try:
            _, address, _ = page.launch(server_name=options.host, server_port=options.port, **LAUNCH)
        except (OSError, OverflowError) as error:
            address = f"--host={options.host} --port={options.port}"
            raise UserError(f"{address}: is in use or not permitted; choose a different port or host.") from error
        say(str(address))
        if options.host == "0.0.0.0":
            say(f"Phones use http://ADDRESS:{options.port}, with this machine's address in the network.")
        while True:  # on Windows Ctrl-C cannot interrupt a wait for a lock
            time.sleep(60)
