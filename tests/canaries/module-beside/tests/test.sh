#!/usr/bin/bash
echo 0 > /logs/verifier/reward.txt
cd /app && python3 -c '
import json
from pathlib import Path
answer = Path("/app/answer.txt")
right = answer.is_file() and json.loads(answer.read_text() or "0") == 42
Path("/logs/verifier/reward.txt").write_text("1" if right else "0")
'
exit 0
