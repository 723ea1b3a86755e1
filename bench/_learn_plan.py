"""What a learning run does: its tier of tasks, its seeds, its settings, by arm. Pure.

Owns: the recipe, fixed before any judged run. Promise: the instances that a run trains on and those
that judge it are drawn from different seeds, and no combination of values of one is among the
other's (muster/instances.py). Does not cover: doing it (_learn_run.py).

The tier is what tasks/ itself calls easy: training tasks with parameters, one command, difficulty
"easy". Tasks without parameters have one instance only, so nothing of them can be held out.
"""

from __future__ import annotations

from collections.abc import Mapping

from muster.errors import InvalidInput
from muster.instances import EVAL_SEEDS
from muster.types import Value

TIER = ("append-line", "move-into", "note-word", "save-output", "sort-lines")
TUNING_SEED = 0
"""The seed on which the recipe was found; a run of it judges nothing."""
JUDGING_SEEDS = (1, 2)
TEMPERATURES = (0.2, 0.6, 1.0)
"""At which the untrained model is tried; its best is what the trained one is compared with."""
SAMPLES = 16  # a task, at each temperature
EVAL_GROUP = 2  # siblings that share a held-out instance: 8 instances a task
TARGET_POINTS = 20.0
_ROUNDS_MAX = 10_000  # training instances of a task that belong to one seed


class Recipe(Value, frozen=True):
    """Settings of the training phase. A batch holds `groups` groups of `group_size`.

    Nine steps on the tuning seed at a rate of 4e-5 brought the reward from 0.26 to 0.74, with steps
    of a KL up to 0.07 per token, above the trainer's alarm; so it became 3e-5, over twenty steps.
    """

    steps: int = 20
    groups: int = 5
    group_size: int = 16
    lr: float = 3e-5
    temperature: float = 0.6
    turn_tokens: int = 32
    checkpoint_every: int = 5
    threads: int = 1  # of the trainer and of the engine each
    micro_batch_tokens: int = 1024  # a group with its shared prompt makes one row

    @property
    def rounds(self) -> int:
        """Fresh instances of each task."""
        return -(-self.steps * self.groups // len(TIER))


RECIPE = Recipe()


class Arm(Value, frozen=True):
    """One way to train. extra: settings that differ from the main arm's, by variable name.

    failing: where infrastructure fails during the training, at which rate (muster/failpoints.py).
    """

    name: str
    about: str
    extra: Mapping[str, str] = {}
    failing: str = ""


ARMS = {
    arm.name: arm
    for arm in (
        Arm("main", "lag 0, token TIS"),
        Arm("lag4_tis", "lag 4, token TIS", {"ROUTER__LAG_MAX": "4"}),
        Arm(
            "lag4_none",
            "lag 4, no correction",
            {"ROUTER__LAG_MAX": "4", "TRAINER__CORRECTION": "none"},
        ),
        # An attempt passes each of the two places once: 1 - 0.9 * 0.89 = 20 % of attempts.
        Arm(
            "infra20",
            "as main; of the attempts of the training 10 % get no box, and of 11 % of the others "
            "the step fails",
            failing="router.acquire.before=fail%10,router.exec.before=fail%11",
        ),
    )
}


def check_seed(seed: int) -> None:
    """Raises InvalidInput for a seed whose training instances would not be training ones."""
    if not 0 <= seed < EVAL_SEEDS // _ROUNDS_MAX:
        raise InvalidInput(
            "not a seed of a run", field="--seed", value=seed, way_out="0 to 99; 1 and 2 are judged"
        )


def training_seed(seed: int) -> int:
    """The first instance that a run trains on."""
    return _ROUNDS_MAX * seed


def held_out_seed(seed: int) -> int:
    """The first instance that judges it: held out, so `--split train` never reaches it."""
    return EVAL_SEEDS + _ROUNDS_MAX * seed


def variables(recipe: Recipe, folder: str, model: str) -> dict[str, str]:
    """Settings of both phases, as MUSTER_* variables."""
    return _named(
        {
            "STATE_DIR": folder,
            "MODEL__PATH": model,
            "TELEMETRY__TRACES": "false",
            "ROUTER__LISTEN": "127.0.0.1:0",
            "ROUTER__EPISODES_MAX": "12",
            "ROUTER__CONTEXT_TOKENS_MAX": "1024",
            "ROUTER__TURN_TOKENS_MAX": str(recipe.turn_tokens),
            "INFERENCE__MAX_MODEL_LEN": "1024",
            "INFERENCE__MAX_REQUESTS": "64",
            "INFERENCE__KV_CACHE_GIB": "0.5",
            "INFERENCE__START_TIMEOUT_S": "1200",  # of a busy machine
            "INFERENCE__THREADS": str(recipe.threads),
            "SANDBOX__BOXES_MAX": "64",
        }
    )


def evaluating() -> dict[str, str]:
    """All groups may be open at once: nothing trains, so none of them ever gets a fate."""
    return _named({"GROUPS_PER_BATCH": "4096"})


def training(recipe: Recipe, arm: Arm) -> dict[str, str]:
    """Settings of the training phase beside the common ones."""
    return _named(
        {
            "GROUPS_PER_BATCH": str(recipe.groups),
            "TRAINER__LR": repr(recipe.lr),
            "TRAINER__CHECKPOINT_EVERY": str(recipe.checkpoint_every),
            "TRAINER__CHECKPOINTS_KEPT": "2",
            "TRAINER__THREADS": str(recipe.threads),
            "TRAINER__MICRO_BATCH_TOKENS": str(recipe.micro_batch_tokens),
            **arm.extra,
        }
    )


def _named(settings: Mapping[str, str]) -> dict[str, str]:
    return {f"MUSTER_{name}": value for name, value in settings.items()}
