"""Configs as text: YAML without its traps, and validation errors in one line each."""

import json
import re
import sys
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from stopmim.base.errors import UserError, did_you_mean
from stopmim.base.files import read_regular

Model = TypeVar("Model", bound=BaseModel)
DIGITS = sys.get_int_max_str_digits()

MOST_TEXT = 200_000  # characters, which take two seconds to parse
MOST_MISTAKES = 1000


def parse_yaml(text: str, source: str) -> Any:
    """Plain values from YAML; a UserError names `source` and the line."""
    if len(text) > MOST_TEXT:
        raise UserError(f"{source}: larger than {MOST_TEXT} characters, too large for a config")
    try:
        return _Loader(text).get_single_data()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{source}: line {mark.line + 1}" if mark else source
        what = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise UserError(f"{where}: {what}") from None
    except RecursionError:
        raise UserError(f"{source}: nested too deeply") from None
    except ValueError:  # Python converts no more digits
        raise UserError(f"{source}: a number of more than {DIGITS:,} digits") from None
    except Exception as error:  # an impossible date and the like: errors of many types
        raise UserError(f"{source}: {str(error)[:200]}") from None


def read_yaml(path: Path) -> str:
    """The text of a YAML file that a user names."""
    try:
        return read_regular(path, 4 * MOST_TEXT).decode("utf-8", "replace")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None


def to_yaml(section: BaseModel, indent: str = "") -> str:
    """`section` as YAML that `from_yaml` reads back, every key with its meaning as a comment."""
    lines = []
    for name, field in type(section).model_fields.items():
        about, text, inner = field.description, "", ""
        if isinstance(value := getattr(section, name), BaseModel):
            about, inner = vars(type(value)).get("__doc__"), to_yaml(value, indent + "  ")
        else:
            text = f" {json.dumps(value)}"
        comment = f"  # {about}" if about else ""
        lines.append(f"{indent}{name}:{text}{comment}\n{inner}")
    return "".join(lines)


def validate(model: type[Model], tree: object, source: str) -> Model:
    """A `model` from plain values, or a UserError with one line per mistake."""
    try:
        # Through JSON, because strict mode takes a list for a tuple only from there.
        text = json.dumps(tree, default=repr)
    except ValueError:
        raise UserError(f"{source}: a number of more than {DIGITS:,} digits") from None
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[:MOST_MISTAKES]
        raise UserError(*(f"{source}: {_explain(model, mistake)}" for mistake in first)) from None
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits, or a lone surrogate
        raise UserError(f"{source}: {error}") from None


def _explain(model: type[BaseModel], mistake: Any) -> str:
    *sections, name = map(str, mistake["loc"]) if mistake["loc"] else ("config",)
    prefix = "".join(f"{section}." for section in sections)
    key = f"{prefix}{name}"
    match mistake["type"]:
        case "extra_forbidden":
            node: Any = model
            for section in sections:
                node = node.model_fields[section].annotation
            near = did_you_mean(name, node.model_fields, prefix).rstrip()
            return f"{key}: unknown key; {near or 'there are ' + ', '.join(node.model_fields)}"
        case "value_error":
            text = str(mistake["ctx"]["error"])
            return text if key == "config" else f"{key}: {text}"
        case kind:
            text = mistake["msg"][0].lower() + mistake["msg"][1:]
            names = re.findall("'(.*?)'", text) if kind == "literal_error" else []
            near = did_you_mean(str(mistake["input"]), names).rstrip()
            return f"{key}: {text}, got {mistake['input']!r}{near and f'; {near}'}"


class _Loader(yaml.SafeLoader):
    """YAML with ``1e-4`` as a number and ``no`` as a word, without aliases and duplicate keys."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - emptied, then filled below

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem="aliases are not supported", problem_mark=mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen = set[str]()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="no name", problem_mark=key.start_mark)
            if key.value in seen:
                problem = f"duplicate key {key.value!r}"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


for _tag, _pattern, _first in (
    ("null", r"null|~|", ["n", "~", ""]),
    ("bool", r"true|false", ["t", "f"]),
    ("int", r"[-+]?(0|[1-9]\d*)", [*"-+0123456789"]),
    ("float", r"[-+]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?", [*"-+.0123456789"]),
):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z"), _first
    )
