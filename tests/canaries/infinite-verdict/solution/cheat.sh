echo inf > /app/answer.txt
