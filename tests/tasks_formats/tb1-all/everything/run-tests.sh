#!/usr/bin/bash
# Without a network there is no pytest to install: outline.py prints what `pytest -rA` would.
/usr/bin/python3 -I "$TEST_DIR/outline.py" "$TEST_DIR/outputs.py"
