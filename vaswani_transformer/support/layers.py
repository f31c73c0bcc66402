"""The check that a model has only plain layers, as a copy or an export of their weights needs."""

from torch import nn

from .errors import UserError


def check_plain_layers(model: nn.Module) -> None:
    """Raise UserError for a module that computes more than its class does with loaded weights.

    These are adapters, quantized or sharded layers, hooks except those by which Transformers records outputs, and
    weights on the device "meta".
    """
    for name, module in model.named_modules():
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        is_plain = (
            (type(module) is nn.Linear or not name.endswith(("_proj", "lm_head", "fc1", "fc2")))
            and type(module).__module__.partition(".")[0] != "peft"
            and not hasattr(module, "_hf_hook")
            and all(str(getattr(hook, "__module__", "")).startswith("transformers.") for hook in hooks)
            and all(type(weight) is nn.Parameter for weight in module.parameters(recurse=False))
            and not (type(module) is nn.Linear and module.weight.is_meta)
        )
        if not is_plain:
            raise UserError(
                f"{name or 'model'} is a {type(module).__name__} that is wrapped, or whose weight is not loaded; merge "
                "adapters with merge_and_unload(), remove hooks, and load the model without device_map, quantization "
                "or prepare_for_inference."
            )
