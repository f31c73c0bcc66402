"""The second phase of FlowSeq: its flow starts from the pairs of one optimizer step, which all processes share."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from accelerate.utils import broadcast, gather_object
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from training.trainer.draws import STATES, draw_latents
from vaswani_transformer import VaswaniFlowSeqForConditionalGeneration
from vaswani_transformer.flow import ActNorm
from vaswani_transformer.support.modes import eval_mode


def gather_pairs(batches: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Return the pairs of the micro-batches of all processes, which must call together, as one batch."""
    parts = gather_object(batches)
    pairs = {STATES: torch.cat([part[STATES] for part in parts])}
    for name in ("input_ids", "attention_mask", "labels", "word_draws"):
        rows = [row for part in parts for row in part[name]]
        pairs[name] = pad_sequence(rows, batch_first=True, padding_value=-100 if name == "labels" else 0)
    return pairs


class FlowStart:
    """Starts a model's flow before a step, once, unless it has a start, as that of a resumed run has."""

    def __init__(self, model: VaswaniFlowSeqForConditionalGeneration, after: int, device: torch.device) -> None:
        self.model, self.after, self.device = model, after, device
        self.is_done = False

    def __call__(self, step: int, batches: list[dict[str, Any]], autocast: AbstractContextManager) -> None:
        """Start the flow from the batches of a step, which are on the host; all processes must call together."""
        if self.is_done or step < self.after or not batches:
            return
        self.is_done = True
        if float(self.model.flow.started) == 1:
            return
        pairs = {name: tensor.to(self.device) for name, tensor in gather_pairs(batches).items()}
        with eval_mode(self.model), autocast:
            self.model.start_flow(**draw_latents(pairs, self.model.config.d_model))
        for layer in self.model.flow.layers:
            if isinstance(layer, ActNorm):  # the same to the bit in every process
                broadcast([layer.log_scale.data, layer.shift.data])
