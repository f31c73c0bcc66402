"""The content of the small Hub of the tests: repositories, branches, commits and LFS objects, all in memory."""

import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from typing import Any

import yaml
from huggingface_hub.repocard_data import model_index_to_eval_results


class RequestError(Exception):
    """An error answer to a request: its status, the Hub's code and a sentence."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass
class File:
    """A file of a commit."""

    content: bytes
    is_lfs: bool

    @property
    def oid(self) -> str:
        """Return its name in git, or the SHA-256 of an LFS object."""
        if self.is_lfs:
            return hashlib.sha256(self.content).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(self.content) + self.content).hexdigest()


@dataclass
class Commit:
    """The files of a repository at one time, the message, and the commit before it."""

    files: dict[str, File]
    message: str
    parent: str | None

    @property
    def sha(self) -> str:
        tree = sorted((path, file.oid) for path, file in self.files.items())
        return hashlib.sha1(json.dumps([tree, self.message, self.parent]).encode()).hexdigest()


class Repository:
    """Commits, the branches that name them, and the uploaded LFS objects."""

    def __init__(self, private: bool) -> None:
        self.private = private
        self.commits: dict[str, Commit] = {}
        self.branches: dict[str, str] = {}
        self.objects: dict[str, bytes] = {}
        self.add("main", Commit({".gitattributes": File(b"*.safetensors filter=lfs\n", False)}, "initial commit", None))

    def add(self, branch: str, commit: Commit) -> str:
        self.commits[commit.sha] = commit
        self.branches[branch] = commit.sha
        return commit.sha

    def at(self, revision: str) -> tuple[str, Commit]:
        sha = self.branches.get(revision, revision)
        if sha not in self.commits:
            raise RequestError(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return sha, self.commits[sha]


@dataclass
class Hub:
    """The repositories that servers share, in turn or at the same time.

    users: the owner of each token.
    requests: method and path of every request, in order.
    """

    users: dict[str, str] = field(default_factory=lambda: {"hf_of_somebody": "somebody"})
    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    lock: Any = field(default_factory=threading.RLock)

    def files(self, name: str, revision: str = "main") -> dict[str, bytes]:
        """Return the files of a repository at a revision, without `.gitattributes`."""
        files = self.repositories[name].at(revision)[1].files
        return {path: file.content for path, file in files.items() if path != ".gitattributes"}

    def messages(self, name: str, revision: str = "main") -> list[str]:
        """Return the messages of a branch's commits after the first, oldest first."""
        repository, messages = self.repositories[name], []
        sha: str | None = repository.at(revision)[0]
        while sha is not None:
            messages.append(repository.commits[sha].message)
            sha = repository.commits[sha].parent
        return messages[-2::-1]


def metadata_errors(card: str) -> list[str]:
    """Return the errors in the YAML header of a card."""
    block = re.match(r"---\n(.*?)\n---\n", card, flags=re.DOTALL)
    if block is None:
        return []
    try:
        data = yaml.safe_load(block[1])
    except yaml.YAMLError as error:
        return [f"not YAML: {error}"]
    languages = data.get("language", [])
    errors = [f'"language" has {language!r}' for language in languages if not re.fullmatch("[a-z]{2,3}", language)]
    try:
        for result in model_index_to_eval_results(data["model-index"])[1] if "model-index" in data else ():
            if not isinstance(result.metric_value, int | float):
                errors.append(f'"model-index" has the value {result.metric_value!r}')
    except (KeyError, TypeError, ValueError) as error:
        errors.append(f'"model-index" lacks {error}')
    return errors
