"""The `muster` command. main.py declares it; each other module does one command's work."""
