{ printf 1; head -c 100000 /dev/zero | tr '\0' '\n'; } > /app/answer.txt
