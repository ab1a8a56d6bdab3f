"""KV that moves between holders while its sequence decodes."""
