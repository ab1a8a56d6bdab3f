"""Partial attention and its merge in C++, loaded with ctypes; torch's operators where it cannot be."""
