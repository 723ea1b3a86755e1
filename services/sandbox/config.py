"""Configuration of the sandbox service: section [sandbox]."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from muster.config import Config, Section
from muster.errors import ConfigError


class SandboxConfig(Section):
    """Boxes on one host."""

    listen: str = "127.0.0.1:0"
    """Address of the gRPC server; port 0 lets the system choose."""
    backend: str = Field("native", pattern="^(native|docker|fake)$")
    """native (namespaces of this kernel), docker (containers of a Docker Engine), or fake: no
    boxes, no root; answers and rewards are made up from the commands, for tests of the other
    services."""
    bases: dict[str, str] = Field(default_factory=dict)
    """What an image that a task's FROM names is taken from, by a pattern of its name (`*`): `host`
    (a skeleton with this machine's read-only /usr), a folder with a root file system, a tarball of
    one, or `image:NAME` of the Docker Engine; a folder or tarball may end in `@sha256:DIGEST`. The
    longest pattern that fits counts. Without more, muster/host-base and scratch are `host`."""
    docker_url: str = ""
    """Address of the Docker Engine of the docker backend, as unix:///path or tcp://host:port; empty
    takes DOCKER_HOST, else /var/run/docker.sock. Boxes never get it."""
    host_id: str = ""
    """Name of this host in the registry; empty makes one up and keeps it in `runtime_dir`, so that
    a service that starts again is the same host."""
    runtime_dir: Path | None = None
    """Where this instance keeps its name and lock, mounts its stage, and finds the boxes of a
    service that was killed; empty: `sandbox` in the state folder. Two hosts on one machine need
    two."""
    boxes_max: int = Field(32, ge=1, le=4096)
    """Boxes that exist at once; callers beyond that wait."""
    starting_max: int = Field(4, ge=1, le=256)
    """Boxes that start at once: starts compete for the same kernel locks."""
    waiting_max: int = Field(256, ge=1, le=65536)
    """Callers that may wait for a box; more are refused at once."""
    warm_max: int = Field(8, ge=0, le=4096)
    """Boxes that stand ready unused, of all tasks together; 0: none. They give way to callers."""
    warm_idle_s: float = Field(120.0, gt=0)
    """A warm box that nobody has asked for within so long (seconds) ends."""
    building_max: int = Field(2, ge=1, le=64)
    """Set-ups of different tasks that run at once; each needs a box for its time."""
    snapshots_max: int = Field(64, ge=1, le=4096)
    """Snapshots of set-ups and of forked boxes kept; beyond, unused ones go, the oldest first. When
    so many are in use, no box is forked."""
    snapshot_bytes_max: int = Field(2 << 30, ge=1 << 20)
    """The same in bytes; native ones lie in memory."""
    copying_max: int = Field(2, ge=1, le=64)
    """Boxes copied at once for forks."""
    squash_depth: int = Field(16, ge=2, le=64)
    """A snapshot with more layers than that is made one layer."""
    orphan_s: float = Field(30.0, ge=0, le=3600)
    """How long boxes live on without their service (seconds), for its successor to adopt them. At
    least router.host_away_s."""
    copy_bytes_max: int = Field(8 << 20, ge=1024, le=32 << 20)
    """Most bytes of one copy into or out of a box."""
    verifying_max: int = Field(8, ge=1, le=1024)
    """Verifications at once; each needs a second box for its time."""
    idle_s: float = Field(1800.0, gt=0)
    """A box that no call touches for so long (seconds) ends; one in which a step, a verification or
    a copy runs is not idle. Longer than an episode may be held (router.hold_max_s) and one reply
    may take (router.generate_timeout_s)."""
    adopt_s: float = Field(600.0, gt=0)
    """When a new router has taken over, boxes that it does not use within so long (seconds) end. A
    router gives back at once what it does not need; this is for one that cannot. Longer than an
    episode may be held (router.hold_max_s) and one reply may take (router.generate_timeout_s)."""
    answers_kept: int = Field(16, ge=1, le=1024)
    """Results of steps that a box keeps for repeated calls, the newest ones."""
    steps_max: int = Field(512, ge=1, le=65536)
    """Steps that one box may run."""
    command_bytes_max: int = Field(64 << 10, ge=1024, le=100 << 10)
    """Longest command; the kernel takes 128 KiB as one argument."""
    step_timeout_s_max: float = Field(600.0, gt=0, le=86400)
    """Longest time limit that a step may ask for, in seconds."""
    verify_timeout_s_max: float = Field(900.0, gt=0, le=86400)
    """Longest time limit of a verifier in seconds; a task that asks for more gets this."""
    setup_timeout_s: float = Field(120.0, gt=0, le=86400)
    """Longest time for one RUN line of a task's Dockerfile, in seconds."""
    memory_bytes_max: int = Field(2 << 30, ge=16 << 20)
    """Largest memory limit that a box may ask for."""
    pids_max: int = Field(1024, ge=8)
    """Largest process limit that a box may ask for."""
    disk_bytes_max: int = Field(1 << 30, ge=1 << 20)
    """Largest disk limit that a box may ask for; files lie in memory."""
    disk_inodes_max: int = Field(262144, ge=64)
    """Largest file-count limit that a box may ask for."""
    cpus_max: float = Field(0.0, ge=0)
    """Largest processor limit that a box may ask for, and what one gets that asks for none; 0: no
    limit."""
    output_bytes_max: int = Field(1 << 20, ge=256, le=4 << 20)
    """Most bytes of output kept per step."""


def section(config: Config) -> SandboxConfig:
    """The section, checked against what the same file asks of the router.

    Raises ConfigError where a host would refuse, or throw away, what the router counts on.
    """
    found = config.section("sandbox", SandboxConfig)
    router = config.sections.get("router")
    for name, least, why in (
        ("adopt_s", ("hold_max_s", "generate_timeout_s"), "an episode may be held so long"),
        ("idle_s", ("hold_max_s", "generate_timeout_s"), "an episode may be held so long"),
        ("orphan_s", ("host_away_s",), "the router waits so long for a host to come back"),
        ("command_bytes_max", ("command_bytes_max",), "the router lets such commands pass"),
        ("steps_max", ("box_steps_max",), "the router lets an episode have so many turns"),
    ):
        bound = sum(float(getattr(router, field, 0.0)) for field in least)
        if getattr(found, name) < bound:
            fields = " + ".join(f"router.{field}" for field in least)
            raise ConfigError(
                f"less than {fields} = {bound:g}: {why}",
                field=f"sandbox.{name}",
                value=getattr(found, name),
                way_out=f"raise it to {bound:g} or more, or lower {fields}",
            )
    return found
