grep -rhoE 'SECRET-[0-9]+' /app /tests /solution /logs /root /tmp 2>/dev/null | head -n 1 > /app/answer.txt
