"""One small text file from an https address, kept in the cache for when there is no network."""

import hashlib
import ssl
import urllib.error
import urllib.request
from http.client import HTTPMessage
from pathlib import Path
from typing import IO
from urllib.parse import unquote, urlsplit

from ckpt_prune.checkpoint.files import read_input
from ckpt_prune.checkpoint.hub_files import is_offline
from ckpt_prune.checkpoint.staging import write_atomically
from ckpt_prune.common.errors import UserError

_SECONDS = 30
"""For which a server may be silent."""
_PAGE_STARTS = (b"<!doctype", b"<html")


def fetch_web_file(url: str, *, most: int, sha256: str | None = None) -> Path:
    """Download a text file into the cache.

    Args:
        url: https, without user or password.
        most: bytes that it may have; no more are read.
        sha256: of its content, if that is pinned. A copy in the cache that has it is not downloaded again.
    """
    _check_address(url)
    cached, shown = _cache_path(url), hide_query(url)
    try:
        old = read_input(cached, most)
    except OSError:
        old = None
    if old is not None and sha256 is not None and hashlib.sha256(old).hexdigest() == sha256:
        return cached
    if is_offline():
        if old is None:
            raise UserError(f"{shown} was not fetched before, and HF_HUB_OFFLINE is set; give a file")
        content = old
    else:
        content = _download(url, most)
    digest = hashlib.sha256(content).hexdigest()
    if sha256 is not None and digest != sha256:
        raise UserError(f"{shown} has sha256 {digest}, not {sha256}: it is not the file that was pinned")
    if content is not old:
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{shown} is not text") from error
        cached.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(cached, text)
    return cached


def hide_query(url: str) -> str:
    """Cut an address at its question mark, behind which some hosts put secrets."""
    return url.partition("?")[0]


def _check_address(url: str) -> None:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise UserError(f"{hide_query(url)} is no address; give https://HOST/PATH") from error
    if parts.username is not None or parts.password is not None:  # not repeated in the message
        raise UserError(
            f"the address on {parts.hostname} names a user or a password, which would be on record; fetch the file and "
            "give its path"
        )
    if parts.scheme != "https":
        raise UserError(f"{hide_query(url)}: only https addresses are fetched")
    if not parts.hostname:
        raise UserError(f"{hide_query(url)} is no address; give https://HOST/PATH")


def _cache_path(url: str) -> Path:
    """Return the place of an address in the cache; no other address shares it."""
    from huggingface_hub import constants

    name = unquote(urlsplit(url).path).rpartition("/")[2]
    safe = "".join(character if character.isalnum() or character in "-_." else "_" for character in name)
    folder = Path(constants.HF_HOME) / "ckpt_prune" / hashlib.sha256(url.encode()).hexdigest()[:16]
    return folder / (safe.lstrip(".")[-100:] or "file")


class _HttpsOnly(urllib.request.HTTPRedirectHandler):
    """Follows redirections to https only."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> urllib.request.Request | None:
        if urlsplit(newurl).scheme != "https":
            fp.close()
            old, new = hide_query(req.full_url), hide_query(newurl)
            raise UserError(f"{old} leads to {new}, and only https addresses are fetched")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _download(url: str, most: int) -> bytes:
    shown = hide_query(url)
    https = urllib.request.HTTPSHandler(context=ssl.create_default_context())
    request = urllib.request.Request(url, headers={"User-Agent": "ckpt-prune"})
    try:
        with urllib.request.build_opener(_HttpsOnly(), https).open(request, timeout=_SECONDS) as reply:
            content: bytes = reply.read(most + 1)
    except urllib.error.HTTPError as error:
        error.close()
        raise UserError(f"{shown} cannot be fetched (the server says {error.code} {error.reason}); check it") from error
    except (OSError, ValueError) as error:  # no such host, no network, a certificate that nobody vouches for
        reason = " ".join(str(getattr(error, "reason", error)).split())
        remedy = "try again, or set HF_HUB_OFFLINE=1 to take what was fetched before"
        raise UserError(f"{shown} cannot be fetched ({reason}); {remedy}") from error
    if len(content) > most:
        raise UserError(f"{shown} has more than {most} bytes, which are the most of such a file")
    if content.lstrip()[:20].lower().startswith(_PAGE_STARTS):
        raise UserError(f"{shown} is a web page; give the address of the raw file")
    return content
