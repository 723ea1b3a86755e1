"""A deterministic world that runs the very machines of the services.

world.py is the seeded event heap, store.py what Redis would hold, builders.py short ways to make
events (tests use them too), router.py and bank.py bind the machines to the world, trainer.py stands
in for a trainer, checks.py is what must always hold. Nothing here is imported by a service.
"""
