"""Adapters that come and go: fetched, sent, forked; what does not fit is refused whole."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

import art_core as art
from art_core.errors import CheckpointError
from art_core.wire import protocol as wire
from art_core.wire.adapter_tar import tar_of, unpack
from tests.core.small_run import CONFIG, PROJECT, figures, play, say
from tests.server.server_process import KEY, ServerProcess

pytest.importorskip("fastapi", reason="art-langgraph[server] is not installed")


@pytest.fixture(scope="module")
def server(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("server"), tiny_llama) as process:
        yield process


@pytest.fixture
async def backend(server: ServerProcess) -> AsyncIterator[art.HttpBackend]:
    async with server.backend() as found:
        yield found


async def trained(
    server: ServerProcess, backend: art.HttpBackend, base: Path, name: str
) -> art.TrainableModel[Any]:
    model = server.model(base, name=name)
    await model.register(backend)
    if await model.get_step() == 0:
        await model.train(await play(model, (0.0, 1.0), (1.0, 0.5)), CONFIG)
    return model


async def test_an_adapter_is_fetched_and_sent_back_as_another_models_step(
    server: ServerProcess, backend: art.HttpBackend, tiny_llama: Path, tmp_path: Path
) -> None:
    source = await trained(server, backend, tiny_llama, "source")
    folder = await backend.download_checkpoint(source, 1, tmp_path / "adapter")
    assert sorted(p.name for p in folder.iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors", "base_model.json",
    ]  # fmt: skip
    other = server.model(tiny_llama, name="other")
    await other.register(backend)
    before = await figures(other, "other")
    result = await backend.adopt(other, folder)
    assert (result.step, await other.get_step()) == (1, 1)
    after, expected = await figures(other, "other"), await figures(source, "source")
    assert after == pytest.approx(expected, abs=2e-4)
    assert after != pytest.approx(before, abs=2e-4)
    trained_on = await other.train(await play(other, (0.0, 1.0)), CONFIG)
    assert trained_on.step == 2


async def test_a_fork_goes_on_from_the_others_step_optimizer_included(
    server: ServerProcess, backend: art.HttpBackend, tiny_llama: Path
) -> None:
    source = await trained(server, backend, tiny_llama, "source")
    fork = server.model(tiny_llama, name="fork")
    await fork.register(backend)
    await backend.fork(fork, "source", step=1)
    assert (await say(fork)).art_policy == "fork@1"  # type: ignore[attr-defined]  # an extra
    groups = await play(source, (1.0, 0.0))
    await source.train(groups, CONFIG)
    for group in groups:
        for trajectory in group:
            for call in trajectory.calls:
                object.__setattr__(call, "model", "fork")
    await fork.train(groups, CONFIG)
    one, two = await figures(source, "source@2"), await figures(fork, "fork@2")
    assert one == pytest.approx(two, abs=2e-4)
    with pytest.raises(CheckpointError, match="no checkpoint"):
        await backend.fork(fork, "nobody")
    with pytest.raises(CheckpointError, match="can't be used"):
        await backend.fork(fork, "source", step=99)
    with pytest.raises(art.errors.ConfigError, match="name"):
        await backend.fork(fork, "../source")


async def test_what_does_not_fit_is_refused_and_nothing_has_changed(
    server: ServerProcess, backend: art.HttpBackend, tiny_llama: Path, tmp_path: Path
) -> None:
    model = await trained(server, backend, tiny_llama, "source")
    step, before = await model.get_step(), await figures(model, "source")
    good = await backend.download_checkpoint(model, 1, tmp_path / "good")

    def changed(name: str, **settings: Any) -> Path:
        folder = shutil.copytree(good, tmp_path / name)
        config = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps({**config, **settings}))
        return folder

    cut = shutil.copytree(good, tmp_path / "cut")
    weights = cut / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5])
    strange = shutil.copytree(good, tmp_path / "strange")
    told = json.loads((strange / "base_model.json").read_text())
    (strange / "base_model.json").write_text(json.dumps({**told, "sha256": "0" * 64}))
    for folder in (changed("rank", r=3), changed("scale", lora_alpha=99), cut, strange):
        with pytest.raises(CheckpointError):
            await backend.adopt(model, folder)
    assert await model.get_step() == step
    assert await figures(model, "source") == pytest.approx(before, abs=2e-4)


def tar(*files: tuple[str, bytes], link: str | None = None) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for name, raw in files:
            info = tarfile.TarInfo(name)
            info.size = len(raw)
            archive.addfile(info, io.BytesIO(raw))
        if link is not None:
            info = tarfile.TarInfo("adapter_config.json")
            info.type, info.linkname = tarfile.SYMTYPE, link
            archive.addfile(info)
    return made.getvalue()


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"no tar",
        tar(("adapter_config.json", b"{}")),
        tar(("../adapter_config.json", b"{}")),
        tar(("/tmp/adapter_config.json", b"{}")),
        tar(("adapter_model.bin", b"\x80\x04.")),
        tar(("adapter_config.json", b"{}"), ("adapter_config.json", b"{}")),
        tar(link="/etc/passwd"),
        tar(("adapter_config.json", b"{}"))[:600],
    ],
)
def test_what_is_no_adapter_is_not_unpacked(raw: bytes, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no adapter"):
        unpack(io.BytesIO(raw), tmp_path / "in")
    assert not list(tmp_path.rglob("*.bin"))
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def test_a_tar_is_what_tar_reads(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(bytes(1000))
    (tmp_path / "optimizer.safetensors").write_bytes(b"stays")
    with tarfile.open(fileobj=io.BytesIO(b"".join(tar_of(tmp_path)))) as archive:
        assert archive.getnames() == ["adapter_config.json", "adapter_model.safetensors"]


async def test_an_upload_says_what_it_is(server: ServerProcess) -> None:
    path = wire.path(wire.CHECKPOINTS, project=PROJECT, name="source")
    headers = {"authorization": f"Bearer {KEY}"}
    async with httpx2.AsyncClient(base_url=server.url, headers=headers) as client:
        assert (await client.put(path, content=b"x")).status_code == 415
