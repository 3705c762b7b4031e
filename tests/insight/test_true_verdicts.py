"""An encoder without training is nowhere said to be good, and one that knows the answers is."""

import re
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
import torch
from torch import nn

from stopmim.cli import main
from stopmim.data.crops import normalise
from stopmim.data.sources.scenes import Scenes
from stopmim.evals.results import Result, record
from stopmim.evals.table import rows, text, write_pages
from stopmim.method.encoder import VisionTransformer
from stopmim.train.loop import pretrain
from tiny import tiny

DATA = "scenes:120:24:3"
QUESTION = ["--train", DATA, "--test", DATA, "--label", "shape", "--layers", "last"]
QUESTION += ["--videos", "scenes:1:32"]
POSITIVE = re.compile(
    r"\b(above random|useful|healthy|good|better|best|improve\w*|gain\w*|learned)\b",
    re.I,
)


def knowing(path: Path) -> Path:
    """A file with an encoder that was told the answers."""
    images = Scenes(120, size=24, seed=3)
    pixels = torch.stack([torch.from_numpy(images.read(i)).permute(2, 0, 1) for i in range(120)])
    answers = torch.from_numpy(images.labels["shape"]).long()
    torch.manual_seed(0)
    encoder, head = VisionTransformer.from_arch("vit_micro4", 24), nn.Linear(96, 3)
    optimizer = torch.optim.AdamW([*encoder.parameters(), *head.parameters()], lr=3e-4)
    for _ in range(180):
        found = head(encoder(normalise(pixels)).mean(dim=1))
        loss = nn.functional.cross_entropy(found, answers)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert float((found.argmax(dim=1) == answers).float().mean()) > 0.9
    torch.save({"model": encoder.state_dict()}, path)
    return path


def written(run: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """What doctor, report and the files of a suite say about a run, by who says it."""
    capsys.readouterr()
    assert main(["doctor", str(run)]) in (0, 12)
    doctor = capsys.readouterr().out
    assert main(["report", str(run)]) == 0
    page = (run / "report.html").read_text().partition("<body>")[2]
    page = re.sub(r"(?s)<script.*?</script>|<svg.*?</svg>|<pre.*?</pre>", " ", page)
    summary = page.partition('class="summary">')[2].partition("</section>")[0]
    said = {"doctor": doctor, "report": page, "first": summary}
    said |= {"page": (run / "evaluation.html").read_text().partition("</head>")[2]}
    said |= {name: (run / name).read_text() for name in ("evaluation.json", "results.jsonl")}
    return {who: " ".join(unescape(re.sub("<[^>]+>", " ", x)).split()) for who, x in said.items()}


def check_null(run: Path, said: dict[str, str]) -> None:
    for who, words in said.items():
        assert POSITIVE.findall(words) == [], (who, words)
    first = "On scenes:120:24:3 (120 images), the encoder is not distinguishable from random init"
    assert said["first"].startswith(f"{first} in all 3 questions.")
    assert "evaluated: not distinguishable from random init in all 3" in said["doctor"]
    page = (run / "report.html").read_text()
    assert 'class="num up"' not in page
    assert 'class="verdict good"' not in page


def check_good(run: Path, said: dict[str, str]) -> None:
    for who, words in said.items():
        counted = "above random init in " in words
        assert counted or (who == "results.jsonl" and "above random init" in words), (who, words)
    assert "useful: above random init" in said["doctor"]


@pytest.mark.parametrize("gain", [0.016, 0.3])
def test_planted_results_are_called_what_they_are(
    gain: float, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """1.6 points more than random init, of 120 images, are nothing."""
    monkeypatch.setattr("stopmim.insight.report.page.PREVIEWS", 1)
    run = pretrain("scenes:64:24", tmp_path, tiny(**{"runtime.health_every": 1}), stop_at=1)
    facts = {"test_data": "scenes:120:24:3 (120 images)", "step": 1, "branch": "target"}
    interval = (gain - 0.11, gain + 0.11)
    results = [
        Result("accuracy", name, "shape", 0.4 + gain, (0.3, 0.5), 120, "none", 0, 0.4)
        for name in ("knn", "linear", "lowshot")
    ]
    results = [replace(result, difference=interval, chance=0.34) for result in results]
    record(tmp_path / "results.jsonl", [result.as_dict() for result in results], facts)
    write_pages(tmp_path, results, "Evaluation of run", facts)
    table = " ".join(text(rows(results)).split())
    assert ("above" in table) == (gain > 0.1)
    said = written(run.path, capsys)
    (check_good if gain > 0.1 else check_null)(run.path, said)


@pytest.mark.slow
def test_planted_encoders_are_called_what_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole way: a run with random weights, and one that was told the answers."""
    monkeypatch.setenv("STOPMIM_CACHE", str(tmp_path / "cache"))
    started = {"runtime.health_every": 1, "optim.start_lr": 1e-9}
    config = {"null": tiny(**started)}
    config["good"] = tiny(init=str(knowing(tmp_path / "knowing.pth")), **started)
    for name, check in (("null", check_null), ("good", check_good)):
        run = pretrain("scenes:64:24", tmp_path / name, config[name], stop_at=1)
        capsys.readouterr()
        assert main(["eval", "suite", str(run.path), *QUESTION]) == 0
        suite = " ".join(" ".join(capsys.readouterr()).split())
        check(run.path, written(run.path, capsys) | {"suite": suite})


@pytest.mark.parametrize("command", ["doctor", "report"])
def test_a_run_that_was_not_evaluated_is_told_how(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    pretrain("scenes:64:24", run, tiny(**{"runtime.health_every": 1}), stop_at=1)
    assert main([command, str(run)]) == 0
    said = capsys.readouterr().out if command == "doctor" else (run / "report.html").read_text()
    said = re.sub("<[^>]+>", "", said)
    assert f"ot evaluated yet: run stopmim eval suite {run} --data scenes:64:24" in said
