"""The web page: a chat with the proof of each answer, and a live view of the commons."""
