"""Typed configuration: one TOML file, then the environment, then nothing else.

Owns: reading, merging, and the errors of it. Promise: an unknown key is refused with the nearest
known name, a wrong value names its field, value and what would be right; the result is frozen.
Sections of services are found through the entry-point group `muster.sections`.

Environment: MUSTER_<KEY> for top-level keys, MUSTER_<SECTION>__<KEY> for the others; MUSTER_CONFIG
names the file where a command is given none.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from muster.errors import ConfigError

S = TypeVar("S", bound="Section")
FILE = "MUSTER_CONFIG"


class Section(BaseModel):
    """Base of every section: frozen, unknown keys refused, field docstrings as help."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class RedisConfig(Section):
    """Where streams and payloads live."""

    url: str = ""
    """redis://, rediss:// or unix:// address; empty lets `muster up` start its own."""
    appendfsync: Literal["always", "everysec", "no"] = "everysec"
    """What must survive a power cut: always = everything acknowledged; everysec = all but the last
    two seconds; no = what the kernel had written. The embedded server runs with it, another one
    must keep at least this; below everysec, allow_volatile is needed."""
    allow_volatile: bool = False
    """Accept a server that keeps less than that, no append-only file at all, or evicts keys."""
    maxmemory_bytes: int = Field(0, ge=0)
    """Most memory of the embedded server, which then refuses writes and evicts nothing; 0: all."""
    high_water: float = Field(0.8, gt=0, le=1)
    """Share of the server's maxmemory from which on no new episodes are launched."""
    high_water_bytes: int = Field(0, ge=0)
    """The same mark in bytes, for servers without maxmemory; 0: none."""
    connections_max: int = Field(32, ge=2, le=4096)
    """Connections per process; a caller waits when all are in use."""
    timeout_s: float = Field(10.0, gt=0)
    """Longest wait for a connection or a reply."""


class ModelConfig(Section):
    """The policy's starting point."""

    path: str = "smollm2-135m-instruct"
    """A Hugging Face folder, or the name of a model that set-up converts once."""


class TelemetryConfig(Section):
    """Traces and logs."""

    log_level: str = Field("INFO", pattern="^(DEBUG|INFO|WARNING|ERROR)$")
    """DEBUG, INFO, WARNING or ERROR."""
    traces: bool = True
    """Write spans as JSON lines into the state folder."""
    loop_lag_s: float = Field(60.0, gt=0, le=600)
    """Seconds between two log lines that tell how late the event loop was."""


class TrackingConfig(Section):
    """The figures of each step, publication and evaluation, below state_dir/tracking/RUN."""

    enabled: bool = True
    """Write them as JSON lines, steps.jsonl; from these a restart knows what is written."""
    tensorboard: bool = True
    """Write them as TensorBoard event files too (needs tensorboardX)."""
    batch_figures: bool = True
    """With each step, what the streams say of its batch: rewards, lengths, time to trainable batch
    and its split. The trainer's process reads them for it."""


class Config(Section):
    """Everything a process needs to know, checked."""

    run: str = Field("main", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")
    """Name of the policy lineage; prefix of its streams."""
    state_dir: Path = Path(".muster")
    """Checkpoints, journals, logs, the embedded server's data."""
    advertise_host: str = Field("", pattern=r"^[A-Za-z0-9.:_-]*$")
    """Name or address under which other machines reach this one, announced by services that listen
    on all addresses (0.0.0.0); empty: the address from which this machine reaches Redis."""
    groups_per_batch: int = Field(4, ge=1, le=65536)
    """Groups in a batch: what the trainer leases, and the unit of the admission bound."""
    repairs_max: int = Field(2, ge=0, le=16)
    """Attempts that replace one lost to infrastructure; then the group's policy applies."""
    standbys: bool = False
    """`muster up` runs a second router and a second ready bank that take over at once."""
    replicas: int = Field(1, ge=1, le=64)
    """Inference replicas that `muster up` runs; where inference.threads is 0, they share the cores.
    Each takes its own inference.kv_cache_gib."""
    redis: RedisConfig = RedisConfig()
    model: ModelConfig = ModelConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    tracking: TrackingConfig = TrackingConfig()
    sections: dict[str, Section] = {}
    """Filled by the loader, one entry per service."""

    def section(self, name: str, kind: type[S]) -> S:
        """The section of a service, defaults where the file is silent."""
        found = self.sections[name]
        if not isinstance(found, kind):
            raise TypeError(f"section {name} is {type(found).__name__}, not {kind.__name__}")
        return found

    def tracked(self, run: str) -> Path:
        """Folder of a run's tracked figures (muster/tracking_files.py)."""
        return self.state_dir / "tracking" / run

    def history(self, run: str) -> Path:
        """Folder of the entries that were trimmed from a run's streams (muster/history.py)."""
        return self.state_dir / "history" / run


def load_config(path: Path | None, environ: Mapping[str, str]) -> Config:
    """Read `path` (None: what MUSTER_CONFIG names, else defaults), apply MUSTER_* variables, check
    all sections.

    Raises ConfigError naming the field, the value and the way out.
    """
    if path:
        raw = _read(path, "--config")
    else:
        named = environ.get(FILE, "")
        raw = _read(Path(named), FILE) if named else {}
    kinds = {e.name: e.load() for e in entry_points(group="muster.sections")}
    via = _overlay(raw, environ, kinds)
    known = [k for k in Config.model_fields if k != "sections"]
    for key in raw:
        if key not in known and key not in kinds:
            raise _unknown(key, raw[key], [*known, *kinds], via.get(key, ""))
    top = {k: v for k, v in raw.items() if k in known}
    sections = {n: _check(kind, raw.get(n, {}), n, via) for n, kind in kinds.items()}
    config: Config = _check(Config, top, "", via)
    absolute = config.state_dir.expanduser().resolve()
    return config.model_copy(update={"sections": sections, "state_dir": absolute})


def _read(path: Path, field: str) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            "there is no such file", field=field, value=path, way_out="name a TOML file"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"cannot be read: {error.strerror}",
            field=field,
            value=path,
            way_out="name a TOML file that this user may read",
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"not valid TOML: {error}", field=field, value=path, way_out="mend that line"
        ) from error


def _overlay(
    raw: dict[str, Any], environ: Mapping[str, str], kinds: Mapping[str, type[Section]]
) -> dict[str, str]:
    """Put the variables over the file; which variable each key comes from."""
    via: dict[str, str] = {}
    for name, value in sorted(environ.items()):
        if not name.startswith("MUSTER_") or name.startswith(_NOT_CONFIGURATION):
            continue
        section, _, key = name.removeprefix("MUSTER_").lower().rpartition("__")
        target = raw.setdefault(section, {}) if section else raw
        if not isinstance(target, dict) or (section and section not in {*kinds, *_TOP_SECTIONS}):
            raise _unknown(section, value, [*kinds, *_TOP_SECTIONS], via=name)
        target[key] = value
        via[f"{section}.{key}" if section else key] = name
    return via


_NOT_CONFIGURATION = ("MUSTER_TEST_", "MUSTER_CACHE", FILE)  # of the tests, and of set-up
_TOP_SECTIONS: dict[str, type[Section]] = {
    "redis": RedisConfig,
    "model": ModelConfig,
    "telemetry": TelemetryConfig,
    "tracking": TrackingConfig,
}


# What to write, by the beginning of what pydantic calls the mistake.
_STEPS = {
    "int": "write a whole number",
    "float": "write a number",
    "bool": "write true or false",
    "string_type": "write a text in quotes",
    "dict": "write a table",
    "greater": "raise it",
    "less": "lower it",
}


def _check(kind: type[S], data: object, where: str, via: Mapping[str, str]) -> S:
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        path = [where] if where else []
        path += [str(part) for part in first["loc"]]
        field = ".".join(path)
        if first["type"] == "extra_forbidden":
            known = list(_names(kind, where))
            raise _unknown(field, first["input"], known, via.get(field, "")) from None
        raise ConfigError(
            first["msg"].lower() + _from(via.get(field, "")),
            field=field,
            value=first["input"],
            way_out=_hint(kind, first),
        ) from None


def _names(kind: type[BaseModel], where: str) -> Iterator[str]:
    for name, info in kind.model_fields.items():
        dotted = f"{where}.{name}" if where else name
        inner = _as_model(info.annotation)
        if inner:
            yield from _names(inner, dotted)
        else:
            yield dotted


def _hint(kind: type[BaseModel], error: Any) -> str:
    model: type[BaseModel] | None = kind
    info = None
    for part in error["loc"]:
        info = model.model_fields.get(str(part)) if model else None
        model = _as_model(info.annotation if info else None)
    step = next((to for kind_, to in _STEPS.items() if error["type"].startswith(kind_)), "")
    described = (info.description or "see the field's type") if info else "see the field's type"
    return f"{step}: {described}" if step else described


def _as_model(annotation: object) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return None


def _from(via: str) -> str:
    return f" (from the environment variable {via})" if via else ""


def _unknown(key: str, value: object, known: list[str], via: str = "") -> ConfigError:
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
    return ConfigError(
        "unknown key" + _from(via),
        field=key,
        value="" if isinstance(value, dict) else value,
        way_out=f"did you mean {near[0]!r}?" if near else "remove it",
    )
