"""One file from the Python package index that pip would ask, without pip.

In: a project's name, a file's name, and the settings of pip and uv as they are found on this
machine. Out: the file's bytes on disk. Speaks the simple repository API (JSON and HTML) over
HTTP(S) and plain folders. It leaves out everything about dependencies, and never shows a password.
"""

from __future__ import annotations

import base64
import configparser
import json
import os
import re
import ssl
import sys
import time
from collections.abc import Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin, urlsplit, urlunsplit
from urllib.request import HTTPSHandler, OpenerDirector, Request, build_opener

import platformdirs

PYPI = "https://pypi.org/simple/"
"""What pip and uv ask where no other index is named."""

_ACCEPT = "application/vnd.pypi.simple.v1+json, text/html;q=0.5"
_SOCKET_SECONDS = 30.0  # silence of the index after which it counts as gone
_PAGE_BYTES = 20_000_000  # a project's page is never longer
_CHUNK = 1 << 20


def configured_indexes(environ: Mapping[str, str] = os.environ) -> list[str]:
    """URLs of the simple indexes that pip and uv would ask by their settings, in the order to try.

    PyPI is the last of them unless another main index is named; with PIP_NO_INDEX there is none.

    Args:
        environ: the environment to read, `os.environ` unless a test says otherwise.
    """
    if environ.get("PIP_NO_INDEX", "").lower() not in ("", "0", "false", "no", "off"):
        return []
    files = [*reversed(_pip_settings(environ))]  # the later file wins in pip
    main = [environ.get(key) for key in ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL")]
    main += [url for file in files for url in _named(file, "index-url")]
    more = [
        url
        for key in ("PIP_EXTRA_INDEX_URL", "UV_INDEX", "UV_EXTRA_INDEX_URL")
        for url in environ.get(key, "").split()
    ]
    more += [url for file in files for url in _named(file, "extra-index-url")]
    found = [url for url in main if url] + more
    # uv allows "name=url".
    urls = [re.sub(r"^[\w.-]+=(?=\w+://)", "", url) for url in found]
    return list(dict.fromkeys([*urls, *([] if any(main) else [PYPI])]))


def download(
    index: str, project: str, filename: str, target: Path, *, size: int, deadline: float
) -> None:
    """Write the file `filename` of `project`, as the index offers it, to `target`.

    Args:
        index: URL of a simple index, with or without name and password.
        size: bytes the file must have; a longer answer is cut off.
        deadline: `time.monotonic()` after which to give up.

    Raises:
        LookupError: the index has no such file.
        OSError: the index does not answer, answers with an error, or sends another size.
    """
    opener = _opener()
    page = f"{index.rstrip('/')}/{project}/"
    link = _request(_find_link(opener, page, filename), like=page)
    got = 0
    with opener.open(link, timeout=_SOCKET_SECONDS) as answer, target.open("wb") as file:
        while got <= size and (chunk := answer.read(_CHUNK)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"only {got} of {size} bytes came in time")
            file.write(chunk)
            got += len(chunk)
    if got != size:
        raise OSError(f"{filename} has {got} bytes or more, not {size}")


def without_password(text: str) -> str:
    """`text` with the name and password of every URL in it hidden."""
    return re.sub(r"(?<=://)[^/@\s]+@", "****@", text)


def _find_link(opener: OpenerDirector, page: str, filename: str) -> str:
    """The absolute URL of `filename` on a project's page."""
    folder = urlsplit(page)
    if folder.scheme == "file":  # an index on disk: the page is a folder, maybe with index.html
        path = Path(unquote(folder.path))
        if (path / filename).is_file():
            return (path / filename).as_uri()
        page = (path / "index.html").as_uri()
    with opener.open(_request(page), timeout=_SOCKET_SECONDS) as answer:
        body = answer.read(_PAGE_BYTES).decode("utf-8", "replace")
        kind = answer.headers.get("Content-Type", "")
        base = answer.geturl()
    for url in _json_links(body) if "json" in kind else _html_links(body):
        link = str(urldefrag(urljoin(base, url)).url)
        if unquote(urlsplit(link).path.rpartition("/")[2]) == filename:
            return link
    raise LookupError(f"the index does not offer {filename}")


def _json_links(body: str) -> Iterator[str]:
    for file in json.loads(body).get("files", []):
        yield str(file["url"])


def _html_links(body: str) -> Iterator[str]:
    parser = _Anchors()
    parser.feed(body)
    yield from parser.links


class _Anchors(HTMLParser):
    """Collects the targets of a page's links."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.links += [value for name, value in attrs if name == "href" and value]


def _request(url: str, *, like: str | None = None) -> Request:
    """A request for `url`; the name and password travel as a header, to that host alone.

    Args:
        like: a URL whose name and password hold here too, if it is on the same host.
    """
    parts = urlsplit(url)
    user = parts.netloc.rpartition("@")[0]
    if not user and like and urlsplit(like).hostname == parts.hostname:
        user = urlsplit(like).netloc.rpartition("@")[0]
    bare = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    request = Request(bare, headers={"Accept": _ACCEPT})
    if user and parts.scheme in ("http", "https"):
        token = base64.b64encode(unquote(user).encode()).decode()
        request.add_unredirected_header("Authorization", f"Basic {token}")
    return request


def _opener() -> OpenerDirector:
    """Opens URLs with the certificates that pip would trust, through the proxy it would use."""
    context = ssl.create_default_context(cafile=os.environ.get("PIP_CERT") or None)
    return build_opener(HTTPSHandler(context=context))


def _pip_settings(environ: Mapping[str, str]) -> list[Path]:
    """pip's settings files, the weakest first; they need not exist."""
    named = environ.get("PIP_CONFIG_FILE")
    if named == os.devnull:  # pip's own way to say: none of them
        return []
    name = "pip.ini" if os.name == "nt" else "pip.conf"
    site = platformdirs.site_config_dir("pip", appauthor=False, multipath=True)
    paths = [Path(folder) / name for folder in reversed(site.split(os.pathsep))]
    if os.name != "nt":
        paths.append(Path("/etc") / name)
    paths.append(Path.home() / ("pip" if os.name == "nt" else ".pip") / name)
    paths.append(Path(platformdirs.user_config_dir("pip", appauthor=False, roaming=True)) / name)
    if sys.platform == "darwin":
        paths.append(Path.home() / ".config" / "pip" / name)
    paths.append(Path(sys.prefix) / name)
    if named:
        paths.append(Path(named))
    return paths


def _named(settings: Path, key: str) -> list[str]:
    """The indexes that one of pip's settings files names; none if it can't be read."""
    parser = configparser.RawConfigParser()
    try:
        parser.read(settings, encoding="utf-8")
    except (configparser.Error, OSError, UnicodeDecodeError):
        return []
    sections = ("download", "global")
    return [url for name in sections for url in parser.get(name, key, fallback="").split()]
