"""Processes and devices: one process, several that share each step (DDP), or several that shard the model (FSDP2).

The arguments of `accelerate launch`, or a file of `training/accelerate`, choose one; the recipe sets everything else.
"""

import contextlib
import json
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Generator
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

from accelerate import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, broadcast_object_list, gather_object
from torch import Tensor
from torch.distributed import TCPStore
from torch.distributed.checkpoint.state_dict import DictValueType, StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import OffloadPolicy, fully_shard

from training.recipe.machine import is_set, uses_cpu
from training.run.launch import LaunchWatch, connect
from vaswani_transformer.body import ProjectedModel
from vaswani_transformer.support.checked_loading import check_finite, check_weights_fit
from vaswani_transformer.support.errors import UserError, exit_on_user_error, one_line

logger = logging.getLogger(__name__)
T = TypeVar("T")

RECIPE_SETS = ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_DYNAMO_", "FSDP_ACTIVATION_CHECKPOINTING")
PROCESS_GROUP_TIMEOUT = timedelta(hours=6)  # one process prepares the data while the others wait
KERNELS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64"}
# What gloo and NCCL report of a connection to a process that is gone
LOST_PEER = re.compile(r"Connection (closed|reset)|Broken pipe|ncclRemoteError")


class RunError(UserError):
    """A run cannot continue; all processes of a launch raise it together, so that the main one prints it."""


@contextlib.contextmanager
def exit_together(what_now: str, *more_errors: type[Exception]) -> Generator[None]:
    """End a command of one or several processes as `exit_on_user_error` does, and after the loss of another process."""
    with exit_on_user_error(*more_errors, what_now=what_now):
        try:
            yield
        except RunError as error:
            if PartialState().is_main_process:
                print(one_line(error), file=sys.stderr, flush=True)
            PartialState().wait_for_everyone()  # a launcher ends all processes when the first one ends
            sys.exit(2)
        except RuntimeError as error:
            if LOST_PEER.search(str(error)) is None:
                raise
            report_lost_peer(what_now)
            sys.exit(1)


def report_lost_peer(what_now: str) -> None:
    """Say that another process of the launch has ended, in the launcher's last lines where there is a launcher.

    torch's launcher prints these lines last, and takes the message of a failed process from the file that it names.
    """
    line = f"Another process of the launch was killed or has failed{what_now}."
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        message = {"message": line, "extraInfo": {"timestamp": str(int(time.time()))}}
        Path(file).write_text(json.dumps({"message": message}), encoding="utf-8")
    else:
        print(line, file=sys.stderr, flush=True)


def raise_together(function: Callable[[], T]) -> T:
    """Return the function's result; if it fails on one process, all processes raise that error."""
    results: list[T] = []
    failure = None
    try:
        results.append(function())
    except (UserError, OSError, ValueError) as error:
        failure = one_line(error)
    if failures := [each for each in gather_object([failure]) if each]:
        raise RunError(failures[0])
    return results[0]


def limit_cached_kernels() -> None:
    """Limit a CPU's kernel caches to a few batches, unless the environment sets other limits.

    oneDNN compiles a kernel for every shape of a bfloat16 matrix product, about 25 for each shape of a batch, because
    all layers share them. It caches the last 1,024 kernels, and PyTorch as many descriptions of them. Batches by token
    budget have dozens of shapes. So both caches fill with nearly a MiB an entry, and fragments of the heap take as much
    again. Both libraries read their limits at the first such product.
    """
    for name, capacity in KERNELS.items():
        os.environ.setdefault(name, capacity)


def init_distributed() -> None:
    """Initialize the process group; no code may read the number of processes earlier.

    A process on a CPU gets its limits of cached kernels here.
    """
    for name in [name for name in os.environ if name.startswith(RECIPE_SETS)]:
        if os.environ.pop(name).lower() not in ("no", "false", "default"):
            logger.warning("%s of the launch is ignored; the recipe sets it.", name)
    if uses_cpu():
        # Without an index: Transformers before 5.20 cannot load the optimizer's state onto "cpu:0" when it resumes.
        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
        limit_cached_kernels()
    os.environ["FSDP_STATE_DICT_TYPE"] = "FULL_STATE_DICT"  # `from_pretrained` loads such checkpoints
    state = PartialState(cpu=uses_cpu(), timeout=PROCESS_GROUP_TIMEOUT)
    is_watched = any(isinstance(thread, LaunchWatch) for thread in threading.enumerate())  # by an earlier run's thread
    if not is_watched and (store := connect()) is not None:
        LaunchWatch(store).start()
    if not is_set("ACCELERATE_USE_FSDP"):
        return
    if os.environ.get("FSDP_VERSION", "1") != "2":
        raise UserError(
            f"fsdp: the launch asks for version {os.environ.get('FSDP_VERSION', '1')}, expected version 2; "
            "set fsdp_version to 2, as training/accelerate/eight-gpus-fsdp2.yaml does."
        )
    if state.distributed_type in (DistributedType.NO, DistributedType.MULTI_CPU):
        raise UserError(
            "fsdp: Accelerate shards models only on accelerators, not on a CPU; launch "
            "with training/accelerate/two-cpu-processes.yaml."
        )


def open_store() -> TCPStore | None:
    """Return a store that all processes of a launch reach, None for a single process; all must call together."""
    state = PartialState()
    if state.num_processes == 1:
        return None
    host = os.environ["MASTER_ADDR"]
    server = TCPStore(host, 0, is_master=True, wait_for_workers=False) if state.is_main_process else None
    (port,) = broadcast_object_list([None if server is None else server.port])
    return TCPStore(host, port, wait_for_workers=False) if server is None else server


def shard(model: ProjectedModel, plugin: FullyShardedDataParallelPlugin) -> None:
    """Shard a model's weights over all processes, in place: one group a layer, one for all other weights.

    Accelerate's own grouping separates `shared` and `lm_head` from the stacks' embeddings, which are the same matrix.
    Weights stay in float32, as under DDP; autocast gives the precision.
    """
    plugin.auto_wrap_policy = None  # Accelerate has nothing left to group
    offload = plugin.cpu_offload if isinstance(plugin.cpu_offload, OffloadPolicy) else OffloadPolicy()
    for layer in (*model.model.encoder.layers, *model.model.decoder.layers):
        fully_shard(layer, reshard_after_forward=bool(plugin.reshard_after_forward), offload_policy=offload)
    fully_shard(model, offload_policy=offload)


def check_weights(model: ProjectedModel, weights: dict[str, Tensor], name: str, fix: str) -> None:
    """Check that full weights are exactly those of a model, a tied matrix once, of its shapes and finite."""
    expected = {key: weight for key, weight in model.state_dict().items() if key not in model.all_tied_weights_keys}
    misshapen = [
        f"{key} {tuple(weights[key].shape)}, expected {tuple(weight.shape)}"
        for key, weight in expected.items()
        if key in weights and weights[key].shape != weight.shape
    ]
    missing, unexpected = list(expected.keys() - weights.keys()), list(weights.keys() - expected.keys())
    try:
        check_weights_fit(name, missing, unexpected, misshapen, "the recipe's model", fix[0].upper() + fix[1:])
        check_finite(name, weights, fix)
    except UserError as error:  # all processes read the same files
        raise RunError(str(error)) from error


def load_weights(model: ProjectedModel, weights: dict[str, Tensor]) -> None:
    """Load full weights, which have a tied matrix once, into a model that may be sharded."""
    state: DictValueType = {**weights}
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, strict=False))
