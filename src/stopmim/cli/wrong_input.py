"""Messages about a wrong command line: turns each of tyro's boxes into one line."""

import re

from stopmim.base.errors import did_you_mean
from stopmim.config.schema import Config, flatten

TAKE_KEYS = ("demo", "pretrain", "ablate", "check", "bench")  # commands with config keys
GROUPS = ("eval", "bench")  # commands with subcommands
REWORDED = {  # tyro's messages about values -> ours
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
# A required argument with a fixed set of values, whose help is one line per value.
_MEANINGS = re.compile(r"((?:--\S+ )?(?:\{.*?\}|[A-Z]+)) (\w+: [^;]+;.*) \(required\)")


def command_of(words: list[str]) -> str:
    """The command that `words` begin with, such as "eval knn"."""
    return " ".join(word for word in words[: 1 + (words[0] in GROUPS)] if word.isalpha())


def one_line(box: str, words: list[str]) -> str:
    """The message in one of tyro's titled boxes, as one line."""
    text = re.sub(r"[\u2500-\u257f]|-{3,}", " ", box)  # lines and corners
    _, *lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    text = " ".join(lines).partition("For full helptext")[0]
    message, _, near = text.partition("Perhaps you meant:")
    known = re.search(r"(?:Available subcommands: |Expected one of \{)([\w, ]+)", message)
    if known and (unknown := _no_such_command(words, known[1].strip().split(", "))):
        return unknown
    close = near.split()[0] if near else ""
    if option := re.match(r"Unrecognized (or misplaced )?options: (--[\w.-]+)", message):
        message = f"{command_of(words)}: no option {option[2]}"
        # Tyro suggests an option of another command; a config key may have this name.
        if option[1] or not close:
            name = option[2].removeprefix("--").replace("-", "_")
            keys = dict(flatten(Config().model_dump(mode="json"))) if words[0] in TAKE_KEYS else {}
            close = next((f"--{key}" for key in keys if key.split(".")[-1] == name), "")
    elif extra := re.match(r"Unrecognized options: ([^-].*)", message):
        message = f'{command_of(words)}: one argument too many: "{extra[1].strip()}"'
    elif choice := re.match(r"invalid choice '(.*)' for argument '(\S+)'\. (.*)", message):
        names = re.findall(r"'([^']*)'", choice[3])
        where = f"{choice[2]}: " if choice[2].startswith("-") else ""
        choices = f"{did_you_mean(choice[1], names)}there are {', '.join(names)}"
        message = f"{command_of(words)}: {where}invalid choice '{choice[1]}'; {choices}"
    message = _MEANINGS.sub(_names_alone, message)
    for theirs, ours in REWORDED.items():
        message = re.sub(theirs, ours, message)
    close = close.rstrip(",")  # of a flag with its opposite
    hint = did_you_mean(close, [close]) if close else ""
    return f"{message.strip(' .,')}; {hint}see stopmim {command_of(words)} --help"


def _no_such_command(words: list[str], names: list[str]) -> str:
    """The message about a command that is missing or not one of `names`; "" if it is one."""
    above = [word for word in words[:1] if word in GROUPS]
    word = next(iter(words[len(above) :]), "")
    if word in names:
        return ""
    given = f'no command "{word}"' if word else "a command is missing"
    return ": ".join([*above, f"{given}; {did_you_mean(word, names)}there are {', '.join(names)}"])


def _names_alone(missing: re.Match[str]) -> str:
    """A missing argument with the names of its values, and without their meanings."""
    what = "" if missing[1].startswith("{") else f"{missing[1]}, "
    names = re.findall(r"(?:^|; )(\w+): ", missing[2])
    return f"{what}one of {', '.join(names)}"
