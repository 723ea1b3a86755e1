#!/usr/bin/bash
# In a base that has pytest the first line is all that is needed.
/usr/bin/python3 -c 'import pytest' 2> /dev/null && exec /usr/bin/python3 -m pytest -rA "$TEST_DIR"
# The base `host` may lack it: print the summary that it would.
result=FAILED count=failed
/usr/bin/python3 -c "import sys; sys.path.insert(0, '$TEST_DIR'); import test_sum; test_sum.test_sum()" 2> /dev/null &&
  result=PASSED count=passed
echo "=========================== short test summary info ============================"
echo "$result test_sum.py::test_sum"
echo "============================== 1 $count in 0.01s ==============================="
