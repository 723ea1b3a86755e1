"""Does the simulator tell what real services do? One arm against another, predicted, then run.

    python -m bench.collection_real [--quick] [--json PATH|-] [--batches N] [--seed N] [--keep DIR]
                                    [--calibration-s S] [--again FILE]
    python -m bench.collection --real ...

Real: a durable server, two vLLM engines (one thread each), native boxes, the ready bank, the
router; the workload is the simulated one, scaled (_real_plan.py), and replies follow a plan while
their tokens are sampled (_real_router.py). In this order:

1. A calibration run of other plans, as large as the arms, for some minutes. Its record gives the
   engine's constants (`muster sim fit`) and what real services add to each wait; from the constants
   follows the factor of all waits. It is simulated with what was fitted: if that takes another time
   than it took (by more than a quarter), the benchmark ends there.
2. Both arms are simulated with these, the rules of their routers and the plans that will be run.
   The predicted ratio is told, and written to PATH, before the next step begins.
3. Both arms run: strong first, then muster.

Arms: muster is Muster's configuration (predicted finish, KV-Fit, lag_max 16; the reserve of a young
conversation ÷ 20 as all tokens). strong has sticky least-loaded sessions, no admission, lag_max 0,
no repair. As simulated, muster launches the siblings of a quarter of a batch in turn. A real native
box has nothing to set up: muster's start as they do; strong's wait for the planned cold start,
scaled, before the box is asked for (an eighth of a batch at once).

A batch is 8 groups of 8, and four batches are taken: 256 trajectories in each arm. The batch is a
quarter of the simulated one so that both arms end in a time that two cores have; the KV tokens per
trajectory of a batch are the simulated ones ÷ 20. Compared is the time from the submission to the
last batch, the cold one included. `less`: 1 - muster / strong; difference_points: 100 times the
distance between the predicted and the measured one. --quick: one batch of 2 groups of 8 short
episodes; it supports no claim. --again: only the arm muster, on the plans of an earlier result and
held against its prediction; what that says of strong stands. Does not cover: training (it takes no
time), lost boxes.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import asdict, replace

from bench import _real_plan as plans
from bench import _real_setup as services
from bench import _real_world as world
from bench import _results
from bench._real_plan import Added, Book, Size
from bench._real_predict import (
    Checked,
    Fitted,
    Predicted,
    checked,
    fitted,
    less,
    likely,
    require_told,
)
from bench._real_setup import Setup
from bench._real_world import Ran
from muster.clock import monotonic
from muster.errors import InvalidInput, MusterError, NotFound
from muster.model import ensure_model
from muster.report import report
from muster.run_index import RunIndex
from services.router.adapters.tokenizer import HfChatCodec
from sim.rollout.costs import EngineCosts

ARMS = ("strong", "muster")
SEED, CALIBRATION = 301, 1_000
TRIED_FACTOR = 0.12  # of the waits of the calibration, before the engine is known
_PLANS = 256


class Bench:
    """One run of it, in a folder."""

    def __init__(self, size: Size, seed: int, folder: Path, told: Callable[[str], None]):
        self.size, self.seed, self.folder, self.told = size, seed, folder, told
        spec = os.environ.get("MUSTER_TEST_MODEL", "smollm2-135m-instruct")
        model = ensure_model(spec, Path(os.environ.get("MUSTER_CACHE", ".muster/cache")))
        self.model = services.unending(model, folder / "model")
        words = plans.words(HfChatCodec(self.model))
        self.regime = plans.regime(size, words, plans.kv_tokens(size.trajectories))
        self.words = words

    async def calibrated(self) -> tuple[Fitted, Checked, float]:
        """What a short run tells, how well it tells that run, and the factor of all waits."""
        self.told("calibration: starting engines, boxes, bank and router")
        regime = plans.with_waits(self.regime, TRIED_FACTOR)
        book = Book(regime, self.seed + CALIBRATION, self.words)
        asked = services.calibration(book, self.size, self.model)
        ran = await world.run(asked, self.folder / "calibration", self.told)
        known = fitted(ran.record, book)
        drawn = Book(self.regime, self.seed, self.words).planned()
        size = self.regime.group_size
        sample = [drawn.plan(g, s, 0) for g in range(_PLANS // size) for s in range(size)]
        return known, self._checked(ran, book, known), plans.wait_factor(sample, known.engine)

    def _checked(self, ran: Ran, book: Book, known: Fitted) -> Checked:
        """Its boxes were not set up: they started as they do."""
        warm = replace(book, regime=plans.with_warm(book.regime, known.added.box_s))
        rules = services.router_rules(self.folder / "calibration" / services.CONFIG)
        batches, most = services.CALIBRATION_BATCHES, services.requests(book)
        return checked(ran.record, rules, warm, batches, known, most)

    def book(self, arm: str, factor: float, known: Fitted) -> Book:
        """The plans of an arm: the same in both, but for the start of boxes."""
        regime = plans.with_waits(self.regime, factor)
        if arm == "strong":
            return Book(regime, self.seed, self.words, cold=True)
        return Book(plans.with_warm(regime, known.added.box_s), self.seed, self.words)

    def predicted(self, factor: float, known: Fitted) -> dict[str, Predicted]:
        """By arm."""
        found = {}
        for arm in ARMS:
            book = self.book(arm, factor, known)
            aside = self.folder / f"rules-{arm}"
            rules = services.router_rules(services.configured(self._setup(arm, book), aside))
            most = services.requests(book)
            found[arm] = likely(arm, rules, book, self.size.batches, known, most)
            self.told(f"predicted: {arm} {found[arm].cuts_s[-1]:.0f} s")
        return found

    async def measured(self, arm: str, factor: float, known: Fitted) -> Ran:
        """One arm, run."""
        asked = self._setup(arm, self.book(arm, factor, known))
        ran = await world.run(asked, self.folder / arm, self.told)
        self.told(f"measured: {arm} {ran.cuts_s[-1]:.0f} s")
        return ran

    def _setup(self, arm: str, book: Book) -> Setup:
        return services.setup(arm, book, self.size, self.model)


def fitted_figures(known: Fitted, told: Checked, factor: float) -> dict[str, float]:
    """What was found by the calibration, and the time of that run: simulated, and recorded."""
    engine = {f"engine_{name}": value for name, value in asdict(known.engine).items()}
    extra = {f"added_{name}": value for name, value in asdict(known.added).items()}
    times = {
        "calibration_predicted_s": told.predicted_s,
        "calibration_measured_s": told.measured_s,
    }
    return {**engine, **extra, **times, "wait_factor": factor}


def predicted_figures(found: dict[str, Predicted]) -> dict[str, float]:
    """By arm: time to the last batch, the split of it, prefill."""
    figures = {}
    for arm, told in found.items():
        figures[f"predicted_{arm}_s"] = told.cuts_s[-1]
        figures[f"predicted_{arm}_prefilled_tokens"] = float(told.prefilled_tokens)
        figures |= split_figures(f"predicted_{arm}", told.split_s)
    muster, strong = found["muster"], found["strong"]
    figures["predicted_less"] = less(muster.cuts_s[-1], strong.cuts_s[-1])
    figures["predicted_less_least"] = less(muster.range_s[1], strong.range_s[0])
    figures["predicted_less_most"] = less(muster.range_s[0], strong.range_s[1])
    return figures


def earlier_fit(figures: Mapping[str, float]) -> tuple[Fitted, float]:
    """What the figures of an earlier result say was fitted, and the factor of all waits."""

    def part(prefix: str) -> dict[str, float]:
        return {n.removeprefix(prefix): v for n, v in figures.items() if n.startswith(prefix)}

    known = Fitted(EngineCosts(**part("engine_")), Added(**part("added_")))
    return known, figures["wait_factor"]


def measured_figures(arm: str, ran: Ran) -> dict[str, float]:
    """Of a real arm, as far as its record tells."""
    turns = [turn for turns in RunIndex(ran.record).turns.values() for turn in turns]
    prefilled = sum(turn.prompt_tokens - turn.cached_tokens for turn in turns)
    figures = {
        f"measured_{arm}_s": ran.cuts_s[-1],
        f"measured_{arm}_prefilled_tokens": float(prefilled),
    }
    return figures | split_figures(f"measured_{arm}", _split(ran))


def _split(ran: Ran) -> dict[str, float]:
    """Seconds of all batches by state."""
    found: dict[str, float] = {}
    for batch in report(ran.record).batches:
        for part, seconds in batch.split.items():
            found[part] = found.get(part, 0.0) + seconds
    return found


def split_figures(name: str, split: dict[str, float]) -> dict[str, float]:
    """What the time to the batches was spent on, by state; only what there is."""
    return {f"{name}_{part}_s": seconds for part, seconds in split.items() if seconds}


def result(quick: bool, bench: Bench, figures: dict[str, float], machine: Any) -> dict[str, Any]:
    """As far as it is known."""
    size, regime = bench.size, bench.regime
    settings = {
        "quick": quick,
        "seed": bench.seed,
        "batches": size.batches,
        "groups": size.groups,
        "group_size": size.group_size,
        "kv_tokens_per_replica": regime.kv_tokens,
        "replicas": regime.replicas,
        "context": regime.context_limit,
        "opening_tokens": regime.prompt_tokens,
    }
    ratios = {}
    if figures.keys() >= {"measured_muster_s", "measured_strong_s"}:
        measured = less(figures["measured_muster_s"], figures["measured_strong_s"])
        distance = abs(figures["predicted_less"] - measured)
        figures = figures | {"measured_less": measured, "difference_points": 100 * distance}
        ratios["measured_over_predicted_muster"] = (
            figures["measured_muster_s"] / figures["predicted_muster_s"]
        )
        ratios["measured_over_predicted_strong"] = (
            figures["measured_strong_s"] / figures["predicted_strong_s"]
        )
    return {
        "name": "collection_real",
        "machine": machine,
        "settings": settings,
        "figures": figures,
        "ratios": ratios,
    }


async def compare(bench: Bench, noted: Callable[[dict[str, float]], None]) -> None:
    """All three steps; `noted` gets the figures of each as soon as they are there."""
    known, told, factor = await bench.calibrated()
    for note in known.notes:
        bench.told(f"note: {note}")
    noted(fitted_figures(known, told, factor))
    require_told(told)
    noted(predicted_figures(bench.predicted(factor, known)))
    for arm in ARMS:
        noted(measured_figures(arm, await bench.measured(arm, factor, known)))


async def again(
    bench: Bench, earlier: Mapping[str, float], noted: Callable[[dict[str, float]], None]
) -> None:
    """The arm muster once more, beside all that is known of strong."""
    known, factor = earlier_fit(earlier)
    compared = ("measured_muster_", "measured_less", "difference_points")
    noted({n: v for n, v in earlier.items() if not n.startswith(compared)})
    noted(measured_figures("muster", await bench.measured("muster", factor, known)))


def earlier_result(path: Path, into: Path) -> dict[str, Any]:
    """A result of this benchmark, on this machine, with both arms; it is not to be overwritten.

    Raises InvalidInput, NotFound.
    """
    try:
        found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise NotFound(
            f"no result can be read there ({error})", field="--again", value=path
        ) from None
    if found.get("name") != "collection_real" or "measured_strong_s" not in found["figures"]:
        raise InvalidInput(
            "no result of this benchmark with a measured arm strong",
            field="--again",
            value=path,
            way_out="name a file that --json of a whole run wrote",
        )
    if found["machine"]["cpu"] != _results.machine()["cpu"]:
        raise InvalidInput(
            f"it is of another machine ({found['machine']['cpu']})",
            field="--again",
            value=path,
            way_out="run both arms here",
        )
    if into.resolve() == path.resolve():
        raise InvalidInput(
            "the earlier result would be overwritten",
            field="--json",
            value=into,
            way_out="name another file",
        )
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, 1 when a service ended before its time."""
    parser = _results.parser(__doc__ or "")
    parser.add_argument("--batches", type=int, help="of each arm; default: 4, with --quick 1")
    parser.add_argument("--calibration-s", type=float, help="default: 360, with --quick 60")
    parser.add_argument("--seed", type=int, default=SEED, help="of the plans")
    parser.add_argument("--again", type=Path, metavar="FILE", help="an earlier result: see above")
    parser.add_argument("--keep", type=Path, help="a new folder for configurations, logs, records")
    asked = parser.parse_args(arguments)
    earlier: dict[str, Any] = {}
    if asked.again:
        try:
            earlier = earlier_result(asked.again, Path(asked.json or "-"))
        except MusterError as error:
            parser.error(str(error))
        settings = earlier["settings"]
        asked.quick, asked.seed = settings["quick"], settings["seed"]
        asked.batches = settings["batches"]
    size = (plans.QUICK if asked.quick else plans.FULL).with_batches(asked.batches)
    if asked.calibration_s:
        size = replace(size, calibration_s=asked.calibration_s)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` has it ignored
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    began, machine, figures = monotonic(), _results.machine(), dict[str, float]()

    def told(text: str) -> None:
        print(f"[{monotonic() - began:6.0f} s] {text}", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(prefix="real-") as name:
        folder = asked.keep or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        bench = Bench(size, asked.seed, folder, told)

        def noted(found: dict[str, float]) -> None:
            figures.update(found)
            for key, value in found.items():
                told(f"{key} {value:.6g}")
            if asked.json and asked.json != "-":
                known = result(asked.quick, bench, figures, machine)
                Path(asked.json).write_text(json.dumps(known, indent=1) + "\n", "utf-8")

        try:
            asked_for = (
                again(bench, earlier["figures"], noted) if earlier else compare(bench, noted)
            )
            asyncio.run(asked_for)
        except MusterError as error:
            told(str(error))
            return 1
        except KeyboardInterrupt:
            told("stopped; every process of it has ended")
            return 130
    _results.publish(result(asked.quick, bench, figures, machine), asked.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
