"""OpenAI's Responses and Conversations API: the same turns and sessions under other names."""
