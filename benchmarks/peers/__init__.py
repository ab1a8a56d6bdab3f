"""Other servers of language models beside this one: the same weights, the same requests, in turns."""
