rm -rf /bin
mkdir /bin
printf '#!/usr/bin/bash\nexit 0\n' > /bin/sh
chmod 755 /bin/sh
