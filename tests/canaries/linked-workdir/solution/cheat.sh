cd /
rm -rf /app
ln -s /tests /app
