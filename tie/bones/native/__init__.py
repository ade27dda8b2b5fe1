"""The compiled CPU forward step: C++ sources, its ctypes binding, its packing of weights, its executor."""
