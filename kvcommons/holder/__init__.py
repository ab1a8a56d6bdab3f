"""The holder contract, shared by decode and attention_pool: memory that answers for segments of sequences."""
