"""What a model's answer is made of: its text, and in it reasoning, content and calls of tools."""
