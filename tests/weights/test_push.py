"""Exports on a hub: the real client talks to a small server of the hub's protocol."""

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

import stopmim
from stopmim.base.errors import StorageError, UserError
from stopmim.cli import main
from stopmim.method.encoder import VisionTransformer
from stopmim.weights.export import export

COMMIT = "0" * 40


class Hub(ThreadingHTTPServer):
    """Repositories in memory: what was created and what each holds."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.repos: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.refuse = False

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Answer(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def send(self, body: bytes, code: int = 200, **headers: str) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_POST(self) -> None:
        hub, body = self.server, self.rfile.read(int(self.headers["Content-Length"]))
        if hub.refuse or self.headers["Authorization"] != "Bearer hf_me":
            return self.send(b"{}", 403, X_Error_Message="You may not write here")
        if self.path == "/api/repos/create":
            wanted = json.loads(body)
            name = f"{wanted.get('organization') or 'me'}/{wanted['name']}"
            hub.repos[name] = {}
            private = wanted.get("visibility") == "private"  # newer clients
            hub.private[name] = wanted.get("private", private)
            answer: Any = {"url": f"{hub.address}/{name}", "id": name, "name": name}
        elif self.path.endswith("/preupload/main"):
            files = json.loads(body)["files"]
            answer = {
                "files": [
                    {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                    for file in files
                ]
            }
        elif self.path.endswith("/commit/main"):
            name = self.path.removeprefix("/api/models/").removesuffix("/commit/main")
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    content = base64.b64decode(line["value"]["content"])
                    hub.repos[name][line["value"]["path"]] = content
            address = f"{hub.address}/{name}/commit/{COMMIT}"
            answer = {"success": True, "commitUrl": address, "commitOid": COMMIT}
        else:
            answer = {"errors": [], "warnings": []}  # of the front matter of the README
        self.send(json.dumps(answer).encode())

    def do_GET(self) -> None:
        name, _, file = self.path.lstrip("/").partition("/resolve/main/")
        if file and file in self.server.repos.get(name, {}):
            content = self.server.repos[name][file]
            return self.send(content, X_Repo_Commit=COMMIT, ETag=f'"{hash(content)}"')
        if file:
            return self.send(b"", 404, X_Error_Code="EntryNotFound", X_Repo_Commit=COMMIT)
        self.send(json.dumps({"id": "me/encoder", "sha": COMMIT, "siblings": []}).encode())

    do_HEAD = do_GET  # noqa: N815 - so http.server calls it


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    from huggingface_hub import constants

    server = Hub()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    monkeypatch.setattr(constants, "ENDPOINT", server.address)
    template = "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.address + template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_TOKEN", "hf_me")
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    torch.save(VisionTransformer(24, 6, 96, 1, 3).state_dict(), tmp_path / "a.pth")
    return tmp_path / "a.pth"


def test_a_pushed_export_is_what_the_hub_gives_to_timm(
    hub: Hub, source: Path, timm: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    words = ["export", str(source), "--to", "timm", "--out", str(out), "--push", "me/encoder"]
    assert main(words) == 0
    said = capsys.readouterr()
    assert said.out.strip() == str(out)
    assert f"{hub.address}/me/encoder" in said.err
    assert hub.private == {"me/encoder": True}
    assert hub.repos["me/encoder"] == {file.name: file.read_bytes() for file in out.iterdir()}
    model = timm.create_model("hf-hub:me/encoder", pretrained=True).eval()
    images = torch.randn(2, 3, 24, 24)
    with torch.no_grad():
        want = stopmim.load_encoder(source).features(images)
        torch.testing.assert_close(model(images), want, atol=1e-5, rtol=0)
    settings = timm.data.resolve_model_data_config(model)
    assert [*settings["input_size"], settings["interpolation"]] == [3, 24, 24, "bilinear"]


def test_a_hub_that_refuses_leaves_the_export(hub: Hub, source: Path, tmp_path: Path) -> None:
    hub.refuse = True
    with pytest.raises(
        StorageError, match=r"me/encoder: cannot be pushed: .*; the export"
    ) as caught:
        export(source, "safetensors", tmp_path / "out", repo="me/encoder")
    assert len(str(caught.value).splitlines()) == 1
    assert stopmim.load_encoder(tmp_path / "out").width == 96


@pytest.mark.usefixtures("hub")
def test_a_push_that_cannot_work_is_refused_before_anything_is_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="expected USER/NAME"):
        export(source, "safetensors", tmp_path / "out", repo="a/b/c")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setenv("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(UserError, match="hf auth login"):
        export(source, "safetensors", tmp_path / "out", repo="me/encoder")
    assert not (tmp_path / "out").exists()
