"""The process that makes and ends boxes: one thread, a private mount namespace, blocking calls.

Owns: the instance's stage (a tmpfs that only this process and boxes see), its cgroups, and PID 1
of every box as its child. Promise: no request holds up the others for long (an end that takes its
time is answered `pending`, to be asked again). When the service says that it stops, every box is
ended and every cgroup removed at once. When it is gone without a word, boxes with a note, and what
runs in them, live on for `orphan_s`, for the next service of the same folder to take over; those
without one end at once, for nobody else could use them. What a killed keeper leaves is empty
groups, and the next one sweeps them. A second keeper of the same instance is refused by a file
lock.
Does not cover: what runs in a box (boxinit.py). Standard library only.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from typing import Any

from muster.isolate import leave_terminal
from services.sandbox.adapters.native import lock, pressure, release
from services.sandbox.adapters.native import syscalls as sc
from services.sandbox.adapters.native.boxes import Boxes
from services.sandbox.adapters.native.cgroups import CgroupTrouble, Tree, discover
from services.sandbox.adapters.native.notes import Notes
from services.sandbox.adapters.native.reception import Event, Reception, What
from services.sandbox.adapters.native.verdictfile import read_verdict

_END_WAIT_S = 10.0  # for the processes of a box to end, at the keeper's own end
_LEAVING_PAUSE_S = 0.02  # between two looks whether boxes without a service have ended


class Keeper:
    """Serves one service, then its successor."""

    def __init__(self, runtime_dir: str, instance: str, reception: Reception):
        self._dir, self._stage = runtime_dir, os.path.join(runtime_dir, "stage")
        self._record = os.path.join(runtime_dir, "cgroups.json")
        self._tree = Tree(instance, discover())
        self._boxes = Boxes(self._tree)
        self._reception = reception
        self._notes = Notes()
        self._leaving: list[str] = []  # boxes of a former service that nobody could use

    def open(self) -> dict[str, Any]:
        """Lock, sweep, mount the stage, build the base."""
        self._lock = lock.take(self._dir)
        swept = self._tree.sweep(self._recorded())
        sc.unshare(sc.CLONE_NEWNS)
        sc.mount("", "/", "", sc.MS_REC | sc.MS_PRIVATE)
        try:
            self._note()
            self._tree.create()
        except CgroupTrouble:
            self._tree.sweep([])
            raise
        self._note()
        os.makedirs(self._stage, exist_ok=True)
        sc.mount("tmpfs", self._stage, "tmpfs", 0, "size=64m,mode=0700")
        # From here on all paths are relative to the stage: short, and a box that reads its own
        # mount options learns nothing of the host.
        os.chdir(self._stage)
        self._boxes.open_stage()
        ready: dict[str, Any] = {"ready": True, "stall": pressure.told(self._tree.kill_root)}
        ready |= {"cpu": self._tree.limits_cpu, "release": release.digest()}
        self._reception.greeting = ready
        self._reception.open()
        return ready | {"swept": swept, "epoch": self._reception.epoch}

    def _note(self) -> None:
        """Record where our groups are, for a successor that is started from elsewhere."""
        with open(self._record, "w", encoding="utf-8") as file:
            json.dump(self._tree.roots, file)

    def _recorded(self) -> list[str]:
        try:
            with open(self._record, encoding="utf-8") as file:
                found = json.load(file)
        except (OSError, ValueError):
            return []
        return [str(path) for path in found] if isinstance(found, list) else []

    def close(self) -> None:
        """End everything and leave nothing."""
        self._reception.close()
        self._boxes.kill_all()  # all at once: they end while we tidy up after the first
        for name in self._boxes.names:
            try:
                if not self._boxes.end(name, _END_WAIT_S):
                    raise TimeoutError(f"not ended in {_END_WAIT_S:g} s")
            except OSError as error:
                # The others end all the same; what is left of this one, the next keeper sweeps.
                _complain(f"box {name}: {error}")
        self._boxes.close()
        self._tree.sweep([])
        os.chdir("/")
        sc.unmount(self._stage)
        os.rmdir(self._stage)
        os.unlink(self._record)
        os.unlink(os.path.join(self._dir, "lock"))
        try:
            os.rmdir(self._dir)
        except OSError:
            pass  # it holds something of somebody else's

    def serve(self) -> None:
        """Answer requests until a service stops, or none has been there for `orphan_s`."""
        while True:
            event = self._reception.wait(_LEAVING_PAUSE_S if self._leaving else None)
            if event.what in (What.STOP, What.EXPIRED):
                return
            if event.what is What.REQUEST:
                self._answer(event)
            elif event.what in (What.LOST, What.TAKEN):
                noted = set(self._noted())
                self._leaving = [name for name in self._boxes.names if name not in noted]
                self._boxes.orphan_snapshots()
            self._leaving = [name for name in self._leaving if not self._ended(name)]
            if self._reception.orphaned and not self._boxes.names:
                return

    def _ended(self, name: str) -> bool:
        try:
            return name not in self._boxes.names or self._boxes.end(name)
        except (OSError, CgroupTrouble):
            return False  # the keeper's own end sees to it

    def _answer(self, event: Event) -> None:
        blob = b""
        try:
            answer, blob = self._handle(event.request, event.blob, event.fd)
        except (OSError, CgroupTrouble) as error:
            answer = {"error": str(error)}
        finally:
            if event.fd >= 0:
                os.close(event.fd)
        self._reception.answer(answer, blob)

    def _handle(
        self, request: dict[str, Any], blob: bytes, fd: int
    ) -> tuple[dict[str, Any], bytes]:
        op, box = str(request["op"]), str(request["box"])
        if op == "end":
            return self._end(box), b""
        if op == "seal":
            self._notes.seal(box, int(request["newest"]))
            return {"ok": True} if self._boxes.stop(box) else {"pending": True}, b""
        if op == "verdict":
            if self._boxes.stop(box):
                return read_verdict(self._boxes.verdict_folder(box))
            return {"pending": True}, b""
        if op == "note":
            return self._note_of(box, request, blob), b""
        if op == "survivors":
            return self._survivors(), b""
        if op == "stopping":
            self._reception.expect_no_successor()
            return {"ok": True}, b""
        if op == "claim":
            self._boxes.claim_snapshots([str(name) for name in request["layers"]])
            return {"ok": True}, b""
        if op == "adopt":
            return self._adopt(box, fd)
        return self._boxes.handle(op, box, request, fd) or {"error": f"no such request: {op}"}, b""

    def _survivors(self) -> dict[str, Any]:
        if self._leaving:
            return {"pending": True}
        return {"boxes": self._noted()}

    def _noted(self) -> list[str]:
        return [name for name in self._notes.names if name in self._boxes.names]

    def _note_of(self, box: str, request: dict[str, Any], blob: bytes) -> dict[str, Any]:
        if box not in self._boxes.names:
            return {"error": f"there is no box {box}"}
        size, limits = int(request["size"]), dict(request["limits"])
        kept = self._notes.keep(box, limits, blob[:size], str(request["shared"]), blob[size:])
        return {"ok": True} if kept else {"wanted": True}

    def _end(self, box: str) -> dict[str, Any]:
        if box not in self._boxes.names:
            return {"existed": False}
        if not self._boxes.end(box):
            return {"pending": True}
        self._notes.forget(box)
        return {"existed": True}

    def _adopt(self, box: str, fd: int) -> tuple[dict[str, Any], bytes]:
        """Give a box of a former service to the one at the other end of `fd`."""
        record = self._notes.of(box)
        if record.sealing and not self._boxes.stop(box):
            return {"pending": True}, b""
        living = not record.sealing and self._boxes.hand_over(box, fd)
        facts = {"limits": record.limits, "sealed": record.sealing, "newest": record.newest}
        facts |= {"living": living, "size": len(record.data)}
        return facts, record.data + self._notes.shared(record)


def _complain(problem: str) -> None:
    try:
        os.write(2, f"muster-keeper: {problem}\n".encode())
    except OSError:
        return  # nobody reads it any more


def _run_read_only() -> None:
    """Be the same program, started from a read-only mount that nobody else sees.

    A box can have the kernel start the program of whoever starts its shell (`#!/proc/self/exe` in
    a base of its own), and reach our file by that: it must not be able to set its mode.
    """
    program = os.path.realpath("/proc/self/exe")
    if os.statvfs("/proc/self/exe").f_flag & os.ST_RDONLY:
        return
    sc.unshare(sc.CLONE_NEWNS)
    sc.mount("", "/", "", sc.MS_REC | sc.MS_PRIVATE)
    sc.bind(program, program, readonly=True)
    os.execv(sys.executable, sys.orig_argv)


def main(runtime_dir: str, instance: str, fd: int, orphan_s: float) -> None:
    """Entry point; `fd` is the socket to the service."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the service says when to end
    leave_terminal()  # boxes inherit that there is none
    sc.set_name("muster-keeper")
    reception = Reception(runtime_dir, socket.socket(fileno=fd), orphan_s)
    try:
        _run_read_only()
        keeper = Keeper(runtime_dir, instance, reception)
        ready = keeper.open()
    except (OSError, CgroupTrouble) as error:
        way_out = getattr(error, "way_out", "run as root; --check-host says what is missing")
        reception.answer({"error": str(error), "way_out": way_out})
        return
    reception.answer(ready)
    keeper.serve()
    keeper.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
