"""Boxes on one host: start, steps under limits, verification apart from the agent.

Invariants: when a limit ends a step, or a box is over, no process, mount, cgroup or file of it
is left; the verdict is read from a place that no process of the agent could ever write; no
command runs twice in a box. Does not cover: what the agent is asked to do (the router's loop).
"""
