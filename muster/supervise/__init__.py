"""Parts of the supervisor: its machine, the guard of each service, the sweep of what stays."""
