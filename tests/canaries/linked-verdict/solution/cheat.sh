echo 1 > /app/one
ln -s /app/one /app/answer.txt
