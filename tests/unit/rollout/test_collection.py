"""Comparing arms: paired ratios, the names that targets know, cached runs, page and plot."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path

import msgspec
import pytest

from bench import check
from bench.collection_plan import FULL, MAIN, QUICK, Job, Plan
from bench.collection_plot import drawn
from bench.collection_report import rendered
from bench.collection_runs import Cache, Results, results
from bench.collection_tables import Study, changes, figures, paired, ratios
from sim.rollout.bound import Bounds
from sim.rollout.doing import Doing
from sim.rollout.figures import RunFigures
from sim.rollout.run import Result

PLAN = msgspec.structs.replace(
    FULL,
    seeds=(201, 202),
    batches=2,
    few_seeds=(201,),
    few_batches=2,
    levers=("without boxes",),
    variants=("tb-like kv x0.5",),
)
SECONDS = dict(zip(MAIN, (20_000.0, 12_000.0, 5_000.0, 4_000.0, 3_000.0), strict=True))
SECONDS["machine, no lever"] = 16_000.0


def result(job: Job, seconds: float) -> Result:
    """A run whose batches all take so long."""
    told = RunFigures(
        arm=job.arm,
        regime=job.regime,
        seed=job.seed,
        batches=job.batches,
        first_batch_s=seconds + 500,
        interval_s=seconds,
        interval_mean_s=seconds,
        intervals_s=(seconds,) * (job.batches - 1),
        split_s={str(doing): seconds / len(Doing) for doing in Doing},
        tail_s=seconds / 4,
        recomputed_tokens=2e6,
        prefilled_tokens=9e6,
        ks_worst=0.01,
        ks_mean=0.005,
        fates=1.0,
        lag_p50=1.0,
        lag_max=3,
        lag_slope=0.5,
        age_p50_s=1.0,
        age_p99_s=2.0,
        gpu_wait_s=3.0,
        busy=0.9,
        busy_worst=1.0,
        attempts=1,
        lost=0,
        turns=1,
    )
    return Result(told, Bounds(2_000.0, 2_500.0, 2_600.0, 100.0))


def study(plan: Plan = PLAN) -> Study:
    """Each arm takes its SECONDS, 10 % more under seed 202."""
    found: Results = {
        job: result(job, SECONDS.get(job.arm, 3_300.0) * (1.1 if job.seed == 202 else 1.0))
        for job in plan.jobs()
    }
    return Study(plan, found)


def test_a_paired_ratio_is_the_geometric_mean_with_its_t_interval() -> None:
    found = paired([1.0, 4.0], [2.0, 4.0])
    half = 12.706 * math.log(2) / 2  # of logs -ln 2 and 0: deviation ln 2 / sqrt 2, over sqrt 2
    assert found.value == pytest.approx(math.sqrt(0.5))
    assert found.low == pytest.approx(math.sqrt(0.5) * math.exp(-half))
    assert found.high == pytest.approx(math.sqrt(0.5) * math.exp(half))


def test_one_seed_has_no_interval() -> None:
    assert math.isnan(paired([1.0], [2.0]).low)


def test_what_all_seeds_share_is_no_uncertainty() -> None:
    found = study().against("plain", "tb-like")
    assert (found.value, found.low, found.high) == pytest.approx((0.15, 0.15, 0.15))


def test_every_target_of_the_benchmark_is_among_its_figures() -> None:
    targets = tomllib.loads(check.TARGETS.read_text("utf-8"))["collection"]
    found = study()
    assert set(targets) <= {*figures(found), *ratios(found)}


def test_a_bound_is_compared_with_the_mean() -> None:
    assert ratios(study())["muster_over_bound_tb"] == pytest.approx(3_000 * 1.1**0.5 / 2_500)


def test_the_plan_judges_on_twenty_seeds_that_tuned_nothing() -> None:
    assert len(FULL.seeds) >= 20
    assert min(FULL.seeds) >= 201
    assert max(QUICK.seeds) < 201
    assert set(FULL.few_seeds) <= set(FULL.seeds)


def test_a_result_is_read_again_and_not_made_again(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    job = Job("muster", "tb-like", 201, 3, True)
    cache.put(job, result(job, 7.0))
    assert results((job,), cache, processes=1)[job].figures.interval_s == 7.0


def test_other_settings_are_other_results(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    job = Job("muster", "tb-like", 201, 3, True)
    cache.put(job, result(job, 7.0))
    others = [
        msgspec.structs.replace(job, **change)
        for change in ({"seed": 202}, {"batches": 4}, {"follow": False}, {"regime": "env-bound"})
    ]
    assert [cache.get(other) for other in others] == [None] * 4


def test_levers_that_stand_alone_stand_against_the_machine_without_any() -> None:
    """Which itself stands against plain: another program."""
    plan = msgspec.structs.replace(
        PLAN, levers=("only boxes", "machine, no lever", "without boxes")
    )
    found = changes(study(plan))
    assert found["tb_only_boxes_over_machine_no_lever"] == pytest.approx(3_300 / 16_000)
    assert found["tb_machine_no_lever_over_plain"] == pytest.approx(16_000 / 20_000)
    assert found["tb_without_boxes_over_muster"] == pytest.approx(3_300 / 3_000)


def test_a_lever_is_compared_over_as_many_batches_as_it_ran() -> None:
    """Muster's own run is longer: of it the first ones count."""
    plan = msgspec.structs.replace(PLAN, seeds=(201,), batches=4)
    job = Job("muster", "tb-like", 201, plan.cuts(4), True)
    figures = msgspec.structs.replace(
        result(job, 1.0).figures, intervals_s=(10.0, 20.0, 500.0, 600.0)
    )
    found = Study(plan, {job: msgspec.structs.replace(result(job, 1.0), figures=figures)})
    assert found.few_medians("muster", "tb-like") == [15.0]


def test_equal_work_leaves_a_seed_of_heavy_groups_out_of_a_lever() -> None:
    """Under one seed the lever's batches happen to be twice the work, and take twice as long; of
    muster's own run, which is longer, later batches do not count."""
    plan = msgspec.structs.replace(PLAN, seeds=(201, 202), few_seeds=(201, 202))

    def ran(job: Job, times: tuple[float, ...], work: tuple[float, ...]) -> Result:
        told = msgspec.structs.replace(result(job, 1.0).figures, intervals_s=times)
        each = tuple(Bounds(0.0, b, 0.0, 1.0) for b in work)
        return msgspec.structs.replace(result(job, 1.0), figures=told, each=each)

    found: Results = {}
    for seed, heavy in ((201, 1.0), (202, 2.0)):
        base = Job("muster", "tb-like", seed, plan.cuts(2), True)
        found[base] = ran(base, (100.0, 300.0, 9e9), (100.0, 100.0, 1.0))
        lever = Job("without boxes", "tb-like", seed, plan.cuts(2), False)
        found[lever] = ran(lever, (220.0 * heavy,) * 2, (100.0 * heavy,) * 2)
    made = Study(plan, found)
    work = made.few_work("without boxes", "muster", "tb-like")
    assert (work.value, work.low, work.high) == pytest.approx((1.1, 1.1, 1.1))
    assert made.few_change("without boxes", "muster", "tb-like").value > 1.5


def test_an_interrupted_run_has_whole_seeds_and_levers_before_sensitivity() -> None:
    jobs = [job for job in FULL.jobs() if not job.follow]
    levers = [job for job in jobs if job.arm in FULL.levers]
    assert jobs[: len(levers)] == levers
    for part in (levers, jobs[len(levers) :]):
        assert [job.seed for job in part] == sorted(job.seed for job in part)
    assert len(jobs) == len(set(jobs))


def test_the_page_says_which_targets_are_met() -> None:
    page = "\n".join(rendered(study(), {"cpu": "a processor", "python": "3"}))
    assert "| muster less than plain tb | ≥ 0.83 | 0.850 | met |" in page
    assert "| muster over bound tb | ≤ 1.1 | 1.259 | **missed** |" in page


def test_where_boxes_are_scarce_their_lever_is_tried() -> None:
    assert FULL.compared[-1] == ("env-bound 128 boxes", "without boxes")
    assert {job.arm for job in FULL.jobs() if job.regime == "env-bound 128 boxes"} == {
        "async-strong",
        "hold-resume",
        "muster",
        "without boxes",
    }


def test_a_change_that_may_be_none_supports_no_claim() -> None:
    page = "\n".join(rendered(study(), {"cpu": "a processor", "python": "3"}))
    (row,) = {line for line in page.splitlines() if line.startswith("| without boxes |")}
    assert "no claim" in row  # one seed


def test_the_page_names_every_arm_and_lever() -> None:
    page = "\n".join(rendered(study(), {"cpu": "a processor", "python": "3"}))
    for name in (*MAIN, *PLAN.levers, *PLAN.variants):
        assert f"| {name} |" in page


def test_a_bar_is_as_long_as_its_mean_interval() -> None:
    widths: dict[str, float] = {}
    arm = ""
    for line in drawn(study()).splitlines():
        if 'text-anchor="end"' in line:
            arm = line.partition(">")[2].partition("<")[0]
            widths[arm] = 0.0
        elif 'height="20"' in line:
            widths[arm] += float(line.partition('width="')[2].partition('"')[0])
    for name in MAIN:
        share = SECONDS[name] / SECONDS["plain"]
        assert widths[name] / widths["plain"] == pytest.approx(share, abs=0.01)
