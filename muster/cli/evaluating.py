"""`muster eval`: evaluate the policy that a run serves, or a model folder on services of its own.

Promise: nothing of it is ever trained on; with --out the result is a file that is whole or not
there; a job that was left behind can be asked for again by its name. Does not cover: the figures
(muster/evaluation.py), the calls (muster/client.py).
"""

from __future__ import annotations

import asyncio
import json
import os
import uuid
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from muster.cli.demo import bundled_tasks, with_free_port
from muster.cli.jobs import Where, followed, reached, tell
from muster.cli.screen import Screen, emit, screen
from muster.cli.settings import read_config
from muster.cli.up import finish, run_services
from muster.client import JobState, MusterClient, Progress
from muster.config import Config
from muster.errors import ConfigError, InvalidInput
from muster.evaluation import EvaluationResult, Training
from muster.evaluation_doubts import compared
from muster.evaluation_view import render_evaluation
from muster.figures import as_json as to_json
from muster.supervise.state import router_address
from muster.supervisor import Work
from muster.taskset import count_tasks
from muster.tracking_files import read_served
from muster.types import Purpose, SamplingParams, Value
from muster.view import console
from muster.wanted import check_sampling, check_sizes

SERVICES = ("sandbox", "inference", "readybank", "router")


class EvalOptions(Value, frozen=True):
    """What the command line asked for."""

    tasks: Path | None
    split: str = "eval"
    samples: int = 16
    rounds: int = 1
    instances: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    job: str = ""
    out: Path | None = None

    @property
    def sampling(self) -> SamplingParams:
        """Temperature 0 means the likeliest token each time."""
        if self.temperature == 0.0:
            return SamplingParams(temperature=1.0, top_k=1)
        return SamplingParams(self.temperature, self.top_p, self.top_k)

    @property
    def task_set(self) -> Path:
        return self.tasks or bundled_tasks()


def evaluate(options: EvalOptions, *, where: Where, as_json: bool) -> int:
    """Against a running `muster up`. 0 when the result is whole, 1 when it is not."""
    checked(options)
    with screen(as_json) as shown:

        async def work() -> EvaluationResult:
            async with reached(where) as client:
                return await run(client, options, shown, where.options)

        found = asyncio.run(work())
    return told(found, options.out, as_json=as_json)


def evaluate_model(
    options: EvalOptions, model: Path, *, config_path: Path | None, as_json: bool
) -> int:
    """A model folder, on services of its own that are stopped after it; 130 after Ctrl-C."""
    checked(options)
    config = model_config(read_config(config_path), model)
    results: list[EvaluationResult] = []
    with screen(as_json) as shown:

        def work_of(resolved: Config) -> Work:
            async def work() -> None:
                find = lambda: router_address(resolved.state_dir)  # noqa: E731
                async with MusterClient(find=find) as client:
                    found = await run(client, options, shown, "")
                named = replace(found, asked=replace(found.asked, model=str(model)))
                results.append(compared(named, trained_with(model, config.state_dir.parent)))

            return work

        ended = run_services(config, shown, work_of, only=SERVICES)
    status = finish(ended, interrupted_status=130, as_json=as_json)
    if status or not results:
        return status or 1
    return told(results[0], options.out, as_json=as_json)


def model_config(config: Config, model: Path) -> Config:
    """`config` with that model, in a state folder and a run of its own: versions of another
    evaluation there, or of training, are none of this one's."""
    if not model.is_dir():
        raise ConfigError(
            "there is no such folder",
            field="--model",
            value=model,
            way_out="name a Hugging Face model folder, or a checkpoint (checkpoints/RUN/step-…)",
        )
    changes: dict[str, Any] = {
        "state_dir": config.state_dir / "eval",
        "run": f"eval-{uuid.uuid4().hex[:8]}",
        "model": config.model.model_copy(update={"path": str(model.resolve())}),
    }
    return with_free_port(config).model_copy(update=changes)


def trained_with(model: Path, state_dir: Path) -> Training:
    """What the run that wrote this checkpoint was sampled and served with, as far as it is known:
    the run keeps it with its tracked figures."""
    try:
        meta = json.loads((model / "meta.json").read_text("utf-8"))
        run = str(meta["run"])
    except (OSError, ValueError, KeyError, TypeError):  # a model that no run wrote
        return Training()
    # A checkpoint lies in STATE/checkpoints/RUN/step-…; it may also have been taken elsewhere.
    places = [state_dir, *model.resolve().parents[2:3]]
    found = (read_served(place, run) for place in places)
    return next((one for one in found if one is not None), Training())


def one_or_the_other(options: EvalOptions, where: Where) -> None:
    """A model folder is evaluated on services of its own: nothing else can be named with it."""
    named = {"--router": where.router, "--state-dir": where.state_dir, "--job": options.job}
    for field, value in named.items():
        if value:
            raise InvalidInput(
                "says which running services are meant, and --model starts some of its own",
                field=field,
                value=value,
                way_out=f"leave out {field}, or --model",
            )


def checked(options: EvalOptions) -> None:
    """Raise InvalidInput for what can be seen to be wrong before anything runs."""
    if options.out is not None:
        _writable(options.out)
    if options.job:
        return
    check_sampling(options.sampling, purpose=Purpose.EVALUATE)
    if options.rounds < 1:
        raise InvalidInput(
            "must be at least 1", field="--rounds", value=options.rounds, way_out="ask for one"
        )
    groups = count_tasks([options.task_set], options.split) * options.rounds
    check_sizes(groups, options.samples, Purpose.EVALUATE)


async def run(
    client: MusterClient, options: EvalOptions, shown: Screen, where: str
) -> EvaluationResult:
    """Submit unless the job is named, follow to its end, fetch the result."""
    job = options.job
    if not job:
        groups = count_tasks([options.task_set], options.split) * options.rounds
        job = await client.submit(
            options.task_set,
            groups=groups,
            group_size=options.samples,
            sampling=options.sampling,
            split=options.split,
            instances=options.instances,
            purpose=Purpose.EVALUATE,
        )
        shown.line(f"evaluating as {job}: `muster eval --job {job}{where}` asks for it again")
    await client.evaluation(job)  # one that is for the trainer is refused before it is followed
    why = f"`muster explain {job}{where}` says why"

    def quiet(line: str) -> None:
        tell(f"{line}: {why}")

    last: Progress = await followed(client.watch(job), shown.job, quiet)
    if last.state is not JobState.DONE:
        shown.line(f"{job} was cancelled")
    return await client.evaluation(job)


def told(found: EvaluationResult, out: Path | None, *, as_json: bool) -> int:
    """Show the result, then keep it: who waited for it has it also where it cannot be written.
    0 when it is whole, else 1."""
    if as_json:
        emit("evaluation", found)
    else:
        console().print(render_evaluation(found))
    if out is not None:
        write(out, found)
        if not as_json:
            print(f"the result is in {out}")
    return 0 if found.complete else 1


def write(path: Path, found: EvaluationResult) -> None:
    """As JSON; an interrupted write leaves what was there before."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_text(to_json(found) + "\n", encoding="utf-8")
        aside.replace(path)
    except OSError as error:
        raise _unwritable(path, error.strerror or str(error)) from error


def _writable(path: Path) -> None:
    """Raises InvalidInput before hours of work end at it."""
    if path.is_dir():
        raise _unwritable(path, "it is a folder")
    if not path.parent.is_dir():
        raise _unwritable(path, "there is no such folder")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise _unwritable(path, "this user may not write there")


def _unwritable(path: Path, why: str) -> InvalidInput:
    return InvalidInput(
        f"cannot be written: {why}",
        field="--out",
        value=path,
        way_out="name a file in a folder that this user may write to",
    )
