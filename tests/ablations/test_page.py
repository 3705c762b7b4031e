"""The page of the paper beside ours: nothing left out, nothing made up, and runs in their rows."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import tables
from stopmim.ablations.page import PRETRAINING, PRINTED, ours, page
from stopmim.ablations.paper import TABLES
from stopmim.ablations.questions import refuse_without_effect
from stopmim.ablations.record import as_text, read_records
from stopmim.ablations.recorded import Recorded, Runs, recorded, settings
from stopmim.base.errors import UserError
from stopmim.cli import main
from stopmim.cli.run import parse
from stopmim.config.presets import PRESETS
from stopmim.config.schema import override, resolve
from stopmim.evals.recipes import TASKS

TEXT = (tables.ROOT / tables.PAPER).read_text()
SECTIONS = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", TEXT, re.S | re.M))
QUICK = "tiny_cpu_quick"
FIXED = {"positions.kind": "stochastic", "positions.covariance": "fixed"}
SINE = {"positions": {"kind": "sincos"}}


def test_the_page_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ablate", "--page", str(tables.ROOT / "results")]) == 0
    assert capsys.readouterr().out == TEXT, "run `make tables`"


def test_every_row_of_every_table_is_there_with_the_papers_numbers() -> None:
    for name, table in TABLES.items():
        lines = [line.strip("| ").split(" | ") for line in SECTIONS[name].splitlines()]
        for one in table.published:
            (line,) = (line for line in lines if line[:2] == [one.method, one.arch])
            assert set(map(str, one.numbers.values())) <= set(line)
        for row in table.rows:
            found = [line for line in lines if line[0] == row.name]
            assert found or table.asks == "finetune", (name, row.name)
            for value in row.paper.values():
                assert all(line[1].split()[0] == str(value) for line in found)


def test_what_was_not_run_has_a_command_that_exists_and_a_cost() -> None:
    for name, text in SECTIONS.items():
        table = TABLES.get(name)
        if table is None or not (said := re.search(r"^Not run: (.*?)\. `(.*?)` takes", text, re.M)):
            continue
        words = shlex.split(said[2])
        assert words[:3] == ["stopmim", "ablate", name]
        rows = re.search(r"--rows (.*?) --", said[2])
        chosen = table.choose(tuple(rows[1].split()) if rows else ())
        missing = [row.name for row in table.rows if f"| {row.name} | " not in text]
        cells = re.findall(r"^\| ([^|]+) \|.*not run", text, re.M)
        left = set(said[1].split(", ")) & {row.name for row in table.rows}
        if not table.published:
            assert left == set(cells)
            assert not missing
        assert left <= {row.name for row in chosen}
        minutes = len(chosen) * 3 * (PRESETS["small_images"].cost.minutes or 0)
        assert f"takes {minutes:.0f} GPU minutes of training" in text
        again = [row.name for row in chosen if row.name not in left]
        included = re.search(r"of training, (.*?) included\.", text)
        assert (included[1].split(" and ") if included else []) == again, name
    command: Any = parse(shlex.split(said[2])[1:]) if said else None  # of the last table
    assert command.changes == {"positions.sigma": 0.25}  # the setting it is to be compared in


def test_every_line_of_a_main_table_has_a_command_that_measures_it() -> None:
    for name, table in TABLES.items():
        said = re.search(rf"then `stopmim (ablate {name} .*?)`, which trains", SECTIONS[name])
        assert bool(said) == bool(table.published)
        if said:
            command: Any = parse(shlex.split(said[1]))
            assert command.seeds == 0
            asks = {key: getattr(command.evaluation, key) for key in ("selection", "views")}
            changed = {key: x for key, x in asks.items() if x not in ("held-out", 0)}
            refuse_without_effect(table.asks, changed)
            assert changed.get("selection", "paper") in ("paper", "both")
            for recipe, equals, _ in (text.partition("=") for text in command.eval):
                assert not equals or TASKS[recipe].recipe.epochs == command.evaluation.views
    assert "of ViT-H are trained by LARS: `--eval imagenet_lars=DATA` and" in SECTIONS["downstream"]


def test_every_figure_of_the_paper_is_mentioned() -> None:
    assert re.findall(r"^\| Figure (\d),", SECTIONS["Figures"], re.M) == list("123456")


def test_hours_are_those_of_the_presets() -> None:
    """Which are those of the benchmarks: test_tables.py."""
    for arch in ("b16", "l16", "h14"):
        hours = PRESETS[f"vit_{arch}_stop"].cost.hours or 0
        assert SECTIONS["tracking"].count(f"`vit_{arch}_stop`, {hours:,} GPU hours") == 1
        assert SECTIONS["tracking"].count(f"`vit_{arch}_ijepa`, {hours:,} GPU hours") == 1


def test_our_presets_are_tables_9_to_12_but_for_the_epochs_of_vit_h() -> None:
    different = [
        (key, number)
        for key, values in PRINTED.items()
        for value, (number, preset) in zip(values, PRETRAINING.items(), strict=True)
        if ours(PRESETS[preset]())[key] != value
    ]
    assert different == [("epochs", 12)]


# ------------------------------------------------------------------------------ runs in their rows


def write(
    root: Path, name: str, changes: dict[str, Any], *values: float | None, **more: Any
) -> None:
    """Records of a run with a telling name, one per seed; None: it failed."""
    asked: dict[str, Any] = {"name": "accuracy", "protocol": "lowshot", "label": "class"}
    asked |= {"test_data": "mine.npz (9 images)", "n": 9, "setting": "7/class"}
    asked |= {"selection": "none", "unit": "percent"}
    config = resolve(override(override(PRESETS[QUICK](), {"positions.sigma": 0.1}), changes))
    (root / "table").mkdir(exist_ok=True)
    for seed, value in enumerate(values):
        own = override(config, {"seed": seed}).model_dump(mode="json")
        tree = {
            "row": name,
            "seed": seed,
            "run": name,
            "preset": QUICK,
            "config": own,
            "data": {"source": "mine.npz", "images": 4096, "fingerprint": "abc"},
            "updates": 20,
            "seconds": 9.0,
            "problem": "" if value is not None else "ran away",
            "verdict": "not collapsed",
            "answers": [] if value is None else [asked | {"value": value}],
            "curve": [{"step": 20, "norm_A": 1.0, "norm_mask_token": 0.5}],
        }
        (root / "table" / f"{name}-{seed}.json").write_text(as_text(tree | more))


def runs_in(root: Path) -> Runs:
    return recorded(read_records(root))


def rows(root: Path, name: str) -> dict[str, str]:
    """Rows of the first setting of a table, with what stands in the column of lowshot."""
    (setting, *_) = settings(TABLES[name], runs_in(root))
    return {row.name: setting.cells(row)["lowshot"] for row in TABLES[name].rows}


def test_a_record_without_a_config_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "a", {}, 50.0)
    (file,) = (tmp_path / "table").iterdir()
    record = json.loads(file.read_text())
    del record["config"]
    file.write_text(as_text(record))
    with pytest.raises(UserError, match=r"a-0\.json: config: not as stopmim ablate writes it"):
        page(tmp_path)


def test_a_run_is_found_by_its_config_whatever_it_is_called(tmp_path: Path) -> None:
    write(tmp_path, "StoP", SINE, 40.0, 60.0)
    write(tmp_path, "b", {}, 42.0, 64.0)
    write(tmp_path, "c", FIXED, 99.0, 99.0)  # noise, but not StoP
    write(tmp_path, "d", SINE, 1.0, 1.0, data={"source": "mine.npz", "fingerprint": "other"})
    assert rows(tmp_path, "positions") == {
        "sine-cosine": "50.0 \u00b1 127.1",
        "learned": "not run",
        "StoP": "53.0 \u00b1 139.8 (+3.0 \u00b1 12.7)",
    }
    write(tmp_path, "e", {"positions": {"kind": "learned"}}, None, None)
    assert rows(tmp_path, "positions")["learned"] == "ran away"
    assert "Not run: learned." not in page(tmp_path)
    (found,) = settings(TABLES["positions"], runs_in(tmp_path))
    assert "preset `tiny_cpu_quick`, sigma 0.1, " in str(found)
    assert "evaluated on mine.npz (9 images)" in str(found)


def test_the_paper_has_architectures_that_count_apart_and_longer_runs_come_first(
    tmp_path: Path,
) -> None:
    large = {"arch": "vit_b16", "image_size": 224, "masking.context_length": 0.3}
    for changes, updates in (({}, 10), ({"optim.batch_size": 8}, 30), (large, 20)):
        write(tmp_path, f"i{updates}", SINE | changes, 1.0, updates=updates)
        write(tmp_path, f"s{updates}", changes, 2.0, updates=updates)
    found = settings(TABLES["downstream"], runs_in(tmp_path))
    assert [(one.arch, one.updates) for one in found] == [("ViT-Micro/6", 30), ("ViT-B/16", 20)]
    assert [one.updates for one in settings(TABLES["positions"], runs_in(tmp_path))] == [30]
    text = page(tmp_path)
    assert re.search(r"^\| StoP \| ViT-B/16 \|.* below \|$", text, re.M)
    assert re.search(r"^\| StoP \| ViT-L/16 \|.* not run: `vit_l16_stop`", text, re.M)
    # Only the setting of the preset itself has a known cost.
    command = f"ablate finetune --preset {QUICK} --positions.sigma 0.1 --data mine.npz --few 7"
    assert f"`stopmim {command} --seeds 1` takes 3 CPU minutes of training" in text


def test_other_images_are_transfer_and_checkpoints_stand_in_their_lines(tmp_path: Path) -> None:
    write(tmp_path, "a", SINE, 40.0)
    write(tmp_path, "b", {}, 50.0)
    file = tmp_path / "table" / "b-0.json"
    record = json.loads(file.read_text())
    (asked,) = record["answers"]
    other = asked | {"protocol": "linear best depth", "test_data": "x/cifar100.npz (9 images)"}
    file.write_text(json.dumps(record | {"answers": [asked, other]}))
    dino = asked | {"protocol": "linear last4", "value": 61.2}
    given = record | {"row": "DINO ViT-B/16", "config": None, "answers": [dino]}
    (tmp_path / "table" / "dino.json").write_text(json.dumps(given))
    (found,) = settings(TABLES["transfer"], runs_in(tmp_path))
    assert (found.columns, found.rows) == (["linear best depth cifar100"], {"StoP"})
    assert rows(tmp_path, "positions")["StoP"] == "50.0 (+10.0)"
    assert re.search(r"^\| DINO \| ViT-B/16 \|.* linear last4 61.2 \|$", page(tmp_path), re.M)
    left = re.search(r"^Not run: (.*?)\. `stopmim ablate transfer (.*?)`", page(tmp_path), re.M)
    assert left
    assert left[1] == "I-JEPA, Places205, iNat18, CLEVR/Count, CLEVR/Dist"
    assert "--eval places205=DATA inat18=DATA" in left[2]


def test_a_folder_without_records_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ablate", "--page", str(tmp_path)]) == 2
    assert "no records here; name a folder with TABLE/ROW-SEED.json" in capsys.readouterr().err
    assert main(["ablate", "tie", "--page", str(tmp_path)]) == 2
    assert "--page is about all tables" in capsys.readouterr().err


def test_a_preset_is_what_rows_start_from() -> None:
    plain, fixed = (resolve(override(PRESETS[QUICK](), changes)) for changes in ({}, FIXED))
    assert Recorded(plain, []).is_plain
    assert not Recorded(fixed, []).is_plain


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("config", []), ("config.foo", 3), ("config.predictor.depth", 300_000)),
        *(("updates", "x"), ("data", None), ("preset", None), ("seed", "x"), ("problem", ["a"])),
        *(("answers", [1]), ("answers", [{}]), ("answers", [{"protocol": "knn"}])),
    ],
)
def test_a_record_of_another_version_or_of_nobody_is_one_line(
    key: str, value: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = json.loads((tables.ROOT / "results" / "beyond" / "StoP-0.json").read_text())
    inner, *names = tree, *key.split(".")
    for name in names[:-1]:
        inner = inner[name]
    inner[names[-1]] = value
    file = tmp_path / "sigma" / "a.json"
    file.parent.mkdir()
    file.write_text(json.dumps(tree))
    assert main(["ablate", "--page", str(tmp_path)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"stopmim: error: {file}: {key}: ")
