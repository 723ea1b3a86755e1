"""A fitted model: what `muster sim fit` writes and `muster sim what-if` reads.

Owns: the carrier, its file (JSON, versioned), the errors of a file that is none. Promise: what was
written reads back equal; a file of another format is refused with the way out. Does not cover: how
the figures are found (fit.py), what is done with them (whatif.py).
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from muster.errors import InvalidInput
from muster.types import Value
from sim.rollout.costs import EngineCosts
from sim.rollout.workload import Regime

FORMAT = 1
KIND = "muster-sim-model"
_WAY_OUT = "make one with `muster sim fit --out FILE`"


class Goodness(Value, frozen=True):
    """One quantity as recorded and as the model has it: quantiles 0.1, 0.5, 0.9; units as named."""

    samples: int
    recorded: tuple[float, float, float]
    predicted: tuple[float, float, float]

    @property
    def median_ratio(self) -> float:
        """Predicted over recorded median; 1 where both are 0."""
        if self.recorded[1] == 0:
            return 1.0 if self.predicted[1] == 0 else float("inf")
        return self.predicted[1] / self.recorded[1]


class Model(Value, frozen=True):
    """The workload and the engines of a run. `notes`: what the record could not tell, and how the
    router is given what it did tell."""

    run: str
    regime: Regime
    engine: EngineCosts
    batch_s: float  # recorded time to a trainable batch, median of the warm ones; 0: none
    goodness: dict[str, Goodness]
    notes: tuple[str, ...] = ()
    kind: str = KIND
    format: int = FORMAT


def write(model: Model, path: Path) -> None:
    """As indented JSON. Raises InvalidInput when the file cannot be written."""
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(model), indent=1) + b"\n")
    except OSError as error:
        raise InvalidInput(
            f"cannot be written: {error.strerror}",
            field="--out",
            value=path,
            way_out="name a file in a folder that is there and may be written",
        ) from error


def read(path: Path) -> Model:
    """The model in that file. Raises InvalidInput for what is none."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise _refusal(f"cannot be read: {error.strerror}", path) from error
    try:
        told = msgspec.json.decode(data, type=_Head)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _refusal(f"is no model: {error}", path) from error
    if told.kind != KIND or told.format != FORMAT:
        problem = f"is a {told.kind or 'file'} of format {told.format}, not {KIND} of {FORMAT}"
        raise _refusal(problem, path)
    try:
        return msgspec.json.decode(data, type=Model)
    except msgspec.DecodeError as error:
        raise _refusal(f"is a damaged model: {error}", path) from error


class _Head(Value, frozen=True):
    kind: str = ""
    format: int = 0


def _refusal(problem: str, path: Path) -> InvalidInput:
    return InvalidInput(problem, field="--model", value=path, way_out=_WAY_OUT)
