"""The light event heap: order, cancelling, alarms, traces."""

from __future__ import annotations

from sim.rollout.heap import Alarm, Heap


def test_equal_times_run_in_the_order_of_asking_and_the_past_is_now() -> None:
    heap, seen = Heap(), []
    heap.at(2.0, lambda: seen.append(("b", heap.now)))
    heap.at(1.0, lambda: heap.at(0.0, lambda: seen.append(("late", heap.now))))
    heap.at(2.0, lambda: seen.append(("c", heap.now)))
    assert heap.run()
    assert seen == [("late", 1.0), ("b", 2.0), ("c", 2.0)]


def test_what_is_cancelled_does_not_run_and_costs_no_step() -> None:
    heap, seen = Heap(), []
    entry = heap.after(1.0, lambda: seen.append("gone"))
    heap.after(2.0, lambda: seen.append("kept"))
    heap.cancel(entry)
    heap.run()
    assert (seen, heap.steps) == (["kept"], 1)


def test_running_until_stops_where_it_holds() -> None:
    heap, seen = Heap(), []
    for number in range(5):
        heap.after(number, lambda n=number: seen.append(n))
    assert heap.run(lambda: len(seen) == 3)
    assert (seen, heap.now) == ([0, 1, 2], 2.0)
    assert not heap.run(lambda: len(seen) == 9)


def test_an_alarm_rings_once_at_the_last_time_it_was_set_to() -> None:
    heap, rings = Heap(), []
    alarm = Alarm(heap, lambda: rings.append(heap.now))
    for when in (5.0, 3.0, 4.0):
        alarm.set(when)
    heap.run()
    alarm.set(9.0)
    alarm.set(None)
    heap.run()
    assert rings == [4.0]


def test_an_alarm_may_be_set_again_while_it_rings() -> None:
    heap, rings = Heap(), []

    def ring() -> None:
        rings.append(heap.now)
        alarm.set(heap.now + 1 if len(rings) < 3 else None)

    alarm = Alarm(heap, ring)
    alarm.set(1.0)
    heap.run()
    assert rings == [1.0, 2.0, 3.0]


def test_equal_seeds_give_equal_traces_and_names_do_not_disturb_each_other() -> None:
    def trace(seed: int, *, other: bool) -> str:
        heap = Heap(seed, trace=True)
        for _ in range(10):
            if other:
                heap.rng("other").random()
            heap.after(heap.rng("mine").random(), lambda: heap.note("ran"))
        heap.run()
        return heap.trace

    assert trace(1, other=False) == trace(1, other=True) != trace(2, other=False)
    assert Heap().trace == ""
