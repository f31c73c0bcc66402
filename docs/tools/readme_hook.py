"""Build hook: the README for PyPI's page, where links and pictures lead to the files of the repository."""

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

RELATIVE_IMAGE = re.compile(r"(!\[[^\]]*\]\()(?!https?://)")
RELATIVE_LINK = re.compile(r"\]\((?!https?://|#)")


class ReadmeHook(MetadataHookInterface):
    """Sets the description of the package."""

    def update(self, metadata: dict) -> None:
        """Add the README, with its relative links below the address of the repository."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        source = metadata["urls"]["Source"]
        text = RELATIVE_IMAGE.sub(rf"\g<1>{source}/raw/main/", text)
        text = RELATIVE_LINK.sub(f"]({source}/blob/main/", text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
