"""What the services of bench.collection_real are given: configuration, tasks, model folder.

Owns: what each arm is in the configuration, the sizes of engines, boxes and router. Promise: an arm
is configuration and nothing else; its router's rules are those that the simulation gets. Does not
cover: processes (_real_world.py), plans (_real_plan.py).
"""

from __future__ import annotations

import json
from pathlib import Path

from bench import _bank_world as bank
from bench._real_plan import (
    BLOCK,
    CONTEXT,
    Book,
    Size,
    instruction,
    kv_gib,
)
from muster.config import load_config
from muster.types import Value
from services.router.config import RouterConfig, rules
from services.router.rules import RouterRules
from sim.rollout.muster import AHEAD_BATCHES

# Where they are not Muster's defaults. An arm is the rest of section [router], and the boxes.
CONFIG = "real.toml"
ARMS = {
    "muster": "lag_max = 16\nreserve_tokens = {reserve}\ninterleave_groups = {interleave}",
    "strong": 'placement = "sticky_least_loaded"\nadmission = "none"\nlag_max = 0',
}
_CONFIG = """
run = "{run}"
state_dir = "{folder}/state"
groups_per_batch = {groups}
repairs_max = {repairs}
[redis]
url = "unix://{folder}/s"
[model]
path = "{model}"
[telemetry]
log_level = "INFO"
traces = false
[readybank]
tick_s = 0.1
[inference]
max_model_len = {context}
kv_cache_gib = {kv_gib:.6f}
max_requests = {requests}
threads = 1
block_size = {block}
canary_timeout_s = 300.0
stall_s = 1800.0
[sandbox]
boxes_max = {boxes_max}
starting_max = 8
verifying_max = {verifying}
warm_max = {warm}
idle_s = 14400.0
adopt_s = 14400.0
[router]
listen = "127.0.0.1:0"
{arm}
episodes_max = {episodes}
turns_max = {turns}
turn_tokens_max = {context}
episode_tokens_max = 1000000
context_tokens_max = {context}
step_timeout_s = 590.0
episode_timeout_s = 100000.0
generate_timeout_s = 7200.0
hold_max_s = 7200.0
prefix_block_tokens = {block}
probe_timeout_s = 120.0
wedge_s = 600.0
stall_s = 600.0
box_output_bytes = 8192
"""


_TASK_TOML = """
[task]
name = "bench/{name}"
description = "Digits"
[metadata]
muster_max_turns = {turns}
[verifier]
timeout_sec = 120.0
[environment]
network_mode = "no-network"
"""
_TURNS_MAX = 400
CALIBRATION_BATCHES = 4  # more than its time has room for
_VERIFIER = "#!/usr/bin/bash\nprintf '1\\n' > /logs/verifier/reward.txt\n"


class Setup(Value, frozen=True):
    """One run of one arm. model: the folder that the services load.

    for_s: it ends then, or a little later, once there are so many `entries`; 0: with its batches.
    """

    arm: str
    book: Book
    batches: int
    ahead_batches: int
    size: Size
    model: str
    for_s: float = 0.0
    entries: int = 0  # turns and ends

    @property
    def groups(self) -> int:
        """Of the job."""
        return self.book.regime.groups * (self.batches + self.ahead_batches)


def setup(arm: str, book: Book, size: Size, model: Path) -> Setup:
    """A job that goes beyond the batches that are waited for, as in the simulation."""
    return Setup(arm, book, size.batches, AHEAD_BATCHES, size, str(model))


def calibration(book: Book, size: Size, model: Path) -> Setup:
    """Without admission, for a time: as much at once, and as little KV for it, as in the runs."""
    return Setup(
        "strong",
        book,
        CALIBRATION_BATCHES,
        AHEAD_BATCHES,
        size,
        str(model),
        for_s=size.calibration_s,
        entries=size.calibration_entries,
    )


def requests(book: Book) -> int:
    """Most that an engine takes at once: all that may run, and some to spare."""
    return book.regime.boxes + 8


def configured(asked: Setup, folder: Path) -> Path:
    """Write the configuration of all services into a new folder; its path."""
    folder.mkdir()
    regime = asked.book.regime
    model = json.loads((Path(asked.model) / "config.json").read_text("utf-8"))
    verifying = max(2, regime.boxes // 8)
    text = _CONFIG.format(
        run=bank.RUN,
        folder=folder,
        groups=regime.groups,
        repairs=0 if asked.arm == "strong" else 2,
        model=asked.model,
        context=CONTEXT,
        turns=_TURNS_MAX,
        kv_gib=kv_gib(regime.kv_tokens, model),
        requests=requests(asked.book),
        block=BLOCK,
        boxes_max=regime.boxes + 2 * verifying + 8,
        verifying=verifying,
        warm=0 if asked.book.cold else 8,
        episodes=regime.boxes,
        arm=ARMS[asked.arm].format(
            reserve=asked.size.reserve_tokens, interleave=asked.size.interleave_groups
        ),
    )
    path = folder / CONFIG
    path.write_text(text, "utf-8")
    return path


def router_rules(path: Path) -> RouterRules:
    """The rules of the router's machine under that configuration."""
    config = load_config(path, {})
    return rules(config, config.section("router", RouterConfig), 1)


def unending(model: Path, folder: Path) -> Path:
    """The model without tokens that end a reply: an engine would end it before its plan."""
    folder.mkdir()
    for file in model.iterdir():
        if file.suffix != ".json" or file.name.startswith("tokenizer"):
            (folder / file.name).symlink_to(file.resolve())
    config = json.loads((model / "config.json").read_text("utf-8"))
    config.pop("eos_token_id", None)
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    (folder / "generation_config.json").write_text("{}", "utf-8")
    return folder


def write_tasks(folder: Path, asked: Setup) -> list[Path]:
    """A task for each group: its share of the opening, a verifier that passes everything."""
    found = []
    for number in range(asked.groups):
        task = folder / f"task-{number:05d}"
        (task / "tests").mkdir(parents=True)
        (task / "instruction.md").write_text(instruction(number), "utf-8")
        (task / "task.toml").write_text(
            _TASK_TOML.format(name=task.name, turns=_TURNS_MAX), "utf-8"
        )
        (task / "tests" / "test.sh").write_text(_VERIFIER, "utf-8")
        (task / "environment").mkdir()
        (task / "environment" / "Dockerfile").write_text("FROM scratch\n", "utf-8")
        found.append(task)
    return found
