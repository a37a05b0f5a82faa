"""Fetching one file from a package index without pip."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from art_core.nn.simple_index import PYPI, configured_indexes, download, without_password
from tests.core.loopback import serving

WHEEL = "pack-1.0-py3-none-any.whl"
BYTES = bytes(range(256)) * 16


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """An index on disk that offers one wheel, which lies beside the pages."""
    (tmp_path / "simple" / "pack").mkdir(parents=True)
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / WHEEL).write_bytes(BYTES)
    page = f'<a href="../../files/{WHEEL}#sha256=00">{WHEEL}</a> <a href="other.whl">other</a>'
    (tmp_path / "simple" / "pack" / "index.html").write_text(page, "utf-8")
    return tmp_path


def fetch(url: str, target: Path, *, size: int = len(BYTES), seconds: float = 30.0) -> bytes:
    """Download the wheel from the index at `url`."""
    download(url, "pack", WHEEL, target, size=size, deadline=time.monotonic() + seconds)
    return target.read_bytes()


def test_html_pages(index: Path) -> None:
    with serving(index) as served:
        assert fetch(f"{served.url}/simple/", index / "got") == BYTES


def test_json_pages(index: Path) -> None:
    page = {"files": [{"filename": WHEEL, "url": f"../../files/{WHEEL}"}]}
    (index / "simple" / "pack" / "index.html").write_text(json.dumps(page), "utf-8")
    with serving(index, json=True) as served:
        assert fetch(f"{served.url}/simple", index / "got") == BYTES


def test_an_index_on_disk(index: Path) -> None:
    assert fetch((index / "simple").as_uri(), index / "got") == BYTES
    bare = index / "bare" / "pack"
    bare.mkdir(parents=True)
    (bare / WHEEL).write_bytes(BYTES)
    assert fetch((index / "bare").as_uri(), index / "got") == BYTES


def test_name_and_password_go_to_the_index_as_a_header(index: Path) -> None:
    with serving(index, user="me:s3cret@") as served:
        url = served.url.replace("://", "://me:s3cret%40@")
        assert fetch(f"{url}/simple", index / "got") == BYTES
        with pytest.raises(OSError, match="401"):
            fetch(f"{served.url}/simple", index / "got")


def test_name_and_password_go_to_no_other_host(index: Path) -> None:
    """ "localhost" and "127.0.0.1" are two hosts to a client."""
    with serving(index) as files, serving(index, user="me:pw") as served:
        link = files.url.replace("127.0.0.1", "localhost")
        page = f'<a href="{link}/files/{WHEEL}">{WHEEL}</a>'
        (index / "simple" / "pack" / "index.html").write_text(page, "utf-8")
        url = served.url.replace("://", "://me:pw@")
        assert fetch(f"{url}/simple", index / "got") == BYTES
        assert [authorization for _, authorization in files.requests] == [None]


def test_a_file_that_is_not_offered(index: Path) -> None:
    with serving(index) as served:
        with pytest.raises(LookupError, match="does not offer nothing"):
            download(
                f"{served.url}/simple", "pack", "nothing.whl", index / "got",
                size=1, deadline=time.monotonic() + 30,
            )  # fmt: skip
        with pytest.raises(OSError, match="404"):
            fetch(f"{served.url}/nowhere", index / "got")


@pytest.mark.parametrize("size", [len(BYTES) - 1, len(BYTES) + 1])
def test_another_size_is_refused(index: Path, size: int) -> None:
    with serving(index) as served, pytest.raises(OSError, match=f"not {size}"):
        fetch(f"{served.url}/simple", index / "got", size=size)


def test_the_deadline_holds(index: Path) -> None:
    with serving(index) as served, pytest.raises(TimeoutError, match="came in time"):
        fetch(f"{served.url}/simple", index / "got", seconds=-1.0)


def test_settings_of_pip_and_uv_name_the_indexes(tmp_path: Path) -> None:
    settings = tmp_path / "pip.conf"
    settings.write_text(
        "[global]\nindex-url = http://file/\nextra-index-url =\n  http://more/\n  http://uv/\n"
        "[download]\nindex-url = http://download/\n",
        "utf-8",
    )
    environ = {
        "PIP_CONFIG_FILE": str(settings),
        "PIP_INDEX_URL": "http://pip/",
        "UV_DEFAULT_INDEX": "http://uv/",
        "UV_INDEX": "mine=http://mine/ http://plain/?a=b",
    }
    # Main indexes first, then more of them; variables before files, pip before uv; each once.
    assert [url for url in configured_indexes(environ) if url.startswith("http://")] == [
        "http://pip/", "http://uv/", "http://download/", "http://file/",
        "http://mine/", "http://plain/?a=b", "http://more/",
    ]  # fmt: skip
    assert PYPI not in configured_indexes(environ)


def test_pypi_is_asked_where_no_main_index_is_named() -> None:
    nowhere = {"PIP_CONFIG_FILE": os.devnull}
    assert configured_indexes(nowhere) == [PYPI]
    assert configured_indexes(nowhere | {"UV_INDEX": "http://a/"}) == ["http://a/", PYPI]
    assert configured_indexes(nowhere | {"UV_DEFAULT_INDEX": "http://a/"}) == ["http://a/"]
    assert configured_indexes(nowhere | {"PIP_NO_INDEX": "1"}) == []


def test_settings_that_can_not_be_read_name_nothing(tmp_path: Path) -> None:
    settings = tmp_path / "pip.conf"
    settings.write_bytes(b"no section\n\xff")
    missing = configured_indexes({"PIP_CONFIG_FILE": str(tmp_path / "none")})
    assert configured_indexes({"PIP_CONFIG_FILE": str(settings)}) == missing


def test_passwords_are_hidden() -> None:
    text = "http://me:pw@host/simple: 401, https://token@host: gone, http://host/a@b: fine"
    assert without_password(text) == (
        "http://****@host/simple: 401, https://****@host: gone, http://host/a@b: fine"
    )
