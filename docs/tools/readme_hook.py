"""Build hook: the README for PyPI's page, where links to files of the repository lead to the repository."""

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

RELATIVE_LINK = re.compile(r"\]\((?!https?://|#)")


class ReadmeHook(MetadataHookInterface):
    """Sets the description of the package."""

    def update(self, metadata: dict) -> None:
        """Add the README, with its relative links below the address of the repository."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        files = f"{metadata['urls']['Source']}/blob/main/"
        metadata["readme"] = {"content-type": "text/markdown", "text": RELATIVE_LINK.sub(f"]({files}", text)}
