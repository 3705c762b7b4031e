"""The computed tables of the pages are those of now, and what stands beside them is true."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import results
import tables
from stopmim.ablations.record import as_text
from stopmim.ablations.table import read_table
from stopmim.cli import main
from stopmim.config.presets import PRESETS
from stopmim.config.schema import Config, flatten
from stopmim.config.yaml_text import parse_yaml
from stopmim.method.build import configure

CONFIGURE = (tables.DOCS / "configure.md").read_text()
REFUSING = re.findall(r"^\| `stopmim (pretrain .*) \.\.\.` \|", CONFIGURE, re.M)[0].split()
REFUSED = [
    (match[1], match[2]) for match in re.finditer(r"^\| `(--.*?)` \| `(.*)` \|$", CONFIGURE, re.M)
]


SLOW = {"docs/faithfulness.md"}  # a minute of drawing masks


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.slow] * (page in SLOW)) for page in tables.PAGES],
)
def test_the_tables_of_a_page_are_not_stale(page: str) -> None:
    if tables.PAGES[page] is not results.all_tables:  # of which a page may show some
        assert set(tables.names(page)) == set(tables.PAGES[page]())
    assert tables.page(page) == (tables.ROOT / page).read_text(), "run `make tables`"


def test_the_pages_of_results_have_every_study_and_no_number_that_was_typed() -> None:
    shown = set()
    for page in results.PAGES:
        typed = results.typed_decimals((tables.ROOT / page).read_text())
        assert not typed, f"{page}: as <!-- number: NAME --><!-- end -->, `make tables`"
        shown |= {name.split("_health")[0] for name in tables.names(page)}
    assert {study.name for study in results.studies()} <= shown


def test_the_figures_of_results_are_drawn_from_the_records_of_now() -> None:
    wanted = {
        f"results-{study.name}-{what}.svg": f"data {results.data(study, what)}<"
        for study in results.studies()
        for what in results.figures(study)
    }
    there = {path.name: path.read_text() for path in results.FIGURES.glob("results-*.svg")}
    assert there.keys() == wanted.keys(), "run `make tables`, remove what is not wanted"
    for name, mark in wanted.items():
        assert mark in there[name], f"{name}: run `make tables`"


def test_no_number_begins_a_line() -> None:
    """There a comment would end the paragraph, in Markdown."""
    for page in tables.PAGES:
        text = (tables.ROOT / page).read_text()
        assert "\n<!-- number" not in text, page


def test_the_preset_for_small_images_is_what_was_trained_three_times() -> None:
    ours = configure("small_images").model_dump(mode="json", exclude={"runtime", "seed"})
    study = next(study for study in results.studies() if study.name == "claim")
    trained = [one["config"] for one in study.records if one["row"] == "StoP-0.0625"]
    assert len(trained) == 3
    for config in trained:
        assert {key: _now(config)[key] for key in ours} == ours


@pytest.mark.parametrize("study", results.studies(), ids=lambda study: study.name)
def test_the_command_above_a_table_gives_the_configs_of_its_records(study: results.Study) -> None:
    file = results.RESULTS / f"{study.name}.yaml"
    comment = " ".join(re.findall(r"^# (.*)$", file.read_text(), re.M))
    options = dict(re.findall(r"--(\S+) (\S+)", comment))
    shared = {key: parse_yaml(value, key) for key, value in options.items() if "." in key}
    preset = options["preset"]
    base = configure(str(tables.ROOT / preset) if "/" in preset else preset, shared)
    rows = {row.name: row for row in read_table(file).rows}
    for one in study.records:
        ours = configure(base, rows[one["row"]].of(base) | {"seed": one["seed"]})
        tree = ours.model_dump(mode="json", exclude={"runtime"})
        assert {key: _now(one["config"])[key] for key in tree} == tree, one["row"]


SPEED = {"photos_s16": 6450, "small_images": 13400}  # images/s of an H200, batches of 64
IMAGES = {"imagenette.npz": 9469, "imagenette_held.npz": 7570, "tiny100.npz": 50_000}
OPEN = re.findall(
    r"\| (\d+) \| (\d+)(?: \(\d+\))? \| `(.*)` \|", (results.RESULTS / "README.md").read_text()
)


@pytest.mark.parametrize(("runs", "minutes", "command"), OPEN, ids=[one[2][24:44] for one in OPEN])
def test_the_cost_of_an_open_table_follows_from_its_rows(
    runs: str, minutes: str, command: str
) -> None:
    file = tables.ROOT / command.split()[2]
    above = re.findall(r"^# (.*)$", file.read_text(), re.M)
    assert " ".join(line.strip() for line in above) == command
    options = dict(re.findall(r"--(\S+) (\S+)", command))
    shared = {key: parse_yaml(value, key) for key, value in options.items() if "." in key}
    base, seeds = configure(options["preset"], shared), int(options.get("seeds", "1"))
    epochs = [configure(base, row.of(base)).optim.epochs for row in read_table(file).rows]
    assert int(runs) == len(epochs) * seeds
    images = sum(epochs) * seeds * IMAGES[options["data"]]
    assert int(minutes) == round(images / SPEED[options["preset"]] / 60)


def _now(config: dict[str, Any]) -> dict[str, Any]:
    """The config of a record with the keys that have been added since, at their defaults."""
    return Config.model_validate_json(json.dumps(config)).model_dump(mode="json")


def test_the_figure_of_growth_is_drawn_from_the_newest_benchmark() -> None:
    mark = f"data {tables.fingerprint(tables.measured('growth_nvidia-h200'))}<"
    assert mark in (results.FIGURES / tables.GROWTH_FIGURE).read_text(), "run `make tables`"


def test_a_step_takes_as_long_as_its_batch_is_large_once_the_gpu_is_full() -> None:
    lines = tables.measured("growth_nvidia-h200")
    ms = {line["value"]: line["ms"] for line in lines if line["varied"] == "optim.batch_size"}
    assert ms[512] / (2 * ms[256]) == pytest.approx(1, abs=0.05)


def test_every_key_is_named_with_a_meaning() -> None:
    for key, _ in flatten(Config().model_dump(mode="json")):
        row = re.search(rf"^\| `{re.escape(key)}` \| `.+` \| .+ \| (.*) \|$", CONFIGURE, re.M)
        assert row, key
        assert row[1].strip(), f"{key} has no text below it in config/schema.py"


def test_what_the_page_says_is_refused_is_refused_in_these_words(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert len(REFUSED) > 5
    for options, answer in REFUSED:
        assert main([*REFUSING, *shlex.split(options)]) == 2
        assert capsys.readouterr().err == f"stopmim: error: config: {answer}\n"


@pytest.mark.parametrize("arch", ["vit_b16", "vit_l16"])
def test_operations_by_weights_and_tokens_are_those_torch_counted(arch: str) -> None:
    one = tables.cost(arch)
    (counted, *_) = tables.measured(f"step_{arch}_nvidia-h200")
    ours = tables.operations(arch, one.encoder, one.predictor) / 1e9
    assert ours == pytest.approx(counted["gflop_per_image"], rel=0.02)


def test_memory_by_features_carries_over_from_one_size_to_the_next() -> None:
    """What ViT-H is computed with: ViT-L from the bytes per feature of ViT-B."""
    small, large = (tables.bytes_per_feature(tables.cost(arch)) for arch in ("vit_b16", "vit_l16"))
    assert small == pytest.approx(large, rel=0.05)


def test_hours_and_memory_of_presets_are_those_of_the_benchmarks() -> None:
    hours = {name: p.cost.hours for name, p in PRESETS.items() if p.cost.hours is not None}
    assert len(hours) == 16
    for name, said in hours.items():
        assert said == round(tables.hours(name)), name
    memory = {name: p for name, p in PRESETS.items() if p.needs.memory_gib and p.cost.hours}
    assert len(memory) == 8
    for name, preset in memory.items():
        lines = tables.measured(f"step_{preset.config.arch}_nvidia-h200")
        (one, *_) = (
            line for line in lines if line.get("positions") == preset.config.positions.kind
        )
        assert preset.needs.batch == one["batch_size"]
        assert preset.needs.memory_gib == round(one["peak_memory_mib"] / 1024, 1), name


# ------------------------------------------------------------------------------ what was found


def write_record(root: Path, row: str, seed: int, value: float, **more: Any) -> None:
    """A run of "claim", of which the baseline is "plain", as `ablate` records it."""
    asked = {"name": "accuracy", "protocol": "knn", "label": "class", "on": ""}
    curve = [
        {"step": 10, "epoch": 0.5, "norm_A": 2.0, "norm_mask_token": 0.1, "target_rank": 4.0},
        {"step": 20, "epoch": 1.0, "norm_A": 1.0 + seed, "norm_mask_token": 0.3},
    ]
    tree = {
        "about": "what is claimed",
        "baseline": "plain",
        "rows": ["plain", "StoP-0.25"],
        "row": row,
        "seed": seed,
        "run": f"{row}-{seed}",
        "updates": 20,
        "seconds": 90.0,
        "problem": "",
        "verdict": "healthy",
        "answers": [asked | {"value": value, "random_init": 0.1}],
        "curve": curve,
    }
    (root / "claim").mkdir(exist_ok=True)
    (root / "claim" / f"{row}-{seed}.json").write_text(as_text(tree | more))


@pytest.fixture
def records(tmp_path: Path) -> Path:
    for seed, (plain, stop) in enumerate([(0.30, 0.34), (0.50, 0.52)]):
        write_record(tmp_path, "plain", seed, plain)
        write_record(tmp_path, "StoP-0.25", seed, stop)
    return tmp_path


def test_tables_of_records_are_those_of_the_ablation_in_the_order_of_its_rows(
    records: Path,
) -> None:
    found = {name: text.splitlines()[2:] for name, text in results.all_tables(records).items()}
    assert found == {
        "claim": [
            "| plain | 40.0 \u00b1 127.1 |",
            "| StoP-0.25 | 43.0 \u00b1 114.4 |",
            "| random init | 10.0 |",
        ],
        "claim_differences": ["| StoP-0.25 | +3.0 \u00b1 12.7 |"],
        "claim_health": [
            f"| {row} | 2 | not collapsed "
            "| 1.500 \u00b1 6.353 | 0.300 \u00b1 0.000 | 4.0 \u00b1 0.0 |"
            for row in ("plain", "StoP-0.25")
        ],
        "claim_cost": [f"| {row} | 20 | 1:30 | 0.22 |" for row in ("plain", "StoP-0.25")],
    }


def test_numbers_in_sentences_are_those_of_the_tables(records: Path) -> None:
    numbers = results.all_numbers(records)
    text = (
        "StoP has <!-- number: claim.StoP-0.25.knn.mean -->9<!-- end -->, "
        "<!-- number: claim.StoP-0.25.knn.difference --><!-- end --> +/- "
        "<!-- number: claim.StoP-0.25.knn.difference.half -->\n<!-- end -->, random weights "
        "<!-- number: claim.random init.knn -->1<!-- end -->, after "
        "<!-- number: claim.plain.minutes -->?<!-- end -->.\n\n"
        "<!-- table: claim -->\nold\n<!-- end -->\n"
    )
    now = tables.filled(text, results.all_tables(records), numbers)
    said = re.sub("<!--.*?-->", "", now.split("\n")[0])
    assert said == "StoP has 43.0, +3.0 +/- 12.7, random weights 10.0, after 1.5."
    assert "| plain | 40.0" in now
    assert "old" not in now
    assert tables.filled(now, results.all_tables(records), numbers) == now
    assert "claim.plain.knn.difference" not in numbers  # to itself
    with pytest.raises(KeyError, match=r"claim\.gone"):
        tables.filled("<!-- number: claim.gone -->1<!-- end -->", {}, numbers)


def test_a_run_that_failed_is_in_the_tables_and_its_baseline_may_be_missing(tmp_path: Path) -> None:
    write_record(tmp_path, "StoP-0.25", 0, 0.5)
    write_record(tmp_path, "other", 0, 0.5, answers=[], curve=[], problem="not finite", seconds=0.0)
    assert "| other | - |" in results.all_tables(tmp_path)["claim"]
    assert "| other | 1 | not finite | - | - | - |" in results.all_tables(tmp_path)["claim_health"]
    numbers = results.all_numbers(tmp_path)
    assert numbers["claim.StoP-0.25.knn.mean"] == "50.0"
    assert not [name for name in numbers if "difference" in name or name.endswith("other.minutes")]
    assert results.all_figures(tmp_path)


def test_figures_are_equal_when_drawn_again_and_say_which_data_they_show(records: Path) -> None:
    first = results.all_figures(records)
    assert results.all_figures(records) == first
    assert set(first) == {"results-claim-norms.svg", "results-claim-accuracy.svg"}
    (study,) = results.studies(records)
    marks = {what: results.data(study, what) for what in ("norms", "accuracy")}
    for what, mark in marks.items():
        assert f"data {mark}<" in first[f"results-claim-{what}.svg"]
        assert "StoP-0.25" in first[f"results-claim-{what}.svg"]
    write_record(records, "plain", 0, 0.31)  # which says nothing new of norms
    (study,) = results.studies(records)
    assert results.data(study, "norms") == marks["norms"]
    assert results.data(study, "accuracy") != marks["accuracy"]


def test_a_typed_result_is_found_and_what_is_no_result_is_not() -> None:
    typed = "It gains 1.5 points, 2.5x, (+3.25 %) and -4.0. Then 6.75, the row StoP-0.25 too."
    assert results.typed_decimals(typed) == ["1.5", "2.5", "3.25", "4.0", "6.75", "0.25"]
    fine = (
        "On 2026-11-15, with torch 2.13.0 and `sigma 0.0625`, 3 seeds.\n"
        "See [it](figures/results-0.5.svg). <!-- number: a.b-0.25.c -->12.3<!-- end --> percent\n"
        "<!-- table: a -->\n\n| b | 1.5 |\n\n<!-- end -->\n\n"
        "```sh\nstopmim ablate claim.yaml --positions.sigma 0.0625\n```\n"
    )
    assert results.typed_decimals(fine) == []
