"""rBlocks: identity, byte layout, checksum, and the allocator of a holder's memory. No torch, no I/O."""
