import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from litce.cli import main
from litce.config import Config
from litce.model import GPT
from litce.tools.convert_hf import convert_to_hf
from litce.training.checkpoint import load_model
from tests.tiny import save_byte_model

SHA = "0123456789" * 4
SECRETS = ("pytorch_model.bin", "training_args.bin", "modeling_custom.py", "original/model.safetensors", "weights.pkl")


class Hub(ThreadingHTTPServer):
    """What the library asks of huggingface.co, for the repositories tests/NAME."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, dict[str, bytes]] = {}
        self.asked: list[str] = []
        self.closed: dict[str, tuple[int, str]] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        owner, name, *rest_of_path = self.path.split("?")[0].removeprefix("/api/models").strip("/").split("/")
        repo, rest = f"{owner}/{name}", "/".join(rest_of_path)
        status, code = self.server.closed.get(repo, (0, ""))
        if repo not in self.server.files:
            return self.send(404, b"", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
        files = self.server.files[repo]
        if status and (status != 403 or rest.startswith("resolve/")):
            return self.send(status, b"", {"X-Error-Code": code, "X-Error-Message": "no"})
        if rest.startswith("revision/"):
            content = {"id": repo, "sha": SHA, "siblings": [{"rfilename": name} for name in files]}
            return self.send(200, json.dumps(content).encode())
        if rest.startswith("tree/"):
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in files.items()
            ]
            return self.send(200, json.dumps(entries).encode())
        name = rest.removeprefix(f"resolve/{SHA}/")
        self.server.asked.append(name)
        etag = hashlib.sha1(files[name]).hexdigest()
        return self.send(200, files[name], {"ETag": f'"{etag}"', "X-Repo-Commit": SHA})

    def send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *args: object) -> None: ...


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    for name in ("HF_HUB_CACHE", "HF_TOKEN_PATH", "HF_XET_CACHE"):
        monkeypatch.setattr(constants, name, str(tmp_path / "cache" / name))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.chdir(tmp_path)
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def files(tmp_path: Path) -> dict[str, bytes]:
    """A model of GPT-2's family, as it lies on the hub, and what must not be downloaded."""
    folder = save_byte_model(tmp_path / "model")
    out = convert_to_hf(folder, max_shard_size="40KiB")
    found = {path.name: path.read_bytes() for path in out.iterdir()}
    assert len([name for name in found if name.endswith(".safetensors")]) > 1
    return found | dict.fromkeys(SECRETS, b"not for reading")


def test_a_model_is_downloaded_and_converted(hub: Hub, files: dict[str, bytes], tmp_path: Path) -> None:
    hub.files["tests/tiny"] = files
    main(["download", "tests/tiny"])
    out = tmp_path / "checkpoints/tests/tiny"
    assert sorted(set(hub.asked)) == sorted(set(files) - set(SECRETS))
    model, original = load_model(out), load_model(tmp_path / "model")
    assert model.config.name == "tiny" and isinstance(model, GPT)
    ids = torch.arange(20)[None]
    assert torch.equal(model(ids), original(ids))
    assert {path.name for path in out.iterdir()} == {
        "lit_model.safetensors",
        "model_config.yaml",
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert Config.from_file(out / "model_config.yaml").block_size == 64


def test_what_is_in_the_cache_is_not_downloaded_again(hub: Hub, files: dict[str, bytes], tmp_path: Path) -> None:
    hub.files["tests/tiny"] = files
    main(["download", "tests/tiny", "--out_dir", "a"])
    hub.asked.clear()
    main(["download", "tests/tiny", "--out_dir", "b"])
    assert hub.asked == []
    hub.shutdown()
    hub.server_close()
    main(["download", "tests/tiny", "--out_dir", "c"])
    assert (tmp_path / "c/lit_model.safetensors").read_bytes() == (tmp_path / "a/lit_model.safetensors").read_bytes()


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        main(["download", *words])
    assert caught.value.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("litce ")]
    assert len(lines) == 1
    return lines[0]


def test_errors_are_one_line(
    hub: Hub, files: dict[str, bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = hub.url
    assert f"{url} has no tests/none, or it is private; check the name" in refused(capsys, "tests/none")
    assert "'a/b/c' names no repository; give one such as" in refused(capsys, "a/b/c")
    hub.files["tests/gated"] = files
    hub.closed["tests/gated"] = (403, "GatedRepo")
    assert f"tests/gated is gated: accept its terms at {url}/tests/gated, and" in refused(capsys, "tests/gated")
    hub.files["tests/pickled"] = {name: files[name] for name in ("config.json", *SECRETS)}
    assert "tests/pickled has no model*.safetensors" in refused(capsys, "tests/pickled")
    hub.files["tests/other"] = {**files, "config.json": b'{"model_type": "mamba"}'}
    assert "mamba" in refused(capsys, "tests/other")
    assert not (tmp_path / "checkpoints").exists()
    assert not set(hub.asked) & set(SECRETS)
    hub.shutdown()
    hub.server_close()
    message = refused(capsys, "tests/none")
    assert f"tests/none cannot be downloaded from {url} (" in message and message.endswith("check the network")


def test_an_existing_checkpoint_is_refused_before_the_download(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_byte_model(tmp_path / "model")
    assert "holds lit_model.safetensors already" in refused(capsys, "tests/none", "--out_dir", str(folder))
    assert hub.asked == []
