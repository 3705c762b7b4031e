"""Credentials in URLs: removed where a URL comes in, restored where it is fetched.

In between, the whole package sees the URL without ``user:password@`` and without the query, which
may be a signature, so that neither is ever printed or written. Child processes inherit them through
an environment variable, as they do other credentials.
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
_NO_PORT = re.compile(r"https?://[^/\[\]]*:[^/]*[^/\d]")  # an unescaped password


def shown(text: str) -> str:
    """`text` without credentials in its URLs, which libraries quote in their messages."""
    return _URL.sub(_shown_one, text) if "://" in text else text


def hide(text: str) -> str:
    """`shown` for text that a user gives: stores the credentials for `reveal`."""
    for found in _URL.finditer(text) if "://" in text else ():
        if (safe := _shown_one(found)) != found[0]:
            os.environ[VARIABLE] = json.dumps(_known() | {safe: found[0]})
    return shown(text)


def remember(url: str) -> str:
    """`shown` for a URL derived from a given one, as by a pattern: stores it for `reveal`.

    Child processes derive it again: an environment variable cannot hold thousands.
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
