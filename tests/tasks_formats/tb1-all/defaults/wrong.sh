echo steady > state.txt
