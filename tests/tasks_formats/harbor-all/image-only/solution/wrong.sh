touch done
