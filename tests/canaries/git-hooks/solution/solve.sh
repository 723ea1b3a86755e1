git init -q /app
echo 42 > /app/answer.txt
