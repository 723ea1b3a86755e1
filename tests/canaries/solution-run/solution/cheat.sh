bash /solution/solve.sh || true
