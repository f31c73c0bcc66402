"""Dialogue: a prompt in, a reply out. One prompt has many replies, so one reference says less than for translation."""

from training.tasks.translation import BLEU_1, BLEU_2, TextTask


class DialogueTask(TextTask):
    """Replies to prompts, scored by BLEU-1 and BLEU-2 and described by their variety."""

    hub_name = "text-generation"
    verb = "answer"
    roles = ("prompt", "reply", "reference")
    metrics = (BLEU_1, BLEU_2)
    best_metric = BLEU_2
    title = "Dialogue"

    def __init__(self, tokenize: str) -> None:
        self.tokenize = tokenize

    @property
    def card_words(self) -> dict[str, str]:
        return {
            "purpose": "answer prompts with replies",
            "languages": "those of the data's prompts and replies",
            "use": "`vaswani-translate` of vaswani-transformer answers a file of prompts, a line each.",
            "limits": "It answers a single prompt and knows nothing of the turns before it.",
            "errors": "It may answer anything with the same few phrases, contradict itself or invent facts.",
            "measure": "BLEU-1 and BLEU-2 compare words with one reply of the many that would do.",
        }
