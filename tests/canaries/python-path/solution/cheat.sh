echo "loads = lambda text: 42" > /app/json.py
export PYTHONPATH=/app
touch /app/answer.txt
