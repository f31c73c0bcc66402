"""The paper's learning rate schedule, equation (3), and Adam (5.3)."""

from collections.abc import Iterable

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import LambdaLR

FUSED_DEVICES = ("cpu", "cuda", "mps", "xpu")


def learning_rate(step: int, d_model: int, warmup_steps: int = 4000) -> float:
    """Return equation (3), d_model^-0.5 min(step^-0.5, step warmup_steps^-1.5), for steps counted from 1."""
    return d_model**-0.5 * min(step**-0.5, step * warmup_steps**-1.5)


def paper_schedule(optimizer: Optimizer, d_model: int, warmup_steps: int = 4000, scale: float = 1.0) -> LambdaLR:
    """Return a scheduler for equation (3) times `scale`; the learning rate of `optimizer` must be 1.

    Raises:
        ValueError: the learning rate of a parameter group is not 1, or `warmup_steps` is below 1.
    """
    if not warmup_steps >= 1:
        raise ValueError(f"warmup_steps: equation (3) rises to this step; got {warmup_steps!r}, expected at least 1.")
    rates = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
    if wrong := [rate for rate in rates if rate != 1]:
        raise ValueError(
            f"optimizer: equation (3) is multiplied by its learning rate; got lr={wrong[0]:g}, expected 1 in each "
            "parameter group. Pass paper_adam(model.parameters()), or lr=1.0 and a `scale`."
        )
    return LambdaLR(optimizer, lambda done: scale * learning_rate(done + 1, d_model, warmup_steps))


def paper_adam(parameters: Iterable[nn.Parameter]) -> Adam:
    """Return Adam with beta_1 = 0.9, beta_2 = 0.98, epsilon = 1e-9 (5.3) and learning rate 1, for `paper_schedule`.

    It is fused if torch supports that on the parameters' device. DTensors and plain tensors, which a fused step cannot
    mix, are in separate parameter groups.

    Raises:
        ValueError: `parameters` contain something other than parameters.
    """
    parameters = list(parameters)
    for parameter in parameters:
        if not isinstance(parameter, Tensor):
            raise ValueError(
                "parameters: expected parameters, not groups or (name, parameter) pairs; got a "
                f"{type(parameter).__name__}. Pass model.parameters()."
            )

    groups: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    is_fusable = True
    for parameter in parameters:
        if parameter.requires_grad:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            groups.setdefault(mesh, []).append(parameter)
            is_fusable &= parameter.is_floating_point() and parameter.device.type in FUSED_DEVICES
    return Adam(
        [{"params": group} for group in groups.values()], lr=1.0, betas=(0.9, 0.98), eps=1e-9, fused=is_fusable or None
    )
