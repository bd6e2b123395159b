"""One small file from an address on the web, kept beside the Hub's cache for when there is no network."""

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
"""That a server may be silent for."""
_PAGES = (b"<!doctype", b"<html")


def fetch_web_file(url: str, *, most: int, sha256: str | None = None) -> Path:
    """A text file from the web, in the local cache.

    Args:
        url: https, without user or password.
        most: bytes that it may have; no more are read.
        sha256: of its content, where that is pinned: a copy in the cache that has it is not fetched again.

    Raises:
        UserError: the address will not do, nothing or too much is there, it is a web page, or its content is not what
            was pinned.
    """
    _check_address(url)
    kept, shown = _kept(url), hide_query(url)
    held = _content(kept, most)
    if held is not None and sha256 is not None and hashlib.sha256(held).hexdigest() == sha256:
        return kept
    if is_offline():
        if held is None:
            raise UserError(f"{shown} was not fetched before, and HF_HUB_OFFLINE is set; give a file")
        content = held
    else:
        content = _fetched(url, most)
    found = hashlib.sha256(content).hexdigest()
    if sha256 is not None and found != sha256:
        raise UserError(f"{shown} has sha256 {found}, not {sha256}: it is not the file that was pinned")
    if content is not held:
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(kept, _text(url, content))
    return kept


def hide_query(url: str) -> str:
    """An address without what stands behind a question mark, where some hosts put secrets."""
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


def _kept(url: str) -> Path:
    """Where a file is kept; two addresses never share a place."""
    from huggingface_hub import constants

    name = unquote(urlsplit(url).path).rpartition("/")[2] or "file"
    safe = "".join(each if each.isalnum() or each in "-_." else "_" for each in name).lstrip(".")[-100:] or "file"
    return Path(constants.HF_HOME) / "ckpt_prune" / hashlib.sha256(url.encode()).hexdigest()[:16] / safe


def _content(kept: Path, most: int) -> bytes | None:
    try:
        return read_input(kept, most)
    except OSError:
        return None


class _OnlySecure(urllib.request.HTTPRedirectHandler):
    """Redirections lead to https alone."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> urllib.request.Request | None:
        if urlsplit(newurl).scheme != "https":
            fp.close()
            raise UserError(
                f"{hide_query(req.full_url)} leads to {hide_query(newurl)}, and only https addresses are fetched"
            )
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _fetched(url: str, most: int) -> bytes:
    opener = urllib.request.build_opener(
        _OnlySecure(), urllib.request.HTTPSHandler(context=ssl.create_default_context())
    )
    try:
        with opener.open(urllib.request.Request(url, headers={"User-Agent": "ckpt-prune"}), timeout=_SECONDS) as reply:
            content: bytes = reply.read(most + 1)
    except urllib.error.HTTPError as error:
        error.close()
        raise UserError(
            f"{hide_query(url)} cannot be fetched (the server says {error.code} {error.reason}); check it"
        ) from error
    except (OSError, ValueError) as error:  # no such host, no network, a certificate that nobody vouches for
        reason = " ".join(str(getattr(error, "reason", error)).split())
        raise UserError(
            f"{hide_query(url)} cannot be fetched ({reason}); try again, or set HF_HUB_OFFLINE=1 to take what was fetched "
            "before"
        ) from error
    if len(content) > most:
        raise UserError(f"{hide_query(url)} has more than {most} bytes, which are the most of such a file")
    if content.lstrip()[:20].lower().startswith(_PAGES):
        raise UserError(f"{hide_query(url)} is a web page; give the address of the raw file")
    return content


def _text(url: str, content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{hide_query(url)} is not text") from error
