"""Where a sequence's blocks go, when it arrives and as it grows: policies without I/O, one chosen per
deployment (`placement` of decode)."""
