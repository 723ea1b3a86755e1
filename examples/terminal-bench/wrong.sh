wc -l < /app/numbers.txt > /app/sum.txt
