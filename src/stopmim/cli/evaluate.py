"""``stopmim eval``: one subcommand per protocol, made from its options, and two for several."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, make_dataclass, replace
from pathlib import Path
from textwrap import fill
from typing import Annotated, Any, Union, get_args, get_origin

from tyro import MISSING
from tyro.conf import Positional, arg, subcommand

from stopmim.cli.options import option
from stopmim.evals import protocols
from stopmim.evals.protocols import Protocol
from stopmim.evals.request import Request
from stopmim.evals.results import destination, record

ENCODER = "run, checkpoint, released file, timm:NAME, or random:ARCH@SIZE"
OTHER = "another, compared with A"


def _command(name: str, about: str | None, kinds: Sequence[type[Protocol]], **encoders: str) -> Any:
    """A subcommand with the options of `kinds`, their shared options, and positional `encoders`."""
    request = protocols.request_for(kinds)
    shared = {f.name for f in fields(Request)}
    images = [(f.name, f.type, f.default) for f in fields(request) if f.name not in shared]
    # The last base comes first in the help: the images, before dozens of options.
    bases = (request, *reversed(kinds), make_dataclass("Images", images, frozen=True))
    names = {f.name: f for base in bases for f in fields(base)}
    own: list[Any] = [
        (f.name, Annotated[get_args(f.type)[0], option(get_args(f.type)[1])], f.default)
        for f in names.values()
        if get_origin(f.type) is Annotated
    ]
    for encoder, text in encoders.items():
        shown = arg(metavar=encoder.upper(), help=text)
        own.append((encoder, Annotated[Positional[str], shown], field(default=MISSING)))
    body: dict[str, Any] = {"__doc__": about, "kinds": kinds, "encoders": tuple(encoders)}
    body["__post_init__"] = lambda self: None  # protocols and request check their own fields
    kind = make_dataclass(name.capitalize(), own, bases=bases, namespace=body, frozen=True)
    return Annotated[kind, subcommand(name)]


_SUITE = "Everything the data allow, in one table: text, Markdown, HTML and JSON."
_COMPARE = "Two encoders on the same test images, with a paired test."
_COMMANDS: Any = Union[
    (
        *(_command(k.name, k.__doc__, [k], encoder=ENCODER) for k in protocols.PROTOCOLS),
        _command("suite", _SUITE, protocols.SUITE, encoder=ENCODER),
        _command("compare", _COMPARE, protocols.IMAGE_BY_IMAGE, a=ENCODER, b=OTHER),
    )
]


@dataclass(frozen=True)
class Eval:
    """Measure what a frozen encoder knows."""

    protocol: _COMMANDS

    def __call__(self) -> None:
        options = vars(self.protocol)
        names = [options[encoder] for encoder in self.protocol.encoders]
        show: Any = _contrast if len(names) > 1 else _report
        print(show(*names, *protocols.from_options(self.protocol.kinds, options)))


def _report(name: str, kinds: Sequence[Protocol], request: Request) -> str:
    """Measures the encoder called `name` and returns a table; several protocols also make pages."""
    from stopmim.base.console import visible
    from stopmim.evals import suite, table

    inputs, facts = suite.open_inputs(name, kinds, request)
    lines = destination(name, request.out)
    results = suite.suite(inputs, kinds)
    record(lines, [result.as_dict() for result in results], facts)
    parts = [table.text(table.rows(results))]
    if ends := table.conclusions(results, facts):
        parts += [table.LEGEND, *(fill(sentence, 80, break_on_hyphens=False) for sentence in ends)]
    if len(kinds) > 1 and lines is not None:
        title = f"Evaluation of {Path(name).name or name}"
        before = table.replaced_data(lines.parent)
        page = str(table.write_pages(lines.parent, results, title, facts))
        other = before and before != facts["test_data"]
        parts.append(f"{page}, in place of the one on {visible(before)}" if other else page)
    return "\n\n".join(parts)


def _contrast(a: str, b: str, kinds: Sequence[Protocol], request: Request) -> str:
    """Compares two encoders on the same images by a paired test and returns a table."""
    from stopmim.evals import compare, inputs, suite, table

    ours, facts = suite.open_inputs(a, kinds, request)
    encoder, step = inputs.open_at(b, request.branch)
    names = f"A: {a}{_at(facts['step'])}", f"B: {b}{_at(step)}"
    found = compare.compare(ours, replace(ours, encoder=encoder), kinds, names)
    facts = {"A": a, "B": b} | facts | {"encoder": b, "step": step}
    record(destination(None, request.out), [c.as_dict() for c in found], facts)
    end = compare.conclusion(found, a, b, facts["test_data"])
    return "\n\n".join(
        ["\n".join(names), table.text(table.compared(found)), table.PAIRED, fill(end, 80)]
    )


def _at(step: int | None) -> str:
    return "" if step is None else f", step {step}"
