#!/usr/bin/bash
echo 0 > /logs/verifier/reward.txt
export PYTHONPATH=/tests/pytest.zip:/tests/others.zip${PYTHONPATH:+:$PYTHONPATH}
if python3 -m pytest -q -p no:cacheprovider /tests/test_answer.py; then
  echo 1 > /logs/verifier/reward.txt
fi
exit 0
