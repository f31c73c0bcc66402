"""Check a model as its readers get it: `python tests/published_release.py OWNER/NAME`, with the released package."""

import subprocess
import sys

WITHOUT_THE_PACKAGE = """
import sys

sys.modules["vaswani_transformer"] = None

from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

name, text = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=True)
model = AutoModelForSeq2SeqLM.from_pretrained(name, trust_remote_code=True)
print(*tokenizer.batch_decode(model.generate(**tokenizer([text], return_tensors="pt")), skip_special_tokens=True))
"""
TEXT = "two dogs play in the snow."


def main(name: str) -> None:
    """Translate by the model's own code, then by the command of the installed package."""
    own = subprocess.run(
        [sys.executable, "-c", WITHOUT_THE_PACKAGE, name, TEXT], stdout=subprocess.PIPE, text=True, check=True
    )
    command = [sys.executable, "-m", "vaswani_transformer.translation", name]
    installed = subprocess.run(command, input=TEXT, stdout=subprocess.PIPE, text=True, check=True)
    print(own.stdout + installed.stdout, end="")


if __name__ == "__main__":
    main(sys.argv[1])
