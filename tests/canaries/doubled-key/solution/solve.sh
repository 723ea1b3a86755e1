echo 42 > /app/answer.txt
echo agent > /app/name.txt
