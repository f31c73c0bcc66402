"""A small Hub in memory for huggingface_hub's client in another process, at a free port of 127.0.0.1.

It has repositories, branches and commits of small files. As on the Hub, a commit is complete or absent.
"""

import base64
import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import unquote, urlsplit


@dataclass
class Commit:
    """The message of a commit, and the files of the repository after it."""

    message: str
    files: dict[str, bytes]

    @property
    def sha(self) -> str:
        return hashlib.sha1(repr((self.message, sorted(self.files.items()))).encode()).hexdigest()


@dataclass
class Hub:
    """The commits of each branch of each repository, oldest first; `address` is where it is served."""

    branches: dict[str, dict[str, list[Commit]]] = field(default_factory=dict)
    address: str = ""

    def at(self, name: str, revision: str = "main") -> Commit:
        """Return the commit of this branch or SHA; raise KeyError if there is none."""
        if revision in self.branches[name]:
            return self.branches[name][revision][-1]
        return {commit.sha: commit for commits in self.branches[name].values() for commit in commits}[revision]

    def messages(self, name: str, branch: str = "main") -> list[str]:
        """Return the messages of a branch's commits after the first, which is empty."""
        return [commit.message for commit in self.branches[name][branch][1:]]

    def create(self, content: bytes) -> dict[str, Any]:
        request = json.loads(content)
        name = f"{request.get('organization') or 'somebody'}/{request['name']}"
        self.branches.setdefault(name, {"main": [Commit("initial commit", {})]})
        return {"name": name, "url": f"{self.address}/{name}"}

    def create_branch(self, _: bytes, name: str, branch: str) -> dict[str, Any]:
        self.branches[name].setdefault(branch, list(self.branches[name]["main"]))
        return {}

    def info(self, _: bytes, name: str, revision: str = "main") -> dict[str, Any]:
        commit = self.at(name, revision)
        siblings = [{"rfilename": path} for path in commit.files]
        return {"id": name, "sha": commit.sha, "private": False, "siblings": siblings, "tags": [], "likes": 0}

    def tree(self, _: bytes, name: str, revision: str) -> list[dict[str, Any]]:
        files = self.at(name, revision).files
        return [{"type": "file", "path": path, "size": len(files[path]), "oid": path} for path in files]

    def upload_modes(self, content: bytes, **_: str) -> dict[str, Any]:
        """Let the client put every file into the commit itself, without LFS."""
        paths = [file["path"] for file in json.loads(content)["files"]]
        return {"files": [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in paths]}

    def commit(self, content: bytes, name: str, branch: str) -> dict[str, Any]:
        header, *changes = [json.loads(line) for line in content.splitlines()]
        files = dict(self.at(name, branch).files)
        for change in changes:
            path = change["value"]["path"]
            if change["key"] == "deletedFile":
                del files[path]
            else:
                files[path] = base64.b64decode(change["value"]["content"])
        commit = Commit(header["value"]["summary"], files)
        self.branches[name][branch].append(commit)
        url = f"{self.address}/{name}/commit/{commit.sha}"
        return {"success": True, "commitOid": commit.sha, "commitUrl": url}


NAME = r"(?P<name>[\w.-]+/[\w.-]+)"
ROUTES: list[tuple[str, Callable[..., Any]]] = [
    ("GET /api/whoami-v2", lambda hub, _: {"type": "user", "name": "somebody", "orgs": []}),
    ("POST /api/validate-yaml", lambda hub, _: {"errors": [], "warnings": []}),
    ("POST /api/repos/create", Hub.create),
    (f"GET /api/models/{NAME}(/revision/(?P<revision>.+))?", Hub.info),
    (f"GET /api/models/{NAME}/tree/(?P<revision>[^/]+)", Hub.tree),
    (f"POST /api/models/{NAME}/branch/(?P<branch>.+)", Hub.create_branch),
    (f"POST /api/models/{NAME}/preupload/.+", Hub.upload_modes),
    (f"POST /api/models/{NAME}/commit/(?P<branch>.+)", Hub.commit),
]


class Requests(BaseHTTPRequestHandler):
    """Answers to the client's requests; what is not there is a missing file to it."""

    protocol_version = "HTTP/1.1"
    hub: ClassVar[Hub]

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""

    def answer(self, status: int, payload: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(payload))}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(payload)

    def serve(self) -> None:
        """Answer with JSON as one of `ROUTES` says, or with a file."""
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(self.path).path)
        try:
            for pattern, respond in ROUTES:
                if match := re.fullmatch(pattern, f"{self.command} {path}"):
                    given = {name: value for name, value in match.groupdict().items() if value is not None}
                    result = json.dumps(respond(self.hub, content, **given))
                    return self.answer(200, result.encode(), Content_Type="application/json")
            owner, name, _, revision, file = path.removeprefix("/").split("/", 4)
            commit = self.hub.at(f"{owner}/{name}", revision)
            file_content = commit.files[file]
            tag = hashlib.sha1(file_content).hexdigest()
            return self.answer(200, file_content, X_Repo_Commit=commit.sha, ETag=f'"{tag}"')
        except (KeyError, ValueError):
            return self.answer(404, b"{}", X_Error_Code="EntryNotFound")

    do_GET = do_HEAD = do_POST = serve  # noqa: N815 - names of http.server


@contextlib.contextmanager
def serving(hub: Hub) -> Generator[str]:
    """Serve `hub` at the yielded address until the block ends."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("RequestsOfHub", (Requests,), {"hub": hub}))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    hub.address = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub.address
    finally:
        server.shutdown()
        server.server_close()


def client_environment(url: str, home: Any) -> dict[str, Any]:
    """Return the environment in which another process uses that Hub as "somebody", with an empty cache."""
    variables = {"HF_ENDPOINT": url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    quiet = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_UPDATE_CHECK": "1"}
    here = {"no_proxy": "127.0.0.1", "NO_PROXY": "127.0.0.1"}
    return variables | quiet | here | {"HF_TOKEN": "hf_of_somebody", "HUGGING_FACE_HUB_TOKEN": ""}
