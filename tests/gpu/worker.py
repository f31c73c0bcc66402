"""The process that runs parts: it reads names of parts line by line, and writes rows and statuses as JSON lines.

Usage: python -m tests.gpu.worker CATALOG DEVICE
"""

import faulthandler
import gc
import importlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from tests.gpu.runner import STACK_SIGNAL, Setting, perform

GRAPHS = 64  # of one function: searches of several sizes have a graph each, and torch's limit is 8


def main(catalog: str, device: str) -> None:
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the output of libraries goes to the log
    faulthandler.enable(all_threads=True)
    faulthandler.register(STACK_SIGNAL, all_threads=True)

    def send(event: dict[str, Any]) -> None:
        print(json.dumps(event), file=channel, flush=True)

    logging.set_verbosity_error()
    parts = {part.name: part for part in importlib.import_module(catalog).parts()}
    send({"ready": True})
    for line in sys.stdin:
        torch.manual_seed(0)
        torch.compiler.reset()
        torch._dynamo.config.recompile_limit = GRAPHS  # ty: ignore[invalid-assignment] - ty takes it for a constant
        with tempfile.TemporaryDirectory() as folder:
            setting = Setting(torch.device(device), device == "cpu", Path(folder))
            status, reason = perform(parts[line.strip()], setting, lambda row: send({"row": row}))
        send({"status": status, "reason": reason})
        gc.collect()  # a Trainer is part of a cycle, and holds its model and optimizer
        if setting.is_cuda:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main(*sys.argv[1:])
