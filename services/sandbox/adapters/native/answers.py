"""What PID 1 of a box says of a step, read with distrust: types and bounds, then the figures."""

from __future__ import annotations

from typing import Any

from services.sandbox.adapters.native.pressure import UNTOLD
from services.sandbox.adapters.native.steps import Session
from services.sandbox.box import BoxFailure, Evidence


def evidence(answer: dict[str, Any], blob: bytes, output_bytes: int) -> Evidence:
    """The evidence in an answer; raises BoxFailure for an error and for nonsense."""
    if "error" in answer:
        raise BoxFailure(str(answer["error"])[:2000])
    try:
        if "broken" in answer:
            return Evidence(
                exit_code=137,
                broken=str(answer["broken"])[:500],
                oom_kills=max(0, int(answer["oom_kills"])),
                pids_refused=max(0, int(answer["pids_refused"])),
            )
        head = max(0, min(int(answer["head"]), len(blob)))
        return Evidence(
            exit_code=int(answer["exit_code"]) & 0xFF,
            signal=int(answer["signal"]) & 0x7F,
            timed_out=bool(answer["timed_out"]),
            oom_kills=max(0, int(answer["oom_kills"])),
            pids_refused=max(0, int(answer["pids_refused"])),
            disk_full=bool(answer["disk_full"]),
            wall_s=max(0.0, float(answer["wall_s"])),
            cpu_s=max(0.0, float(answer["cpu_s"])),
            cpu_stall_s=max(UNTOLD, float(answer["cpu_stall_s"])),
            memory_stall_s=max(UNTOLD, float(answer["memory_stall_s"])),
            io_stall_s=max(UNTOLD, float(answer["io_stall_s"])),
            head=blob[:head][:output_bytes],
            tail=blob[head:][:output_bytes],
            total=max(0, int(answer["total"])),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise BoxFailure(f"PID 1 of the box answered nonsense: {error}") from error


def textual(session: bytes) -> tuple[str, dict[str, str]]:
    """Folder and environment of a session that are text, which is what is kept and sent of it.

    Variables that are none are left out; a folder that is none is `/`.
    """
    found = Session.unpacked(session)
    cwd = found.cwd if found.cwd.startswith("/") and _is_text(found.cwd) else "/"
    return cwd, {k: v for k, v in found.env.items() if _is_text(k) and _is_text(v)}


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
