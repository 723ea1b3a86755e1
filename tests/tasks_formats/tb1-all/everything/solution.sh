sort names.txt > sorted.txt
