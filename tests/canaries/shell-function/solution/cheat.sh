cat() { echo 42; }
export -f cat
