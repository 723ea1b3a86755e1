"""The boxes of the baselines: how many there are, how many start at once, spares."""

from __future__ import annotations

from msgspec.structs import replace

from sim.rollout.boxes import Boxes, Ticket
from sim.rollout.heap import Heap
from sim.rollout.workload import TB_LIKE, Regime, Spread


def regime(**changes: object) -> Regime:
    return replace(TB_LIKE, cold=Spread(20.0, 0.0), **changes)


class Requests:
    """Asks for boxes and notes when each began to start and when it was up."""

    def __init__(self, heap: Heap, boxes: Boxes):
        self.heap, self.boxes = heap, boxes
        self.began: dict[str, float] = {}
        self.up: dict[str, float] = {}
        self.tickets: dict[str, Ticket] = {}

    def ask(self, *names: str, start_s: float = 20.0) -> None:
        for name in names:
            self.tickets[name] = self.boxes.acquire(
                start_s,
                lambda n=name: self.began.setdefault(n, self.heap.now),
                lambda n=name: self.up.setdefault(n, self.heap.now),
            )


def test_a_box_is_waited_for_in_the_order_of_asking() -> None:
    heap = Heap()
    boxes = Boxes(heap, regime(boxes=2))
    asked = Requests(heap, boxes)
    asked.ask("a", "b", "c", "d")
    heap.at(50.0, lambda: boxes.release(asked.tickets["b"]))
    heap.at(60.0, lambda: boxes.release(asked.tickets["a"]))
    heap.run()
    assert asked.up == {"a": 20.0, "b": 20.0, "c": 70.0, "d": 80.0}
    assert asked.began == {"a": 0.0, "b": 0.0, "c": 50.0, "d": 60.0}
    assert boxes.available == 0


def test_only_so_many_start_cold_at_once() -> None:
    heap = Heap()
    asked = Requests(heap, Boxes(heap, regime(boxes=9, cold_at_once=2)))
    asked.ask("a", "b", "c", "d", "e")
    heap.run()
    assert asked.up == {"a": 20.0, "b": 20.0, "c": 40.0, "d": 40.0, "e": 60.0}


def test_a_start_that_is_broken_off_frees_its_place_among_those_that_start() -> None:
    heap = Heap()
    boxes = Boxes(heap, regime(boxes=3, cold_at_once=1))
    asked = Requests(heap, boxes)
    asked.ask("a", "b")
    heap.at(5.0, lambda: boxes.release(asked.tickets["a"]))
    heap.run()
    assert asked.up == {"b": 25.0}
    assert boxes.available == 2


def test_giving_up_the_wait_or_releasing_twice_gives_nothing_away() -> None:
    heap = Heap()
    boxes = Boxes(heap, regime(boxes=1))
    asked = Requests(heap, boxes)
    asked.ask("a", "b", "c")
    heap.run(lambda: "a" in asked.up)
    for name in ("b", "a", "a"):
        boxes.release(asked.tickets[name])
    heap.run()
    assert asked.up == {"a": 20.0, "c": 40.0}
    boxes.release(asked.tickets["c"])
    assert boxes.available == 1


def test_a_spare_is_there_at_once_and_is_made_up_for() -> None:
    heap = Heap()
    boxes = Boxes(heap, regime(boxes=3), spares=1)
    asked = Requests(heap, boxes)
    heap.at(30.0, lambda: asked.ask("a", "b"))  # one spare; the other starts cold
    heap.run()
    assert asked.up == {"a": 30.05, "b": 50.0}
    assert (boxes.spare, boxes.free) == (1, 0)  # the third box is the next spare
    heap.at(70.0, lambda: asked.ask("c"))
    heap.run()
    assert asked.up["c"] == 70.05


def test_spares_are_boxes_like_others() -> None:
    heap = Heap()
    boxes = Boxes(heap, regime(boxes=2), spares=5)
    heap.run()
    assert (boxes.spare, boxes.free, boxes.available) == (2, 0, 2)
