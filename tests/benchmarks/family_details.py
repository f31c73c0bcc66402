"""The inside of one translation by the models of a family: the outputs of each iteration, and where the time goes."""

import argparse
import time
from collections import Counter
from typing import cast

import torch
from torch import nn

from tests.benchmarks.family_arms import BATCH, Arm, encode, padded
from tests.benchmarks.part_times import PARTS, part_shares
from training.tasks.metrics import bleu
from training.tasks.text_statistics import repeats
from vaswani_transformer.support.modes import is_non_autoregressive


def history(arms: list[Arm], sources: list[str], references: list[str], count: int) -> str:
    """Return `count` sentences, evenly spaced, as each model's most thorough search translates them, by iteration."""
    chosen = {arm.model_name: arm for arm in arms}.values()  # the last arm of a model has most passes and lengths
    rows, parts = encode(arms, sources), [f"## {count} sentences after each iteration"]
    for index in range(0, len(sources) // count * count, len(sources) // count):
        parts.append(f"Source: {sources[index]}\\\nReference: {references[index]}")
        lines = ["| model | passes | translation |", "| --- | --- | --- |"]
        for arm in chosen:
            inputs = padded([rows[index]])
            if is_non_autoregressive(arm.model):
                token_history = arm.generate(inputs, return_dict_in_generate=True, return_history=True).history[:, 0]
                steps = list(enumerate(arm.decode(token_history), start=1))
            else:
                steps = [(arm.passes, arm.decode(arm.generate(inputs))[0])]
            lines += [f"| {arm.name} | {step} | {text.replace('|', chr(92) + '|')} |" for step, text in steps]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def refinement_table(arms: list[Arm], sources: list[str], references: list[str], options: argparse.Namespace) -> str:
    """Return the scores of what each model's most thorough search has after each iteration, or each layer."""
    columns = ("model", "iteration or layer", "BLEU", "repeats", "tokens changed")
    lines = [f"| {' | '.join(columns)} |", f"| {' | '.join(['---'] * len(columns))} |"]
    for arm in {arm.model_name: arm for arm in arms if is_non_autoregressive(arm.model)}.values():
        rows = encode([arm], sources)
        texts: list[list[str]] = []  # by iteration
        changed, tokens = Counter[int](), 0
        for start in range(0, len(rows), BATCH):
            inputs = padded(rows[start : start + BATCH])
            output = arm.generate(inputs, return_dict_in_generate=True, return_history=True)
            steps = output.history[:, :, 1:]  # (R, B, T)
            is_real = torch.arange(steps.shape[2]) < output.lengths[:, None]  # (B, T)
            texts = [old + arm.decode(step) for old, step in zip(texts or [[]] * len(steps), steps, strict=True)]
            changed.update({i + 1: int(((steps[i] != steps[i - 1]) & is_real).sum()) for i in range(1, len(steps))})
            tokens += int(is_real.sum())
        for number, outputs in enumerate(texts, start=1):
            share = f"{changed[number] / tokens:.1%}" if number > 1 else ""
            scores = f"{bleu(outputs, references, options.tokenize)['bleu']:.2f} | {repeats(outputs):.2%}"
            lines.append(f"| {arm.name} | {number} | {scores} | {share} |")
    return "\n".join(["## After each iteration or layer", "", *lines]) + "\n"


def parts_table(arms: list[Arm], rows: list[list[int]], count: int) -> str:
    """Return the share of each part in the CPU time of `count` sentences by one thread, for all parallel arms."""
    torch.set_num_threads(1)
    inputs, names = [padded([row]) for row in rows[:count]], [*PARTS, "rest"]
    lines = [f"| model, passes | {' | '.join(names)} |", f"| {' | '.join(['---'] * (len(names) + 1))} |"]
    for arm in arms:
        if is_non_autoregressive(arm.model):
            shares = part_shares(cast(nn.Module, arm.model), arm.generate, inputs, time.process_time)
            cells = [f"{shares[name]:.0%}" if name in shares else "" for name in names]
            lines.append(f"| {arm.name}, {arm.passes} | {' | '.join(cells)} |")
    return "\n".join(["## Share of each part in the time of a sentence", "", *lines]) + "\n"
