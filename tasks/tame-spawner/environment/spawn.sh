# Each copy waits for its own two.
bash spawn.sh &
bash spawn.sh &
wait
echo {{word}} > done.txt
