echo mine > /app/answer.txt
setsid bash -c 'until [ -s /tests/expected.txt ]; do sleep 0.01; done; while :; do echo mine > /tests/expected.txt; sleep 0.01; done' > /dev/null 2>&1 < /dev/null &
