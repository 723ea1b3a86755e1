"""The fault bench: a deterministic world that runs the very machines of the services.

world.py is the seeded event heap, process.py and net.py what dies and what gets lost, faults.py the
faults of a seed, streams.py what Redis would hold. router.py, bank.py, trainer.py and host.py bind
the real machines, engine.py and box.py are dumb models. truth.py is what happened, checks.py what
must always hold, experiment.py one run, search.py many of them and the shrinking. Nothing here is
imported by a service.
"""
