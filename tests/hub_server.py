"""A small local Hub for huggingface_hub's client: repositories, branches, LFS and commits.

It listens on a free port of 127.0.0.1 and stores everything in memory. Its answers follow the Hub: a commit is complete
or absent, an LFS object must have its hash as name, and without a token a private repository does not exist.
"""

import base64
import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Callable, Generator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.hub_state import Commit, File, Hub, Repository, RequestError, metadata_errors

LFS_SUFFIXES = (".safetensors", ".bin")


class ServerStoppedError(Exception):
    """The server stops in the middle of a request."""


class Handler(BaseHTTPRequestHandler):
    """Answers to the requests of huggingface_hub's client; `ROUTES` names the method of each."""

    protocol_version = "HTTP/1.1"
    timeout = 30
    server: "HubServer"  # ty: ignore[incompatible-mutable-override] - only HubServer makes a Handler

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""

    @property
    def hub(self) -> Hub:
        return self.server.hub

    def body(self) -> bytes:
        """Return the request's body, which may come in chunks."""
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        content = b""
        while size := int(self.rfile.readline(), 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content

    def answer(self, status: int, content: Any = None, headers: dict[str, str] | None = None) -> None:
        payload = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in ({"Content-Type": "application/json"} | (headers or {})).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(payload)

    def serve(self) -> None:
        path = unquote(urlsplit(self.path).path)
        with self.hub.lock:
            self.hub.requests.append(f"{self.command} {path}")
        try:
            if self.server.is_dead or (self.server.dies_at or "\n") in f"{self.command} {path}":
                raise ServerStoppedError
            content = self.body()
            for method, pattern, respond in ROUTES:
                if method == self.command and (match := pattern.fullmatch(path)):
                    with self.hub.lock:
                        return respond(self, content, **match.groupdict())
            raise RequestError(404, "NotFound", f"There is no {self.command} {path}.")
        except RequestError as error:
            headers = {"X-Error-Code": error.code, "X-Error-Message": str(error)}
            self.answer(error.status, {"error": str(error)}, headers)
        except ServerStoppedError:
            self.close_connection = True
            self.server.die()
        return None

    do_GET = do_HEAD = do_POST = do_PUT = serve  # noqa: N815 - names of http.server

    def user(self) -> str | None:
        return self.hub.users.get((self.headers.get("Authorization") or "").removeprefix("Bearer "))

    def owner(self) -> str:
        if (user := self.user()) is None:
            raise RequestError(401, "Unauthorized", "Invalid username or password.")
        return user

    def repository(self, name: str, writes: bool = False) -> Repository:
        """Return the repository `name`; only its owner reads a private one, and only its owner writes."""
        repository = self.hub.repositories.get(name)
        is_owner = self.user() == name.partition("/")[0]
        if repository is None or (repository.private and not is_owner):
            raise RequestError(404 if self.user() else 401, "RepoNotFound", "Repository not found")
        if writes and not is_owner:
            self.owner()
            raise RequestError(403, "Forbidden", f"You have no write access to {name}")
        return repository

    def whoami(self, _: bytes) -> None:
        self.answer(200, {"type": "user", "name": self.owner(), "orgs": []})

    def create(self, content: bytes) -> None:
        request, owner = json.loads(content), self.owner()
        if (request.get("organization") or owner) != owner:
            owner = request["organization"]
            raise RequestError(403, "Forbidden", f"You have no rights to create a model under {owner}")
        name = f"{owner}/{request['name']}"
        answer = {"url": f"{self.server.url}/{name}", "name": name}
        if name in self.hub.repositories:
            return self.answer(409, answer | {"error": "You already created this model repo"})
        is_private = request.get("visibility") == "private" or bool(request.get("private"))
        self.hub.repositories[name] = Repository(is_private)
        return self.answer(200, answer)

    def validate(self, content: bytes) -> None:
        errors = metadata_errors(json.loads(content)["content"])
        self.answer(400 if errors else 200, {"errors": [{"message": text} for text in errors], "warnings": []})

    def info(self, _: bytes, name: str, revision: str = "main") -> None:
        repository = self.repository(name)
        sha, commit = repository.at(revision)
        siblings = [{"rfilename": path} for path in sorted(commit.files)]
        answer = {"id": name, "sha": sha, "private": repository.private, "siblings": siblings}
        self.answer(200, answer | {"tags": [], "likes": 0})

    def branch(self, content: bytes, name: str, branch: str) -> None:
        repository = self.repository(name, writes=True)
        if branch in repository.branches:
            raise RequestError(409, "Conflict", f"Reference already exists: {branch}")
        request = json.loads(content or b"{}") or {}
        repository.branches[branch] = repository.at(request.get("startingPoint", "main"))[0]
        self.answer(200, {})

    def tree(self, _: bytes, name: str, revision: str, folder: str | None = None) -> None:
        commit = self.repository(name).at(revision)[1]
        inside = {path: file for path, file in commit.files.items() if path.startswith(f"{folder}/" if folder else "")}
        if folder and not inside:
            raise RequestError(404, "EntryNotFound", f"{folder} does not exist")
        listed = []
        for path, file in sorted(inside.items()):
            entry: dict[str, Any] = {"type": "file", "path": path, "size": len(file.content), "oid": file.oid}
            if file.is_lfs:
                entry["lfs"] = {"oid": file.oid, "size": len(file.content), "pointerSize": 130}
            listed.append(entry)
        self.answer(200, listed)

    def preupload(self, content: bytes, name: str, revision: str) -> None:
        _, commit = self.repository(name, writes=True).at(revision)
        files = []
        for request in json.loads(content)["files"]:
            path, known = request["path"], commit.files.get(request["path"])
            mode = "lfs" if path.endswith(LFS_SUFFIXES) else "regular"
            oid = None if known is None else known.oid
            files.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self.answer(200, {"files": files})

    def batch(self, content: bytes, name: str) -> None:
        repository, objects = self.repository(name, writes=True), []
        for request in json.loads(content)["objects"]:
            entry = {"oid": request["oid"], "size": request["size"]}
            if request["oid"] not in repository.objects:
                entry["actions"] = {
                    action: {"href": f"{self.server.url}/lfs{verb}/{name}/{request['oid']}"}
                    for action, verb in (("upload", ""), ("verify", "-verify"))
                }
            objects.append(entry)
        self.answer(200, {"transfer": "basic", "objects": objects})

    def upload(self, content: bytes, name: str, oid: str) -> None:
        if self.server.spoils_uploads:
            content = content[:-1] + bytes([content[-1] ^ 1])
        if (digest := hashlib.sha256(content).hexdigest()) != oid:
            raise RequestError(422, "BadDigest", f"The SHA-256 of the received content is {digest}, not {oid}")
        self.hub.repositories[name].objects[oid] = content
        self.answer(200, {})

    def verify(self, content: bytes, name: str, oid: str) -> None:
        request = json.loads(content)
        known = self.repository(name, writes=True).objects.get(oid)
        if known is None or (request["oid"], request["size"]) != (oid, len(known)):
            raise RequestError(404, "NotFound", f"There is no such object: {oid}")
        self.answer(200, {})

    def commit(self, content: bytes, name: str, revision: str) -> None:
        repository = self.repository(name, writes=True)
        parent, before = repository.at(revision)
        header, *lines = [json.loads(line) for line in content.splitlines()]
        files = dict(before.files)
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = File(base64.b64decode(value["content"]), False)
            elif line["key"] == "lfsFile":
                if (oid := value["oid"]) not in repository.objects:
                    raise RequestError(400, "BadRequest", f"{value['path']} points to {oid}, which was not uploaded")
                files[value["path"]] = File(repository.objects[oid], True)
            elif line["key"] == "deletedFile":
                del files[value["path"]]
            else:
                raise RequestError(400, "BadRequest", f"{line['key']} is not known here")
        if "README.md" in files and (errors := metadata_errors(files["README.md"].content.decode())):
            raise RequestError(400, "BadRequest", "; ".join(errors))
        sha = repository.add(revision, Commit(files, header["value"]["summary"], parent))
        self.answer(200, {"success": True, "commitOid": sha, "commitUrl": f"{self.server.url}/{name}/commit/{sha}"})

    def resolve(self, _: bytes, name: str, revision: str, path: str) -> None:
        sha, commit = self.repository(name).at(revision)
        if (file := commit.files.get(path)) is None:
            raise RequestError(404, "EntryNotFound", "Entry not found")
        headers = {"X-Repo-Commit": sha, "ETag": f'"{file.oid}"', "Content-Type": "application/octet-stream"}
        if file.is_lfs:
            headers |= {"X-Linked-ETag": f'"{file.oid}"', "X-Linked-Size": str(len(file.content))}
        self.answer(200, file.content, headers)


NAME = r"(?:models/)?(?P<name>[\w.-]+/[\w.-]+)"
ROUTES: list[tuple[str, re.Pattern, Callable]] = [
    (method, re.compile(pattern.replace("NAME", NAME)), respond)
    for method, pattern, respond in (
        ("GET", "/api/whoami-v2", Handler.whoami),
        ("POST", "/api/repos/create", Handler.create),
        ("POST", "/api/validate-yaml", Handler.validate),
        ("GET", "/api/NAME", Handler.info),
        ("GET", "/api/NAME/revision/(?P<revision>.+)", Handler.info),
        ("POST", "/api/NAME/branch/(?P<branch>.+)", Handler.branch),
        ("GET", r"/api/NAME/tree/(?P<revision>[^/]+)(/(?P<folder>.+))?", Handler.tree),
        ("POST", "/api/NAME/preupload/(?P<revision>.+)", Handler.preupload),
        ("POST", "/NAME.git/info/lfs/objects/batch", Handler.batch),
        ("PUT", "/lfs/NAME/(?P<oid>[0-9a-f]{64})", Handler.upload),
        ("POST", "/lfs-verify/NAME/(?P<oid>[0-9a-f]{64})", Handler.verify),
        ("POST", "/api/NAME/commit/(?P<revision>.+)", Handler.commit),
        ("GET", "/NAME/resolve/(?P<revision>[^/]+)/(?P<path>.+)", Handler.resolve),
        ("HEAD", "/NAME/resolve/(?P<revision>[^/]+)/(?P<path>.+)", Handler.resolve),
    )
]


class HubServer(ThreadingHTTPServer):
    """A server of one `Hub`, which can break off at a request or damage uploads."""

    daemon_threads = True

    def __init__(self, hub: Hub, dies_at: str | None, spoils_uploads: bool) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.hub, self.dies_at, self.spoils_uploads = hub, dies_at, spoils_uploads
        self.is_dead = False
        self.url = f"http://127.0.0.1:{self.server_port}"

    def verify_request(self, request: Any, client_address: Any) -> bool:
        return not self.is_dead

    def die(self) -> None:
        """Stop answering."""
        self.is_dead = True
        threading.Thread(target=self.stop, daemon=True).start()

    def stop(self) -> None:
        """Stop listening, so that no request waits in the queue."""
        self.shutdown()
        self.server_close()


@contextlib.contextmanager
def serving(hub: Hub, dies_at: str | None = None, spoils_uploads: bool = False) -> Generator[str]:
    """Serve `hub` until the block ends at the yielded address.

    Args:
        dies_at: text of a request, such as "PUT /lfs", at which the server stops.
        spoils_uploads: change one bit of each uploaded LFS object.
    """
    server = HubServer(hub, dies_at, spoils_uploads)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server.url
    finally:
        server.stop()
        thread.join(timeout=10)


def client_environment(url: str, home: Any, token: str | None = "hf_of_somebody") -> dict[str, Any]:
    """Return the environment in which another process uses that Hub, with an empty cache."""
    variables = {"HF_ENDPOINT": url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    quiet = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_UPDATE_CHECK": "1"}
    here = {"no_proxy": "127.0.0.1", "NO_PROXY": "127.0.0.1"}
    return variables | quiet | here | {"HF_TOKEN": token or "", "HUGGING_FACE_HUB_TOKEN": ""}
