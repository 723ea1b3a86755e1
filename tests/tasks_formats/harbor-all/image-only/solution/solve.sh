mkdir done
