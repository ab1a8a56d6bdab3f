"""Room for KV at decode: how much there is, and who may ask for it next."""
