echo 1 > /app/answer.txt
