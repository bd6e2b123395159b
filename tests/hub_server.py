"""A small server that speaks the Hub's protocol as its client asks it: repositories, LFS, commits, files, refusals."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

TOKEN = "hf_" + "abcdEFGH" * 4
READER = "hf_" + "readONLY" * 4
USER, TEAM = "ada", "team"


@dataclass
class Repo:
    """A model repository: its commits, oldest first, each a name and all files that it has."""

    private: bool = True
    commits: list[tuple[str, dict[str, bytes]]] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.commits:
            self.commit({".gitattributes": b"*.safetensors filter=lfs\n"}, "initial commit")

    def commit(self, files: dict[str, bytes], message: str) -> str:
        name = hashlib.sha1(f"{len(self.commits)}{message}{sorted(files)}".encode()).hexdigest()
        self.commits.append((name, files))
        self.messages.append(message)
        return name

    @property
    def head(self) -> str:
        return self.commits[-1][0]

    @property
    def files(self) -> dict[str, bytes]:
        return self.commits[-1][1]

    def at(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        return self.commits[-1] if revision == "main" else {c[0]: c for c in self.commits}.get(revision)


@dataclass
class Hub:
    """The files of the server, and the requests that it had."""

    url: str = ""
    repos: dict[str, Repo] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    asked: list[tuple[str, str]] = field(default_factory=list)
    breaks: set[str] = field(default_factory=set)
    """Kinds of request that fail: blob, commit."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Sizes that are stated of files, in place of their own."""

    def uploads(self) -> list[tuple[str, str]]:
        """Requests that write something."""
        return [
            request for request in self.asked if request[0] in ("POST", "PUT") and "validate-yaml" not in request[1]
        ]


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, *_: object) -> None:
        pass

    # ---- replies

    def _reply(self, status: int, body: Any = None, headers: dict[str, str] | None = None) -> None:
        data = body if isinstance(body, bytes) else json.dumps({} if body is None else body).encode()
        self.send_response(status)
        fields = {"Content-Type": "application/json", "Content-Length": str(len(data))} | (headers or {})
        for name, value in fields.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _refuse(self, status: int, code: str = "", message: str = "") -> None:
        headers = {"X-Error-Code": code} if code else {}
        self._reply(status, {"error": message}, headers | ({"X-Error-Message": message} if message else {}))

    def _token(self) -> str:
        return (self.headers.get("Authorization") or "").removeprefix("Bearer ")

    def _writes(self) -> bool:
        if self._token() == TOKEN:
            return True
        self._refuse(403 if self._token() == READER else 401, message="You have no rights to write here")
        return False

    def _repo(self, name: str) -> Repo | None:
        repo = self.hub.repos.get(name)
        if repo is None or (repo.private and self._token() not in (TOKEN, READER)):
            self._refuse(404 if self._token() in (TOKEN, READER) else 401, "RepoNotFound", "Repository not found")
            return None
        return repo

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    # ---- requests

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append((self.command, path))
        if path == "/api/whoami-v2":
            self._whoami()
        elif path.startswith("/api/models/"):
            self._info(path.removeprefix("/api/models/"))
        elif "/resolve/" in path:
            self._resolve(*path.lstrip("/").split("/resolve/", 1))
        else:
            self._refuse(404)

    def do_PUT(self) -> None:
        path = urlsplit(self.path).path
        self.hub.asked.append(("PUT", path))
        data = self._body()
        oid = path.rpartition("/")[2]
        if "blob" in self.hub.breaks or hashlib.sha256(data).hexdigest() != oid:
            self._refuse(400, message="the store is broken")
            return
        self.hub.blobs[oid] = data
        self._reply(200)

    def do_POST(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append(("POST", path))
        body = self._body()
        if path == "/api/validate-yaml":
            self._reply(200, {"errors": [], "warnings": []})
        elif not self._writes():
            return
        elif path == "/api/repos/create":
            self._create(json.loads(body))
        elif path.endswith("/info/lfs/objects/batch"):
            self._batch(json.loads(body))
        elif "/preupload/" in path:
            self._preupload(json.loads(body))
        elif "/commit/" in path:
            self._commit(path.removeprefix("/api/models/").split("/commit/")[0], body)
        else:
            self._refuse(404)

    def _whoami(self) -> None:
        role = {TOKEN: "write", READER: "read"}.get(self._token())
        if role is None:
            self._refuse(401, message="Invalid user token.")
            return
        orgs = [{"name": TEAM, "roleInOrg": "write"}]
        self._reply(200, {"name": USER, "type": "user", "orgs": orgs, "auth": {"accessToken": {"role": role}}})

    def _info(self, path: str) -> None:
        if "/tree/" in path:
            self._tree(*path.split("/tree/", 1))
            return
        name, _, revision = path.partition("/revision/")
        repo = self._repo(name)
        if repo is None:
            return
        commit = repo.at(revision or "main")
        if commit is None:
            self._refuse(404, "RevisionNotFound", "Invalid rev id")
            return
        siblings = [{"rfilename": file} for file in commit[1]]
        self._reply(
            200,
            {"id": name, "modelId": name, "sha": commit[0], "private": repo.private, "siblings": siblings, "tags": []},
        )

    def _tree(self, name: str, revision: str) -> None:
        repo = self._repo(name)
        commit = None if repo is None else repo.at(revision)
        if commit is not None:
            entries = [("file", path, hashlib.sha1(data).hexdigest(), len(data)) for path, data in commit[1].items()]
            self._reply(200, [dict(zip(("type", "path", "oid", "size"), entry, strict=True)) for entry in entries])

    def _resolve(self, name: str, path: str) -> None:
        repo = self._repo(name)
        if repo is None:
            return
        revision, _, file = path.partition("/")
        commit = repo.at(revision)
        if commit is None:
            self._refuse(404, "RevisionNotFound", "Invalid rev id")
        elif file not in commit[1]:
            self._refuse(404, "EntryNotFound", "Entry not found")
        else:
            data = commit[1][file]
            headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": commit[0]}
            if file in self.hub.sizes:
                headers["X-Linked-Size"] = str(self.hub.sizes[file])
            self._reply(200, data, headers | {"Content-Type": "text/plain"})

    def _create(self, request: dict[str, Any]) -> None:
        name = f"{request.get('organization') or USER}/{request['name']}"
        if name.split("/")[0] not in (USER, TEAM):
            self._refuse(403, message="You don't have the rights to create a model under this namespace")
        elif name in self.hub.repos:
            self._refuse(409, message="You already created this model repo")
        else:
            self.hub.repos[name] = Repo(
                private=request.get("visibility") == "private" or request.get("private") is True
            )
            self._reply(200, {"url": f"{self.hub.url}/{name}"})

    def _preupload(self, request: dict[str, Any]) -> None:
        files = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith((".safetensors", ".onnx")) else "regular",
                "shouldIgnore": False,
            }
            for file in request["files"]
        ]
        self._reply(200, {"files": files})

    def _batch(self, request: dict[str, Any]) -> None:
        objects = []
        for blob in request["objects"]:
            upload = {"actions": {"upload": {"href": f"{self.hub.url}/blobs/{blob['oid']}"}}}
            objects.append(blob | ({} if blob["oid"] in self.hub.blobs else upload))
        self._reply(200, {"transfer": "basic", "objects": objects})

    def _commit(self, name: str, body: bytes) -> None:
        repo = self._repo(name)
        if repo is None:
            return
        if "commit" in self.hub.breaks:
            self._refuse(500, message=f"the Hub fell over {self._token()}")
            return
        lines = [json.loads(line) for line in body.splitlines()]
        header = next(line["value"] for line in lines if line["key"] == "header")
        if header.get("parentCommit") not in (None, repo.head):
            self._refuse(412, message="A commit has happened since")
            return
        files = dict(repo.files)
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.blobs[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        oid = repo.commit(files, header["summary"])
        self._reply(200, {"commitUrl": f"{self.hub.url}/{name}/commit/{oid}", "commitOid": oid, "hookOutput": ""})


def talk_to(hub: Hub, home: Path, patch: pytest.MonkeyPatch) -> None:
    """Let the Hub's client ask this server, with a token that may write and what it keeps in `home`."""
    values = {"ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_CACHE": str(home / "hub")}
    values["HUGGINGFACE_CO_URL_TEMPLATE"] = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    for name, value in (values | {"HF_HUB_DISABLE_XET": True, "HF_HUB_OFFLINE": False}).items():
        patch.setattr(f"huggingface_hub.constants.{name}", value)
    patch.setenv("HF_TOKEN", TOKEN)


@contextmanager
def serving() -> Iterator[Hub]:
    """A Hub of its own on this machine."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
