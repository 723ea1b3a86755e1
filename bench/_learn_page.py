"""The page of bench.learn, made from the results that are there.

Owns: docs/results/learning.md. Promise: what has no result is called not yet run; every number is
of a result file. Does not cover: the plot (_learn_plot.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import fmean
from typing import Any

from bench import _learn_plan as plan
from muster.instances import EVAL_SEEDS
from muster.view import counted

Results = Mapping[tuple[str, int], Mapping[str, Any]]  # by arm and seed
WANTED = (("main", 1), ("main", 2), ("lag4_tis", 1), ("lag4_none", 1), ("infra20", 1))
_NOT_RUN = "not yet run"
_NOTES = {
    ("main", 1): "seed 1 of main: with 48 replies asked for at a time (`router.episodes_max`) the "
    "busy machine let 46 attempts of the 14th batch miss the deadline of a reply; they were "
    "labelled failures of the infrastructure and repaired. The run was stopped there, and went on "
    "from its step 13 with 12 at a time, as the other runs have.",
    ("main", 2): "seed 2 of main: the disk was full at step 19 (of other work), and the run ended; "
    "called again, its trainer went back to step 17 and took the two batches since then again. "
    "Those of the last two steps were sampled from versions that were lost, so their lag is "
    "unknown.",
    ("infra20", 1): "seed 1 of infra20: the disk was full for some minutes at its third step (of "
    "other work): router, bank and trainer ended, their supervisor started them anew, and the run "
    "went on.",
}


def written(results: Results) -> str:
    """The whole page."""
    parts = [*_head(results), *_verdict(results), *_tasks(results), *_course(results)]
    parts += [*_lag(results), *_infra(results), *_evidence(results), *_limits()]
    return "\n".join(parts).rstrip() + "\n"


def _head(results: Results) -> Iterator[str]:
    recipe = plan.RECIPE
    yield "# Does it learn?\n"
    yield (
        "`make learn ARM=main SEED=1` (in the background; stopped at any moment, it goes on where "
        "it was when it is called again) makes one result, `python -m bench.learn --report` this "
        "page from the files in [learning/](learning/).\n"
    )
    yield (
        "SmolLM2-135M-Instruct (converted by the first `muster up`), vLLM on CPU, native boxes, "
        "the reference trainer: all five services, as `muster up` runs them. The tier is what "
        f"tasks/ calls easy and what can be held out: {', '.join(plan.TIER)}. Each group of the "
        f"training is a fresh instance; the judging instances are held out (their seeds begin at "
        f"{EVAL_SEEDS:,}; one combination of values in eight is theirs alone), "
        f"{plan.SAMPLES} samples a task and temperature over {plan.SAMPLES // plan.EVAL_GROUP} "
        "instances. An evaluation has services of its own and no trainer.\n"
    )
    yield (
        f"The recipe was fixed on seed {plan.TUNING_SEED}, which judges nothing; there nine steps "
        "at a rate of 4e-5 brought the mean reward of a batch from 0.26 to 0.74, some of them "
        f"further than the trainer's alarm for one step allows. It is: {recipe.steps} "
        f"steps of {recipe.groups} groups of {recipe.group_size}, temperature "
        f"{recipe.temperature:g}, learning rate {recipe.lr:g}, {recipe.turn_tokens} tokens a turn, "
        f"AdamW, GRPO advantages, token TIS at 2, lag 0. A pass rate is the mean of the tasks' "
        "rates. The *gain* is that of the trained model over the untrained one, both at the "
        "temperature (of 0.2, 0.6, 1.0) that is best for the untrained one.\n"
    )


def _verdict(results: Results) -> Iterator[str]:
    columns = ("run", "untrained at 0.2, 0.6, 1.0", "trained at 0.2, 0.6, 1.0")
    yield f"| {' | '.join(columns)} | gain (wanted: +20) | processor time | wall time |"
    yield "|---|---|---|---|---|---|"
    for key in WANTED:
        name = f"{key[0]}, seed {key[1]}"
        if key not in results:
            yield f"| {name} | {_NOT_RUN} | | | | |"
            continue
        found = results[key]["figures"]
        rates = [
            ", ".join(f"{found[f'{phase}_{t:g}_percent']:.1f} %" for t in plan.TEMPERATURES)
            for phase in ("before", "after")
        ]
        gain = found["gain_points"]
        judged = "met" if gain >= plan.TARGET_POINTS else "**missed**"
        yield (
            f"| {name} | {rates[0]} | {rates[1]} | {gain:+.1f} points, {judged} | "
            f"{found['cpu_s'] / 60:.0f} min | {found['wall_s'] / 60:.0f} min |"
        )
    yield (
        "\nThe target is 45 minutes a seed on two quiet cores. The machine had two cores and was "
        "shared with other work while these runs went, so wall time says little here: processor "
        "time of at most 90 minutes is what two quiet cores give in 45. It is that of the bench "
        "and all services, and what it took before a stop counts; steps in boxes are not in it.\n"
    )
    for key, note in _NOTES.items():
        if key in results:
            starts = results[key]["settings"]["starts"]
            yield f"{note[0].upper()}{note[1:]} It was started {starts} times in all.\n"
    if results:
        yield "![pass rates over the steps of the training](learning.svg)\n"


def _tasks(results: Results) -> Iterator[str]:
    if not results:
        return
    yield "## By task\n"
    yield "Passed of 16, untrained → trained, at each temperature.\n"
    for key in WANTED:
        if key not in results:
            continue
        yield f"**{key[0]}, seed {key[1]}**\n"
        yield "| task | 0.2 | 0.6 | 1.0 |"
        yield "|---|---|---|---|"
        for task in plan.TIER:
            cells = [
                f"{_passed(results[key], 'before', t, task)} → "
                f"{_passed(results[key], 'after', t, task)}"
                for t in plan.TEMPERATURES
            ]
            yield f"| {task} | {' | '.join(cells)} |"
        yield ""


def _passed(found: Mapping[str, Any], phase: str, temperature: float, task: str) -> str:
    passed, samples = found[phase][f"{temperature:g}"]["tasks"].get(task, (0, 0))
    return f"{passed}" if samples == plan.SAMPLES else f"{passed} of {samples}"


def _course(results: Results) -> Iterator[str]:
    if not results:
        return
    yield "## The course of the training\n"
    yield (
        "Mean reward of the groups of a batch (fresh instances, at the training's temperature), "
        "by quarters of the training; *variance*: groups with a variance of reward; KL: of a step, "
        "per token; k3: mismatch between engine and trainer, per token.\n"
    )
    columns = ("run", "reward by quarters", "variance", "step KL, largest", "k3, mean")
    yield f"| {' | '.join(columns)} | ESS, least | lag, mean | attempts lost, repaired |"
    yield "|---|---|---|---|---|---|---|---|"
    for key in WANTED:
        if key not in results:
            continue
        steps = [s for s in results[key]["training"]["steps"] if "variance" in s]
        quarter = -(-len(steps) // 4)
        rewards = [
            f"{_mean(steps[n : n + quarter], 'reward'):.2f}" for n in range(0, len(steps), quarter)
        ]
        yield (
            f"| {key[0]}, seed {key[1]} | {' '.join(rewards)} | "
            f"{_mean(steps, 'variance'):.1f} of {plan.RECIPE.groups} | "
            f"{max(s['step_kl'] or 0.0 for s in steps):.3f} | {_mean(steps, 'k3'):.4f} | "
            f"{min(s['ess'] for s in steps):.3f} | {_mean(steps, 'lag'):.2f} | "
            f"{_lost(results[key]['training'])} of "
            f"{sum(results[key]['training']['attempts'].values())} |"
        )
    yield ""


def _lost(training: Mapping[str, Any]) -> int:
    attempts = training["attempts"].items()
    return sum(n for name, n in attempts if name.startswith("infra_failure"))


def _mean(steps: list[Mapping[str, Any]], name: str) -> float:
    """Over those that tell it."""
    return fmean(float(step[name]) for step in steps if step[name] is not None)


def _lag(results: Results) -> Iterator[str]:
    yield "## Lag 4, with and without correction\n"
    pair = [results.get((arm, 1)) for arm in ("lag4_tis", "lag4_none")]
    if None in pair:
        missing = [a for a, r in zip(("lag4_tis", "lag4_none"), pair, strict=True) if r is None]
        yield f"{' and '.join(missing)}: {_NOT_RUN}.\n"
        return
    gains = [found["figures"]["gain_points"] for found in pair if found]
    yield (
        f"One pair: {gains[0]:+.1f} points with token TIS, {gains[1]:+.1f} without correction. One "
        "pair of one seed says what happened here, not which is better.\n"
    )


def _infra(results: Results) -> Iterator[str]:
    yield "## One attempt in five lost to infrastructure\n"
    found = results.get(("infra20", 1))
    if found is None:
        yield f"infra20: {_NOT_RUN}.\n"
        return
    told = found["training"]
    attempts = told["attempts"]
    lost = _lost(told)
    yield (
        f"Of {sum(attempts.values())} attempts {lost} "
        f"({100 * lost / sum(attempts.values()):.0f} %) were failures of the infrastructure and "
        f"were labelled so: {counted(attempts)}. {told['repaired']} attempts replaced lost ones, "
        f"{told['restored_boxes']} boxes were rebuilt by replay. "
        f"{told['siblings_left_out']} siblings were lost as often as they may be repaired: they "
        f"were left out of their groups; {told['siblings_trained']} were trained on, all with "
        "outcomes of the model.\n"
    )


def _evidence(results: Results) -> Iterator[str]:
    if not any(arm == "main" for arm, _ in results):
        return
    yield "## Ten successes of each main run, drawn at random\n"
    yield (
        "Of the trained model at the temperature of the gain, drawn by the run's seed; as recorded "
        "by the services. `$` is what ran in the box, `exit` what the box answered.\n"
    )
    for key in WANTED:
        if key[0] != "main" or key not in results:
            continue
        yield f"**{key[0]}, seed {key[1]}**\n"
        yield "```"
        best = results[key]["figures"]["best_temperature"]
        for one in results[key]["after"][f"{best:g}"]["evidence"]:
            yield f"{one['episode']}  {one['task']}"
            for turn in one["turns"]:
                yield from _turn(turn)
            told = one["verdict"]
            yield f"  verdict: {told['outcome']} ({told['cause']}), reward {told['reward']:g}"
        yield "```\n"


def _turn(turn: Mapping[str, Any]) -> Iterator[str]:
    for number, line in enumerate(turn["command"].splitlines()):
        yield f"  {'>' if number else '$'} {line.replace('```', '` ` `')}"
    yield f"  exit {turn['exit_code']} in box {turn['box']}"
    yield from (f"  | {line}" for line in turn["output"].replace("```", "` ` `").splitlines())


def _limits() -> Iterator[str]:
    yield "## What this does not say\n"
    yield (
        "- Commands of one turn, words from a list of 139: the model learns to copy names into the "
        "right command. Nothing here is about longer tasks.\n"
        "- 80 samples a phase and temperature: a pass rate is good to about ± 11 points (95 %), a "
        "difference of two to about ± 15.\n"
        "- GPUs: not yet run on hardware."
    )
