"""Pipeline stages of one prefill replica (Mnemosyne, section 4.3): each has a range of layers."""
