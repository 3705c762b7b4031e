"""The words of a command line: config keys among them, and what to say of those that are wrong."""

import re
from typing import Any, get_origin

from stopmim.base.errors import UserError, did_you_mean
from stopmim.config.schema import Config, Section, flatten, takes_text, type_of
from stopmim.config.yaml_text import parse_yaml

TAKE_KEYS = ("demo", "pretrain", "ablate", "check", "bench")  # --optim.lr 1e-3 and the like
REWORDED = {  # what tyro says of a value, in our words
    r"Missing from stopmim ([\w ]+):": r"\1: missing",
    r"((?:--\S+ )?(?:\{.*?\}|[A-Z]+\b)) ([^()]*) \(required\)": r"\1 (\2),",
    r"Missing value for argument '(\S+)'.*": r"\1: a value is missing",
    r"Error parsing (\S+): .*literal for int.*? ('.*') Argument helptext.*": (
        r"\1: expected a whole number, got \2"
    ),
    r"Error parsing (\S+): .*string to float: ('.*') Argument helptext.*": (
        r"\1: expected a number, got \2"
    ),
}


def one_line(box: str, words: list[str]) -> str:
    """What tyro says in a titled box, as one line."""
    text = re.sub(r"[\u2500-\u257f]|-{3,}", " ", box)  # its lines and corners
    _, *lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    text = " ".join(lines).partition("For full helptext")[0]
    said, _, near = text.partition("Perhaps you meant:")
    known = re.search(r"(?:Available subcommands: |Expected one of \{)([\w, ]+)", said)
    if known and (lost := _no_such_command(words, known[1].strip().split(", "))):
        return lost
    close = near.split()[0] if near else ""
    if unknown := re.match(r"Unrecognized (or misplaced )?options: (--[\w.-]+)", said):
        said = f"{words[0]}: no option {unknown[2]}"
        if unknown[1]:  # what is near is an option of another command
            close = _key_of(unknown[2]) if words[0] in TAKE_KEYS else ""
    hint = f'did you mean "{close}"?' if close else ""
    if extra := re.match(r"Unrecognized options: ([^-].*)", said):
        said = f'{words[0]}: one argument too many: "{extra[1].strip()}"'
    for theirs, ours in REWORDED.items():
        said = re.sub(theirs, ours, said)
    given = words[: 2 if words[:1] == ["eval"] else 1]
    command = " ".join(["stopmim", *(word for word in given if word.isalpha()), "--help"])
    return "; ".join(filter(None, [said.strip(" .,"), hint, f"see {command}"]))


def _key_of(option: str) -> str:
    """The option of a config key that has this name without its section, or nothing."""
    name = option.removeprefix("--").replace("-", "_")
    keys = [key for key, _ in flatten(Config().model_dump(mode="json"))]
    return next((f"--{key}" for key in keys if key.split(".")[-1] == name), "")


def _no_such_command(words: list[str], names: list[str]) -> str:
    """What to say of a command that is not one of `names`, or is not there; else nothing."""
    above = [word for word in words[:1] if word == "eval"]
    word = next(iter(words[len(above) :]), "")
    if word in names:
        return ""
    given = f'no command "{word}"' if word else "a command is missing"
    return ": ".join([*above, f"{given}; {did_you_mean(word, names)}there are {', '.join(names)}"])


def split_changes(words: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Takes the options that are config keys (``--optim.lr 1e-3``) out of the command line."""
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
    """Whether a bare name is a config key; a section is none, and may be a command's option."""
    known = Config.model_fields.get(key)
    return known is not None and not isinstance(known.default, Section)


def _arity(key: str) -> int:
    """How many words a config key takes: two for a pair, as ``--optim.ema 0.996 1``."""
    return 2 if get_origin(type_of(key)) is tuple else 1


def printable(text: str) -> str:
    """`text` without control characters or halves of characters, safe for a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
