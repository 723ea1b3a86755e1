sort -r names.txt > sorted.txt
