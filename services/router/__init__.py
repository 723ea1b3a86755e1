"""Which group and sibling runs next, and where; the agent loop lives here.

Promise: a task set is durable before its submission is answered; every finished turn is appended
before the next begins; only the newest attempt under the newest owner epoch counts.
"""
