#!/usr/bin/bash
result=FAILED count=failed
[ -f state.txt ] && [ ! -L state.txt ] && [ "$(/usr/bin/head -c 100 state.txt)" = ready ] &&
  result=PASSED count=passed
echo "=========================== short test summary info ============================"
echo "$result test_state.py::test_state"
echo "============================== 1 $count in 0.01s ==============================="
