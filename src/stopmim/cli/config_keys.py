"""Config keys in a command line: ``--optim.lr 1e-3``."""

from typing import Any, get_origin

from stopmim.base.errors import UserError
from stopmim.config.schema import Config, Section, takes_text, type_of
from stopmim.config.yaml_text import parse_yaml


def split_changes(words: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Separates the options that are config keys from the other words."""
    rest, changes, words = list[str](), dict[str, Any](), list(words)
    while words:
        word = words.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        key = name.replace("-", "_")
        if not word.startswith("--") or not ("." in key or _is_value(key)):
            rest.append(word)
            continue
        values = [value] if equals else []
        while len(values) < _arity(key) and words:
            values.append(words.pop(0))
            if values[0].startswith("["):
                break
        if not values:
            raise UserError(f"--{name}: a value is missing")
        if takes_text(key) and values[0] != "null":
            changes[key] = values[0]  # as YAML, "runs/first #2" would end before the #
            continue
        parsed = [parse_yaml(v, f"--{name}") for v in values]
        changes[key] = parsed if _arity(key) == 2 and len(parsed) == 2 else parsed[0]
    return rest, changes


def _is_value(key: str) -> bool:
    """Whether a bare name is a config key. A section is not: it may be a command's own option."""
    known = Config.model_fields.get(key)
    return known is not None and not isinstance(known.default, Section)


def _arity(key: str) -> int:
    """Number of words that a key takes: two for a pair, as ``--optim.ema 0.996 1``."""
    return 2 if get_origin(type_of(key)) is tuple else 1
