"""`training.train` under FSDP2 on processes of a CPU: Accelerate, which shards on accelerators alone, is told of some.

What it then calls runs on a CPU as well.
"""

import sys

import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import DistributedType

from training import train


def pretend_accelerators() -> None:
    """Have Accelerate take the processes of this launch, which talk by gloo, for those of GPUs."""
    dist.init_process_group("gloo")
    PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)


if __name__ == "__main__":
    pretend_accelerators()
    train.main(sys.argv[1:])
