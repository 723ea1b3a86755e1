echo 'cat() { echo 42; }' > ~/.bash_profile
