"""The session store.

Session records and KV blocks that survive the request, the process and the machine's reboot.
"""
