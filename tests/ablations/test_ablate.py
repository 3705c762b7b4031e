"""Ablations: every row is what its name says and runs; nothing is lost, and nothing done twice."""

import csv
import dataclasses
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from test_videos import davis

import results
from stopmim import pretrain
from stopmim.ablations import run as ablate
from stopmim.ablations.jobs import Child, last_update, places
from stopmim.ablations.lines import lines, metric
from stopmim.ablations.paper import TABLES, find_table, listing
from stopmim.ablations.questions import Question, questions
from stopmim.ablations.record import outcome_of, read_records, write_records
from stopmim.ablations.report import as_markdown, figures, notes, terminal, write_report
from stopmim.ablations.run import identity
from stopmim.ablations.trial import TRIAL_JSON, Outcome, Plan, Trial, perform
from stopmim.base.errors import DataError, StorageError, UserError
from stopmim.cli import main
from stopmim.cli.run import parse
from stopmim.config.architectures import printed
from stopmim.config.schema import Config
from stopmim.config.yaml_text import to_yaml
from stopmim.data.checks.check import check
from stopmim.evals import cache
from stopmim.evals.protocols import PROTOCOLS, from_options
from stopmim.evals.results import over_seeds, paired, t_quantile
from stopmim.method.build import configure
from stopmim.runs.run import Run
from tiny import NoiseImages, tiny, write_folder, write_parts

# One row for everything that a row can change; `slow` has all of them.
MECHANISMS = {
    "positions": ["sine-cosine", "learned", "StoP"],
    "covariance": ["fixed-0.25"],
    "tokens": ["both"],
    "tie": ["untied"],
    "lowres": ["max"],
    "penalty": ["l1-1e-05"],
    "conditioned": ["conditioned"],
    "jitter": ["jitter-1"],
    "mae": ["share-0.5", "ramp"],
    "masks": ["released"],
    "augmentation": ["released"],
    "lr": ["StoP-x2"],
}


def small(**changes: Any) -> Config:
    """Two updates on an 8x8 grid."""
    return tiny(**{"image_size": 32, "optim": {"epochs": 1}} | changes)


def plan(name: str, out: Path, **options: Any) -> Plan:
    asked = {} if name == "tracking" else {"evals": ["scenes:24:32:3"], "few": "2"}
    given: dict[str, Any] = {"data": "scenes:16:32", "preset": small(), "out": out}
    return ablate.plan(name, **given | asked | options)


def test_data_in_one_part_are_told_the_way_out_that_ablate_has(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "images")
    with pytest.raises(
        DataError, match=r"as train/ and val/; name data that has both with --eval DATA"
    ):
        plan("tie", tmp_path / "out", data=str(folder), evals=[])


def test_a_misspelt_row_is_noticed_before_any_image_is_looked_for(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r'--rows stoP: no such row; did you mean "StoP"\? there are sine'
    ):
        plan("positions", tmp_path, data=str(tmp_path / "gone"), rows=["stoP"])


@pytest.mark.parametrize(("name", "has"), [("positions", True), ("norms", False)])
def test_of_the_papers_numbers_a_page_speaks_where_there_are_some(
    name: str, has: bool, tmp_path: Path
) -> None:
    planned = plan(name, tmp_path)
    text = as_markdown(planned, {"Results": [{"row": "a"}]}, notes(planned, []))
    assert ("The paper's numbers" in text) == has
    assert "- seed: 0\n" in text  # not "seeds: 0"


def test_a_new_ablation_among_its_images_is_refused_before_anything_trains(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "images")
    with pytest.raises(UserError, match="lies in the folder of the images"):
        plan("tie", folder / "out", data=str(folder))


def quick(planned: Plan) -> Plan:
    """`planned` with one question that is answered at once, instead of its own."""
    request = {"train": "scenes:24:32:3", "test": "scenes:24:32:4", "label": ["count"]}
    asked = (Question(("knn",), request),)
    return replace(planned, trials=tuple(replace(t, questions=asked) for t in planned.trials))


def carried_out(planned: Plan) -> list[Outcome]:
    """Every run, in this process."""
    for trial in planned.runs.values():
        perform(trial)
    return [Outcome.of_trial(trial) for trial in planned.trials]


# ------------------------------------------------------------------------------ the tables


@pytest.mark.parametrize("preset", ["tiny_cpu", "ablation_b16_stop", "ablation_b16_ijepa"])
@pytest.mark.parametrize("name", TABLES)
def test_every_row_of_every_table_is_a_valid_run_of_its_own(name: str, preset: str) -> None:
    base = configure(preset)
    configs = [configure(base, row.of(base)) for row in TABLES[name].rows]
    assert len({identity(config, "data") for config in configs}) == len(configs)
    assert TABLES[name].baseline in {row.name for row in TABLES[name].rows}


def test_a_row_is_the_same_whatever_the_preset_has_for_positions() -> None:
    """Also if the preset is the I-JEPA twin, or has another covariance."""
    for name in ("positions", "tie", "covariance", "tokens", "jitter"):
        rows = TABLES[name].rows
        first, *others = (
            [configure(preset, row.of(preset)).positions.kind for row in rows]
            for preset in (
                configure("ablation_b16_stop"),
                configure("ablation_b16_ijepa"),
                configure("ablation_b16_stop", {"positions.covariance": "fixed"}),
            )
        )
        assert all(other == first for other in others), name
    fixed = configure("ablation_b16_stop", {"positions.covariance": "fixed"})
    tied, untied = (configure(fixed, row.of(fixed)) for row in TABLES["tie"].rows)
    assert (tied.positions.covariance, untied.positions.covariance) == ("tied", "untied")


def test_rates_and_ramps_are_relative_to_the_preset() -> None:
    base = configure("tiny_cpu", {"optim.lr": 3e-4, "optim.epochs": 8})
    rates = {row.name: configure(base, row.of(base)).optim for row in TABLES["lr"].rows}
    assert rates["StoP-x8"].lr == pytest.approx(24e-4)
    assert rates["StoP-x1"] == rates["sine-cosine-x1"] == base.optim
    ramp = next(row for row in TABLES["mae"].rows if row.name == "ramp")
    assert configure(base, ramp.of(base)).positions.ramp == 4


def test_numbers_are_those_printed_in_the_paper() -> None:
    """Copied by hand from its tables, a few of each."""
    one = "IN-1k, 1 %"
    for table, row, value in (
        ("positions", "sine-cosine", 54.3),
        ("positions", "learned", 54.4),
        ("positions", "StoP", 57.8),
        ("tokens", "context", 55.1),
        ("tokens", "both", 56.8),
        ("lowres", "bilinear", 52.1),
        ("lowres", "max", 54.1),
    ):
        assert find_table(table).quoted(row) == {one: value}
    downstream = find_table("downstream")
    assert list(downstream.quoted("StoP", "ViT-H/14").values()) == [65.4, 79.0, 79.6, 79.6]
    assert list(downstream.quoted("I-JEPA ViT-L/16").values()) == [64.2, 76.1, 77.5, 77.5]
    assert downstream.quoted("MAE ViT-H/14") == {"100 %, last layer": 76.6, "100 %, best": 77.2}
    assert downstream.quoted("MSN ViT-L/7") == {"100 %, best": 80.7}
    transfer = find_table("transfer")
    assert list(transfer.quoted("StoP", "ViT-B/16").values()) == [81.2, 54.3, 44.7, 83.7, 71.3]
    assert list(transfer.quoted("iBOT ViT-L/16").values()) == [88.3, 60.4, 57.3, 85.7, 62.8]
    assert transfer.quoted("MAE ViT-L/16")["CLEVR/Count"] == 92.1
    tracking = find_table("tracking")
    assert list(tracking.quoted("I-JEPA", "ViT-L/16").values()) == [56.1, 55.7, 55.9]
    assert list(tracking.quoted("DINO ViT-B/16").values()) == [60.7, 63.9, 62.3]
    assert [p.numbers["IN-1k, 1 %, fine-tuned"] for p in find_table("finetune").published] == [
        *(69.4, 71.7, 70.0, 69.7, 67.0),
    ]


def test_epochs_are_those_of_tables_2_14_and_16_and_no_number_to_compare() -> None:
    known = {p.name: p.epochs for p in find_table("downstream").published}
    assert (known["StoP ViT-B/16"], known["StoP ViT-H/14"], known["I-JEPA ViT-L/16"]) == (
        *(600, 300, 600),
    )
    assert (known["SimCLR v2 RN152 (2x)"], known["MSN ViT-L/7"], known["data2vec ViT-L/16"]) == (
        *(800, 200, 1600),
    )
    assert (known["DINO ViT-B/16"], known["DINO ViT-B/8"]) == (400, 300)
    tuned = {p.name: p.epochs for p in find_table("finetune").published}
    # The paper gives iBOT's ViT-B/16 250 epochs in Table 14 and 400 in Table 16.
    assert (known["iBOT ViT-B/16"], tuned["iBOT ViT-B/16"]) == (250, 400)
    assert (tuned["StoP ViT-L/16"], tuned["MAE ViT-L/16"]) == (600, 1600)
    assert all([*known.values(), *tuned.values()])
    assert "epochs" not in find_table("downstream").columns
    assert "StoP ViT-H/14         300 epochs: 65.4" in listing("downstream")


def test_a_list_fits_a_terminal() -> None:
    shown = [listing(), *map(listing, TABLES)]
    assert max(len(line) for text in shown for line in text.splitlines()) <= 80


def test_the_numbers_beside_a_row_are_of_its_architecture_if_the_paper_has_it() -> None:
    assert printed("vit_h14") == "ViT-H/14"
    table = find_table("downstream")
    assert table.quoted("StoP", printed("vit_l16")) != table.quoted("StoP", printed("vit_b16"))
    assert table.quoted("StoP", printed("vit_micro6")) == table.quoted("StoP ViT-B/16")


def test_a_list_shows_rows_with_the_numbers_of_the_paper(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["ablate", "--list"]) == 0
    everything = capsys.readouterr().out
    assert all(f"\n{name}: " in f"\n{everything}" for name in TABLES)
    assert main(["ablate", "transfer", "--list"]) == 0
    assert "DINO ViT-B/16  84.8 (CIFAR100)" in " ".join(capsys.readouterr().out.split(" ")).replace(
        "DINO ViT-B/16      ", "DINO ViT-B/16  "
    )
    assert "0.25" in listing("covariance")


# ------------------------------------------------------------------------------ tables of others


def own(folder: Path, text: str) -> str:
    file = folder / "mine.yaml"
    file.write_text(text)
    return str(file)


def test_a_table_of_ones_own_has_its_rows_dotted_or_nested(tmp_path: Path) -> None:
    text = "about: a try\nbaseline: b\nasks: all labels\nrows:\n  a: {predictor.width: 48}\n"
    file = own(tmp_path, text + "  b: {}\n  c+1_.x: {predictor: {width: 48, depth: 2}}\n")
    planned = plan(file, tmp_path / "out", seeds=2)
    assert (planned.name, planned.table.about, planned.table.baseline) == ("mine", "a try", "b")
    shapes = {(t.row, t.seed): t.config and t.config.predictor for t in planned.trials}
    found = {(row, seed): (p.width, p.depth) for (row, seed), p in shapes.items() if p}
    assert found == {
        (row, seed): shape
        for row, shape in {"a": (48, 1), "b": (24, 1), "c+1_.x": (48, 2)}.items()
        for seed in (0, 1)
    }
    (asked,) = planned.trials[0].questions
    assert asked.request["layers"] == "best"  # of all labels
    assert [t.row for t in plan(file, tmp_path / "out", rows=["c+1_.x"]).trials] == ["c+1_.x"]
    short = own(tmp_path, "rows:\n  first: {}\n")
    assert (find_table(short).baseline, find_table(short).asks) == ("first", "few labels")
    assert listing(short) == "mine: mine (not in the paper)\n  first"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "a table needs rows, each as NAME: "),
        ("- a", "a table needs rows"),
        ("about: x", "a table needs rows"),
        ("rows: {}", "a table needs rows"),
        ("rows: [a, b]", "a table needs rows"),
        ("rows: {a: {}, a: {}}", "line 1: duplicate key 'a'"),
        ("row: 1\nrows: {a: {}}", "row: unknown key; there are about, baseline, asks, rows"),
        ("rows: {a: 3}", "row a: expected {config key: value}"),
        ("rows: {a: {1: 2}}", "row a: expected {config key: value}"),
        ("rows: {a/b: {}}", "row a/b: a name consists of letters, digits and . _ - +"),
        ("rows: {..: {}}", "row ..: a name consists of letters"),
        ("rows: {0.5: {}}", "row 0.5: a name consists of letters"),
        ("rows: {a: {seed: 3}}", "row a: seed is the same for all rows"),
        ("rows: {a: {runtime.threads: 1}}", "row a: runtime.threads is the same for all rows"),
        ("baseline: b\nrows: {a: {}}", "baseline b: no such row; there are a"),
        ("asks: me\nrows: {a: {}}", "asks me: must be one of few labels, all labels"),
    ],
)
def test_a_table_that_makes_no_sense_is_refused_in_a_line_with_the_file(
    text: str, said: str, tmp_path: Path
) -> None:
    file = own(tmp_path, text)
    with pytest.raises(UserError) as caught:
        find_table(file)
    assert str(caught.value).startswith(f"{file}: {said}")
    assert "\n" not in str(caught.value)


def test_a_table_of_ones_own_can_neither_hide_another_nor_have_unknown_keys(
    tmp_path: Path,
) -> None:
    with pytest.raises(UserError, match=r"nowhere\.yaml: cannot be read: No such file"):
        find_table("nowhere.yaml")
    for taken in ("positions.yaml", "runs.yml"):
        with pytest.raises(UserError, match=r"is taken; rename the file"):
            find_table(taken)
    file = own(tmp_path, "rows: {a: {}, wide: {predictor.widht: 384}}")
    with pytest.raises(UserError) as caught:
        plan(file, tmp_path)
    said = 'wide: config: predictor.widht: unknown key; did you mean "predictor.width"?'
    assert str(caught.value) == said


# ------------------------------------------------------------------------------ numbers over seeds


def test_the_quantiles_are_students() -> None:
    known = {1: 12.706, 2: 4.303, 4: 2.776, 9: 2.262, 10: 2.228, 20: 2.086, 60: 2.000}
    for freedom, value in known.items():
        assert t_quantile(freedom) == pytest.approx(value, abs=6e-4)


def test_a_difference_is_paired_by_seed() -> None:
    # Seeds differ by tens of points, rows by about one: only in pairs can that be seen.
    baseline = {0: 10.0, 1: 30.0, 2: 50.0}
    row = {2: 51.0, 0: 11.2, 1: 30.8, 7: 99.0}  # in another order, and with a seed of its own
    found = paired(row, baseline)
    assert found is not None
    assert found.mean == pytest.approx(1.0)
    assert found.n == 3
    assert found.half == pytest.approx(4.303 * 0.2 / 3**0.5, rel=1e-3)
    apart = over_seeds(list(row.values())[:3]).half
    assert apart is not None
    assert apart > 40
    assert paired({5: 1.0}, baseline) is None
    assert over_seeds([3.0]).half is None


# ------------------------------------------------------------------------------ the plan


def test_a_run_is_known_by_config_data_and_seed_not_by_its_table(tmp_path: Path) -> None:
    covariance, norms = (plan(name, tmp_path, seeds=2) for name in ("covariance", "norms"))

    def paths(planned: Plan) -> set[str]:
        return {path.name.rsplit("-", 1)[1] for path in planned.runs}

    assert paths(norms) < paths(covariance)
    assert len(paths(norms)) == 16
    other_data = plan("norms", tmp_path, seeds=2, data="scenes:16:32:5")
    assert not paths(other_data) & paths(norms)
    slower = plan("norms", tmp_path, seeds=2, preset=small(runtime={"log_every": 2}))
    assert paths(slower) == paths(norms)  # how it is carried out does not matter
    # A run that is there under the name of another table is that run.
    (path,) = (p for p in covariance.runs if p.name.startswith("learned-0.5-0-"))
    path.with_name(path.name.replace("learned-0.5", "other")).mkdir(parents=True)
    again = {t.row: t.path.name for t in plan("norms", tmp_path).trials}
    assert again["learned-0.5"].startswith("other-0-")


def test_rows_that_are_the_same_are_one_run(tmp_path: Path) -> None:
    planned = plan("positions", tmp_path, rows=["StoP"])
    (trial,) = planned.trials
    twice = replace(planned, trials=(trial, replace(trial, row="again")))
    assert len(twice.runs) == 1
    assert [o.row for o in carried_out(quick(twice))] == ["StoP", "again"]
    assert len(list((tmp_path / "runs").iterdir())) == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rows": ["stop"]}, "--rows stop: no such row; there are sine-cosine"),
        ({"seeds": 0}, "--seeds 0: expected a number of seeds, 1 to 1000"),
        ({"seeds": 10**8}, "--seeds 100000000: expected a number of seeds, 1 to 1000"),
        ({"data": "scenes:4:32"}, "sine-cosine: 4 images do not fill one batch"),
        ({"few": "many"}, "--few many: neither"),
        ({"checkpoints": ["MAE"]}, "--checkpoint MAE: expected NAME=FILE"),
        ({"evals": [], "data": "nowhere"}, "nowhere: no such folder"),
    ],
)
def test_what_cannot_work_is_said_before_anything_trains(
    options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=said):
        plan("positions", tmp_path, **options)
    assert not (tmp_path / "runs").exists()


def test_broken_images_to_evaluate_on_are_found_before_anything_trains_unless_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, fixes = str(write_parts(tmp_path / "images")), tmp_path / "fixes.jsonl"
    options: dict[str, Any] = {"data": root, "evals": [], "rows": ["StoP"]}
    with pytest.raises(DataError) as caught:
        plan("positions", tmp_path / "o", **options)
    said = str(caught.value)
    assert said.startswith(f"{root}: 2 of 56 images to evaluate on cannot be read, first part0/003")
    assert "--data.skip FILE" in said
    with pytest.raises(DataError, match=r"fix or remove them$"):  # a list is for --data alone
        plan("positions", tmp_path / "o", **options | {"data": "scenes:16:32", "evals": [root]})
    with monkeypatch.context() as patch:
        patch.setattr("stopmim.ablations.questions.MAX_CHECKED", 55)
        assert plan("positions", tmp_path / "o", **options)  # too many to read just in case
    check(root, "tiny_cpu", fix_list=fixes)
    options["changes"] = {"data.skip": str(fixes)}
    planned = plan("positions", tmp_path / "o", **options)
    (done,) = carried_out(planned)
    assert {a["protocol"] for a in done.answers} == {"lowshot", "knn", "linear"}
    assert {a["train_data"] for a in done.answers} == {f"{root} (39 images)"}
    assert {a["test_data"] for a in done.answers} == {f"{root} (15 images)"}
    fixes.write_text(fixes.read_text() + '{"name": "part0/004.png"}\n')
    (trial,) = plan("positions", tmp_path / "o", **options).trials
    assert trial.path.name != done.run  # other images, another run


@pytest.mark.parametrize("what", ["image", "more images", "labels", "few", "skip"])
def test_answers_are_of_the_data_as_they_are_and_not_of_their_names(
    what: str, tmp_path: Path
) -> None:
    root = write_parts(tmp_path / "images")
    image, listed, few, skip = (
        tmp_path / name
        for name in ("images/val/part0/000.png", "list.txt", "few.txt", "skip.jsonl")
    )
    names = [f"part{i}/{j + 8 * i:03}.png" for i in (0, 1) for j in range(4, 12)]
    listed.write_text("".join(f"{name}\t{name[:5]}\n" for name in names))
    few.write_text("\n".join(names[::2]))
    skip.write_text('{"name": "part1/001.png", "part": "test"}\n')
    Image.new("RGB", (24, 24), "red").save(image, compress_level=0)

    def trial() -> Trial:
        data = f"{root}@{listed}"
        asked = questions("quick", data, 24, [], str(few), skip=str(skip))
        return Trial(tmp_path / "run", data, None, asked, "random:vit_micro6@24")

    before = trial()
    assert trial().answers_file == before.answers_file
    assert TRIAL_JSON.validate_json(TRIAL_JSON.dump_json(before)) == before
    size = image.stat().st_size
    if what == "image":
        Image.new("RGB", (24, 24), "blue").save(image, compress_level=0)
        assert image.stat().st_size == size
    elif what == "more images":
        image.with_name("more.png").write_bytes(image.read_bytes())
    elif what == "labels":
        listed.write_text(listed.read_text().replace("\tpart0", "\tpart1", 1))
    elif what == "few":
        few.write_text("\n".join(names[1::2]))
    else:
        skip.write_text(skip.read_text() + '{"name": "part0/001.png", "part": "test"}\n')
    assert trial().answers_file != before.answers_file
    if what == "skip":
        (*_, answer) = perform(trial())
        assert answer["test_data"].endswith("(14 images)")


def test_answers_about_scenes_are_of_their_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kept(asks: Any) -> Path:
        asked = questions(asks, "scenes:16:32", 32, [], "2")
        return Trial(tmp_path, "scenes:16:32", None, asked).answers_file

    before = {asks: kept(asks) for asks in ("quick", "tracking")}
    assert before == {asks: kept(asks) for asks in before}
    monkeypatch.setattr("stopmim.ablations.questions.RENDERER", "scenes-v2")
    for asks, path in before.items():
        assert kept(asks) != path


def test_answers_about_videos_are_of_their_frames_and_masks(tmp_path: Path) -> None:
    root = davis(tmp_path)

    def content() -> str:
        (asked,) = questions("tracking", "scenes", 32, [str(root)], "2")
        return asked.content

    before = content()
    assert content() == before
    for file in ("JPEGImages/480p/judo/00001.jpg", "Annotations/480p/judo/00001.png"):
        (root / file).write_bytes((root / file).read_bytes())
        assert content() != before
        before = content()


def test_a_run_to_compare_with_that_has_gone_on_is_asked_again(tmp_path: Path) -> None:
    pretrain(NoiseImages(), tmp_path / "other", tiny(), stop_at=3)

    def borrowed() -> Trial:
        given = [f"other={tmp_path / 'other'}"]
        return plan("positions", tmp_path, rows=["StoP"], checkpoints=given).trials[-1]

    before = borrowed()
    assert borrowed() == before
    run = pretrain(NoiseImages(), tmp_path / "other", tiny())
    assert borrowed().path != before.path
    assert borrowed().encoder == str(run.checkpoint)


def test_checkpoints_alone_are_evaluated_beside_the_papers_numbers(tmp_path: Path) -> None:
    pretrain(NoiseImages(), tmp_path / "run", tiny(), stop_at=1)
    given = [f"MAE ViT-B/16={tmp_path / 'run'}"]
    planned = quick(plan("downstream", tmp_path / "out", seeds=0, checkpoints=given))
    said = ablate.describe(planned)
    assert "1 runs, 0 of them done, 0 updates left" in said
    assert "preset" not in said.split("--checkpoint.")[-1]  # after the note of the table
    write_report(planned, carried_out(planned))
    text = (tmp_path / "out" / "downstream" / "table.md").read_text()
    assert "pretrained on" not in text
    header, _, row = (line for line in text.partition("## Results")[2].splitlines()[2:5])
    cells = dict(zip(header.split(" | "), row.split(" | "), strict=True))
    assert cells["| row"] == "| MAE ViT-B/16"
    assert cells["paper: 100 %, last layer"].strip() == "68.0"
    assert not [file for file in (tmp_path / "out").rglob("metrics.jsonl")]


def test_every_problem_of_every_row_is_said_at_once(tmp_path: Path) -> None:
    """The released code has no tokens but masked ones, and these images fill no batch."""
    with pytest.raises(UserError) as caught:
        plan("tokens", tmp_path, preset="ablation_b16_stop_released", seeds=3)
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0] for line in lines] == ["none", "context", "both", "masked"]
    assert "tokens has no effect with compat: released" in lines[1]


def test_every_kind_of_table_asks_by_its_own_protocol(tmp_path: Path) -> None:
    def asked(asks: Any, *evals: str, data: str = "scenes") -> list[tuple[Any, ...]]:
        found = questions(asks, data, 48, evals, "25")
        return [(q.protocols, q.request.get("recipe"), q.request.get("label")) for q in found]

    both = ["count", "distance"]
    assert asked("few labels") == [(("lowshot", "linear"), "auto", both)]
    assert asked("tracking") == [(("tracking",), None, None)]
    assert asked("finetune") == [(("finetune",), "auto", both)]
    assert asked("transfer", "clevr_count=scenes:8", "cifar100=scenes:9") == [
        (("linear",), "clevr_count", both),
        (("linear",), "cifar100", both),
    ]
    with pytest.raises(UserError, match="ablate tracking: name one folder of DAVIS"):
        asked("tracking", data=str(tmp_path))
    with pytest.raises(UserError, match="ablate tracking: name one folder of DAVIS"):
        asked("tracking", "scenes:1", "scenes:2")  # the second would not be looked at


def test_data_sets_to_evaluate_on_have_columns_of_their_own() -> None:
    def names(*evals: str) -> list[str]:
        return [q.on for q in questions("transfer", "scenes", 48, evals, "25")]

    assert names("scenes:8") == [""]
    assert names("scenes:8", "scenes:9") == ["scenes:8", "scenes:9"]
    assert names("cifar100=scenes:8", "scenes:9") == ["cifar100", "scenes:9"]
    for same in (("scenes:8", "scenes:8"), ("cifar100=scenes:8", "cifar100=scenes:9")):
        with pytest.raises(UserError, match=r"--eval: two data sets called (scenes:8|cifar100):"):
            names(*same)


def test_data_without_the_label_of_a_recipe_are_named(tmp_path: Path) -> None:
    root = write_parts(tmp_path / "images")
    said = f"^{re.escape(str(root))}: clevr_count is about the label count, and there is class; "
    with pytest.raises(DataError, match=said):
        questions("transfer", "scenes", 24, [f"clevr_count={root}"], "25")


@pytest.mark.parametrize("asks", ["few labels", "tracking"])
def test_other_code_asks_again(asks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a table that is continued after an update has rows measured by two codes."""
    ours = tmp_path / "stopmim"
    shutil.copytree(Path(cache.__file__).parents[1], ours)
    monkeypatch.setattr(cache, "__file__", str(ours / "evals" / "cache.py"))

    def content() -> str:
        (asked,) = questions(asks, "scenes", 48, (), "25")
        return asked.content

    before = content()
    assert content() == before
    with (ours / "evals" / "protocols" / "knn.py").open("a") as code:
        code.write("VERSION = 2\n")
    assert content() != before


def test_options_of_protocols_reach_them_and_change_nothing_if_they_are_the_defaults(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--selection", "paper", "--views", "3", "--released"]
    command: Any = parse(["ablate", "downstream", *words])
    assert command.evaluation.views == 3
    given = {"selection": "paper", "views": 3, "released": True}
    for name, options in (("downstream", given), ("transfer", {"selection": "paper", "views": 3})):
        (trial, *_) = plan(name, tmp_path, options=options).trials
        (asked,) = trial.questions
        kinds = [kind for kind in PROTOCOLS if kind.name in asked.protocols]
        found = {k: v for p in from_options(kinds, asked.request)[0] for k, v in vars(p).items()}
        assert found.items() >= options.items()
        assert found["layers"] == "best"
        (plain, *_) = plan(name, tmp_path, options={}).trials
        assert plain.answers_file == plan(name, tmp_path).trials[0].answers_file
        assert plain.answers_file != trial.answers_file
    words = ["--out", str(tmp_path / "o"), "--dry-run"]
    assert main(["ablate", "tracking", "--released", *words]) == 2
    said = "--released: has no effect: it is an option of lowshot, and this table is evaluated by"
    assert f"{said} tracking" in capsys.readouterr().err
    assert main(["ablate", "downstream", "--views", "-1", *words]) == 2
    assert "--views -1: expected 0 or more" in capsys.readouterr().err


def test_pairs_of_the_paper_say_that_their_rows_train_at_one_learning_rate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = configure("vit_b16_stop")
    for name in ("downstream", "transfer", "tracking", "finetune"):
        rates = {configure(base, row.of(base)).optim.lr for row in TABLES[name].rows}
        assert rates == {8e-4}
        assert TABLES[name].note.startswith("Both rows train alike, at the preset's learning rate")
    assert main(["ablate", "downstream", "--out", str(tmp_path), "--dry-run"]) == 0
    assert "The paper's I-JEPA had\n1e-3" in capsys.readouterr().out


def test_a_dry_run_trains_nothing_and_says_what_it_would(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ablate", "tie", "--seeds", "3", "--out", str(tmp_path / "o"), "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "6 runs, 0 of them done, 6,144 updates left" in said
    assert "one run of tiny_cpu_quick takes about 1.5 minutes" in said
    assert not (tmp_path / "o").exists()


def test_every_gpu_or_core_gets_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    config = small()
    assert places(config, 3) == [{"OMP_NUM_THREADS": "1"}] * 3
    with pytest.raises(UserError, match="--jobs 0"):
        places(config, 0)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    gpu = configure(config, {"runtime.device": "auto"})
    assert places(gpu, None) == [{"CUDA_VISIBLE_DEVICES": n} for n in ("2", "5")]
    assert places(gpu, 3)[2] == {"CUDA_VISIBLE_DEVICES": "2"}
    assert "OMP_NUM_THREADS" in places(config, 1)[0]  # a config that says cpu stays there


# ------------------------------------------------------------------------------ carried out


@pytest.mark.parametrize("name", MECHANISMS)
def test_a_row_runs_from_its_config_to_its_answers(name: str, tmp_path: Path) -> None:
    found = carried_out(quick(plan(name, tmp_path, rows=MECHANISMS[name])))
    assert [run.row for run in found] == MECHANISMS[name]
    for run in found:
        assert run.updates == 2
        assert run.norms
        (only,) = run.answers
        assert metric(only) == "knn count"
        assert (only["unit"], 0 <= only["value"] <= 100) == ("percent", True)
        assert "random_init" in only


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES)
def test_every_row_of_every_table_runs(name: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"evals": ["scenes:1:32"]} if name == "tracking" else {}
    planned = plan(name, tmp_path, **options)
    found = carried_out(planned)
    page = write_report(planned, found)
    assert len(found) == len(TABLES[name].rows)
    assert all(run.answers for run in found)
    assert (page.parent / "accuracy.png").exists() == bool(planned.table.axes)


def answer(value: float, protocol: str = "lowshot", **more: Any) -> dict[str, Any]:
    fields = {"name": "accuracy", "protocol": protocol, "label": "class", "value": value}
    return fields | {"random_init": 0.1, "on": ""} | more


def made_up(row: str, seed: int, *values: float, problem: str = "") -> Outcome:
    answers = [answer(v) for v in values]
    return Outcome(row, seed, f"{row}-{seed}", answers, problem, "healthy", (2.0, 0.5), 100, 50.0)


def test_the_table_has_means_intervals_paired_differences_and_the_paper_beside(
    tmp_path: Path,
) -> None:
    planned = plan("positions", tmp_path, seeds=2)
    values = {"sine-cosine": (0.30, 0.50), "learned": (0.31, 0.51), "StoP": (0.34, 0.52)}
    found = [made_up(row, i, v) for row, pair in values.items() for i, v in enumerate(pair)]
    other = [answer(0.6, random_init=0.5)]  # of another network: not the random init of this table
    found.append(dataclasses.replace(made_up("somebody's", 0), answers=other))
    page = write_report(planned, found)
    with (page.parent / "table.csv").open() as file:
        rows = {row["row"]: row for row in csv.DictReader(file)}
    assert float(rows["StoP"]["mean"]) == pytest.approx(43.0)
    assert float(rows["StoP"]["half"]) == pytest.approx(12.706 * 9, rel=1e-3)
    assert float(rows["StoP"]["difference_mean"]) == pytest.approx(3.0)
    assert float(rows["StoP"]["difference_half"]) == pytest.approx(12.706 * 1, rel=1e-3)
    assert float(rows["learned"]["difference_half"]) == pytest.approx(0.0, abs=1e-9)
    assert rows["sine-cosine"]["difference_mean"] == ""
    assert json.loads(rows["StoP"]["paper"]) == {"IN-1k, 1 %": 57.8}
    text = (page.parent / "table.md").read_text()
    assert "| StoP | 57.8 | 43.0 \u00b1 114.4 |" in text
    assert "| StoP | +3.5 | +3.0 \u00b1 12.7 |" in text
    assert "| random init |  | 10.0 |" in text
    assert "| StoP | 2 | healthy | 2.000" in text
    assert "| StoP | 100 | 0:50 | 2.00 |" in text
    assert "2.00" not in (page.parent / "table.csv").read_text()  # no time in it
    assert "models of other size" in text


def test_a_table_says_which_runs_collapsed_and_how_many(tmp_path: Path) -> None:
    """Over all that were trained: a run without a log counts for nothing, a failed one counts."""
    planned, said = plan("positions", tmp_path, seeds=2), "Collapsed, in full or in part: "
    verdicts = {"sine-cosine": ("collapse", "not collapsed"), "learned": ("partial collapse", "-")}
    found = [
        replace(made_up(row, i, *([0.25 + i] if one != "-" else [])), verdict=one, rank=2.0 + i)
        for row, pair in verdicts.items()
        for i, one in enumerate(pair)
    ]
    found += [replace(made_up("StoP", i, problem="disk full"), verdict="shortcut") for i in (0, 1)]
    page = write_report(planned, found)
    for text in (page.read_text(), (page.parent / "table.md").read_text()):
        assert f"{said}2 of 5 runs (40 %)." in text
    assert terminal(planned, found).endswith("(40 %).")
    rows = (page.parent / "table.md").read_text().split("## Runs\n\n")[1].splitlines()[:8]
    assert rows[0] == "| row | seed | verdict | RankMe | lowshot |"
    assert rows[2] == "| sine-cosine | 0 | collapse | 2.0 | 25.0 |"
    assert rows[5] == "| learned | 1 | - | 3.0 | - |"
    assert rows[7] == "| StoP | 1 | disk full | - | - |"
    with (page.parent / "table.csv").open() as file:
        told = {row["row"]: (row["collapsed"], row["runs"]) for row in csv.DictReader(file)}
    assert told == {"sine-cosine": ("1", "2"), "learned": ("1", "1"), "StoP": ("0", "2")}
    one = [made_up(row, 0, 0.5) for row in verdicts]
    assert "## Runs" not in write_report(planned, one).with_suffix(".md").read_text()
    assert said not in terminal(planned, [replace(run, verdict="-") for run in one])


def test_numbers_chosen_on_test_have_columns_of_their_own() -> None:
    answers = [answer(0.3, "linear", selection=how) for how in ("held-out", "paper", "none")]
    assert [metric(one) for one in answers] == ["linear", "linear (paper)", "linear"]


def test_a_table_that_is_too_wide_for_a_terminal_is_turned(tmp_path: Path) -> None:
    planned = plan("downstream", tmp_path, seeds=2)
    found = [made_up(row, seed, 0.5) for row in ("I-JEPA", "StoP") for seed in (0, 1)]
    text = terminal(planned, found)
    assert max(map(len, text.splitlines())) <= 80
    head, *lines = text.split("\n\n")[0].splitlines()
    assert head.split() == ["I-JEPA", "StoP", "random", "init"]
    assert lines[-1].split()[:3] == ["lowshot", "50.0", "\u00b1"]


def test_lines_whose_axes_differ_in_meaning_share_a_height_but_no_panel(tmp_path: Path) -> None:
    planned = plan("covariance", tmp_path)
    rows = {"sigma-0": 0.2, "learned-0.25": 0.4, "learned-1": 0.3, "fixed-0.25": 0.9}
    outcomes = [made_up(row, 0, value) for row, value in rows.items()]
    found = lines(planned.table, "vit_b16", outcomes)
    drawn = figures(planned, found, {})
    learned, fixed = (axes for axes in drawn["accuracy"].axes if axes.lines)
    assert (learned.get_xlabel(), fixed.get_xlabel()) == tuple(planned.table.axes.values())
    assert learned.get_xlabel() != fixed.get_xlabel()
    assert learned.get_ylim() == fixed.get_ylim()
    points = [np.asarray(axes.lines[0].get_xdata()).tolist() for axes in (learned, fixed)]
    assert points == [[0.0, 0.25, 1.0], [0.0, 0.25]]  # without noise, both are the same run
    rates = plan("lr", tmp_path / "lr")
    outcomes = [made_up(row, 0, 0.5) for row in ("sine-cosine-x1", "StoP-x1")]
    drawn = figures(rates, lines(rates.table, "vit_b16", outcomes), {})
    assert len([axes for axes in drawn["accuracy"].axes if axes.lines]) == 1  # these do compare


def test_a_page_escapes_what_others_wrote_and_needs_nothing(tmp_path: Path) -> None:
    planned = plan("lr", tmp_path, rows=["StoP-x1", "StoP-x2"])
    evil = "<script>alert(1)</script>|"
    found = [made_up("StoP-x1", 0, 0.5), made_up("StoP-x2", 0, problem=evil)]
    page = write_report(replace(planned, preset=evil), found)
    html = page.read_text()
    assert "<script" not in html
    assert "&lt;script&gt;" in html
    assert "http://" not in html.replace("http://www.w3.org", "")
    assert "prefers-color-scheme: dark" in html
    assert html.count("<svg") == 2  # accuracy and norms over the rate
    assert all((page.parent / f"accuracy.{end}").stat().st_size for end in ("png", "svg"))
    assert "alert(1)</script>\\|" in (page.parent / "table.md").read_text()


def test_a_failed_row_is_in_the_table_and_does_not_stop_the_others(tmp_path: Path) -> None:
    """Through processes: one fails, one trains, one is done already."""
    planned = quick(plan("positions", tmp_path))
    bad, known, new = (trial.path for trial in planned.trials)
    perform(planned.trials[1])
    before = (known / "results.jsonl").stat().st_mtime_ns
    bad.mkdir(parents=True)
    (bad / "run.json").write_text("not a run")
    found = ablate.ablate(planned, jobs=2)
    (failed,) = found.failed
    assert failed.startswith(f"{bad.name}: ")
    assert "not a run directory" in failed
    text = (tmp_path / "positions" / "table.md").read_text()
    assert "(exit code 4)" in text
    assert "| sine-cosine | 54.3 | - |" in text
    assert [bool(run.answers) for run in found.outcomes] == [False, True, True]
    assert last_update(new) == last_update(known) == 2
    assert (known / "results.jsonl").stat().st_mtime_ns == before  # neither trained nor asked again
    records = {path.name: json.loads(path.read_text()) for path in page_records(planned)}
    assert list(records) == ["StoP-0.json", "learned-0.json", "sine-cosine-0.json"]
    failure = records["sine-cosine-0.json"]
    assert (failure["problem"], failure["curve"]) == (found.outcomes[0].problem, [])
    assert outcome_of(failure) == found.outcomes[0]
    one, stop = records["StoP-0.json"], found.outcomes[2]
    assert Config.model_validate_json(json.dumps(one["config"])).positions.kind == "stochastic"
    assert one["data"] == Run(new).about["data"]
    assert one["environment"].keys() >= {"versions", "git", "device"}
    assert [row["step"] for row in one["curve"]] == [1, 2]
    again = outcome_of(one)
    assert (again.row, again.seed, again.updates) == ("StoP", 0, 2)
    assert again.norms == pytest.approx(stop.norms, rel=1e-3)
    assert (again.rank, stop.rank) == (None, None)  # health was not measured
    assert [a["value"] for a in again.answers] == [a["value"] for a in stop.answers]
    assert str(tmp_path) not in json.dumps(one)  # nobody learns where it was
    study = results.read(tmp_path / "positions" / "records")
    assert [line.name for line in study.lines] == ["sine-cosine", "learned", "StoP"]  # in order
    assert study.outcomes[2] == again


def test_a_run_that_is_a_link_leads_nowhere(tmp_path: Path) -> None:
    """Nobody named it: it came with the folder of an ablation."""
    trial = quick(plan("positions", tmp_path / "out")).trials[1]
    (victim := tmp_path / "victim").mkdir()
    trial.path.parent.mkdir(parents=True)
    trial.path.symlink_to(victim)
    with pytest.raises(StorageError, match="is a link, so nothing is written there"):
        perform(trial)
    assert not list(victim.iterdir())


def test_a_table_that_is_cut_short_has_what_is_done_and_says_what_is_not(tmp_path: Path) -> None:
    planned = quick(plan("positions", tmp_path))
    perform(planned.trials[1])
    found = [Outcome.of_trial(trial) for trial in planned.trials]
    page = write_report(planned, found)
    write_records(planned, found)
    text = (page.parent / "table.md").read_text()
    assert text.count("| not finished |") == 2
    assert [path.name for path in page_records(planned)] == ["learned-0.json"]


def page_records(planned: Plan) -> list[Path]:
    return sorted((planned.out / planned.name / "records").iterdir())


@pytest.mark.slow
def test_the_command_ends_with_its_own_code_if_a_row_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    preset = tmp_path / "small.yaml"
    preset.write_text(to_yaml(small()))
    words = ["ablate", "lr", "--preset", str(preset), "--out", str(tmp_path / "o")]
    words += ["--data", "scenes:16:32", "--eval", "scenes:24:32:3", "--few", "2"]
    words += ["--rows", "StoP-x1", "StoP-x8", "--optim.lr", "1e18", "--optim.start_lr", "1e18"]
    assert main(words) == 9  # not finite
    assert "2 runs failed, first StoP-x1-0-" in capsys.readouterr().err
    assert "not finite at step" in (tmp_path / "o" / "lr" / "table.md").read_text()
    assert main([*words[:-4], "--rows", "StoP-x1"]) == 0


# ------------------------------------------------------------------------------ killed


def killed_at(fault: str, work: Callable[[], object]) -> int:
    """The signal that ended `work` in a child process."""
    child = os.fork()
    if child == 0:
        os.environ["STOPMIM_FAULT"] = f"{fault}:kill"
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - the child ends in a moment
        work()
        os._exit(0)
    return os.WTERMSIG(os.waitpid(child, 0)[1])


def test_a_trial_killed_anywhere_gives_the_same_answers(tmp_path: Path) -> None:
    def trial(out: str) -> Trial:
        (only,) = quick(plan("positions", tmp_path / out, rows=["StoP"])).trials
        return only

    def values(found: list[dict[str, Any]]) -> list[Any]:
        return [(a["protocol"], a["label"], a["value"], a["random_init"]) for a in found]

    whole = values(perform(trial("whole")))
    cut = trial("cut")
    for fault in ("step.end@1", "save.model@1", "trial.asked"):
        assert killed_at(fault, lambda: perform(cut)) == signal.SIGKILL
        assert cut.answers() is None
    assert values(perform(cut)) == whole


def processes(mark: str) -> list[int]:
    """Those whose command line has `mark` in it, this one aside."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if mark in words and int(path.parent.name) != os.getpid():
            found.append(int(path.parent.name))
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_ablation_killed_at_random_moments_ends_with_the_same_table(tmp_path: Path) -> None:
    preset = tmp_path / "small.yaml"
    preset.write_text(to_yaml(small(optim={"epochs": 12}, runtime={"save_every": 3})))

    def start(out: Path) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-m", "stopmim", "ablate", "positions", "--preset", str(preset)]
        words += ["--data", "scenes:16:32", "--eval", "scenes:24:32:3", "--few", "2"]
        words += ["--seeds", "2", "--jobs", "2", "--out", str(out)]
        return subprocess.Popen(words, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    assert start(tmp_path / "whole").wait() == 0
    rng, mark = random.Random(3), str(tmp_path / "cut" / "runs")
    for how in (signal.SIGKILL, signal.SIGINT, signal.SIGKILL, signal.SIGTERM, signal.SIGKILL):
        process = start(tmp_path / "cut")
        while not processes(mark) and process.poll() is None:
            time.sleep(0.1)
        time.sleep(10 * rng.random())
        process.send_signal(how)
        code = process.wait()
        assert code in (0, -9, 128 + how)
        deadline = time.monotonic() + 30
        while processes(mark) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not processes(mark)  # nobody trains on
    assert start(tmp_path / "cut").wait() == 0
    same = [tmp_path / one / "positions" / "table.csv" for one in ("whole", "cut")]
    assert same[0].read_bytes() == same[1].read_bytes()


@pytest.mark.parametrize(
    "text",
    [
        *("{}", "5", "[1]", "[" * 100_000, "junk", None, "[{}]", '[{"protocol": 3}]'),
        '[{"protocol": "knn", "name": "accuracy", "label": "", "test_data": "a", "value": "x"}]',
    ],
    ids=lambda text: str(text)[:8],
)
def test_answers_that_are_none_are_asked_for_again(tmp_path: Path, text: str | None) -> None:
    """None: a pipe, which nobody writes to."""
    (trial, *_) = quick(plan("positions", tmp_path)).trials
    trial.path.mkdir(parents=True)
    for path in (trial.answers_file, trial.path / "metrics.jsonl"):
        if text is None:
            os.mkfifo(path)
        else:
            path.write_text(text)
    assert trial.answers() is None
    assert last_update(trial.path) == 0


def test_a_log_that_holds_anything_is_reported(tmp_path: Path) -> None:
    planned = quick(plan("positions", tmp_path))
    trial = planned.trials[0]
    trial.path.mkdir(parents=True)
    lines = ['{"step": "x", "norm_A": 1}', '{"step": [], "norm_A": "y", "target_rank": {}}']
    (trial.path / "metrics.jsonl").write_text("\n".join(lines))
    found = [Outcome.of_trial(trial) for trial in planned.trials]
    assert write_report(planned, found).exists()


@pytest.mark.parametrize("name", ["positions", "positions/records"])
def test_nothing_is_written_through_a_link_in_the_folder(tmp_path: Path, name: str) -> None:
    planned = quick(plan("positions", tmp_path / "out"))
    victim = tmp_path / "victim"
    victim.mkdir()
    (tmp_path / "out" / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "out" / name).symlink_to(victim)
    found = [Outcome.of_trial(trial, "failed") for trial in planned.trials]
    write = write_report if name == "positions" else write_records
    with pytest.raises(StorageError, match="is a link"):
        write(planned, found)
    assert list(victim.iterdir()) == []


@pytest.mark.parametrize("name", ["", "the run"])
def test_nothing_is_trained_through_a_link(tmp_path: Path, name: str) -> None:
    planned = quick(plan("positions", tmp_path / "out"))
    victim = tmp_path / "victim"
    victim.mkdir()
    link = planned.trials[0].path if name else planned.out / "runs"
    link.parent.mkdir(parents=True)
    link.symlink_to(victim)
    with pytest.raises(StorageError, match="is a link"):
        ablate.ablate(planned)
    assert list(victim.iterdir()) == []


def test_what_is_in_the_way_of_a_run_is_one_line(tmp_path: Path) -> None:
    planned = quick(plan("positions", tmp_path / "out"))
    planned.out.mkdir()
    (planned.out / "runs").touch()
    with pytest.raises(StorageError, match="cannot write"):
        ablate.ablate(planned)
    (planned.out / "runs").unlink()
    path = planned.trials[0].path
    path.with_name(path.name + ".log").mkdir(parents=True)
    with pytest.raises(StorageError, match=r"\.log: cannot write"):
        ablate.ablate(planned)


@pytest.mark.parametrize("about", ['{"data": 3}', '{"data": {}, "starts": [3]}', "[]"])
def test_a_record_is_written_whatever_the_run_holds(tmp_path: Path, about: str) -> None:
    planned = quick(plan("positions", tmp_path))
    trial = planned.trials[0]
    trial.path.mkdir(parents=True)
    (trial.path / "run.json").write_text(about)
    (trial.path / "metrics.jsonl").write_text('{"step": 1, "random_init": 3}\n')
    write_records(planned, [Outcome.of_trial(trial, "failed") for trial in planned.trials])
    record = read_records(tmp_path)[0]
    assert record["data"] == {"source": planned.data}
    assert record["random_init"] == {}


def test_a_stopped_process_goes_on_to_save_and_exit() -> None:
    child = object.__new__(Child)
    command = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as child.process:
        assert child.process.stdout
        child.process.stdout.readline()
        child.process.send_signal(signal.SIGSTOP)
        child.stop()
        assert child.process.wait(10) == 0


def test_a_row_that_runs_out_of_memory_says_so(tmp_path: Path) -> None:
    """In a process with little more address space than it has: real allocations fail."""
    request = {"train": "scenes:999999:99:3", "test": "scenes:24:32:4", "label": ["count"]}
    trial = quick(plan("positions", tmp_path)).trials[0]
    file = tmp_path / "trial.json"
    asked = (Question(("knn",), request),)
    file.write_bytes(TRIAL_JSON.dump_json(replace(trial, questions=asked)))
    script = f"""
import resource, sys
from stopmim.ablations.trial import main
import stopmim.evals.knn, stopmim.train.loop
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + 400 * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
sys.exit(main([{str(file)!r}]))
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    line = done.stderr.splitlines()[-1]
    assert done.returncode == 7, line
    assert line.startswith("stopmim: error: out of memory")
