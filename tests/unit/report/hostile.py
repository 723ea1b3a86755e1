"""Text that a box may print to harm whoever looks at it."""

from __future__ import annotations

PAYLOADS = (
    "<script>window.harmed=1;alert(1)</script>",
    "</script><script>window.harmed=2</script>",
    "<img src=x onerror=window.harmed=3>",
    "<svg/onload=window.harmed=4>",
    '"><iframe src=javascript:window.harmed=5>',
    "<!--<script>window.harmed=6",
    "]]><script>window.harmed=7</script>",
    "javascript:window.harmed=8",
    "<a href=http://harm.invalid/x>x</a><link rel=stylesheet href=http://harm.invalid/y>",
    "<style>@import 'http://harm.invalid/z';</style>",
    "<meta http-equiv=refresh content='0;url=http://harm.invalid/'>",
    "<base href=http://harm.invalid/>",
    "{{constructor.constructor('window.harmed=9')()}}",
    "${window.harmed=10}`${window.harmed=11}`",
    "\x1b]0;pwn\x07\x1b[2J\x1b[31mred\x1b[0m",
    "\x1b]8;;http://harm.invalid/\x1b\\link\x1b]8;;\x1b\\",
    "\x1b]52;c;cHduCg==\x07",
    "\x1bP+q544e\x1b\\\x9b2J\x9d0;x\x9c",
    "over\rwrite\x08\x08\x7f\x00",
    "user\u202etxt.exe\u2066\u2069\u200b\u200f\ufeff",
    "\u2028\u2029\U000e0041\ud800",
    "[bold red]markup[/] [link=http://harm.invalid]x[/link]",
    '=HYPERLINK("http://harm.invalid")',
)

SECRETS = (
    "sk-proj-abcdefghijklmnopqrstuv",
    "AKIAIOSFODNN7EXAMPLE",
    "ghp_abcdefghijklmnopqrstuvwxyz0123456789",
    "hf_abcdefghijklmnopqrstuvwx",
    "hunter2-hunter2",
    "p4ssw0rd-in-url",
    "dXNlcjpwYXNz",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl",
    "MIIEvQIBADANBgkqhkiG",
    "value-of-a-variable",
)
LEAKS = (
    "export OPENAI_API_KEY=sk-proj-abcdefghijklmnopqrstuv",
    "aws AKIAIOSFODNN7EXAMPLE",
    "git clone https://ghp_abcdefghijklmnopqrstuvwxyz0123456789@github.com/a/b",
    "login hf_abcdefghijklmnopqrstuvwx",
    "DB_PASSWORD='hunter2-hunter2' run",
    "curl postgres://admin:p4ssw0rd-in-url@db:5432/x",
    "curl -H 'Authorization: Basic dXNlcjpwYXNz' x",
    '{"jwt": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl"}',
    "-----BEGIN RSA PRIVATE KEY-----\nMIIEvQIBADANBgkqhkiG\n-----END RSA PRIVATE KEY-----",
    "echo value-of-a-variable",
)
