"""What one replica may do now: its state, its fences, its admission.

Owns: STARTING → SERVING ⇄ FENCED → DRAINING, the newest owner epoch and trainer epoch seen for each
run, and the counts of calls admitted and refused as a former owner's. Promise: pure and
synchronous; every refusal says why; from the first word of a newer owner on, no older one gets a
token. A replica that may hold mixed weights, or missed a version that others serve, serves nothing
until a full update succeeded. Which version may follow which is the trainer's affair: the newest
trainer epoch may send any, also an older one, for an update always carries every tensor.
Does not cover: the engine itself (adapters/), the order of the verbs' I/O (driver.py).
"""

from __future__ import annotations

from enum import StrEnum

from muster.errors import Exhausted, Fenced, InvalidInput, Refused, Unavailable
from muster.types import EpisodeKey, Value
from services.inference.engine import Load

STATE_FIELD = "replica.state"
"""`field` of a refusal that is about the replica's state, not about the call."""


class State(StrEnum):
    """Of the whole replica."""

    STARTING = "starting"
    SERVING = "serving"
    FENCED = "fenced"
    DRAINING = "draining"


class Bounds:
    """Limits from the configuration. `credit_share`: of the KV cache; `credit_ttl_s`: seconds."""

    def __init__(
        self,
        *,
        requests_max: int,
        scores_max: int,
        tokens_max: int,
        credit_share: float = 1.0,
        credit_ttl_s: float = 10.0,
    ):
        self.requests_max, self.scores_max, self.tokens_max = requests_max, scores_max, tokens_max
        self.credit_share, self.credit_ttl_s = credit_share, credit_ttl_s


class Grant(Value, frozen=True):
    """A credit on the KV cache, good for `ttl_s` seconds; no tokens while nothing is served.

    `life` names the process whose cache it is, `detail` says why it serves nothing, `updating`
    that its engine stands still because weights are being applied.
    """

    life: str
    state: State
    version: int
    credit_tokens: int
    ttl_s: float
    detail: str
    updating: bool = False


class Replica:
    """The state of one replica. Every method either changes it as named or raises."""

    def __init__(self, run: str, bounds: Bounds, life: str = ""):
        """life: names this process, and nothing else ever."""
        self._run, self._bounds, self.life = run, bounds, life
        self.state = State.STARTING
        self.version = 0
        self.why_fenced = ""
        self.committing = False
        self.fenced_calls = 0  # refused because of their owner or trainer epoch
        self._owner_epoch = 0
        self._trainer_epoch = 0
        self._requests: dict[str, int] = {}  # name in the engine → owner epoch
        self._scores = 0

    # Admission ---------------------------------------------------------------------------

    def admit_request(
        self, key: EpisodeKey, request_id: str, *, prompt: int, max_tokens: int
    ) -> str:
        """Admit one Generate: its name in the engine; `release_request` of it must follow.

        Every owner has names of its own: a newer router that asks again for a turn which its
        predecessor left running is not held up by it.
        """
        self.check_owner(key)
        self._check_serving()
        if not request_id or len(request_id) > 256:
            way_out = "name it <group>.<sibling>.<attempt>.<turn>"
            raise _bad("request_id", request_id, "empty or longer than 256", way_out)
        name = engine_name(key, request_id)
        if name in self._requests:
            raise Refused(
                "a request of that name is running",
                field="request_id",
                value=request_id,
                way_out="abort it first; names are unique per attempt and turn",
            )
        self._check_length(prompt, max_tokens)
        if len(self._requests) >= self._bounds.requests_max:
            raise Exhausted(
                f"{self._bounds.requests_max} requests are running",
                field="inference.max_requests",
                value=self._bounds.requests_max,
                way_out="choose another replica, or wait",
            )
        self._requests[name] = key.owner_epoch
        return name

    @property
    def requests(self) -> tuple[str, ...]:
        """The requests that are running, by their names in the engine."""
        return tuple(self._requests)

    @property
    def orphans(self) -> tuple[str, ...]:
        """Those of them that an older owner epoch began: nobody may have their tokens."""
        newest = self._owner_epoch
        return tuple(name for name, epoch in self._requests.items() if epoch < newest)

    def check_still_owner(self, name: str) -> None:
        """Refuse to go on with a request whose owner has been replaced meanwhile."""
        if self._requests[name] < self._owner_epoch:
            self._own(self._run, self._requests[name], "episode.")

    def release_request(self, name: str) -> None:
        """A request is over."""
        self._requests.pop(name, None)

    def admit_score(self, tokens: int) -> None:
        """Admit one Score; `release_score` must follow."""
        self._check_serving()
        if tokens < 2:
            raise _bad("token_ids", tokens, "fewer than two tokens", "send at least two")
        self._check_length(tokens, 1)
        if self._scores >= self._bounds.scores_max:
            raise Exhausted(
                f"{self._bounds.scores_max} scores are running",
                field="inference.scores_max",
                value=self._bounds.scores_max,
                way_out="wait, or choose another replica",
            )
        self._scores += 1

    def release_score(self) -> None:
        """A score is over."""
        self._scores -= 1

    def check_owner(self, key: EpisodeKey) -> None:
        """Refuse a router that is no longer the owner; remember a newer one."""
        self._own(key.run, key.owner_epoch, "episode.")

    def claim(self, run: str, owner_epoch: int) -> None:
        """A router says that it owns the run: every older epoch is refused from now on."""
        self._own(run, owner_epoch, "")

    def grant(self, run: str, owner_epoch: int, load: Load) -> Grant:
        """What the owner's conversations may fill; older owners are refused."""
        self._own(run, owner_epoch, "")
        serving = self.state is State.SERVING
        share = int(load.kv_tokens_total * self._bounds.credit_share)
        why = "" if serving else self.why_fenced or f"the replica is {self.state}"
        return Grant(
            life=self.life,
            state=self.state,
            version=self.version,
            credit_tokens=share if serving else 0,
            ttl_s=self._bounds.credit_ttl_s,
            detail=why,
            updating=self.committing,
        )

    def _own(self, run: str, epoch: int, prefix: str) -> None:
        self._check_run(run, f"{prefix}run")
        if epoch < self._owner_epoch:
            self.fenced_calls += 1
            raise Fenced(
                f"owner epoch {self._owner_epoch} has been seen",
                field=f"{prefix}owner_epoch",
                value=epoch,
                way_out="a newer router owns this run: stop",
            )
        self._owner_epoch = epoch

    # Weight updates ----------------------------------------------------------------------

    def check_trainer(self, run: str, epoch: int) -> None:
        """Refuse a trainer that has been replaced; remember a newer one."""
        self._check_run(run, "run")
        if epoch < self._trainer_epoch:
            self.fenced_calls += 1
            raise Fenced(
                f"trainer epoch {self._trainer_epoch} has been seen",
                field="trainer_epoch",
                value=epoch,
                way_out="a newer trainer publishes for this run: stop",
            )
        self._trainer_epoch = epoch

    def check_prepare(self, version: int, parent: int) -> None:
        """May that version start to arrive? The base model is version 0 of parent -1."""
        if self.state not in (State.SERVING, State.FENCED):
            raise self._unready(f"the replica is {self.state}", "wait until it is SERVING")
        if self.committing:
            raise Refused("an update is being applied", way_out="wait for it, then publish again")
        if version < 0 or parent < -1 or version == parent:
            way_out = "a version is not negative and not its own parent; 0 has the parent -1"
            raise _bad("manifest.version", version, f"not a child of {parent}", way_out)
        if version == self.version and self.state is State.SERVING:
            raise Refused(
                "that version is served already",
                field="manifest.version",
                value=version,
                way_out="nothing to do; versions are never reused",
            )

    def begin_commit(self) -> None:
        """An apply starts: the engine pauses, requests wait."""
        if self.state not in (State.SERVING, State.FENCED):
            raise self._unready(f"the replica is {self.state}", "wait until it is SERVING")
        if self.committing:
            raise Refused("an update is being applied", way_out="ask for the status")
        self.committing = True

    def commit_refused(self) -> None:
        """Nothing had been changed."""
        self.committing = False

    def committed(self, version: int) -> None:
        """The new version passed its canary."""
        self.committing, self.version, self.why_fenced = False, version, ""
        if self.state is State.FENCED:
            self.state = State.SERVING

    def followed(self, version: int) -> None:
        """The engine serves `version` without an update (fakes)."""
        self.version = version

    def apply_failed(self, why: str) -> None:
        """The weights may be mixed."""
        self.committing = False
        self.fence(why)

    def missed(self, version: int) -> None:
        """Others serve a version that this replica did not take: serve nothing until it is whole.

        Nothing happens to a replica that serves it after all (its answer may have been lost).
        """
        if self.state is State.FENCED or (self.state is State.SERVING and self.version == version):
            return
        self.fence(f"version {version} is served elsewhere and was not taken here")

    def fence(self, why: str) -> None:
        """Serve nothing, until a full update succeeds."""
        if self.state is State.DRAINING:
            return
        self.why_fenced = why
        if self.state is State.SERVING:
            self.state = State.FENCED

    # Life --------------------------------------------------------------------------------

    def started(self, version: int, published: int | None = None) -> None:
        """Warm, and the canary passed. `published`: the version that the others serve, if any.

        Another one than that is nothing to be served: the trainer finds a fenced replica at its
        next look and sends it the right one.
        """
        self.version = version
        if published is not None and published != version:
            self.fence(f"it holds version {version}, and {published} is the one published")
        if self.state is State.STARTING:
            self.state = State.FENCED if self.why_fenced else State.SERVING

    def drain(self) -> None:
        """Nothing new is admitted any more."""
        self.state = State.DRAINING

    def _check_serving(self) -> None:
        if self.state is State.SERVING:
            return
        why = f": {self.why_fenced}" if self.state is State.FENCED else ""
        raise self._unready(f"the replica is {self.state}{why}", "choose another replica")

    def _unready(self, problem: str, way_out: str) -> Unavailable:
        """Whoever asks can tell it by its field from a replica that fails."""
        return Unavailable(problem, field=STATE_FIELD, value=self.state, way_out=way_out)

    def _check_run(self, run: str, field: str) -> None:
        if run != self._run:
            way_out = f"this replica serves run {self._run!r}"
            raise _bad(field, run, "another run", way_out)

    def _check_length(self, prompt: int, max_tokens: int) -> None:
        if prompt < 1:
            raise _bad("prompt_token_ids", prompt, "no tokens", "send at least one")
        if max_tokens < 1:
            raise _bad("max_tokens", max_tokens, "nothing may be sampled", "at least 1")
        if prompt + max_tokens > self._bounds.tokens_max:
            raise InvalidInput(
                f"{prompt} tokens and {max_tokens} to sample exceed the context",
                field="inference.max_model_len",
                value=self._bounds.tokens_max,
                way_out="shorten the context, or raise inference.max_model_len",
            )


def engine_name(key: EpisodeKey, request_id: str) -> str:
    """The name of an owner's request in the engine."""
    return f"{key.owner_epoch}/{request_id}"


def _bad(field: str, value: object, problem: str, way_out: str) -> InvalidInput:
    return InvalidInput(problem, field=field, value=value, way_out=way_out)
