"""Native boxes, and the processes that make them.

service (asyncio) ──requests──> keeper ──fork──> PID 1 of each box ──fork──> bash, once a step
        └────────── one socket per box, straight to its PID 1 ──────┘

The keeper is one small single-threaded process with a private mount namespace: everything that is
mounted for boxes lies there and vanishes with it, however it ends. Modules that run inside it or
inside a box import the standard library only.
"""
