"""Credentials in URLs: taken out where a URL comes in, put back where it is fetched.

Between the two, every part of the package sees the URL without ``user:password@`` and without the
query, which may be a signature. So nothing that is printed or written can hold either. Processes
that this one starts inherit them by an environment variable, as they do other credentials.
"""

import json
import os
import re

VARIABLE = "STOPMIM_URLS"  # JSON: a URL as it is shown -> in full

_made: dict[str, str] = {}  # the same, of this process

_URL = re.compile(
    r"([a-zA-Z][a-zA-Z0-9+.-]*)://"
    r"([^/?#\s]*@)?"  # user:password@
    r"((?:(?![a-zA-Z][a-zA-Z0-9+.-]*://)[^?#\s])*)"  # up to a query, or another URL
    r"([?#](?:(?![a-zA-Z][a-zA-Z0-9+.-]*://)\S)*)?"
)
_NO_PORT = re.compile(r"https?://[^/\[\]]*:[^/]*[^/\d]")  # a password that is not escaped


def shown(text: str) -> str:
    """`text` with every URL in it as it may be shown. Libraries quote URLs in their messages."""
    return _URL.sub(_shown_one, text) if "://" in text else text


def hide(text: str) -> str:
    """The same for what a user gives: remembers what is left out, for `reveal`."""
    for found in _URL.finditer(text) if "://" in text else ():
        if (safe := _shown_one(found)) != found[0]:
            os.environ[VARIABLE] = json.dumps(_known() | {safe: found[0]})
    return shown(text)


def remember(url: str) -> str:
    """The same for a URL that is made from what a user gave, as by a pattern; returns it as shown.

    A process that this one starts makes it anew: a variable has no room for thousands.
    """
    safe = shown(url)
    if safe != url:
        _made[safe] = url
    return safe


def reveal(url: str) -> str:
    """The URL in full, if `hide` or `remember` has seen it."""
    return _made.get(url) or _known().get(url, url)


def _shown_one(found: re.Match[str]) -> str:
    scheme, _, rest, _ = found.groups()
    safe = f"{scheme}://{rest}"
    return f"{scheme}://..." if _NO_PORT.match(safe) else safe


def _known() -> dict[str, str]:
    try:
        known = json.loads(os.environ.get(VARIABLE, "{}"))
    except ValueError:
        return {}
    return known if isinstance(known, dict) else {}
