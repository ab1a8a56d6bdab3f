"""Pipeline stages of one replica (Mnemosyne, section 4.3), of prefill or of decode: each has a range of
layers."""
