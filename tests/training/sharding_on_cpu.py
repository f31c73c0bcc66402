"""`training.train` under FSDP2 on CPU processes, with pretended accelerators, because Accelerate shards only on those.

The functions that it calls for them run on a CPU too.
"""

import sys

import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import DistributedType

from training import train


def pretend_accelerators() -> None:
    """Make Accelerate treat the processes of this launch, which use gloo, as processes with GPUs."""
    dist.init_process_group("gloo")
    PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)


if __name__ == "__main__":
    pretend_accelerators()
    train.main(sys.argv[1:])
