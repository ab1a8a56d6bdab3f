"""The role of prefill: prompts are computed for decode instances, their KV is pushed there layer by layer."""
