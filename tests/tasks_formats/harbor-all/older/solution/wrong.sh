wc -c < list.txt > count.txt
