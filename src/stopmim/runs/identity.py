"""Identity of a run: its id, the config that decides its numbers, its data, its threads.

They are in run.json, sealed by a hash so that edits by hand are noticed, and in every checkpoint,
which therefore loads into no other run and can restore run.json. Runs of old versions have neither
id nor seal; for these only the config is compared.
"""

import hashlib
import json
from collections.abc import Container, Mapping
from pathlib import Path
from shlex import quote
from typing import Any

from stopmim.base.errors import CheckpointError, UserError
from stopmim.base.files import read_regular
from stopmim.config.schema import MOST_THREADS, Config, flatten
from stopmim.data.loading import steps_per_epoch

About = dict[str, Any]  # run.json

# Keys that a command may change on resume, at the cost of rounding. Edits in run.json are refused.
ROUNDING = frozenset(
    f"runtime.{name}"
    for name in (
        *("accumulate", "compile", "device", "kernels", "parallel"),
        *("precision", "recompute", "residual", "threads"),
    )
)


def read_about(path: Path) -> About:
    """run.json of the run directory `path`; raises CheckpointError."""
    try:
        tree = json.loads(read_regular(path / "run.json"))
        if isinstance(tree, dict):
            return tree
        why = "run.json holds no object"
    except FileNotFoundError:
        why = "there is no run.json in it" if path.is_dir() else "no such folder"
    except (OSError, ValueError, RecursionError) as error:
        why = f"run.json: {error}"
    raise CheckpointError(f"{path}: not a run directory: {why}")


def about_if_any(path: Path) -> About:
    """run.json, or {} if it cannot be read: a checkpoint can be used without it."""
    try:
        return read_about(path)
    except CheckpointError:
        return {}


def begun(path: Path) -> About:
    """run.json, checked to have what a resumed run needs, as it was written."""
    about = read_about(path)
    if not is_complete(about):
        what = "run.json is not as stopmim writes it"
        raise CheckpointError(
            f"{path}: not a run directory: {what}; see stopmim repair {quote(str(path))}"
        )
    if problem := broken_seal(about):
        what = f"{problem}: undo the change, or restore it with stopmim repair {quote(str(path))}"
        raise CheckpointError(f"{path / 'run.json'}: {what}")
    return about


def is_complete(about: About) -> bool:
    match about:
        case {
            "config": {},
            "data": {"source": _, "images": int(), "fingerprint": _},
            "starts": [{"threads": int(threads)}, *_],
        }:
            return type(threads) is int and 1 <= threads <= MOST_THREADS
    return False


def planned(about: About) -> int | None:
    """Updates of the whole run; None if run.json, which may hold anything, does not say."""
    try:
        config = Config.model_validate_json(json.dumps(about["config"]))
        return config.optim.epochs * steps_per_epoch(range(about["data"]["images"]), config)
    except (UserError, KeyError, TypeError, ValueError, OverflowError):
        return None


def sealed(about: About) -> About:
    """`about` with the hash of everything that decides the numbers of the run."""
    return about | {"check": _seal(about)} if "id" in about else about


def broken_seal(about: About) -> str:
    """Description of a broken seal of a complete run.json, or ""."""
    if "id" not in about and "check" not in about:  # of an old version
        return ""
    found, wanted = about.get("check"), _seal(about)
    if found in (wanted, _seal(about, frozenset())):  # older versions did not seal runtime.*
        return ""
    return f"changed since it was written (check {found!r}, of its content {wanted!r})"


def _seal(about: About, rounding: Container[str] = ROUNDING) -> str:
    pairs = flatten(about["config"])
    config = {key: value for key, value in pairs if not is_free(key) or key in rounding}
    threads = about["starts"][0]["threads"]
    what = [about.get("id"), config, about["data"], threads]
    text = json.dumps(what, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def is_free(key: str) -> bool:
    """Whether a resumed run may have another value for this key."""
    return key.startswith("runtime.") or key == "data.max_bad"


def changed_key(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """The first key that decides the numbers of a run and differs, with both values."""
    default = dict(flatten(Config().model_dump(mode="json")))  # old configs may lack newer keys
    before, now = (default | dict(flatten(config)) for config in (old, new))
    for key in sorted(before.keys() | now.keys()):
        if not is_free(key) and before.get(key) != now.get(key):
            return key, before.get(key), now.get(key)
    return None


# ------------------------------------------------------------------------------ checkpoints


def binding(about: About) -> dict[str, Any] | None:
    """Identity of the run, for its checkpoints, besides the config; None for old versions."""
    if "id" not in about or not is_complete(about):
        return None
    return {"id": about["id"], "data": about["data"], "start": about["starts"][0]}


def rebuilt(state: Mapping[str, Any]) -> About | None:
    """run.json from the state of a checkpoint; None if an old version saved it."""
    match state:
        case {"config": {} as config, "run": {"id": str(name), "data": data, "start": start}}:
            about = {"id": name, "config": config, "data": data, "starts": [start]}
            return sealed(about) if is_complete(about) else None
    return None


def foreign(about: About, state: Mapping[str, Any]) -> str | None:
    """Reason why a checkpoint with this `state` is of another run than this run.json, or None."""
    config, own = state.get("config"), state.get("run")
    if not isinstance(about.get("config"), dict) or not isinstance(config, dict):
        return None  # not of a run; reported where it is needed
    run = own if isinstance(own, dict) else {}
    if key := changed_key(config, about["config"]):
        return f"its {key[0]} is {key[1]!r}, that of run.json {key[2]!r}"
    ids = run.get("id"), about.get("id")
    if ids[0] != ids[1]:
        return f"its run id is {ids[0]!r}, that of run.json {ids[1]!r}"
    prints = [_fingerprint(one.get("data")) for one in (run, about)]
    if run and prints[0] != prints[1]:
        return f"its data fingerprint is {prints[0]!r}, that of run.json {prints[1]!r}"
    return None


def _fingerprint(data: object) -> object:
    return data.get("fingerprint") if isinstance(data, dict) else None
