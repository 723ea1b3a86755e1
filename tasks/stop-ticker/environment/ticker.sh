n=0
while true; do
  n=$((n + 1))
  echo "tick $n"
  sleep 0.1
done
