"""Runs the test functions of a file; prints pytest's short test summary, as `pytest -rA` does."""

import importlib.util
import sys
import time

began = time.perf_counter()
spec = importlib.util.spec_from_file_location("outputs", sys.argv[1])
assert spec is not None
assert spec.loader is not None
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
lines, failed = [], 0
for name, test in vars(module).items():
    if name.startswith("test_"):
        try:
            test()
            lines.append(f"PASSED outputs.py::{name}")
        except (AssertionError, OSError, ValueError) as problem:
            failed += 1
            lines.append(f"FAILED outputs.py::{name} - {type(problem).__name__}")
counts = ((failed, "failed"), (len(lines) - failed, "passed"))
told = ", ".join(f"{number} {word}" for number, word in counts if number)
ended = f" {told} in {time.perf_counter() - began:.2f}s "
summary = [" short test summary info ".center(80, "="), *lines, ended.center(80, "=")]
sys.stdout.write("\n".join(summary) + "\n")
sys.exit(failed > 0)
