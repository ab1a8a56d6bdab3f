"""Documents: contexts that are computed in the background and become a turn of their session at the end."""
