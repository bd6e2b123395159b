"""Recipes of others: from the Hub, from the web, from a folder; data of a bounded size, on record by its digest."""

import hashlib
import json
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests.cli.running import ok, read_refusal
from tests.hub_server import Hub, Repo

MINE = "version: 1\nname: mine\nratio: 0.5\nspaces:\n  mlp: {score: magnitude, compensation: {method: none}}  # by me\n"


@pytest.fixture
def recipes(hub: Hub) -> Repo:
    repo = hub.repos["org/recipes"] = Repo(private=False)
    repo.commit(repo.files | {"mine.yaml": MINE.encode(), "deep/er/mine.yaml": MINE.encode()}, "mine")
    return repo


def test_a_recipe_of_the_hub_prunes_as_a_file_does_and_is_on_record(place: Path, recipes: Repo):
    Path("mine.yaml").write_text(MINE)
    ok("prune", "dense", "--recipe", "mine.yaml", "-o", "a")
    ok("prune", "dense", "--recipe", "org/recipes/deep/er/mine.yaml@main", "-o", "b")
    a, b = (json.loads(Path(out, "ckpt_prune.json").read_text()) for out in "ab")
    assert "origin" not in a
    assert b["origin"] == {
        "reference": "org/recipes/deep/er/mine.yaml",
        "revision": recipes.head,
        "sha256": hashlib.sha256(MINE.encode()).hexdigest(),
    }
    assert (a["recipe_digest"], a["files"]) == (b["recipe_digest"], b["files"])
    assert f"| file of the recipe | org/recipes/deep/er/mine.yaml@{recipes.head} |" in Path("b/README.md").read_text()


def test_what_was_fetched_is_there_without_the_hub(place: Path, hub: Hub, recipes: Repo, monkeypatch):
    ok("recipe", "show", "org/recipes/mine.yaml")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    hub.asked.clear()
    assert ok("recipe", "show", "org/recipes/mine.yaml").startswith(MINE)
    assert ok("recipe", "show", f"org/recipes/mine.yaml@{recipes.head}").startswith(MINE)
    assert read_refusal("prune", "dense", "--recipe", "org/recipes/deep/er/mine.yaml", "-o", "out") == (
        "org/recipes/deep/er/mine.yaml is not in the Hub cache, and HF_HUB_OFFLINE is set; run `hf download "
        "org/recipes deep/er/mine.yaml` while connected, or give a file"
    )
    assert hub.asked == []


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("org/recipes/none.yaml", "org/recipes has no file none.yaml on the Hub; check the name"),
        (
            "org/recipes/mine.yaml@v9",
            "org/recipes has no revision 'v9' on the Hub; give a branch, tag or commit that exists",
        ),
        (
            "org/none/mine.yaml",
            "org/none is no Hub repository you can read; check the name, or run `hf auth login` if it is private",
        ),
        (
            "org/recipes/huge.yaml",
            "org/recipes/huge.yaml has 400000 bytes on the Hub, and 262144 are the most of such a file",
        ),
        ("org/recipes/strange.yaml", "strange.yaml, line 4: unknown key run: did you mean 'runs_on'? allowed here: "),
        ("org/recipes/code.yaml", "code.yaml is not YAML: could not determine a constructor for the tag"),
        ("org/recipes/binary.yaml", "binary.yaml cannot be read as text: a recipe is a YAML file"),
        ("../recipes/mine.yaml", "../recipes/mine.yaml: no such recipe file"),
        ("dense/recipes/mine.yaml", "dense/recipes/mine.yaml: no such recipe file"),  # a folder of this name is here
        ("file:///etc/passwd", "file:///etc/passwd: only https addresses are fetched"),
        ("https://host:port/mine.yaml", "https://host:port/mine.yaml is no address; give https://HOST/PATH"),
        (
            "https://me:secret@host/mine.yaml",
            "the address on host names a user or a password, which would be on record; fetch the file and give its "
            "path",
        ),
        (
            "https://host/mine.yaml?token=secret#sha1=4",
            "https://host/mine.yaml#sha1=4: behind # stands sha256= and 64 digits of 0-9a-f",
        ),
    ],
)
def test_what_is_no_recipe_is_one_line(place: Path, hub: Hub, recipes: Repo, reference: str, message: str):
    strange = MINE.replace("ratio: 0.5", "ratio: 0.5\nrun: rm").replace("name: mine", "name: mine")
    files = {
        "huge.yaml": b"#" * 400_000,
        "strange.yaml": strange.encode(),
        "code.yaml": b"name: !!python/object/apply:os.system [touch hacked]\n",
        "binary.yaml": b"\xff\xfe\x00",
    }
    recipes.commit(recipes.files | files, "more")
    assert message in read_refusal("prune", "dense", "--recipe", reference, "-o", "out")
    assert not any("huge" in path for method, path in hub.asked if method == "GET")


def test_a_folder_stands_for_its_only_recipe():
    Path("mine").mkdir()
    assert read_refusal("recipe", "show", "mine") == "mine is a folder without a recipe; give a .yaml file"
    Path("mine/first.yaml").write_text(MINE)
    assert ok("recipe", "show", "mine").startswith(MINE)
    Path("mine/second.yaml").write_text("x: 1\n")
    assert read_refusal("recipe", "show", "mine") == "mine has 2 recipes; give one of them: mine/first, mine/second"
    assert ok("recipe", "show", "mine/second") == "x: 1\n"


# ---- the web


@dataclass
class Web:
    """A server of a few files: path → status, headers and content."""

    url: str = ""
    files: dict[str, tuple[int, dict[str, str], bytes]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a certificate of 127.0.0.1, with its key in the same file."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl, to make a certificate of this machine")
    folder = tmp_path_factory.mktemp("tls")
    request = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout key -out cert -subj /CN=127.0.0.1"
    words = ["openssl", *request.split(), "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
    subprocess.run(words, cwd=folder, check=True, capture_output=True)
    pem = folder / "both.pem"
    pem.write_bytes((folder / "key").read_bytes() + (folder / "cert").read_bytes())
    return pem


@pytest.fixture
def web(certificate: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    site = Web()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            site.asked.append(self.path)
            status, headers, data = site.files.get(self.path, (404, {}, b""))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

    class Server(HTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            """Clients that do not trust the certificate hang up."""

    server = Server(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    site.url = f"https://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path_factory.mktemp("hf")))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("ckpt_prune.checkpoint.web_file._SECONDS", None)  # a loaded machine answers when it can
    try:
        yield site
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_recipe_of_the_web_is_fetched_kept_and_on_record(place: Path, web: Web, monkeypatch: pytest.MonkeyPatch):
    web.files["/me/recipes/raw/main/mine.yaml?token=secret"] = (200, {}, MINE.encode())
    # The address of the page that shows the file, as one copies it from a browser.
    address = f"{web.url}/me/recipes/blob/main/mine.yaml?token=secret"
    ok("prune", "dense", "--recipe", address, "-o", "out")
    digest = hashlib.sha256(MINE.encode()).hexdigest()
    origin = json.loads(Path("out/ckpt_prune.json").read_text())["origin"]
    assert origin == {
        "reference": f"{web.url}/me/recipes/raw/main/mine.yaml",
        "revision": None,
        "sha256": digest,
    }
    assert len(web.asked) == 1
    assert ok("recipe", "show", f"{address}#sha256={digest}").startswith(MINE)
    assert len(web.asked) == 1  # what is pinned is not asked for again
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert ok("recipe", "show", address).startswith(MINE)
    assert len(web.asked) == 1
    assert "secret" not in "".join(
        path.read_text() for path in Path("out").iterdir() if path.suffix in (".json", ".md")
    )


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ((404, {}, b""), "{} cannot be fetched (the server says 404 Not Found); check it"),
        (
            (302, {"Location": "http://127.0.0.1/x"}, b""),
            "{} leads to http://127.0.0.1/x, and only https addresses are fetched",
        ),
        ((200, {}, b"#" * 400_000), "{} has more than 262144 bytes, which are the most of such a file"),
        ((200, {}, b"\n<!DOCTYPE html><p>"), "{} is a web page; give the address of the raw file"),
        ((200, {}, b"\xff\xfe"), "{} is not text"),
    ],
)
def test_what_the_web_has_instead_is_one_line(web: Web, reply, message):
    web.files["/mine.yaml"] = reply
    assert read_refusal("recipe", "show", f"{web.url}/mine.yaml") == message.format(f"{web.url}/mine.yaml")
    assert not list(Path().rglob("mine.yaml"))


def test_a_pin_that_does_not_hold_is_refused(web: Web):
    web.files["/mine.yaml"] = (200, {}, MINE.encode())
    digest = hashlib.sha256(MINE.encode()).hexdigest()
    assert read_refusal("recipe", "show", f"{web.url}/mine.yaml#sha256={'0' * 64}") == (
        f"{web.url}/mine.yaml has sha256 {digest}, not {'0' * 64}: it is not the file that was pinned"
    )


def test_without_network_only_what_was_fetched(web: Web, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert read_refusal("recipe", "show", f"{web.url}/mine.yaml") == (
        f"{web.url}/mine.yaml was not fetched before, and HF_HUB_OFFLINE is set; give a file"
    )
    assert web.asked == []


def test_a_server_that_nobody_vouches_for_is_refused(web: Web, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("SSL_CERT_FILE")
    web.files["/mine.yaml"] = (200, {}, MINE.encode())
    message = read_refusal("recipe", "show", f"{web.url}/mine.yaml")
    assert message.startswith(f"{web.url}/mine.yaml cannot be fetched (")
    assert "certificate" in message.lower()
    assert web.asked == []
