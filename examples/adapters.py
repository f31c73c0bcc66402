"""Adapt a trained model with LoRA: train the adapter, save it, load it on the plain model, merge it.

python examples/adapters.py [--model runs/quickstart] [--steps 150] [--output_dir runs/adapters]
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments, set_seed

from vaswani_transformer import VaswaniTransformerForConditionalGeneration, VaswaniTransformerTokenizer

PAIRS = [("the dogs sleep.", "los perros no duermen."), ("the cats eat.", "los gatos no comen.")]


def translations(
    model: VaswaniTransformerForConditionalGeneration, tokenizer: VaswaniTransformerTokenizer
) -> list[str]:
    """Translate the sources of PAIRS."""
    batch = tokenizer([source for source, _ in PAIRS], padding=True, return_tensors="pt").to(model.device)
    return tokenizer.batch_decode(model.generate(**batch, max_new_tokens=40), skip_special_tokens=True)


def main() -> None:
    """Model, run, adapter."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="runs/quickstart", help="a model with its tokenizer (runs/quickstart)")
    parser.add_argument("--steps", type=int, default=150, help="optimizer steps (150)")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/adapters"), help="the folder of the adapter")
    options = parser.parse_args()
    if options.model == parser.get_default("model") and not Path(options.model).is_dir():
        parser.error(f"--model={options.model}: no such folder; run the README's quickstart first, or name a model.")
    set_seed(2017)

    tokenizer = VaswaniTransformerTokenizer.from_pretrained(options.model)
    model = VaswaniTransformerForConditionalGeneration.from_pretrained(options.model)
    is_on_cpu = not torch.accelerator.is_available()
    PartialState(cpu=is_on_cpu).print("plain:  ", translations(model, tokenizer))
    lora = LoraConfig(
        task_type="SEQ_2_SEQ_LM", r=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "fc1", "fc2"]
    )
    adapted = get_peft_model(model, lora)

    encoded: Any = [dict(tokenizer(source, text_target=target)) for source, target in PAIRS]
    trainer = Seq2SeqTrainer(
        adapted,
        Seq2SeqTrainingArguments(
            str(options.output_dir),
            max_steps=options.steps,
            learning_rate=5e-3,
            report_to="none",
            save_strategy="no",
            use_cpu=is_on_cpu,
        ),
        train_dataset=encoded,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model),
    )
    trainer.train()
    if not trainer.is_world_process_zero():  # of several processes one saves the adapter
        return
    adapted.eval().save_pretrained(options.output_dir / "adapter")

    plain = VaswaniTransformerForConditionalGeneration.from_pretrained(options.model)
    merged = PeftModel.from_pretrained(plain, options.output_dir / "adapter").merge_and_unload()
    merged.save_pretrained(options.output_dir / "merged")
    tokenizer.save_pretrained(options.output_dir / "merged")
    print("adapted:", translations(merged.eval(), tokenizer))


if __name__ == "__main__":
    main()
