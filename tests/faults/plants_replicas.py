"""Planted bugs of what a router does with replicas: who takes turns, who is held, what counts.

Owns: that part of the list (plants.py has the rest, and says what they have in common).
"""

from __future__ import annotations

from tests.faults.planting import Bug, Edit

_ROUTER = "services.router"

REPLICAS = (
    Bug(
        "probe_skipped",
        "a replica takes turns before it has passed a probe",
        (
            Edit(
                f"{_ROUTER}.health:Health.admits",
                "one.standing is Standing.WELL",
                "one.standing in (Standing.WELL, Standing.NEW, Standing.PROBING)",
            ),
        ),
        r"16: ",
    ),
    Bug(
        "probe_of_a_former_life",
        "a new process under the same name keeps the standing of the former one",
        (
            Edit(
                f"{_ROUTER}.health:Health._heard",
                "one.unproven(now=now)",
                "pass",
            ),
        ),
        r"16: ",
    ),
    Bug(
        "credit_never_expires",
        "a credit counts after its end",
        (
            Edit(
                f"{_ROUTER}.health:Health.admits",
                "and now < one.credit_ends()",
                "",
            ),
            Edit(
                f"{_ROUTER}.credits:Credit.left",
                "if now < self.until else 0.0",
                "",
            ),
        ),
        r"16: .*credit has ended",
        "CUT_OFF",
    ),
    Bug(
        "old_weights_admitted",
        "a replica that serves an older version than was published goes on taking turns",
        (
            Edit(
                f"{_ROUTER}.health:Health._blocked",
                "return None if patient else Standing.OLD",
                "return None",
            ),
        ),
        r"17: ",
    ),
)

SEATS = (
    Bug(
        "held_without_resume",
        "whoever is held for KV is never let on",
        (
            Edit(
                f"{_ROUTER}.seats:Seats._settle",
                "while row.held:",
                "while False:",
            ),
        ),
        r"13: ",
    ),
    Bug(
        "credit_ignored",
        "a conversation goes on whether it fits or not",
        (
            Edit(
                f"{_ROUTER}.arms:KvFit.goes_on",
                "if row.load + program.context <= most:",
                "if True:",
            ),
        ),
        r"18: ",
    ),
    Bug(
        "homeless_asked_one_by_one",
        "those that find room together go on in the order in which they are asked, each beside all",
        (
            Edit(
                f"{_ROUTER}.seats:Seats.ready",
                "self._arm.goes_on if program.home else self._arm.takes",
                "self._arm.goes_on",
            ),
        ),
        r"18: ",
    ),
    Bug(
        "restored_openings_weigh_nothing",
        "after a takeover the opening of a sibling counts no tokens",
        (
            Edit(
                f"{_ROUTER}.groups:Groups.restored",
                "self._prompt(event)",
                "(0, ())",
            ),
        ),
        r"18: ",
    ),
    Bug(
        "first_in_rank_starved",
        "a conversation that is larger than the credit waits for ever",
        (
            Edit(
                f"{_ROUTER}.arms:KvFit.goes_on",
                "above == 0 or above + program.context <= most",
                "above + program.context <= most",
            ),
            Edit(
                f"{_ROUTER}.arms:KvFit.resumes",
                "above == 0 or above + program.context <= most",
                "above + program.context <= most",
            ),
        ),
        r"13: ",
    ),
    Bug(
        "moved_without_abort",
        "a lost replica's request is asked for elsewhere and not aborted",
        (
            Edit(
                f"{_ROUTER}.sampling:Sampling.replica_lost",
                "return [abort, *self._generate",
                "return [*self._generate",
            ),
        ),
        r"15: ",
    ),
    Bug(
        "late_answer_taken",
        "the answer to a request that was given up enters the conversation and is acted on",
        (
            Edit("sim.calls:Calls._wanted", "== request", "is not None"),
            Edit(
                f"{_ROUTER}.sampling:Sampling._awaits",
                "(turn, retry) == (self.turn, self._retry)",
                "turn == self.turn",
            ),
        ),
        r"(14|1|6): ",
    ),
    Bug(
        "wedge_unseen",
        "an engine that takes no step keeps its requests until their deadline",
        (
            Edit(
                f"{_ROUTER}.health:Health._lost_as",
                "one.told_at - one.moved_at >= self._rules.wedge_s",
                "False",
            ),
        ),
        r"21: ",
    ),
    Bug(
        "silence_unseen",
        "a replica that does not answer keeps its requests until their deadline",
        (
            Edit(
                f"{_ROUTER}.health:Health.silent",
                "if one.silent_since is None:",
                "if False:",
            ),
        ),
        r"21: ",
        "CUT_OFF",
    ),
    Bug(
        "cache_of_a_former_life",
        "what a dead process had cached counts as cached in its successor",
        (Edit(f"{_ROUTER}.prefix:PrefixIndex.clear", "cache.clear()", "pass"),),
        r"19: ",
    ),
    Bug(
        "cache_of_former_weights",
        "what was cached under former weights counts as cached under the new ones",
        (
            Edit(f"{_ROUTER}.loads:Loads.published", "self.version = version", "pass"),
            Edit(f"{_ROUTER}.loads:Loads.published", "self._index.clear(replica)", "pass"),
            Edit(f"{_ROUTER}.loads:Loads.serves", "self._index.clear(replica)", "pass"),
        ),
        r"19: ",
    ),
    Bug(
        "box_never_released",
        "a box is not given back when its attempt is over",
        (
            Edit(
                f"{_ROUTER}.attempt:Attempt.on_finished",
                "*self._release(), ",
                "",
            ),
        ),
        r"22: ",
    ),
)
