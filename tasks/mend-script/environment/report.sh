count=$(wc -l < {{pair.0}}.txt) || exit 1
echo "{{label}}: $count"
