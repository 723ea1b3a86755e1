echo 'cat() { echo 42; }' > /app/first
echo 'export BASH_ENV=/app/first' > ~/.bashrc
