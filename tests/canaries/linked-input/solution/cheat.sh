ln -s /proc/self/fd/0 /app/answer.txt
