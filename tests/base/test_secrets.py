"""Credentials in URLs: out of everything that is shown, and back where they are needed."""

import os

import pytest

from stopmim.base.secrets import VARIABLE, hide, remember, reveal, shown


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stopmim.base.secrets._made", {})
    monkeypatch.setenv(VARIABLE, "{}")


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("https://me:pw@host:80/a-{0..3}.tar?sig=pw/x#pw", "https://host:80/a-{0..3}.tar"),
        ("--data=s3://key:pw@bucket/*.tar", "--data=s3://bucket/*.tar"),
        ("knn=https://me:p'w@host/x", "knn=https://host/x"),
        ("GET 'https://host/x?token=pw' failed", "GET 'https://host/x failed"),
        ("https://host/x?pw,https://me:pw@host/y", "https://host/xhttps://host/y"),
        ("https://me:pw/pw@host/x", "https://..."),  # a password that is not escaped
        ("hf://datasets/me/set@main/x.parquet", "hf://datasets/me/set@main/x.parquet"),
        ("http://[::1]:8000/x.tar", "http://[::1]:8000/x.tar"),
        ("a?b@c", "a?b@c"),
    ],
)
def test_what_may_be_shown(text: str, safe: str) -> None:
    assert shown(text) == safe
    assert os.environ[VARIABLE] == "{}"
    assert hide(text) == safe
    assert hide(safe) == safe


def test_a_url_comes_back_in_full_here_and_in_processes_started_from_here() -> None:
    full = "https://me:pw@host/{0..9}.tar?sig=1"
    assert reveal(hide(full)) == full
    assert full in os.environ[VARIABLE]
    assert reveal("https://other/x.tar") == "https://other/x.tar"
    newer = full.replace("sig=1", "sig=2")
    assert reveal(hide(newer)) == newer
    made = "https://me:pw@host/7.tar?sig=2"
    assert reveal(remember(made)) == made
    assert made not in os.environ[VARIABLE]  # which has no room for thousands


def test_a_variable_that_is_no_table_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("[", "[]", ""):
        monkeypatch.setenv(VARIABLE, text)
        assert reveal("https://host/x") == "https://host/x"
