[ -f ready.txt ] || { echo "missing: the file ready.txt"; exit 1; }
[ -d out ] || { echo "missing: the directory out"; exit 1; }
echo "all there"
