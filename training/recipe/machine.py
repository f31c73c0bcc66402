"""What a launch trains on, which decides what a recipe leaves open."""

import os

import torch

TRUE = ("1", "true", "yes", "on")


def is_set(name: str) -> bool:
    """Return whether an environment variable is true."""
    return os.environ.get(name, "").lower() in TRUE


def uses_cpu() -> bool:
    """Return whether training runs on the CPU.

    It does if the launch sets it, if there is no accelerator, or if several processes would share Apple's, which is not
    possible.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    is_only_process = int(os.environ.get("WORLD_SIZE", "1")) == 1
    return accelerator is None or is_set("ACCELERATE_USE_CPU") or (accelerator.type == "mps" and not is_only_process)


def trains_slowly_in_bf16() -> bool:
    """Return whether training runs on a CPU without instructions for bf16, on which fp32 is many times faster.

    The environment variable ONEDNN_MAX_CPU_ISA may hide such instructions.
    """
    has_instructions = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    return uses_cpu() and not (torch.backends.mkldnn.is_available() and has_instructions())
