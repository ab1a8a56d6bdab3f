"""The data plane: frames with raw tensors over blocking sockets, on threads of their own. No torch, no event
loop."""
