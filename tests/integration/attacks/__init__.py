"""What an agent might try against its box: the attempts, and the arena they are tried in."""
