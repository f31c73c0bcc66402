"""Train with the stock Seq2SeqTrainer, the paper's optimizer and learning rate, and batches within a token budget.

python examples/trainer_script.py [--steps 500] [--output_dir runs/trainer-script]
"""

import argparse
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments, set_seed

from vaswani_transformer import (
    TokenBudgetBatchSampler,
    VaswaniTransformerConfig,
    VaswaniTransformerForConditionalGeneration,
    VaswaniTransformerTokenizer,
    paper_adam,
    paper_schedule,
)

NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


class TokenBudgetTrainer(Seq2SeqTrainer):
    """Seq2SeqTrainer whose batches are limited by tokens instead of sentences (section 5.1)."""

    tokens_per_step = 256

    def get_train_dataloader(self) -> DataLoader:
        pairs: Any = self.train_dataset
        sampler = TokenBudgetBatchSampler(
            [len(pair["input_ids"]) for pair in pairs],
            [len(pair["labels"]) for pair in pairs],
            source_tokens=self.tokens_per_step,
            target_tokens=self.tokens_per_step,
            seed=self.args.seed,
            epoch=lambda: int(self.state.epoch or 0),  # the Trainer calls no set_epoch of a batch sampler
        )
        return DataLoader(pairs, batch_sampler=sampler, collate_fn=self.data_collator)


def main() -> None:
    """Data, model, run: numbers in words are translated into digits."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=500, help="optimizer steps (500)")
    parser.add_argument("--output_dir", default="runs/trainer-script", help="the folder of the model")
    options = parser.parse_args()
    set_seed(2017)

    pairs = [(f"{NUMBERS[i // 10]} {NUMBERS[i % 10]}", f"{i // 10}{i % 10}") for i in range(100)]
    texts = [text for pair in pairs for text in pair]
    tokenizer = VaswaniTransformerTokenizer.train_from_iterator(texts, vocab_size=320)
    encoded: Any = [dict(tokenizer(source, text_target=target)) for source, target in pairs]

    config = VaswaniTransformerConfig(
        vocab_size=len(tokenizer), d_model=64, d_ff=128, num_heads=4, encoder_layers=2, decoder_layers=2, dropout=0.0
    )
    model = VaswaniTransformerForConditionalGeneration(config)
    optimizer = paper_adam(model.parameters())

    trainer = TokenBudgetTrainer(
        model,
        Seq2SeqTrainingArguments(
            options.output_dir,
            use_cpu=not torch.accelerator.is_available(),  # without it the processes of a launch on CPUs train apart
            max_steps=options.steps,
            logging_steps=50,
            save_strategy="no",
            report_to="none",
            max_grad_norm=0,  # the paper clips no gradients
        ),
        train_dataset=encoded,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model),
        optimizers=(optimizer, paper_schedule(optimizer, config.d_model, warmup_steps=100)),
    )
    trainer.train()
    if not trainer.is_world_process_zero():  # of several processes one saves the model
        return
    model.eval().use_paper_decoding()
    model.save_pretrained(options.output_dir)
    tokenizer.save_pretrained(options.output_dir)

    sources, targets = zip(*pairs[-100:], strict=True)
    batch = tokenizer(list(sources), padding=True, return_tensors="pt").to(model.device)
    translations = tokenizer.batch_decode(model.generate(**batch), skip_special_tokens=True)
    print(f"{sources[-1]}: {translations[-1]}")
    print(f"{sum(map(str.__eq__, translations, targets))} of {len(targets)} are right")


if __name__ == "__main__":
    main()
