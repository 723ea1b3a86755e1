echo SECRET-4711 > /app/answer.txt
