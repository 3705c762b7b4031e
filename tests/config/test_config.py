"""Every key: its typo is caught, its type is exact, its bounds hold, and something reads it."""

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stopmim.base.errors import UserError
from stopmim.config.presets import PRESETS
from stopmim.config.schema import (
    Config,
    flatten,
    from_yaml,
    override,
    resolve,
)
from stopmim.config.yaml_text import parse_yaml, to_yaml
from stopmim.method.build import configure, describe

SOURCE = Path(__file__).parents[2] / "src" / "stopmim"
KEYS = dict(flatten(Config().model_dump(mode="json")))
RIGHT = [("init", "sixteen"), ("class_token", True), ("norm_pixels", True)]  # as it happens


@pytest.mark.parametrize("key", KEYS)
def test_a_misspelt_key_is_named_with_the_near_one(key: str) -> None:
    *sections, name = key.split(".")
    wrong = ".".join([*sections, name + name[-1]])  # a letter typed twice
    with pytest.raises(UserError, match=re.escape(f'{wrong}: unknown key; did you mean "{key}"?')):
        override(Config(), {wrong: KEYS[key]})


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("value", ["sixteen", True, [1, 2, 3, "x"], {"a": 1}], ids=str)
def test_a_value_of_the_wrong_type_is_named_with_its_key(key: str, value: Any) -> None:
    if (key, value) in RIGHT:
        assert getattr(override(Config(), {key: value}), key) == value
        return
    expected = "unknown arch 'sixteen'" if (key, value) == ("arch", "sixteen") else key
    with pytest.raises(UserError, match=re.escape(expected)) as caught:
        override(Config(), {key: value})
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"positions.sigma": -1}, "positions.sigma: input should be greater than or equal to 0"),
        ({"positions.sigma": float("nan")}, "positions.sigma: input should be a finite number"),
        ({"positions.sigma": float("inf")}, "positions.sigma: input should be a finite number"),
        ({"optim.ema": [0.9, 1.1]}, "optim.ema.1: input should be less than or equal to 1"),
        ({"optim.lr": 0}, "optim.lr: input should be greater than 0"),
        ({"optim.epochs": 0}, "optim.epochs: input should be greater than or equal to 1"),
        ({"optim.epochs": 2.5}, "optim.epochs: input should be a valid integer, got 2.5"),
        ({"optim.batch_size": "8"}, "optim.batch_size: input should be a valid integer, got '8'"),
        ({"optim.warmup_epochs": 700}, "optim: warmup_epochs 700 is more than 600 epochs"),
        ({"image_size": 225}, "image_size: patch 16 of vit_b16 does not divide 225; 224 works"),
        ({"image_size": 3}, "does not divide 3; 16 works"),
        ({"arch": "vit_x16"}, "unknown arch 'vit_x16': expected vit_<size><patch>"),
        ({"arch": "resnet50"}, "unknown arch 'resnet50'"),
        ({"predictor.width": 100, "predictor.heads": 3}, "100 is not divisible by 3 heads"),
        ({"predictor.width": 10}, "predictor.width: input should be a multiple of 4"),
        ({"runtime.accumulate": 3}, "3 parts do not divide the batch of 2048"),
        ({"runtime.keep": 1}, "runtime.keep: input should be greater than or equal to 2"),
        (
            {"masking.context_length": 1.5},
            "masking.context_length: must be a number of patches, or",
        ),
        ({"masking.context_length": 0}, "context_length: must be a number of patches, or a share"),
        ({"data.crop_scale": [1.0, 0.3]}, "data.crop_scale: must be 0 < smallest <= largest"),
        ({"masking.target_scale": [0.0, 0.2]}, "masking.target_scale.0: input should be greater"),
        ({"masking.ratio": 0.5}, "masking: ratio has no effect with kind: multiblock"),
        ({"positions": {"kind": "sincos", "sigma": 0.1}}, "sigma has no effect with kind: sincos"),
        ({"compat": "released", "positions.tokens": "both"}, "no effect with compat: released"),
        ({"positions": {"kind": "sincos", "share": 0.5}}, "share has no effect with kind: sincos"),
        ({"positions": {"kind": "learned", "ramp": 1}}, "ramp has no effect with kind: learned"),
        ({"positions.share": 0}, "positions.share: input should be greater than 0"),
        ({"positions.ramp": 601}, "positions.ramp 601 is more than 600 epochs"),
        ({"norm_pixels": False}, "norm_pixels has no effect with target: features"),
        ({"target": "pixels", "compat": "released"}, "the released code predicts features"),
        (
            {"target": "pixels", "optim.ema": [0.9, 1]},
            "ema has no effect with target: pixels",
        ),
        ({"positions": 3}, "positions: input should be an object, got 3"),
        ({"arch.size": 3}, "arch.size: arch is not a section"),
        ({"nothing": 3}, "nothing: unknown key; there are arch, image_size"),
    ],
    ids=str,
)
def test_what_cannot_work_is_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        override(Config(), changes)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    "changes", [{"positions.kind": "sincos"}, {"positions": {"kind": "sincos"}}]
)
def test_the_twin_of_a_run_with_a_sigma_of_its_own_is_one_key_away(changes: dict[str, Any]) -> None:
    noisy = override(Config(), {"positions.sigma": 0.1, "positions.share": 0.5, "optim.lr": 0.01})
    twin = override(noisy, changes)
    assert twin.positions == Config.model_validate({"positions": {"kind": "sincos"}}).positions
    assert twin.optim == noisy.optim
    same = override(noisy, {"positions.kind": "stochastic", "positions.share": 0.25})
    assert (same.positions.sigma, same.positions.share) == (0.1, 0.25)  # nothing was changed here
    moved = override(noisy, {"positions.sigma": 2.0, "positions.kind": "jitter"})
    assert (moved.positions.sigma, moved.positions.share) == (2.0, 1.0)


def test_all_mistakes_are_reported_at_once() -> None:
    with pytest.raises(UserError) as caught:
        from_yaml("positions: {sgima: 0.1}\noptim: {lr: fast}\n", "my.yaml")
    assert str(caught.value).splitlines() == [
        'my.yaml: positions.sgima: unknown key; did you mean "positions.sigma"?',
        "my.yaml: optim.lr: input should be a valid number, got 'fast'",
    ]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),  # plain YAML 1.1 reads a string
        ("1E3", 1000.0),
        (".5", 0.5),
        ("no", "no"),  # YAML 1.1 reads False
        ("on", "on"),
        ("010", "010"),  # YAML 1.1 reads 8
        ("0x10", "0x10"),
        ("12:30:00", "12:30:00"),  # YAML 1.1 reads 45000
        ("true", True),
        ("null", None),
        ("[0.1, 2]", [0.1, 2]),
    ],
)
def test_yaml_has_no_surprises(text: str, value: Any) -> None:
    got = parse_yaml(text, "test")
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 1\nseed: 2\n", "my.yaml: line 2: duplicate key 'seed'"),
        ("a: &x [1]\nb: *x\n", "my.yaml: line 2: aliases are not supported"),
        ("a: !!python/object/apply:os.system ['touch canary']\n", "my.yaml: line 1: could not"),
        ("a: [1, 2\n", "my.yaml: line 2"),
        ("[" * 5000, "my.yaml: nested too deeply"),
        ("#" * 1_000_001, "my.yaml: larger than 200000 characters"),
        ("\x00", "my.yaml"),
        ("- 1\n", "my.yaml: config: input should be an object"),
    ],
    ids=lambda text: text[:20],
)
def test_hostile_yaml_is_refused_with_its_line(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=re.escape(message)):
        from_yaml(text, "my.yaml")
    assert not list(tmp_path.iterdir())


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=60))
def test_any_text_is_a_config_or_a_user_error(text: str) -> None:
    with contextlib.suppress(UserError):
        assert isinstance(from_yaml(text, "fuzz"), Config)


@settings(max_examples=300, deadline=None)
@given(
    key=st.sampled_from([*KEYS]),
    value=st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5),
        st.lists(st.floats(), max_size=3),
    ),
)  # fmt: skip
def test_any_value_of_any_key_is_accepted_or_named(key: str, value: Any) -> None:
    said = ""
    try:
        json.dumps(override(Config(), {key: value}).model_dump(mode="json"), allow_nan=False)
    except UserError as error:
        said = str(error)
    assert not said or key.split(".")[-1] in said


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_valid_documented_and_survives_a_round_trip(name: str) -> None:
    config = configure(name)
    assert from_yaml(describe(config), "round trip") == config
    preset = PRESETS[name]
    assert preset.name == name
    assert preset.about.endswith(".")
    assert f"--preset {name} --out" in preset.command


@pytest.mark.parametrize(
    ("preset", "sigma", "side"),
    [
        ("ablation_b16_stop", 0.25, 14),
        ("vit_b16_stop", 0.25, 14),
        ("vit_l16_stop", 0.25, 14),
        ("vit_h14_stop", 0.2, 16),
        ("vit_b16_stop_released", 0.0625, 14),
        ("vit_h16_stop_released", 0.04, 14),
        ("vit_b16_ijepa", None, 14),
    ],
)
def test_sigma_is_the_papers_variance_and_the_released_deviation(
    preset: str, sigma: float | None, side: int
) -> None:
    config = configure(preset)
    assert config.positions.sigma == (sigma if sigma is None else pytest.approx(sigma))
    assert config.side == side
    if sigma is not None:
        given_number = configure(preset, {"positions.sigma": 0.3})
        assert given_number.positions.sigma == 0.3  # a given number is a variance in every mode


def test_a_twin_differs_in_its_positions_and_has_the_learning_rate_of_ijepa() -> None:
    """The paper lowered it for StoP with ViT-B and ViT-L; the released code has one config."""
    twins = [name for name in PRESETS if "_ijepa" in name]
    assert len(twins) == 8
    for name in twins:
        stop = dict(flatten(configure(name.replace("_ijepa", "_stop")).model_dump()))
        ijepa = dict(flatten(configure(name).model_dump()))
        different = {key for key in stop if stop[key] != ijepa[key]}
        lowered = {"optim.lr"} if name in ("vit_b16_ijepa", "vit_l16_ijepa") else set()
        assert different == {"positions.kind", "positions.sigma"} | lowered, name
        if not name.endswith("_released"):
            assert ijepa["optim.lr"] == 1e-3
            assert PRESETS[name].notes


def test_the_released_mode_turns_every_quirk_on_and_can_be_taken_apart() -> None:
    config = resolve(Config(compat="released"))
    assert (config.masking.compat, config.data.augmentation) == ("released", "released")
    apart = configure(config, {"masking.compat": "none", "data.augmentation": "crop"})
    assert (apart.masking.compat, apart.data.augmentation) == ("none", "crop")


@pytest.mark.parametrize("key", KEYS)
def test_something_reads_every_key(key: str) -> None:
    name = key.split(".")[-1]
    readers = [
        p for p in SOURCE.rglob("*.py") if p.name not in ("schema.py", "data.py", "presets.py")
    ]
    found = re.compile(rf'(\.{name}\b|"{name}")')
    assert any(found.search(path.read_text()) for path in readers), key


def test_every_key_of_the_yaml_says_what_it_means_or_is_plain() -> None:
    text = to_yaml(resolve(Config()))
    plain = {"image_size", "seed", "width", "epochs", "lr", "warmup_epochs", "betas", "device"}
    for line in text.splitlines():
        name, _, rest = line.strip().partition(":")
        assert "#" in rest or name in plain or rest == "", line


@pytest.mark.parametrize(
    "changes",
    [
        {"masking.context_length": 180},
        {"masking.target_scale": [0.9, 1.0]},
        {"masking.target_aspect": [0.05, 0.05]},
        {"arch": "vit_b112"},
        {"compat": "released", "arch": "vit_b28"},
        {"image_size": 96, "masking.target_scale": [0.5, 0.6], "masking.context_scale": [0.6, 0.6]},
        {"image_size": 96, "masking": {"kind": "random", "ratio": 0.98}},
        {"image_size": 16, "masking": {"kind": "random"}},
    ],
    ids=str,
)
def test_masks_that_cannot_exist_are_refused_before_training(changes: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="config: masking: ") as caught:
        configure("vit_b16_stop", changes)
    assert len(str(caught.value).splitlines()) == 1
