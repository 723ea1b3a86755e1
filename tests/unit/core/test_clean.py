"""What is shown of untrusted text: nothing that acts, nothing hidden, no secret."""

from __future__ import annotations

import logging
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.clean import MASK, clean, masked, printable, secret_values
from muster.telemetry import JsonFormatter
from tests.unit.report.hostile import LEAKS, PAYLOADS, SECRETS

WRAPS = (
    *("{}", "a{}b", "{}{}", "\n{}", '"{}"', "`{}`"),
    *("\x1b{}", "{}\x1b[0m", "\x9b{}\x07", "\u202e{}"),
)


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("payload", PAYLOADS)
def test_nothing_that_acts_or_hides_is_left(payload: str, wrap: str) -> None:
    for char in clean(wrap.replace("{}", payload)):
        assert char in "\n\t" or unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Zl", "Zp")


@given(st.text(st.characters(codec=None)))
def test_whatever_the_text_it_can_be_printed_and_written(text: str) -> None:
    shown = clean(text, ["another secret"], longest=40)
    assert len(shown) <= 40
    assert shown.encode("utf-8").decode() == shown
    assert printable(shown) == shown


@pytest.mark.parametrize("leak", LEAKS)
def test_secrets_are_masked_wherever_they_stand(leak: str) -> None:
    shown = clean(f"before {leak} after", ["value-of-a-variable"])
    assert MASK in shown
    assert not [secret for secret in SECRETS if secret in shown]


@pytest.mark.parametrize(
    "text",
    [
        "sort --key=2,2n file.txt",
        "sorted(x, key=lambda y: y.name)",
        "turn_tokens_max = 64, tokens: 1234567",
        "payload_key=m:{r}:p:job-0.0.0.1",
        "https://github.com/a/b@main and mail@example.org",
        "the author: someone; a monkey=bananas9; sk-learn",
        "ls -la; cat key.pem",
    ],
)
def test_ordinary_text_is_left_alone(text: str) -> None:
    assert masked(text) == text


def test_values_of_secret_variables_are_known_by_the_variables_names() -> None:
    environ = {
        "HF_TOKEN": "value-of-a-variable",
        "AWS_SECRET_ACCESS_KEY": "another-value",
        "PATH": "/usr/bin:/bin",
        "MY_PASSWORD": "short",
    }
    assert set(secret_values(environ)) == {"value-of-a-variable", "another-value"}


def test_a_huge_text_is_cut_before_it_is_searched() -> None:
    assert len(clean("word " * 10_000_000, longest=100)) == 100


def test_a_log_record_is_one_line_without_secrets() -> None:
    for text in (*PAYLOADS, *LEAKS[:-1]):
        made = logging.makeLogRecord({"name": "x", "msg": text, "extra_text": text})
        line = JsonFormatter("router").format(made)
        assert line.isascii()
        assert line.isprintable()
        assert not [secret for secret in SECRETS if secret in line]
