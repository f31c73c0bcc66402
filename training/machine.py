"""Processes, devices and versions: one process, DDP or FSDP2, as chosen by the arguments of `accelerate launch`."""

import os
import platform
import subprocess
from collections import Counter
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path

import psutil
import torch
from accelerate import FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import gather_object
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel

import vaswani_transformer
from vaswani_transformer.support.loading import limit_kernel_caches

# The recipe decides precision, compilation and checkpointing, so that one recipe gives one result under any launcher.
IGNORED_VARIABLES = ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_DYNAMO_", "FSDP_ACTIVATION_CHECKPOINTING")
PROCESS_GROUP_TIMEOUT = timedelta(hours=6)  # one process prepares the data while the others wait
LIBRARIES = ("torch", "transformers", "accelerate", "datasets", "tokenizers", "sacrebleu")


def allowed_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def uses_cpu() -> bool:
    """Return whether training runs on the CPU: without accelerator, by request, or by several processes on Apple's."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    launched_on_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes", "on")
    is_only_process = int(os.environ.get("WORLD_SIZE", "1")) == 1
    return accelerator is None or launched_on_cpu or (accelerator.type == "mps" and not is_only_process)


def trains_slowly_in_bf16() -> bool:
    """Return whether training runs on a CPU or GPU that is faster in fp32 than in bf16.

    These are CPUs without bf16 instructions (which the environment variable ONEDNN_MAX_CPU_ISA may hide), Intel CPUs
    without AMX, and NVIDIA GPUs before Ampere, which only emulate bf16.
    """
    if not uses_cpu():
        return torch.cuda.is_available() and not torch.cuda.is_bf16_supported(including_emulation=False)
    has_instructions = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()  # not in every supported torch
    is_slow_intel = "Intel" in capabilities.get("cpu_name", "") and not capabilities.get("amx_bf16", True)
    return is_slow_intel or not (torch.backends.mkldnn.is_available() and has_instructions())


def init_processes() -> None:
    """Initialize the process group, before any code reads the number of processes, and limit the caches of a CPU."""
    for name in list(os.environ):
        if name.startswith(IGNORED_VARIABLES):
            del os.environ[name]
    if uses_cpu():
        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"  # Transformers before 5.20 cannot resume on "cpu:0"
        limit_kernel_caches()
    os.environ["FSDP_STATE_DICT_TYPE"] = "FULL_STATE_DICT"  # `from_pretrained` loads such checkpoints
    PartialState(cpu=uses_cpu(), timeout=PROCESS_GROUP_TIMEOUT)


def shard(model: PreTrainedModel, plugin: FullyShardedDataParallelPlugin) -> None:
    """Shard a model's weights over all processes (FSDP2), with a group for each layer and one for all other weights.

    Accelerate's grouping would separate the tied embeddings. Weights stay in float32, as with DDP.
    """
    plugin.auto_wrap_policy = None  # no grouping by Accelerate
    for layer in (*model.model.encoder.layers, *model.model.decoder.layers):
        fully_shard(layer, reshard_after_forward=bool(plugin.reshard_after_forward))
    fully_shard(model)


def git(*arguments: str) -> str:
    """Return the output of a git command in the folder of this file."""
    folder = Path(__file__).parent
    command = ["git", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, timeout=30)
    return done.stdout.strip()


def commit() -> dict[str, str | bool] | None:
    """Return the checkout's commit and whether tracked files differ from it; None if git does not track this code."""
    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)
        described = git("describe", "--always", "--abbrev=40", "--exclude=*", "--dirty")
    except (OSError, subprocess.SubprocessError):
        return None
    return {"hash": described.removesuffix("-dirty"), "dirty": described.endswith("-dirty")}


def versions() -> dict[str, str]:
    """Return the versions of Python, this package and the libraries with which a run computes."""
    return {
        "python": platform.python_version(),
        "vaswani_transformer": vaswani_transformer.__version__,
        **{name: version(name) for name in LIBRARIES},
        "torch": str(torch.__version__),  # with its build, such as "+cpu"
    }


def hardware(device: torch.device) -> dict[str, object]:
    """Describe the main process's machine and the accelerators of all processes, which must call this together.

    `cores` is the number available to this process, `memory` is in GiB, and `accelerators` counts devices by name.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {
        "cpu": next(models, platform.processor() or platform.machine()),
        "cores": allowed_cores(),
        "threads": torch.get_num_threads(),
        "memory": round(psutil.virtual_memory().total / 2**30, 1),
        "accelerators": dict(Counter(gather_object([] if device.type == "cpu" else [name]))),
    }
