echo 1.5 > /app/answer.txt
