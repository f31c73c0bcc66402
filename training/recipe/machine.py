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
    """Return whether training runs on a CPU or GPU that is faster in fp32.

    Without instructions for bf16 it is many times faster; the environment variable ONEDNN_MAX_CPU_ISA may hide them.
    Intel's AVX-512 instructions for bf16 multiply at the pace of fp32, so there only the matrix unit (AMX) is faster.
    NVIDIA's GPUs before Ampere, such as T4 and V100, only emulate bf16.
    """
    if not uses_cpu():
        return torch.cuda.is_available() and not torch.cuda.is_bf16_supported(including_emulation=False)
    has_instructions = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()  # not in every supported torch
    is_slow_intel = "Intel" in capabilities.get("cpu_name", "") and not capabilities.get("amx_bf16", True)
    return is_slow_intel or not (torch.backends.mkldnn.is_available() and has_instructions())
